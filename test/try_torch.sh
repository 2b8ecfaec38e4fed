#!/usr/bin/env bash
# Runs the Python tests with another torch, in an environment of its own, which it keeps.
#
#   bash test/try_torch.sh VERSION [pytest options]    for example 2.1.2; the environment is build/torch-VERSION
set -uo pipefail
[[ $# -gt 0 ]] || { echo "usage: bash test/try_torch.sh VERSION [pytest options]" >&2; exit 2; }
export FARANDOLE_VENV=$(cd "$(dirname "$0")/.." && pwd)/build/torch-$1
source "$(dirname "$0")/../examples/setup_env.sh"
cd "$repository"

torch_package=torch==$1
# Built for NumPy 1, before torch 2.3.
[[ $1 == 2.[0-2].* ]] && python_packages=("numpy>=1.24,<2" "${python_packages[@]:1}")
shift

set_up && install_package || exit
export FARANDOLE_TEST_BUILD_DIR=$build_dir
exec "$python" -m pytest -q -rfEs -p no:cacheprovider "${torch_tests[@]}" "$@"
