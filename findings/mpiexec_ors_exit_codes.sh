#!/usr/bin/env bash
# MPICH 5.0.2 and Intel MPI 2021.18.1 (their wheels on PyPI), mpiexec.
#
# Expected: where processes exit with 3 and 4, mpiexec exits with the code of one of them: the first, or the highest, as
#   mpirun of Open MPI and srun do.
# Seen: all codes are joined by a bitwise or: 3 and 4 give 7, a code with which no process ended; so do 1 and 2 give 3.
#   A script that tells 3 (stop) from 4 (try again) by the exit code sees neither.
# Output seen, of each library: 3 and 4 give 7; 1 and 2 give 3; 5 and 0 give 5
# Farandole: farandolerun exits with the code of the rank that failed first; docs/launching.md has a table.
source "$(dirname "$0")/packages.sh"
install mpich==5.0.2
"$python" -m pip install --quiet --disable-pip-version-check --prefix "$folder/intel" impi-rt==2021.18.1

expect() { # FOLDER CODE CODE SEEN: of two processes
  local seen=0
  "$1/bin/mpiexec.hydra" -n 2 sh -c "[ \"\$PMI_RANK\" = 0 ] && exit $2; sleep 0.3; exit $3" || seen=$?
  echo "$(basename "$1"): $2 and $3 give $seen"
  [[ $seen == "$4" ]]
}
for library in "$folder/environment" "$folder/intel"; do
  expect "$library" 3 4 7
  expect "$library" 1 2 3
  expect "$library" 5 0 5
done
