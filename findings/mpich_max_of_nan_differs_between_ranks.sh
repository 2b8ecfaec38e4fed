#!/usr/bin/env bash
# mpich 5.0.2 (PyPI), mpi4py 4.1.2, NumPy 2.4.6.
#
# Expected: MPI_Allreduce gives all ranks the same value.
# Seen: MPI_MAX (and MPI_MIN) of one float64 that is nan on rank 0 gives rank 0 the other's number and rank 1 nan: each
#   rank compares with its own value on the other side. Ranks that branch on the result ("stop if the loss is nan")
#   take different ways, and the next collective is called by one of them only.
# Output seen, two ranks, rank r contributes r or nan:
#   nan on rank 0: rank 0 has 1.0, rank 1 has nan;  nan on rank 1: rank 0 has nan, rank 1 has 0.0
# Other libraries, same program: Open MPI 5.0.11 gives both ranks nan for a nan on rank 0 and 0.0 for one on rank 1;
#   Intel MPI 2021.18.1 drops the nan always. Farandole gives all ranks nan.
source "$(dirname "$0")/packages.sh"
install mpi4py==4.1.2 mpich==5.0.2 numpy==2.4.6

cat >"$folder/program.py" <<'PYTHON'
import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
assert "MPICH Version:" in MPI.Get_library_version()
for with_nan in (0, 1):
    mine = np.array([np.nan if world.rank == with_nan else float(world.rank)])
    result = np.empty_like(mine)
    world.Allreduce(mine, result, op=MPI.MAX)
    everywhere = np.empty(2)
    world.Allgather(result, everywhere)
    if world.rank == 0:
        print(f"nan on rank {with_nan}: rank 0 has {everywhere[0]}, rank 1 has {everywhere[1]}", flush=True)
    assert np.isnan(everywhere).sum() == 1, everywhere
    assert np.isnan(everywhere[1 - with_nan]), everywhere
PYTHON
timeout 300 mpiexec -n 2 "$python" "$folder/program.py"
