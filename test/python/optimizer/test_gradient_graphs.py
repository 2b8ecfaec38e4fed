"""Random graphs: reduced gradients are the means of what each rank alone computes, and nothing else is
written, however autograd lets gradients share memory.

A program is drawn: leaves, operations on them and on earlier values, hooks that keep gradients or take
their time. Every rank runs it with weights of its own, once plainly and then, in several steps, with
wrapped optimizers. FARANDOLE_TEST_GRAPHS says how many programs; the same number of other ones each time.
"""

import os
import time
from dataclasses import dataclass, field

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import farandole.torch as fl
from ranks import run_threads

SIZE, COUNT, STEPS = 2, 32, 3
GRAPHS = int(os.environ.get("FARANDOLE_TEST_GRAPHS", "100"))
SHAPES = [(COUNT,), (1, COUNT), (COUNT, 1), (4, COUNT // 4), (1,)]
#: Whose gradients the leaves have: optimizers, a parameter that is not wrapped, an input.
FIRST, SECOND, NOBODY = range(3)

# Of one value.
UNARY = ["view", "scale", "write", "halves", "turn", "slice", "clone", "keep", "pause"]
BINARY = ["add", "add", "multiply", "subtract", "write"]

leaves = st.lists(
    st.tuples(st.sampled_from(SHAPES), st.sampled_from([FIRST, FIRST, SECOND, NOBODY])),
    min_size=2, max_size=6,
)  # fmt: skip
operations = st.lists(
    st.tuples(st.sampled_from(UNARY + BINARY), st.integers(0, 30), st.integers(0, 30)),
    min_size=1, max_size=10,
)  # fmt: skip
arguments = st.fixed_dictionaries(
    {},
    optional={
        "op": st.sampled_from([fl.Average, fl.Sum]),
        "groups": st.just(1000),
        "overlap": st.booleans(),
        "memory": st.sampled_from(["gradient_as_bucket_view", "share_gradients"]),
        "backward_passes_per_step": st.just(2),
    },
).map(lambda chosen: dict((value, True) if name == "memory" else (name, value) for name, value in chosen.items()))


@dataclass
class Run:
    """One run of a program on one rank: its leaves, and what hooks have kept."""

    leaves: list
    kept: list = field(default_factory=list)

    def value(self, operations, weight):
        """The program's result: what all values without a user add up to, times ``weight``."""
        values = [
            leaf.expand(COUNT) if leaf.numel() == 1 else leaf.view(-1) for leaf in self.leaves
        ]
        unused = set(range(len(values)))
        for name, i, j in operations:
            i, j = i % len(values), j % len(values)
            values.append(self.apply(name, values[i], values[j]))
            unused -= {i, j}
            unused.add(len(values) - 1)
        total = values[-1]
        for i in sorted(unused - {len(values) - 1}):
            total = total + values[i]
        return (total * weight).sum()

    def apply(self, name, x, y):
        """One operation on values of COUNT elements."""
        if name == "view":
            return x.view(1, -1).view(-1)
        if name == "scale":
            return x * 3
        if name == "write":  # in place
            return (x * 1).add_(y)
        if name == "halves":
            return torch.cat([x[: COUNT // 2], x[COUNT // 2 :]])
        if name == "turn":
            return x.view(4, -1).t().t().reshape(-1)
        if name == "slice":
            return torch.cat([x[:5], y[5:]])
        if name == "clone":
            return x.clone()
        if name in ("keep", "pause"):
            x = x.view(-1)
            x.register_hook(self.kept.append if name == "keep" else lambda _: time.sleep(0.001))
            return x
        return {"add": x + y, "multiply": x * y, "subtract": x - y}[name]


def make(program_leaves):
    """The leaves, with the same values on every rank and in every step."""
    generator = torch.Generator().manual_seed(len(program_leaves))
    return [
        torch.nn.Parameter(torch.rand(shape, generator=generator, dtype=torch.float64))
        for shape, _ in program_leaves
    ]


def weights(rank, run):
    """Of rank ``rank`` in pass ``run``."""
    generator = torch.Generator().manual_seed(100 * run + rank)
    return torch.rand(COUNT, generator=generator, dtype=torch.float64)


def gradients_alone(program_leaves, program, rank, passes):
    """Gradients of the leaves on one rank, and what hooks kept, without the library."""
    total, kept = None, []
    for run in passes:
        alone = Run(make(program_leaves))
        value = alone.value(program, weights(rank, run))
        gradients = torch.autograd.grad(value, alone.leaves, allow_unused=True)
        gradients = [None if g is None else g.clone() for g in gradients]
        again = Run(make(program_leaves))
        for leaf in again.leaves:  # no gradient shares memory with what is kept
            leaf.register_hook(lambda g: g.clone())
        again.value(program, weights(rank, run)).backward()
        kept += [g.clone() for g in again.kept]
        total = gradients if total is None else [
            b if a is None else a + b for a, b in zip(total, gradients, strict=True)
        ]  # fmt: skip
    return total, kept


def expected_gradients(program_leaves, alone, rank, op):
    """What leaves hold after a step, if only the optimizers' are reduced."""
    expected = []
    for i, (_, owner) in enumerate(program_leaves):
        mine = alone[rank][0][i]
        if owner == NOBODY or mine is None:
            expected.append(mine)
        else:
            total = sum(gradients[i] for gradients, _ in alone)
            expected.append(total / SIZE if op == fl.Average else total)
    return expected


def check_program(program_leaves, program, complete, arguments):
    """Runs it on all ranks, and compares every gradient with what it must be."""
    op, passes = arguments.get("op", fl.Average), arguments.get("backward_passes_per_step", 1)

    def body(rank):
        tensors = make(program_leaves)
        optimizers = []
        for owner in (FIRST, SECOND):
            mine = [
                (f"{i}", p) for i, p in enumerate(tensors) if program_leaves[i][1] == owner
            ]
            if mine:
                plain = torch.optim.SGD([p for _, p in mine], lr=0.0)
                optimizers.append(
                    fl.DistributedOptimizer(plain, mine, complete=complete, **arguments)
                )
        for step in range(STEPS):
            runs = range(step * passes, (step + 1) * passes)
            alone = [gradients_alone(program_leaves, program, r, runs) for r in range(SIZE)]
            wrapped = Run(tensors)
            for tensor in tensors:
                tensor.grad = None
            for optimizer in optimizers:
                optimizer.zero_grad()
            for run in runs:
                wrapped.value(program, weights(rank, run)).backward()
            for optimizer in optimizers:
                optimizer.synchronize()
            for i, expected in enumerate(expected_gradients(program_leaves, alone, rank, op)):
                if passes > 1 and program_leaves[i][1] == NOBODY:
                    continue  # the second pass adds in place, to all that share its memory
                got = tensors[i].grad
                assert (got is None) == (expected is None), f"leaf {i}, step {step}"
                if got is not None:
                    assert torch.allclose(got, expected), f"leaf {i}, step {step}"
            kept = zip(wrapped.kept, alone[rank][1], strict=True)
            for got, expected in kept if passes == 1 else ():
                assert torch.allclose(got, expected), f"kept by a hook, step {step}"
            for optimizer in optimizers:
                with optimizer.skip_synchronize():
                    optimizer.step()

    run_threads(SIZE, body)


@settings(
    max_examples=GRAPHS, deadline=None, database=None, print_blob=True,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(leaves, operations, st.sampled_from(["backward", "step"]), arguments)
def test_gradients_of_random_graphs_are_the_means_of_what_each_rank_computes(
    program_leaves, program, complete, arguments
):
    check_program(program_leaves, program, complete, arguments)
