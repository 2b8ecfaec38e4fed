"""Collectives in code that torch.compile has compiled: as one graph, with what the program gets without it."""

import pytest
import torch

from test_torch_distributed import pytestmark as of_processes
from test_torch_distributed import run_script

pytestmark = [
    of_processes,
    pytest.mark.skipif(not hasattr(torch.library, "register_autograd"), reason="torch before 2.4"),
]
SCRIPT = """
import farandole.torch as fl
fl.init()

class Doubles:
    def compress(tensor):
        return tensor.double(), tensor.dtype
    def decompress(tensor, dtype):
        return tensor.to(dtype)

CALLS = {
    "sum": lambda x: fl.allreduce(x * 2, op=fl.Sum, prescale_factor=0.5),
    "average": lambda x: fl.allreduce(x, name="average"),
    "half": lambda x: fl.allreduce(x, compression=fl.Compression.bf16),
    "own compression": lambda x: fl.grouped_allreduce([x], compression=Doubles)[0],
    "grouped": lambda x: sum(fl.grouped_allreduce([x, x * x, torch.arange(5 * 3).view(5, 3)], op=fl.Sum)),
    "broadcast": lambda x: fl.broadcast(x, 1),
    "allgather": lambda x: fl.allgather(x[: 2 + R]),
    "grouped allgather": lambda x: fl.grouped_allgather([x, x[:1] * x[:1]])[1],
    "reducescatter": lambda x: fl.reducescatter(x, op=fl.Sum),
    "grouped reducescatter": lambda x: fl.grouped_reducescatter([x, x * 2])[1],
    "alltoall": lambda x: fl.alltoall(x[:4]),
    "alltoall by splits": lambda x: fl.alltoall(x, splits=[1 + R, 2])[0] * 2,
    "numbers": lambda x: fl.alltoall(x, splits=torch.tensor([R, 2]))[1] * x.sum(),
    "process set": lambda x: fl.allreduce(x, process_set=own, op=fl.Sum),
    "twice": lambda x: fl.allreduce(fl.allreduce(x).sin()),
}
own = [fl.add_process_set([rank]) for rank in range(N)][R]

for name, call in CALLS.items():
    def loss_of(x):
        return (call(x).sin() ** 2).sum()

    def run(function):
        torch.manual_seed(R)
        x = torch.randn(5, 3, requires_grad=True)
        loss = function(x)
        loss.backward()
        return torch.cat([loss.detach().view(1), x.grad.view(-1)])

    torch._dynamo.reset()
    compiled = torch.compile(loss_of, backend="aot_eager", fullgraph=True)
    difference = (run(loss_of) - run(compiled)).abs().max()
    tell(f"{name}: same" if difference < 1e-6 else f"{name}: differs by {difference}")
with torch.no_grad():
    for backend in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        used_by_one = torch.compile(lambda x: [fl.allreduce(x), x][R], fullgraph=True, backend=backend)
        tell(f"used by one with {backend}: {used_by_one(torch.ones(2)).tolist()}")
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: fl.allreduce(x), fullgraph=True, backend="aot_eager")
    tell(f"without gradients: {compiled(torch.ones(2)).tolist()}")
    try:
        torch.compile(lambda x: fl.allreduce(x, name="n"), backend="aot_eager")(torch.ones(2 + R))
    except fl.MismatchError as error:
        tell(f"error: {error}")
tell(f"calls: {len(CALLS)}")
"""


def test_a_graph_is_whole_and_gives_what_the_program_gives():
    for output in run_script(2, SCRIPT, timeout_s=300):
        assert output.count(": same") == 15 and "calls: 15" in output, output
        assert output.count(": [1.0, 1.0]") == 3, output
        assert 'error: allreduce "n"' in output and "[2]" in output, output


def test_numbers_of_rows_that_int32_cannot_hold_are_an_error():
    script = """
        import farandole.torch as fl
        fl.init()
        exchange = torch.compile(lambda x: fl.alltoall(x, splits=torch.tensor([x.shape[0]]))[1], backend="eager")
        for rows in (5, 2**31):
            try:
                tell(f"rows: {exchange(torch.empty(rows, 0)).tolist()}")
            except OverflowError:
                tell("too many")
    """
    assert run_script(1, script) == ["rows: [5]\ntoo many\n"]
