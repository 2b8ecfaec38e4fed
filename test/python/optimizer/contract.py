"""The contract of gradients as data: programs for ranks, one interpreter, one oracle.

A program is the text of a step. ``run`` runs it on ranks with wrapped optimizers and compares every gradient and weight
with the oracle's: plain torch, alone, does the same for each rank on a replica of its own and gives all replicas the
mean, or the sum, of their gradients. Actions are separated by ";"; one with " @ condition" is for ranks and steps where
that holds. They are:

    zero, zeros       zero_grad(), with set_to_none=False
    back LOSS         LOSS.sum().backward()
    apart LOSS        the same within no_sync()
    end               gradients are final, with complete="step" after synchronize(); they are compared
    step              step(); gradients and weights are compared
    look              nothing was exchanged since the last of these; each rank's own gradients are compared
    reduced           the oracle reduces here what the next statement uses, as ranks must do unasked
    only STATEMENT    on ranks, not in the oracle
    fails A|B "text" ACTION & ACTION    on ranks: one of the actions raises A or B with this text
    STATEMENT         of Python, on ranks and in the oracle

``zero``, ``end`` and ``step`` are for all optimizers, or with a number for one of them.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import functools
import math
import os
import random
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import farandole.torch as fl
from jobs import Job
from models import Branched, Halved, batch, loss_of

#: Of all that is drawn; a program that fails is printed, with its own.
SEED = int(os.environ.setdefault("FARANDOLE_TEST_SEED", str(random.randrange(10**6))))
PLAIN = functools.partial(torch.optim.SGD, lr=1.0)
Snapshot = dict[str, tuple[torch.Tensor | None, torch.Tensor]]


@dataclass(frozen=True)
class Program:
    """What ranks do.

    Attributes:
        name: What must hold, a sentence.
        text: The actions of each of ``steps`` steps, as above; ``first`` and ``last`` before and after them, ``before``
            the optimizers are wrapped.
        leaves: The parameters, by name, as arguments of dict(); or what makes a model.
        optimizers: The names of each one's parameters, between "|"; "": one has all.
        make: A torch optimizer of parameters.
        arguments: Of DistributedOptimizer, as text.
        sizes, completes: For which numbers of ranks and moments of completion.
        tolerance: Relative; 0: of the dtype.
        writes: A mean is written into the gradient that is there, as into a buffer of the user's.
    """

    name: str
    text: str
    first: str = ""
    last: str = ""
    before: str = ""
    leaves: str | Callable[[], torch.nn.Module] = "p=one(), q=one(), r=one()"
    optimizers: str = ""
    make: Callable[[list[torch.Tensor]], torch.optim.Optimizer] = PLAIN
    arguments: str = ""
    steps: int = 3
    sizes: tuple[int, ...] = (1, 2, 3, 4)
    completes: tuple[str, ...] = ("backward", "step")
    tolerance: float = 0
    writes: bool = False

    def script(self) -> Iterator[tuple[int, str]]:
        """Each action with the number of its step."""
        texts = [(0, self.first), *((step, self.text) for step in range(self.steps)), (self.steps, self.last)]
        for step, text in texts:
            yield from ((step, action) for action in map(str.strip, text.split(";")) if action)

    def jobs(self) -> list[Job]:
        """Two ranks with each moment of completion, others with one that is drawn; all with FARANDOLE_TEST_FULL."""
        draw = random.Random(f"{SEED} {self.name}")
        is_whole = os.environ.get("FARANDOLE_TEST_FULL", "0") == "1"
        chosen = {n: self.completes if n == 2 or is_whole else [draw.choice(self.completes)] for n in self.sizes}
        return [Job(size, complete) for size, completes in chosen.items() for complete in completes]


def one(*values: float) -> torch.nn.Parameter:
    """A vector of weights; of a single 1."""
    return torch.nn.Parameter(torch.tensor(values or (1.0,)))


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(*shape, dtype=dtype))


def rows(table: torch.Tensor, *indices: int) -> torch.Tensor:
    """Looked up, so that the gradient is sparse."""
    return torch.nn.functional.embedding(torch.tensor(indices, dtype=torch.int64), table, sparse=True)


def loop(p: torch.Tensor, times: int, x: torch.Tensor | None = None) -> torch.Tensor:
    """One checkpointed layer, ``times`` times: so often its gradient is accumulated."""
    x = torch.ones(1, requires_grad=True) if x is None else x
    for _ in range(times):
        x = checkpoint(lambda y: y * p, x, use_reentrant=True)
    return x


def grad_of(p: torch.Tensor) -> torch.Tensor:
    """Its gradient; zeros that are assigned where it has none."""
    p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    return p.grad


def resize(p: torch.Tensor, count: int) -> None:
    """To so many rows: structured pruning, or growing."""
    p.data = p.data[:1].expand(count, -1).clone()


class Calling(torch.autograd.Function):
    """The identity, whose backward calls a function first."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[], object]) -> torch.Tensor:
        ctx.call = call
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        with torch.enable_grad():
            ctx.call()
        return grad, None


def calling(x: torch.Tensor, call: Callable[[], object]) -> torch.Tensor:
    return Calling.apply(x, call)


def fail(text: str = "bad batch 17") -> None:
    raise ValueError(text)


class OfBatch(torch.autograd.Function):
    """A function whose gradient is a view of the batch."""

    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inputs)
        return (weights * inputs).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.saved_tensors[0].view(1, -1), None


def pause(grad: torch.Tensor) -> None:
    """In a tensor's hook: what was sent before has time to be reduced, and written."""
    time.sleep(0.02)


class Aside(threading.Thread):
    """Calls a function on a thread of its own."""

    def __init__(self, function: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.function, self.error = function, ""
        self.start()

    def run(self) -> None:
        try:
            self.function()
        except BaseException as error:
            self.error = str(error)

    def outcome(self) -> str:
        """The text of its error; "" if there was none."""
        self.join(60)
        assert not self.is_alive()
        return self.error


class ToFloat(torch.autograd.Function):
    """A float32 copy of bfloat16 weights, whose gradient stays float32."""

    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor) -> torch.Tensor:
        return weights.float()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def half(grad_dtype: torch.dtype | None, *shape: int) -> torch.nn.Parameter:
    """A bfloat16 weight with gradients of another dtype; None: of any."""
    p = ones(*(shape or (3,)), dtype=torch.bfloat16)
    p.grad_dtype = grad_dtype
    return p


def dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor.resolve_conj()


class FirstColumn:
    """Sends the first column only, of another shape; the others become zero."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Size]:
        return tensor.reshape(tensor.shape[0], -1)[:, 0], tensor.shape

    def decompress(self, tensor: torch.Tensor, ctx: torch.Size) -> torch.Tensor:
        full = torch.zeros(ctx).reshape(ctx[0], -1)
        full[:, 0] = tensor
        return full.reshape(ctx)


class AsReal:
    """Complex numbers as pairs."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, bool]:
        return (torch.view_as_real(tensor), True) if tensor.is_complex() else (tensor, False)

    @staticmethod
    def decompress(tensor: torch.Tensor, is_complex: bool) -> torch.Tensor:
        return torch.view_as_complex(tensor) if is_complex else tensor


class Growing(Halved):
    """Makes something else of ones than of zeros."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return tensor.repeat(2 if tensor.any() else 1), tensor.dtype


class Refusing(Halved):
    """Raises on threads for which ``now.refuses`` is set."""

    now = threading.local()

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        if getattr(Refusing.now, "refuses", False):
            raise KeyError("no compressor")
        return Halved.compress(tensor)


def low_rank(rank: int, zero_rows: int = 0) -> torch.Tensor:
    """[40, 30] of rank two, in a space of columns that all ranks share: the mean has rank two as well."""
    a, b = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for shape, seed in (((40, 2), rank), ((2,
    30), 99)))
    a[:zero_rows] = 0
    return a @ b


#: What texts of programs may name.
NAMES = {
    "FINE": 1.0 + 2.0**-20, "batches": lambda: fl.counters()["batches"], "clip": torch.nn.utils.clip_grad_norm_,
    "t": lambda *values: torch.tensor(values, dtype=torch.float32),
    **{each.__name__: each for each in (
        Aside, AsReal, Branched, FirstColumn, Growing, Halved, OfBatch, Refusing, ToFloat, batch, calling, checkpoint,
        copy, fail, grad_of, half, loop, loss_of, low_rank, math, one, ones, pause, pytest, resize, rows, torch,
        warnings)},
    "fl": fl,
}  # fmt: skip
compiled = functools.cache(compile)


class Replica:
    """One rank's leaves and optimizers, and what it does alone."""

    def __init__(self, program: Program, size: int, rank: int, wrap: Callable[..., torch.optim.Optimizer]) -> None:
        self.program = program
        self.names: dict[str, Any] = NAMES | {"size": size, "rank": rank, "step": 0, "turn": 0}
        self.arguments = self.value(f"dict({program.arguments})")
        model = None if isinstance(program.leaves, str) else program.leaves()
        self.leaves = dict(model.named_parameters()) if model else self.value(f"dict({program.leaves})")
        self.names |= self.leaves | {"model": model}
        groups = [names.split() for names in program.optimizers.split("|")] if program.optimizers else [[*self.leaves]]
        named = [[(name, self.leaves[name]) for name in group] for group in groups]
        plain = [program.make([p for _, p in each]) for each in named]
        self.names["plain"] = plain[0]
        for action in filter(None, program.before.split("; ")):
            self.act(0, action)
        self.optimizers = [wrap(optimizer, each, **self.arguments) for optimizer, each in zip(plain, named)]
        self.names |= {"opt": self.optimizers[0], "optimizers": self.optimizers}

    def value(self, text: str) -> Any:
        return eval(compiled(text, text, "eval"), self.names)

    def chosen(self, which: str) -> list[torch.optim.Optimizer]:
        return [self.optimizers[int(which)]] if which else self.optimizers

    def act(self, step: int, action: str) -> None:
        """An action without its condition, where that holds."""
        action, _, condition = action.partition(" @ ")
        self.names |= {"step": step, "turn": step % self.names["size"]}
        if not condition or self.value(condition):
            verb, _, rest = action.partition(" ")
            act = getattr(self, f"on_{verb}", None)
            act(rest) if act else exec(compiled(action, action, "exec"), self.names)

    def on_zero(self, which: str, set_to_none: bool = True) -> None:
        for optimizer in self.chosen(which):
            optimizer.zero_grad(set_to_none=set_to_none)

    def on_zeros(self, which: str) -> None:
        self.on_zero(which, False)

    def on_back(self, loss: str) -> None:
        self.value(loss).sum().backward()

    def on_apart(self, loss: str) -> None:
        with self.optimizers[0].no_sync():
            self.on_back(loss)


class Rank(Replica):
    """On a rank: compares with what the oracle expects."""

    def __init__(self, program: Program, job: Job, rank: int, expected: list[list[Snapshot]]) -> None:
        super().__init__(program, job.size, rank, job.wrap)
        self.job, self.batches = job, NAMES["batches"]()
        self.expected = (snapshots[rank] for snapshots in expected)

    def run(self) -> list[torch.Tensor]:
        """The weights at the end."""
        for step, action in self.program.script():
            try:
                self.act(step, action)
            except Exception as error:
                if hasattr(error, "add_note"):
                    error.add_note(f"rank {self.names['rank']}, step {step}: {action}")
                raise
        owned = (p for o in self.optimizers for group in o.param_groups for p in group["params"])
        return [p.detach().clone() for p in owned]

    def on_end(self, which: str, compares: bool = True) -> None:
        for optimizer in self.chosen(which):
            self.job.finish(optimizer)
        self.compare(compares)

    def on_step(self, which: str, compares: bool = True) -> None:
        for optimizer in self.chosen(which):
            optimizer.step()
        self.compare(compares)

    def on_look(self, _: str) -> None:
        assert NAMES["batches"]() == self.batches, "nothing was to be exchanged"
        self.compare()

    def on_reduced(self, _: str) -> None:
        pass

    def on_only(self, statement: str) -> None:
        exec(compiled(statement, statement, "exec"), self.names)

    def on_fails(self, text: str) -> None:
        kinds, match, actions = re.fullmatch(r'(\S+) "(.*?)" (.*)', text).groups()
        expected = tuple(getattr(fl, kind, None) or getattr(builtins, kind) for kind in kinds.split("|"))
        with pytest.raises(expected, match=match):
            for action in actions.split(" & "):
                if action in ("end", "step"):
                    getattr(self, f"on_{action}")("", compares=False)
                else:
                    self.act(self.names["step"], action)

    def compare(self, compares: bool = True) -> None:
        self.batches = NAMES["batches"]()
        for name, (grad, value) in next(self.expected).items() if compares else ():
            leaf = self.leaves[name]
            assert (leaf.grad is None) == (grad is None), f"{name}: {leaf.grad} and not {grad}"
            pairs = [(leaf.detach(), value)] + ([] if grad is None else [(leaf.grad, grad)])
            for got, want in pairs:
                assert (got.layout, got.dtype, got.shape) == (want.layout, want.dtype, want.shape), name
                got, want = dense(got), dense(want)
                options = {"rtol": 1e-12, "atol": 1e-14} if got.dtype is torch.float64 else {}
                if self.program.tolerance:
                    options = {"rtol": self.program.tolerance, "atol": self.program.tolerance}
                torch.testing.assert_close(got, want, msg=lambda text, n=name: f"{n}: {text}", **options)


class Alone(Replica):
    """A rank's replica in the oracle; it exchanges nothing."""

    def __init__(self, program: Program, size: int, rank: int) -> None:
        super().__init__(program, size, rank, self.plain)
        self.reduced: dict[str, torch.Tensor] = {}  # what the last round gave
        for leaf in self.leaves.values():  # no gradient shares memory, to which a second pass would add twice
            leaf.requires_grad and leaf.register_hook(torch.clone)

    @staticmethod
    def plain(optimizer: torch.optim.Optimizer, named: object, **arguments: object) -> torch.optim.Optimizer:
        nothing = lambda *_: contextlib.nullcontext()  # noqa: E731
        for name in ("no_sync", "skip_synchronize", "synchronize", "set_backward_passes_per_step"):
            setattr(optimizer, name, nothing)
        return optimizer

    def on_only(self, _: str) -> None:
        pass

    on_fails = on_only

    def named(self, which: str) -> dict[str, torch.Tensor]:
        """The parameters to reduce, also those of groups that were added."""
        owned = {id(p) for o in self.chosen(which) for group in o.param_groups for p in group["params"]}
        return {name: leaf for name, leaf in self.leaves.items() if id(leaf) in owned}

    def snapshot(self, which: str) -> Snapshot:
        copied = lambda grad: None if grad is None else grad.detach().clone()  # noqa: E731
        leaves = self.named(which) if which else self.leaves
        return {name: (copied(leaf.grad), leaf.detach().clone()) for name, leaf in leaves.items()}


def total_of(grads: list[torch.Tensor | None], compression: Any) -> torch.Tensor:
    """The sum, dense where one of them is, of what a user's compression leaves of each."""
    present = [grad for grad in grads if grad is not None]
    if all(grad.is_sparse for grad in present):
        return functools.reduce(torch.add, present).coalesce()
    total = torch.zeros_like(next(grad for grad in present if not grad.is_sparse).resolve_neg())
    for grad in present:
        if compression is not None and not getattr(compression, "__module__", "").startswith("farandole"):
            grad = compression.decompress(*compression.compress(grad))
        total = total + grad
    return total


def reduce(replicas: list[Alone], which: str) -> None:
    arguments = replicas[0].arguments
    is_sum = arguments.get("op", fl.Average) == fl.Sum
    for name in replicas[0].named(which):
        leaves = [replica.leaves[name] for replica in replicas]
        before = replicas[0].reduced.get(name)
        grads = [leaf.grad for leaf in leaves]
        if all(grad is None for grad in grads):
            continue
        if is_sum and before is not None and all(g is not None and torch.equal(dense(g), before) for g in grads):
            continue  # reduced already
        total = total_of(grads, arguments.get("compression"))
        total = total if is_sum else total / len(replicas)
        replicas[0].reduced[name] = dense(total).clone()
        for leaf in leaves:
            if replicas[0].program.writes and leaf.grad is not None:
                leaf.grad.data.copy_(total)
            else:
                leaf.grad = total.clone()


def expectation(program: Program, size: int) -> list[list[Snapshot]]:
    """At each comparison, by rank."""
    replicas = [Alone(program, size, rank) for rank in range(size)]
    snapshots = []
    for step, action in program.script():
        verb, _, which = action.partition(" @ ")[0].partition(" ")
        if verb not in ("end", "step", "look", "reduced"):
            for replica in replicas:
                replica.act(step, action)
            continue
        condition = action.partition(" @ ")[2]
        replicas[0].names["step"] = step
        if condition and not replicas[0].value(condition):
            continue
        if verb != "look":
            reduce(replicas, which)
        for replica in replicas if verb == "step" else ():
            for optimizer in replica.chosen(which):
                optimizer.step()
        if verb != "reduced":
            snapshots.append([replica.snapshot(which) for replica in replicas])
    return snapshots


def run(program: Program, job: Job) -> None:
    """On ranks as threads; all must end with the same bits."""
    expected = expectation(program, job.size)
    first, *others = job.run(lambda rank: Rank(program, job, rank, expected).run())
    for other in others:
        assert all(map(torch.equal, first, other)), "replicas differ"


def of_all(programs: list[Program]) -> pytest.MarkDecorator:
    """Each program on each of its jobs."""
    items = [pytest.param(program, job, id=f"{program.name}-{job.size} ranks, {job.complete}")
             for program in programs for job in program.jobs()]  # fmt: skip
    return pytest.mark.parametrize("program, job", items)
