"""Collectives between processes that mpirun starts, on host memory and on fake GPUs."""

import json

import pytest
import torch

from fake_gpu import VARIABLES, needs_fake_gpu
from models import OPTIMIZERS, Branched, train_alone
from ranks import run_mpi

pytestmark = pytest.mark.mpi

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


@pytest.mark.once
def test_processes_exchange_rows():
    size = 3
    told = run_mpi(size, SCRIPT)
    texts = [line for text in told for line in text.splitlines() if line.startswith("alltoall")]
    assert len(set(texts)) == 1 and len(texts) == size
    assert texts[0].startswith('alltoall "mismatch": rank 0 sent float32 [0,1], rank 1 sent')
    assert told[0].splitlines()[-2:] == ["[7, 7]", "[5.0]"]


@needs_fake_gpu
@pytest.mark.once
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


def test_another_collective_of_the_same_name_is_refused_on_all_ranks_between_processes():
    script = """
        import json, numpy as np, farandole as fl
        fl.init()
        calls = {
            "allreduce": lambda: fl.allreduce(np.ones((4, 2)), name="k"),
            "allgather": lambda: fl.allgather(np.ones((4, 2)), name="k"),
            "alltoall": lambda: fl.alltoall(np.ones((4, 2)), name="k"),
        }
        for pair in (("allreduce", "allgather"), ("alltoall", "allgather")):
            try:
                calls[pair[fl.rank()]]()
            except fl.MismatchError as error:
                tell(json.dumps(str(error)))
        fl.allgather(np.ones(2), name="k")
        fl.shutdown()
    """
    told = [[json.loads(line) for line in text.splitlines()] for text in run_mpi(2, script, 30)]
    assert len(told[0]) == len(told[1]) == 2
    for (text, other), first in zip(zip(*told, strict=True), ("allreduce", "alltoall"), strict=True):
        assert text == other and '"k"' in text and f"rank 0 called {first}, rank 1 called allgather" in text, text



@needs_fake_gpu
@pytest.mark.parametrize("shared", [False, True], ids=["own GPUs", "one GPU"])
def test_processes_train_as_one(shared):
    script = f"""
        import farandole.torch as fl
        from fake_gpu import pose, read_by_the_host
        from models import OPTIMIZERS, Branched, scrambled, train_rank

        fl.init()
        for gpus in pose({shared}):
            for gpus in read_by_the_host(gpus):
                model = scrambled(Branched(), fl.rank())
                uses = lambda rank, step: step % 2 == 0 or rank == 0
                _, weights = train_rank(model, OPTIMIZERS["AdamW"], fl.rank(), 4, uses)
                tell((gpus.mine.count("launches") > 0, gpus.mine.count("copies") > 0))
                tell([weight.tolist() for weight in weights])
    """
    told = run_mpi(2, script, 90, FARANDOLE_TEST_CUDA_DEVICES="1" if shared else "8", **VARIABLES)
    _, expected = train_alone(
        Branched(), OPTIMIZERS["AdamW"], 2, 4, lambda rank, step: step % 2 == 0 or rank == 0
    )
    for text in told:
        ways, weights = map(eval, text.splitlines())
        assert ways == (True, shared)  # (our kernels, the host's memory) were used
        for ours, theirs in zip(weights, expected, strict=True):
            torch.testing.assert_close(torch.tensor(ours, dtype=torch.float64), theirs)
    assert told[0] == told[1]



WITHOUT_MEMORY = """
import resource
import numpy as np
import farandole as fl

fl.init()
rank, size = fl.rank(), fl.size()
call = lambda rows: fl.{call}(rows, name="x")
assert len(call(np.ones((size, 1)))) > 0
rows = np.ones((size * 32, 1 << 17))  # 64 MiB
limit = resource.getrlimit(resource.RLIMIT_AS)
if rank == 1:
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), limit[1]))
try:
    result = call(rows)
    tell(result.sum() == result.size)
except fl.HorovodInternalError as error:
    resource.setrlimit(resource.RLIMIT_AS, limit)
    tell(error)
result = call(rows)
tell(result.sum() == result.size)
"""


@pytest.mark.parametrize("call", ["allgather", "alltoall"])
def test_a_rank_without_memory_for_its_result_fails_alone(call):
    fine, short = run_mpi(2, WITHOUT_MEMORY.replace("{call}", call))
    assert fine == "True\nTrue"
    error, again = short.splitlines()
    assert error.startswith(f'{call} "x": no memory for a result of ') and again == "True", short
