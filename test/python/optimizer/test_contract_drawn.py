"""Programs of the gradients' contract that are drawn by a seed: of actions in any order, and of random graphs."""

import functools
import os
import random

import pytest
import torch

from contract import SEED, Program, run
from jobs import Job

pytestmark = pytest.mark.filterwarnings("ignore:optimizer.step.. called without")


def drawn(seed):
    """A program for two to four ranks: passes, held and assigned gradients, skipped ranks and leaves, in any order."""
    draw = random.Random(seed)
    op = draw.choice(["fl.Average", "fl.Average", "fl.Sum"])
    passes = draw.choice([1, 1, 2, 3])
    arguments = [f"op={op}", f"backward_passes_per_step={passes}",
                 draw.choice(["overlap=False", "groups=2", "groups=1000", "gradient_as_bucket_view=True",
                              "sparse_as_dense=True",
                              "gradient_predivide_factor=2.0" if op == "fl.Average" else "groups=1"])]  # fmt: skip
    leaves = [f"{name}=ones({draw.choice(['1', '5', '2, 3', '3000'])})" for name in "abcd"] + ["table=ones(6, 2)"]

    def loss():
        terms = ["a.sum() * (rank + 1)"]
        for name in "bcd":
            term = f"{name}.sum() * {draw.randint(1, 9)} * (rank + 1)"
            terms += draw.choice([[], [term], [f"({term} if rank % 2 == {draw.randint(0, 1)} else 0)"]])
        terms += draw.choice([[], [], [f"rows(table, {draw.randint(0, 5)}, rank).sum() * 2"]])
        return " + ".join(terms)

    text = []
    for step in range(4):
        may_keep = op == "fl.Average"  # a sum may not be reduced again
        text.append(draw.choice(["zero", "zero", *(["", "zeros"] if may_keep else [])]))
        if text[-1] == "zero":
            text += draw.choice([[], [], [f"{draw.choice('bc')}.grad = None",
            f"grad_of({draw.choice('bc')}).add_(rank)"]])
        count = passes if op == "fl.Sum" or passes > 1 else draw.choice([1, 1, 2, 3])
        skips = f" @ rank != {draw.randint(0, 1)}" if count == 1 and draw.random() < 0.3 else ""
        verbs = ["back", "apart"] if may_keep and passes == 1 else ["back"]  # one within no_sync() is none of a window
        text += [f"{draw.choice(verbs if i + 1 < count else verbs[:1])} {loss()}{skips}" for i in range(count)]
        text += ["step"] if skips else draw.choice([["step"], ["end", "step"], ["end",
        "b.grad.mul_(2) @ b.grad is not None",
                 "with opt.skip_synchronize(): opt.step()"]])  # fmt: skip
    return Program(f"drawn by {seed}", "; ".join(text), leaves=", ".join(leaves), arguments=", ".join(arguments),
    steps=1,
                   make=functools.partial(torch.optim.SGD, lr=0.125))  # fmt: skip


#: A value of 32 elements of earlier ones; "keep" and "pause" are hooks.
OPERATIONS = ["{x}.view(1, -1).view(-1)", "{x} * 3", "({x} * 1).add_({y})", "torch.cat([{x}[:16], {x}[16:]])",
              "{x}.view(4, -1).t().t().reshape(-1)", "torch.cat([{x}[:5], {y}[5:]])", "{x}.clone()", "keep", "pause",
              "{x} + {y}", "{x} + {y}", "{x} * {y}", "{x} - {y}"]  # fmt: skip


def drawn_graph(seed):
    """A program of one random graph, in which autograd lets gradients share memory however it likes.

    Leaves are of two optimizers or of none; what hooks keep stays what it was.
    """
    draw = random.Random(seed)
    passes = draw.choice([1, 2])
    names = "abcdef"[: draw.randint(2, 6)]
    owners = {name: 0 if name == "a" else draw.choice([0, 0, 1, 2]) for name in names}
    groups = [" ".join(name for name in names if owners[name] == owner) for owner in (0, 1)]
    shapes = {name: draw.choice(["32", "1, 32", "32, 1", "4, 8", "1"]) for name in names}
    others = [f"{name}.grad = None" for name in names if owners[name] == 2]
    graph = [f"v{i} = {name}.{'expand(32)' if shapes[name] == '1' else 'view(-1)'}" for i, name in enumerate(names)]
    unused = {f"v{i}" for i in range(len(names))}
    for i in range(len(names), len(names) + draw.randint(1, 10)):
        x, y, operation = f"v{draw.randrange(i)}", f"v{draw.randrange(i)}", draw.choice(OPERATIONS)
        hook = {"keep": "lambda g: kept.append((g, g.clone()))", "pause": "pause"}.get(operation)
        graph.append(f"v{i} = {x}.view(-1)" if hook else f"v{i} = {operation.format(x=x, y=y)}")
        graph += [f"only v{i}.register_hook({hook})"] if hook else []
        unused = unused - {x, y} | {f"v{i}"}
    graph.append(f"back ({' + '.join(sorted(unused))}) * torch.linspace(rank + 1, step + 2, 32, dtype=torch.float64)")
    ends = others if passes > 1 else []  # a second pass adds in place, to all that share the memory
    ends = [*ends, "end", *(["only assert all(torch.equal(*pair) for pair in kept)"] if passes == 1 else [])]
    arguments = [f"op={draw.choice(['fl.Average', 'fl.Sum'])}, backward_passes_per_step={passes}"]
    ways = ("groups=1000", "overlap=False", "gradient_as_bucket_view=True")
    arguments += [way for way in ways if draw.random() < 0.5]
    return Program(f"graph {seed}", "; ".join(["zero", "kept = []", *others, *graph * passes, *ends]), tolerance=1e-9,
                   leaves=", ".join(f"{name}=ones({shapes[name]}, dtype=torch.float64)" for name in names),
                   optimizers=" | ".join(filter(None, groups)), arguments=", ".join(arguments))  # fmt: skip


@pytest.mark.parametrize("job", [Job(size, complete) for size in (2, 3) for complete in ("backward", "step")], ids=str)
def test_programs_that_are_drawn(job):
    """FARANDOLE_TEST_GRAPHS says how many; FARANDOLE_TEST_SEED, which."""
    for seed in range(SEED, SEED + int(os.environ.get("FARANDOLE_TEST_GRAPHS", "100")) // 10):
        for program in (drawn(seed), *(drawn_graph(3 * seed + i) for i in range(3))):
            print(program)  # pytest shows it if it fails
            run(program, job)
