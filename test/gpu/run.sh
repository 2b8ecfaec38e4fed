#!/usr/bin/env bash
# All that only a GPU can prove, on a machine without network: conformance, NCCL, Python, sanitizers,
# benchmarks. Ends with one table of targets, measured values and verdicts, and writes it as JSON.
#
#   bash run.sh [--quick] [--kit DIR] [--results DIR] [--only REGEX] [--fake]
#
#   --kit      what test/gpu/pack.sh made: the folder of this file, else build/gpu-kit of the repository
#   --results  logs and table.json; ./gpu-results unless named. Steps of earlier runs there are kept.
#   --only     just the steps whose names match
#   --quick    what fits into eight minutes on one GPU: processes over NCCL on it, then kernels, the plane
#              and a training step; no long conformance runs, one sanitizer
#   --fake     no GPU: the same programs over the fakes. It shows that they run, and proves nothing
#              about a GPU; the table says so.
#
# FARANDOLE_PYTHON is the interpreter (python3), with torch if the Python steps shall run. FARANDOLE_NCCL
# names a libnccl other than that interpreter's. Exit status: 0 if nothing failed, 1 if something did,
# 2 without a GPU or without a kit.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
kit=$here
[[ -f $kit/about.json ]] || kit=$here/../../build/gpu-kit
results=$PWD/gpu-results
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
    --kit | --results | --only)
      (($# > 1)) || refuse "$1 needs a value"
      case $1 in
        --kit) kit=$2 ;;
        --results) results=$2 ;;
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
    *) refuse "usage: bash run.sh [--quick] [--kit DIR] [--results DIR] [--only REGEX] [--fake]" ;;
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
trap 'rm -rf "$work"' EXIT

"$python" "$kit/test/gpu/machine.py" >"$results/machine.json" || refuse "$python does not run"
fact() { "$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])' "$results/machine.json" "$1"; }

if ((fake)); then
  programs=(env FARANDOLE_CUDA_PLUGIN="$kit/fakes/libfarandole_fake_cuda.so" FARANDOLE_TEST_CUDA_DEVICES=1
    FARANDOLE_NCCL="$kit/fakes/nccl/libnccl.so.2")
  nccl=23203
else
  (($(fact gpu_count))) || refuse "no GPU can be used here: $(fact why_no_gpu)"
  programs=(env FARANDOLE_CUDA_PLUGIN="$kit/lib/libfarandole_cuda.so" FARANDOLE_NCCL="$(fact nccl_file)")
  nccl=$(fact nccl_version)
fi
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
((nccl && nccl < 23000)) && no_sharing="NCCL $nccl was found; ranks share a GPU from 23000 (2.30) on"
no_mpi=
command -v mpirun >/dev/null || no_mpi="there is no mpirun"
share=(env FARANDOLE_SHARE_GPU=1)
mpi_plugin=$kit/lib/libfarandole_mpi.so
some_processes=("${programs[@]}" mpirun --oversubscribe -np)
batches=300
((fake)) && batches=20
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
  "${CXX:-g++}" -std=c++20 -O2 -fPIC -shared -fvisibility=hidden -I"$kit/core" -I"$include" \
    "$kit"/core/bindings/python/*.cc "$kit"/lib/libfarandole.so.? '-Wl,-rpath,$ORIGIN' \
    -o "$work/farandole/_core$suffix"
  PYTHONPATH=$work "$python" -c 'import farandole; print(farandole.__version__)'
}
export -f build_core
export kit work python

# First what tells most: several ranks over NCCL, which one GPU can do since 2.30.
conformance=("$kit/bin/gpu_plane_processes" "$mpi_plugin")
for n in 2 3; do
  step_if "${no_mpi:-$no_sharing}" "processes-nccl-shared-$n" 200 "${share[@]}" "${some_processes[@]}" "$n" "${conformance[@]}"
done
step_if "${no_mpi:-$no_sharing}" bench-plane-nccl 120 "${share[@]}" "${some_processes[@]}" 2 \
  "$kit/bin/gpu_plane_bench" "$batches" "$mpi_plugin"
step_if "$no_nccl" nccl-alone 60 "${programs[@]}" "$kit/bin/gpu_nccl_test"
step_if "$no_gpu" move-test 200 "$kit/bin/gpu_move_test"
plane_test=("${programs[@]}" "$kit/bin/gpu_plane_test")
step conformance-solo 200 "${plane_test[@]}" --gtest_filter='*Solo*'
step_if "$no_time" conformance-staged 300 "${plane_test[@]}" --gtest_filter='*StagedOneGpu*'
no_pair=$no_nccl
((fake)) || (($(fact gpu_count) > 1)) || no_pair="there is one GPU"
step_if "${no_pair:-$no_time}" conformance-nccl 200 "${programs[@]}" FARANDOLE_TEST_CUDA_DEVICES=2 \
  "$kit/bin/gpu_plane_test" --gtest_filter='*NcclGpuPerRank*'
step_if "$no_mpi" processes-staged 200 "${some_processes[@]}" 2 "${conformance[@]}"

no_python=$no_gpu
[[ -n $no_python ]] || [[ $(fact torch) != "" ]] || no_python="$python has no torch: $(fact why_no_torch)"
[[ -n $no_python ]] || step python-build 200 bash -c build_core || no_python="the extension could not be built"
export PYTHONPATH=$work${PYTHONPATH:+:$PYTHONPATH}
run_two=("$python" -m farandole.runner -np 2 "$python" "$kit/test/gpu/two_ranks.py")
no_pytest=$no_python
[[ -n $no_pytest ]] || compgen -G "$kit/test/gpu/test_cuda_*.py" >/dev/null || no_pytest="the kit has no such tests"
step_if "${no_pytest:-$no_time}" python-tests 300 "$python" -m pytest -q -rs -p no:cacheprovider "$kit"/test/gpu/test_cuda_*.py
step_if "${no_python:-$no_mpi}" python-two-ranks-staged 120 "${run_two[@]}"
torch_cannot_share=
(($(fact torch_nccl) < 23000)) && torch_cannot_share="torch has NCCL $(fact torch_nccl); ranks share a GPU from 23000 (2.30) on"
step_if "${no_python:-${no_mpi:-$torch_cannot_share}}" python-two-ranks-nccl 120 "${share[@]}" "${run_two[@]}"

no_sanitizer=$no_gpu
sanitizer=$(fact compute_sanitizer)
[[ -n $no_sanitizer || -n $sanitizer ]] || no_sanitizer="compute-sanitizer is not there"
# It runs a hundred times slower: alignments and types, without the large tensors.
for tool in memcheck racecheck initcheck; do
  [[ $tool == memcheck ]] && too_long= || too_long=$no_time
  step_if "${no_sanitizer:-$too_long}" "sanitizer-$tool" 200 "$sanitizer" --tool "$tool" --error-exitcode 9 \
    "$kit/bin/gpu_move_test" --gtest_filter='MoveOnGpu.WorksFrom*'
done

step_if "$no_gpu" bench-move 200 "$kit/bin/gpu_move_bench" "$kit/data/resnet50_backward.csv"
step bench-plane 120 "${programs[@]}" "$kit/bin/gpu_plane_bench" "$batches"
step_if "$no_python" bench-step 300 "$python" "$kit/test/gpu/step_bench.py"
no_overlap=$no_python
[[ -n $no_overlap ]] || (($(fact gpu_count) > 1)) ||
  no_overlap="one GPU: ranks that take turns on it have nothing to hide behind"
step_if "${no_overlap:-$no_mpi}" bench-overlap 300 "$python" -m farandole.runner -np 2 "$python" "$kit/test/gpu/step_bench.py"

"$python" "$kit/test/gpu/table.py" "$results"
