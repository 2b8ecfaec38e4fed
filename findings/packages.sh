# Sourced by each finding: installs pinned public packages into a virtual environment in a temporary folder, which is
# removed at the end, and gives `$python` and `$folder`. PYTHON chooses another interpreter than python3.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=$folder/environment/bin/python

install() { # NAME==VERSION...
  "${PYTHON:-python3}" -m venv "$folder/environment"
  "$python" -m pip install --quiet --disable-pip-version-check "$@"
  PATH=$folder/environment/bin:$PATH
  export OMP_NUM_THREADS=1
}

# on_ranks N <program: runs a Python program, read from stdin, on N processes with RANK, WORLD_SIZE and a file to
# meet at.
on_ranks() {
  local rank processes=() failed=0
  cat >"$folder/program.py"
  for ((rank = 0; rank < $1; ++rank)); do
    RANK=$rank WORLD_SIZE=$1 MEET=$folder/meet timeout 300 "$python" "$folder/program.py" &
    processes+=($!)
  done
  for rank in "${processes[@]}"; do wait "$rank" || failed=1; done
  return "$failed"
}
