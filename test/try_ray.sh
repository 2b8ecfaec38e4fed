#!/bin/bash
# Runs the tests of farandole.ray in a virtual environment of its own, as Ray is large: test/try_ray.sh [FOLDER]
# The package is the one that this Python finds (PYTHONPATH, or installed); its own packages are seen as well.
set -eu
cd "$(dirname "$0")/.."
folder=${1:-build/try_ray}
python=${PYTHON:-python3}
sites=$("$python" -c 'import site; print(":".join(site.getsitepackages()))')
[ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
"$folder/bin/python" -c 'import ray' 2>/dev/null || "$folder/bin/python" -m pip install --quiet 'ray>=2.9'
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$sites
exec "$folder/bin/python" -m pytest -q -p no:cacheprovider test/python/test_ray.py
