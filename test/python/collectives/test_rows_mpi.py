"""Allgather, reducescatter and alltoall between processes."""

import pytest

from fake_gpu import VARIABLES, needs_fake_gpu
from ranks import run_mpi

pytestmark = [pytest.mark.mpi, pytest.mark.once]

SCRIPT = """
import numpy as np
import torch
import farandole.torch as fl
import farandole

fl.init()
rank, size = fl.rank(), fl.size()

for rows in (1, 1000, 300_000):
    mine = torch.arange(rows * 2.0).reshape(rows, 2) + rank
    whole = fl.allreduce(mine, op=fl.Sum, name="whole")
    part = fl.reducescatter(mine, op=fl.Sum, name="part")
    assert len(part) == rows // size + (rank < rows % size)
    assert torch.equal(fl.allgather(part, name="parts"), whole)
    splits = [rows * (to + 1) // (size + 1) - rows * to // (size + 1) for to in range(size)]
    there, counts = fl.alltoall(mine, splits, name="there")
    assert counts.tolist() == [splits[rank]] * size
    back, counts = fl.alltoall(there, counts, name="back")
    assert counts.tolist() == splits and torch.equal(back, mine[: sum(splits)])

names = ["a", "b", "c"] if rank else ["c", "a", "b"]
handles = {}
for name in names:
    handles[name] = (
        fl.allgather_async(torch.full((rank + 1,), rank), name=f"gather.{name}"),
        fl.alltoall_async(torch.full((size,), rank), name=f"exchange.{name}"),
        fl.grouped_reducescatter_async([torch.ones(size), torch.ones(size, 2)], name=name),
    )
for name in names[::-1]:
    gathered, exchanged, scattered = map(fl.synchronize, handles[name])
    assert gathered.tolist() == [r for r in range(size) for _ in range(r + 1)]
    assert exchanged[0].tolist() == list(range(size))
    assert [part.shape for part in scattered] == [(1,), (1, 2)]

try:
    fl.alltoall(torch.ones(size, 1 + rank), name="mismatch")
except fl.MismatchError as error:
    tell(error)
if rank == 0:
    tell(farandole.allgather(np.full(2, 7)).tolist())
    tell(farandole.reducescatter(np.full(size, 5.0), op=fl.Sum).tolist())
fl.join()
"""


def test_processes_exchange_rows():
    size = 3
    told = run_mpi(size, SCRIPT)
    texts = [line for text in told for line in text.splitlines() if line.startswith("alltoall")]
    assert len(set(texts)) == 1 and len(texts) == size
    assert texts[0].startswith('alltoall "mismatch": rank 0 sent float32 [0,1], rank 1 sent')
    assert told[0].splitlines()[-2:] == ["[7, 7]", "[5.0]"]


@needs_fake_gpu
@pytest.mark.parametrize("shared", [False, True], ids=["own GPUs", "one GPU"])
def test_processes_exchange_rows_of_fake_gpus(shared):
    told = run_mpi(
        2,
        f"""
        import torch
        import farandole.torch as fl
        from fake_gpu import pose

        fl.init()
        rank = fl.rank()
        for gpus in pose({shared}):
            gpu = gpus.mine

            def late(values):
                tensor = torch.zeros_like(values)
                gpu.write(tensor, values)
                return tensor

            rows = late(torch.arange(5.0) + 10 * rank)
            tell(gpu.read(fl.reducescatter(rows, op=fl.Sum)).tolist())
            tell(gpu.read(fl.allgather(late(torch.full((rank + 1,), rank)))).tolist())
            output, splits = fl.alltoall(rows, [1, 3])
            tell((gpu.read(output).tolist(), splits.tolist()))
        """,
        FARANDOLE_TEST_CUDA_DEVICES="1" if shared else "8", **VARIABLES,
    )  # fmt: skip
    assert told == [
        "[10.0, 12.0, 14.0]\n[0, 1, 1]\n([0.0, 10.0], [1, 1])",
        "[16.0, 18.0]\n[0, 1, 1]\n([1.0, 2.0, 3.0, 11.0, 12.0, 13.0], [3, 3])",
    ]
