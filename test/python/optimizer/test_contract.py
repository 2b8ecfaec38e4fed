"""Each promise about gradients: a sentence and a program of contract.py."""

import functools
import warnings

import pytest
import torch

import farandole.torch as fl
from contract import Program, Rank, expectation, of_all, one, ones, run
from jobs import Job, on_several
from models import OPTIMIZERS, Branched, Halved
from ranks import run_forked, run_threads

pytestmark = [
    pytest.mark.filterwarnings("ignore:optimizer.step.. called without"),
    pytest.mark.filterwarnings("ignore:Using backward.. with create_graph"),
]
SEVERAL = {"sizes": (2, 3, 4)}
AT_BACKWARD, AT_STEP = {"completes": ("backward",)}, {"completes": ("step",)}
SUM = {"arguments": "op=fl.Sum"}


def each(name, text, *arguments, **options):
    """The program with each of these arguments of DistributedOptimizer."""
    return [Program(f"{name} ({one})" if one else name, text, arguments=one, **options) for one in arguments]


class Square(torch.nn.Linear):
    """With weights that are the same everywhere."""

    def __init__(self):
        super().__init__(200, 200, bias=False)
        self.weight.data = torch.linspace(-0.1, 0.1, 40_000).view(200, 200)


PARTS = [
    Program("gradients are final when backward() returns, for clipping too",
            "zero; back p*(rank + step) + q*2; end; clip([p, q], 0.1); with opt.skip_synchronize(): opt.step()"),
    Program("with complete=step a rank may go on to another collective",
            "zero; back p*12 @ rank; only assert fl.allreduce(torch.ones(1), op=fl.Sum, name='x').item() == size; step",
            **SEVERAL, **AT_STEP),
    Program("a held gradient that did not fire takes part with its value",
            "zero; q.grad = t(6.) @ rank == 0; back p*2 + (q*2 if rank else 0); end; step"),
    Program("a parameter without gradient receives the mean over all ranks",
            "zero; back p*2 + (q*12 if rank == turn else 0); end; step", steps=4),
    Program("no_sync() before step() on one rank is as good as a backward pass: the same sums",
            "zero; apart p*(rank + 2) @ rank == 0; back p*(rank + 2) @ rank != 0; step", **SEVERAL),
    Program("absent everywhere stays None, and weight decay leaves it alone", "zero; back p*1; step",
            make=lambda ps: torch.optim.SGD(ps, lr=1.0, weight_decay=0.5)),
    Program("a reduced gradient that did not fire again is clean, and the same tensor",
            "p.grad = None; only n, clean = batches(), q.grad; back p*1; end; "
            "only assert q.grad is clean and batches() - n == 1",
            first="back p + q*rank; end", last="p.grad = None; back p + (q*12 if rank == 0 else 0); step",
            **SEVERAL, **AT_BACKWARD),
    Program("zeroed gradients that do not fire stay zero",
            "zeros; back p*1; step", first="back p + q*rank; step"),
    Program("a rank that skips backward() takes part in step()", "zero; back p*12 @ rank != turn; step", steps=4),
    Program("a gradient that a user's hook has taken away is absent, where the hook is the first",
            "zero; back p + q*12; end; step",
            before="q.register_post_accumulate_grad_hook(lambda _: setattr(q, 'grad', None)) @ rank == 0"),
    Program("a gradient that a user's hook has taken away is absent, where the hook is the last",
            "zero; back p + q*12; end; step",
            first="q.register_post_accumulate_grad_hook(lambda _: setattr(q, 'grad', None)) @ rank == 0"),
    Program("ranks whose first pass fires in different orders agree",
            "zero; back sum(p * rank for p in (ps[(rank + step) % 6:] + ps[:(rank + step) % 6])); end",
            leaves="a=one(), b=one(), c=one(), d=one(), e=one(), f=one()", first="ps = [a, b, c, d, e, f]", **SEVERAL),
    Program("channels-last and transposed parameters keep their layout",
            "zero; back turned * t(*range(6)).view(3, 2) * (1 + rank)"
            " + (image * t(*range(48)).view(4, 3, 2, 2) * (1 + rank)).sum() * (rank == 0 or step != 1); step; "
            "only assert image.grad.is_contiguous(memory_format=torch.channels_last)",
            leaves="image=torch.nn.Parameter(torch.ones(4, 3, 2, 2).to(memory_format=torch.channels_last)), "
            "turned=torch.nn.Parameter(torch.ones(2, 3).t())"),
    Program("a rank that has no channels-last gradient receives one in that layout",
            "zero; back p + (image.sum() if rank == turn else 0); step; "
            "only assert image.grad.is_contiguous(memory_format=torch.channels_last)",
            leaves="p=one(), image=torch.nn.Parameter(torch.ones(4, 3, 2, 2).to(memory_format=torch.channels_last))"),
    Program("a gradient in another order of memory is averaged in its place",
            "given = t(*range(6)).view(3, 2).t() * rank; p.grad = given; step; "
            "only assert size == 1 or p.grad is given", leaves="p=ones(2, 3)"),
    Program("autocast changes nothing",
            "zero; with torch.autocast('cpu', torch.bfloat16): loss = torch.nn.functional.linear(torch.full((1, 2), "
            "rank * 1.), p)"
            "; back loss; end", leaves="p=ones(1, 2)"),
    Program("gradients without elements that one rank lacks are received",
            "zero; back q + (p.sum() if rank == 0 else 0); end; step", leaves="p=ones(0, 3), q=one()", **SEVERAL),
]  # fmt: skip

#: Ways to write a gradient without a backward pass.
WRITERS = {
    "autograd.grad()": "grad_of(p).copy_(torch.autograd.grad((p * (rank + step)).sum(), p)[0])",
    "func.grad()": "grad_of(p).copy_(torch.func.grad(lambda x: (x * (rank + step)).sum())(p.detach()))",
    "one buffer": "grad_of(p)[:] = rank + step",
    "adding to zeros": "grad_of(p); zeros; p.grad.add_(rank + step)",
    "a flat buffer": "flat.fill_(rank + step)",
}
FLAT = "flat = torch.zeros(4); p.grad = flat[1:3]"
WRITTEN = [
    *(program for way, text in WRITERS.items() for program in each(
        f"gradients that are written by {way} are reduced in every step", f"{text}; step", "", "op=fl.Sum", steps=4,
        leaves="p=one(0., 0.)", writes=True, first=FLAT if "flat" in way else "")),
    Program("a mean is taken of gradients written through .data", "grad_of(p).data.fill_(rank + step); step", steps=4),
    *each("a written gradient takes part beside those of a backward()",
          "p.grad = None; q.grad.fill_(rank + step); back p*rank; step", "", "op=fl.Sum",
          first="q.grad = torch.zeros(1)", **SEVERAL),
    Program("only some ranks write in place", "p.grad.fill_(0) @ rank == 0; step", first="p.grad = t(12. * rank); step",
            steps=1, **SEVERAL),
    Program("with Sum a backward() may add to what was written after zero_grad()",
            "zeros; grad_of(p).add_(rank); back p*1; step", **SUM),
    Program("a gradient made in inference mode, which has no version, is reduced in every step",
            "with torch.inference_mode(): p.grad.fill_(rank + step); step",
            first="with torch.inference_mode(): p.grad = torch.zeros(1)", writes=True),
    Program("a lazily negated gradient on one rank is reduced with its sign",
            "g = t(1., 2.) * (rank + step); p.grad = torch._neg_view(-g) if rank == 0 else g; step",
            leaves="p=one(0., 0.)"),
    Program("an expanded gradient on one rank gets the mean",
            "g = t(rank + step * 1.); p.grad = g.expand(2) if rank == 0 else g.repeat(2); step", leaves="p=one(0., 0.)",
            **SEVERAL),
    *each("gradients that share memory are reduced once each",
    "zero; back (p.view(-1) + q.view(-1)) * (1 + rank + step);"
          " end; p.grad.zero_(); look; with opt.skip_synchronize(): opt.step()",
          *(f"op={op}{more}" for op in ("fl.Average", "fl.Sum") for more in ("", ", overlap=False", ", groups=2")),
          leaves="p=ones(200_000), q=ones(200_000)", **SEVERAL),
]  # fmt: skip

#: How gradients travel; "groups" makes each travel by itself, during the pass.
WAYS = ("groups=1000", "groups=1000, share_gradients=True", "overlap=False",
        "groups=1000, compression=fl.Compression.bf16")  # fmt: skip
LONG = {"leaves": "p=ones(1, 4096), q=ones(4096), r=ones(4096)", **SEVERAL}
#: Autograd gives .grad views, of what else has the same gradient: how y is made, and that gradient.
VIEWED = {
    "an input, as for saliency maps": ("x = torch.ones(4096, requires_grad=True); y = x + p.view(-1)", "x.grad"),
    "a parameter that is not wrapped": ("x = ones(1, 4096); y = x.view(-1) + p.view(-1)", "x.grad"),
    "what a hook keeps": ("kept = []; y = (p.view(-1) * 1).view(1, -1); y.register_hook(kept.append)", "kept[-1]"),
    "what a hook keeps of a sum":
        ("kept = []; y = p.view(-1) + torch.ones(4096); y.register_hook(kept.append)", "kept[-1]"),
}  # fmt: skip
MEMORY = [
    *each("a gradient that later nodes read is reduced in memory of its own",
          "zero; u = a * b; only u.register_hook(pause); back (u + r*2 + q*3 + p.view(-1)) * (1. + rank); end",
          *(f"op=fl.Sum, {way}" for way in WAYS), **LONG | {"leaves": "a=ones(4096), b=ones(4096), " + LONG["leaves"]}),
    *(program for what, (made, other) in VIEWED.items() for program in each(
        f"the gradient of {what} stays", f"zero; {made}; back (y + r*2) * (1. + rank); end; "
        f"only assert {other}.eq(1. + rank).all()", *WAYS, **LONG)),
    *each("the gradient that backward() was given is not written", "zero; given = torch.full((4096,), 1. + rank); "
          "p.view(-1).backward(given); end; only assert given.eq(1. + rank).all()", *WAYS, **LONG),
    *each("a batch of which a function gives a view is not written", "zero; x = torch.full((4096,), 1. + rank); "
          "back OfBatch.apply(p, x); end; only assert x.eq(1. + rank).all()", *WAYS, **LONG),
    *each("two optimizers whose gradients share memory reduce each once",
          "zero; back (p.view(-1) + q) * (1. + rank); end; step", *(f"op=fl.Sum, {way}" for way in WAYS),
          optimizers="p | q", **LONG),
    *each("gradients that overlap in part are reduced once each",
          "zero; back (r + torch.cat([p, q])) * (1. + rank); end", *(f"op=fl.Sum, {way}" for way in WAYS),
          leaves="p=ones(2048), q=ones(2048), r=ones(4096)", **SEVERAL),
    *each("sharing that begins in a later step is handled",  # q is sent when r follows, then p
          "zero; y = p*1 + r*1 + q*1 @ step < 2; y = p.view(-1) + r*1 + q.view(-1) @ step >= 2; "
          "y.backward(torch.ones(4096)); step", *(f"op=fl.Sum, {way}" for way in WAYS), steps=5,
          leaves="p=ones(4096), q=ones(4096), r=ones(4096)", **SEVERAL),
    *each("a flat buffer of the user's keeps the gradients", "zeros; back (p + q*2) * (1. + rank); end; "
          "only assert flat[:4096].equal(p.grad) and flat[4096:].equal(q.grad)",
          *(way for way in WAYS if "share" not in way), leaves="p=ones(4096), q=ones(4096)", writes=True,
          first="flat = torch.zeros(8192); p.grad, q.grad = flat[:4096], flat[4096:]", **SEVERAL),
    Program("a gradient that has left a flat buffer has a version of its own: what is added to others is none to it",
            "zeros; d.grad = None @ step >= 2; back torch.full((64,), rank + 1.) * a * b * c * d; step", steps=5,
            leaves="a=ones(64), b=ones(64), c=ones(64), d=ones(64)", arguments="groups=1000", writes=True,
            first="a.grad, b.grad, c.grad, d.grad = torch.zeros(4, 64)",
            make=functools.partial(torch.optim.SGD, lr=1e-3), **SEVERAL),
    Program("who keeps a gradient keeps its values, in memory that ranks share",
            "zero; back p*(rank + step); step; only kept.append((p.grad, p.grad.clone())); "
            "only assert all(torch.equal(*pair) for pair in kept)", leaves="p=ones(100_000)", first="kept = []",
            arguments="share_gradients=True", steps=4, **SEVERAL),
    Program("what else has a gradient's size, as an activation's has, may be in its block",
            "zero; back model(torch.linspace(-1, 1, 40_000).roll(rank).view(200, 200)).square().mean(); end; step",
            leaves=lambda: torch.nn.Sequential(*(Square() for _ in range(4))), arguments="share_gradients=True",
            tolerance=1e-5, make=functools.partial(torch.optim.SGD, lr=1e-3), **SEVERAL),
    Program("ranks may differ in whether gradients are made in memory that they share",
            "zero; back p*(rank + step); step", leaves="p=ones(100_000)", arguments="share_gradients=rank == 0",
            **SEVERAL),
]  # fmt: skip

IN_FLIGHT = "ValueError|HorovodInternalError"
PRODUCT = "back torch.full((64,), rank + 1.) * a * b * c * d"
FOUR = "a=ones(64), b=ones(64), c=ones(64), d=ones(64)"
ASSIGNED = [
    *each("a gradient assigned where the pass made none is reduced in step()",
          "zero; back p*(rank + step); q.grad = t(2. * (rank + step)); step", "", "op=fl.Sum", steps=4, **SEVERAL),
    Program("a gradient that takes the place of a mean is averaged",
            "zero; back p*rank + q*3; p.grad = p.grad + torch.autograd.grad((p * 10 * rank).sum(), p)[0]; step",
            **SEVERAL, **AT_BACKWARD),
    Program("a gradient that takes the place of a sum is refused by name, and stays after synchronize()",
            'zero; back p*rank; p.grad = p.grad + 1; '
            'fails ValueError "the gradient of .p. was reduced in backward" step',
            last="zero; back p*rank; opt.synchronize(); end; p.grad = p.grad + 1; "
            "with opt.skip_synchronize(): opt.step()",
            **SUM, **SEVERAL, **AT_BACKWARD),
    Program("what is written in place after the round stays: clipping, the same on all ranks",
            "zero; back p*rank + q; end; torch.nn.utils.clip_grad_value_([p, q], 0.5); "
            "with opt.skip_synchronize(): opt.step()", **SUM, **SEVERAL),
    *(program for place, (zero, first) in {
        "": ("zero", ""), " of a flat buffer": ("zeros", "a.grad, b.grad, c.grad, d.grad = torch.zeros(4, 64)")}.items()
      for program in each(
        f"a write into a gradient{place} that is in flight is refused by name",
        f"{zero}; writes = step == 4; {PRODUCT} @ step != 4; step @ step != 4; fails {IN_FLIGHT} "
        f'"the gradient of .d. was changed in place.* while it was in flight" {PRODUCT} @ step == 4',
        "groups=1000", "groups=1000, compression=fl.Compression.bf16", steps=6, leaves=FOUR, tolerance=1e-2,
        make=functools.partial(torch.optim.SGD, lr=1e-3),
        writes=True, before="b.register_hook(lambda g: [writes and d.grad.clamp_(-0.1, 0.1)] and None); writes = False",
        first=first, **SEVERAL, **AT_BACKWARD)),
    Program("clipping before synchronize() is refused by name", "zero; back (a + b + c + d)*(rank + 1); "
    "step @ step < 3; "
            f'clip([a, b, c, d], 0.1 * (rank + 1)) @ step == 3; fails {IN_FLIGHT} "in flight" step @ step == 3',
            leaves=FOUR, arguments="groups=1000", steps=4, **SEVERAL, **AT_STEP),
    Program("zero_grad() of the model between backward() and step() is refused",
            "zero; back p + q; p.grad.zero_() @ step == 3; step @ step < 3; "
            f'fails {IN_FLIGHT} "in flight" step @ step == 3', arguments="groups=1000", steps=4, **SEVERAL, **AT_STEP),
]  # fmt: skip

TWICE = "back p*(rank + 1); look; " * 2
WINDOWS = [
    *each("a mean divides the sum of the passes by the ranks only, also in a partial or a second window",
          "zero; for _ in range(step + 1): (p * 12 * (1 + rank)).sum().backward(); step",
          *(f"backward_passes_per_step={k}" for k in (1, 2, 3, 5)), steps=6),
    Program("only the last pass of a window exchanges", f"zero; {TWICE}back p*(rank + 1); end",
            arguments="backward_passes_per_step=3", **SEVERAL),
    Program("a parameter that fired only early in the window takes part", "zero; back p + q*rank; back p*1; end",
            arguments="backward_passes_per_step=2", **SEVERAL),
    Program("zero_grad() in mid-window begins a new one", "back p*100; zero; back p*rank; look; back p*rank; step; "
    "zero",
            arguments="backward_passes_per_step=2"),
    Program("windows of unequal length, as at an epoch's end, are flushed by step()",
            "zero; for i in range((4, 4, 1, 4, 3)[step]): loss_of(model, batch(rank, 10 * step + i)).backward(); step",
            leaves=Branched, arguments="backward_passes_per_step=4", steps=5, make=OPTIMIZERS["SGD"]),
    Program("set_backward_passes_per_step() changes the window",
            'zero; back p*rank; look; back p*rank; step; fails ValueError "must be > 0, not 0" '
            "opt.set_backward_passes_per_step(0)", first="opt.set_backward_passes_per_step(2)"),
    Program("nothing is exchanged within no_sync()", "zero; apart p*rank + q*rank; look; back p*rank; end; step"),
    Program("step() after only passes within no_sync() reduces them", "zero; apart p*rank; apart p*rank; step"),
    Program("a gradient reduced before no_sync() is reduced again with what came",
            "zero; back p*rank; end; apart p*rank; step"),
    Program("synchronize() and skip_synchronize() are there and not needed",
            "zero; back p*rank; opt.synchronize(); end; with opt.skip_synchronize(): opt.step()"),
    Program("zero_grad() with gradients in flight is refused",
            'back p*rank; fails AssertionError "gradients are in flight" zero; step; zero', **SEVERAL, **AT_STEP),
    Program("a second backward() does not write into gradients in flight", "zero; back p*rank; back p*rank; end; step",
            leaves="p=ones(100_000)", steps=8, **SEVERAL),
    Program("an exception before the last pass fails the window on every rank", 'fails ValueError|AbortedError '
            '"bad batch 17" back calling(p * 1, lambda: rank == 0 and fail()) * q & back p * q & back p * q; '
            "zero; back p*rank; back p*rank; end; step", arguments="backward_passes_per_step=2", **AT_BACKWARD),
]  # fmt: skip

STILL = {"make": functools.partial(torch.optim.SGD, lr=0.0), **SEVERAL}
SECOND = "only meet = lambda: errors.append(Aside(lambda: (p * 100 + q * 100).sum().backward()).outcome())"
THREADS = [
    *(Program(f"a backward() on a second thread is refused while the first runs, on {who}, after {rounds} rounds",
              "zero; errors = []; back calling(p * 1, meet) * q * (1 + rank); step; "
              f"only assert len(errors) == ({where}) and all('one thread' in error for error in errors)",
              first="meet = lambda: None; " + "zero; back p*q; step; " * rounds + f"{SECOND} @ {where}", **STILL)
      for who, where in (("one rank", "rank == 0"), ("all ranks", "True")) for rounds in (0, 2)),
    Program("of two threads one is refused, whichever is faster, so that every rank runs equally many rounds",
            "zero; errors = []; go(); step; "
            "only assert '' in errors and sorted('one thread' in error for error in errors) == [False, True]",
            first="go = run = lambda: (p * q * (1 + rank)).sum().backward(); "
            "only go = lambda: errors.extend(each.outcome() for each in [Aside(run), Aside(run)])",
            leaves="p=one(1., 1.), q=one()", steps=10, **STILL),
    Program("every step may have a thread of its own",
            "zero; error = Aside(lambda: (p * rank).sum().backward()).outcome(); only assert error == ''; step",
            **SEVERAL),
    Program("autograd.grad() may run on other threads", "zero; slope = lambda: torch.autograd.grad((p**2).sum(), p); "
            "errors = [Aside(slope).outcome()]; "
            "back calling(p * 1, lambda: errors.append(Aside(slope).outcome())) * rank; "
            "errors.append(Aside(slope).outcome()); step; only assert errors == [''] * 3", **SEVERAL),
    *(Program(f"{what}() on another thread, which would end a running pass, is refused",
              "zero; errors = []; back calling(p * 1, meet) * q * rank; step; "
              "only assert len(errors) == 1 and 'one thread' in errors[0]",
              first=f"meet = lambda: None; only meet = lambda: errors.append(Aside(opt.{what}).outcome())", **STILL)
      for what in ("step", "synchronize", "zero_grad")),
]  # fmt: skip

HOLDS = 'RuntimeError ".p. already holds a reduced value"'
PASSES = [
    Program("nested passes, of a checkpoint, a function and a hook, are one round",
            "zero; x = calling(checkpoint(lambda y: y * p, torch.ones(1, requires_grad=True), use_reentrant=True), "
            "lambda: (q * rank).sum().backward()); "
            "x.register_hook(lambda g: torch.set_grad_enabled(True) and None or (r * rank).sum().backward()); "
            "only n = batches(); back x*rank; end; only assert step == 0 or batches() - n == 1",
            arguments="overlap=False", **SEVERAL),
    Program("a second backward() accumulates on the mean as in plain torch",
            "zero; for _ in range(3): (p * (1 + rank)).sum().backward(); end"),
    Program("a graph may be retained for a second backward()",
            "zero; loss = (p * p * rank).sum(); loss.backward(retain_graph=True); loss.backward(); end"),
    Program("with Sum a second backward() on a reduced gradient is refused, which clipping does not hide",
            f"zero; back p*1; end; only clip([p], 0.5); fails {HOLDS} back p*1; zeros; back p*1; step", **SUM,
            **SEVERAL),
    Program("with Sum a pass within no_sync() on a reduced gradient is refused",
            f"back p*1; end; fails {HOLDS} apart p*1 & step", steps=1, **SUM, **SEVERAL, **AT_BACKWARD),
    Program("create_graph is refused, and a gradient penalty by autograd.grad() is not",
            'fails RuntimeError "create_graph" (p**2).sum().backward(create_graph=True); zero; '
            "back (torch.autograd.grad((p**3).sum(), p, create_graph=True)[0] - 1)**2 * (1 + rank); end", **SEVERAL),
    Program("autograd.grad() and functional derivatives exchange nothing, before a pass and after it",
            "only assert torch.autograd.grad((p**2).sum(), p)[0] == 2 * p @ rank == 0; "
            "only torch.autograd.functional.jacobian(lambda x: x**2, p.detach()) @ rank == 0; "
            "only torch.func.grad(lambda x: (x**2).sum())(p.detach()) @ rank == 0; look; back p*rank; "
            "only torch.autograd.grad((p**2).sum(), p) @ rank == 0; only fl.allreduce(torch.ones(1), name='apart'); "
            "end; torch.autograd.grad((p**2).sum(), p); step; zero", **SUM),
    Program("backward() to some inputs reduces those",
            "zero; (p * rank + q * rank).sum().backward(inputs=[p]); end; step"),
    Program("a tied weight is sent at its learned number of accumulations, and one more says the way out",
            "zero; back loop(p, 2, loop(q, 1)) * (1 + rank); end; p.data.fill_(1); q.data.fill_(1)",
            last='zero; fails RuntimeError|AbortedError ".p. was accumulated again after.*overlap=False" '
            "back loop(p, 2, loop(q, 1, loop(p, 1))) & end; zero; back loop(p, 2, loop(q, 1, loop(p, 1))); end",
            steps=4, **SEVERAL),
    *each("without overlap loops may vary in length, and between ranks",
          "zero; back loop(p, (2, 5, 1, 0, 7, 3)[step] + (step > 3) * rank) * q; step; p.data.fill_(1); "
          "q.data.fill_(1)",
          "overlap=False", "overlap=False, op=fl.Sum", steps=6),
    Program("an unfrozen parameter is exchanged",
            "zero; q.requires_grad_(step >= 2); back p + q*rank; end; step", first="q.requires_grad_(False)", steps=5),
    Program("a parameter unfrozen on some ranks only is reduced on all",
            "zero; r.requires_grad_(True) @ step >= 2 and rank == 1; "
            "back p*rank + (r if step >= 2 and rank == 1 else 0); "
            "step", before="q.requires_grad_(False); r.requires_grad_(False)", steps=5, **SEVERAL),
    Program("a gradient assigned to a frozen parameter on one rank is reduced on all",
            "zero; r.grad = torch.ones(1) @ step >= 2 and rank == 1; back p*rank; step",
            before="q.requires_grad_(False); r.requires_grad_(False)", steps=5, **SEVERAL),
    Program("a pass that reaches unfrozen parameters only is a round",
            "p.requires_grad_(step < 2); q.requires_grad_(step >= 2); zero; back (p if step < 2 else q)*rank; end; "
            "step",
            before="q.requires_grad_(False)", steps=4, **SEVERAL),
    Program("parameters frozen on some ranks only are a mismatch by name",
            'zero; fails MismatchError "rank 1 sent .*q float32 .1. .requires no gradient" '
            "back p*1 & step",
            before="q.requires_grad_(rank != 1)", steps=1, **SEVERAL),
    Program("a group added on some ranks only is a mismatch by name",
            'zero; back p*1; step; opt.add_param_group({"params": [q]}) @ rank == 0; zero; '
            'fails MismatchError "noname.1.0" back p*1 & step', optimizers="p", steps=1, **SEVERAL),
    Program("an added group is exchanged, and one that was added behind the optimizer's back",
            'opt.add_param_group({"params": [q], "lr": 2.0}) @ step == 2; '
            'opt.param_groups[0]["params"].append(r) @ step == 4; zero; back (p + q + r)*rank; step',
            optimizers="p", steps=6),
    Program("two backward passes after a group was added", "zero; back (p + q + r)*rank; back (p + q + r)*rank; step",
            optimizers="p q", first='back (p + q)*rank; step; opt.add_param_group({"params": [r]})', steps=2),
    Program("a group added between backward() and step() is exchanged", "step",
            first='back (p + q)*rank; opt.add_param_group({"params": [q]})', optimizers="p", steps=1),
    Program("a parameter that replaces another in its group is reduced",
            "back (p if step == 0 else q)*rank; step; opt.param_groups[0]['params'][0] = q", optimizers="p", steps=2),
]  # fmt: skip

WEIGHTS = "p=ones(4096, 8), q=one()"
FORMS = ["", "op=fl.Sum", "compression=Halved", "compression=fl.Compression.bf16"]
SHAPES = [
    *(program for rows in (16, 8192) for used in ("", " @ rank == turn") for program in each(
        f"training goes on when all ranks change a parameter alike, to {rows} rows, {used or 'used'}",
        f"zero; resize(p, {rows}) @ step == 1; resize(p, 2048) @ step == 3; loss = q.sum(); "
        f"loss = loss + p.sum() * 12{used}; back loss; end; step", *FORMS, leaves=WEIGHTS, steps=6, tolerance=1e-2)),
    *(Program(f"a parameter changed on one rank is named on all, after {rounds} rounds", 'zero; fails MismatchError '
              r'"p.*\[(4096|16),8\].*\[(4096|16),8\]" back p.sum() + q & end',
              first="zero; back p.sum() + q; end; " * rounds + "resize(p, 16) @ rank == 1", steps=2,
              last="resize(p, 16); zero; back p.sum() + q; end", leaves=WEIGHTS, **SEVERAL) for rounds in (0, 1, 3)),
    Program("a gradient left in the old shape is refused by name", "zero; back p.sum(); step",
            first=r'back p.sum(); step; resize(p, 16); fails ValueError|AbortedError ".p.*\[4096, 8\].*\[16, 8\]" step',
            leaves=WEIGHTS, steps=1, **SEVERAL),
    *(Program(f"a parameter changed before step() is refused by name: {who}, {rounds} rounds, {what}",
              f"zero; back (p * q).sum(); resize(p, 16) @ {where}; "
              f"p.grad = p.grad[:16].clone() @ {where} and {with_grad}; "
              f'fails ValueError|HorovodInternalError "p" step; resize(p, 16) @ not ({where}); zero; '
              f'back (p * q).sum(); step',
              first="back (p * q).sum(); step; zero; " * rounds, leaves=WEIGHTS, steps=1, tolerance=1e-3,
              sizes=(2, 3), **AT_STEP)
      for who, where in (("one rank", "rank == 0"), ("all ranks", "True")) for rounds in (0, 2)
      for what, with_grad in (("with its gradient", True), ("without",
      False)) if who == "one rank" or rounds or not with_grad),
    Program("all ranks may change a parameter with its gradient before anything is sent",
            "zero; back (p * q).sum(); resize(p, 16); p.grad = p.grad[:16].clone(); step; zero; back (p * q).sum(); "
            "step",
            leaves=WEIGHTS, steps=1, sizes=(2, 3), tolerance=1e-3, **AT_STEP),
    Program("a gradient replaced while it is in flight is refused by name",
            "zero; back (p * q).sum(); step; zero; back (p * q).sum(); step", steps=1, leaves=WEIGHTS, tolerance=1e-3,
            last="zero; back (p * q).sum(); q.grad = q.grad.clone(); p.grad = p.grad.clone(); "
            'fails ValueError|AbortedError ".[pq].*synchronize" step', **SEVERAL, **AT_STEP),
    *each("sparse tables may change their size",
          "zero; p.data = torch.ones((64, 8, 256, 256)[step], 2); back rows(p, rank, len(p) - 1) * 12; end; step",
          "sparse_as_dense=False", "sparse_as_dense=True", leaves="p=ones(64, 2)", steps=4,
          last="p.data = torch.ones(8, 2); p.grad = None @ rank == 0; "
          r'fails ValueError|AbortedError ".p.*\[256, 2\].*\[8, 2\]" step', **SEVERAL),
    Program("a change of the memory order goes on", "zero; p.data = p.data.contiguous(memory_format=orders[step]); "
            "back p * t(*range(48)).view(4, 3, 2, 2); end", leaves="p=ones(4, 3, 2, 2)",
            first="orders = [torch.contiguous_format, torch.channels_last, torch.contiguous_format]"),
    *each("a model converted after wrapping is reduced in its new dtype",
          "p.data = p.data.to((torch.float32, torch.float64, torch.float64)[step]); zero; "
          "back p * (1 + 1e-9 * rank); end; step", "", "op=fl.Sum", make=functools.partial(torch.optim.SGD, lr=0.0)),
]  # fmt: skip

TABLE, SPARSE_AND = "table=ones(6, 2)", "table=ones(6, 2), p=one()"
SPARSE = [
    *each("sparse gradients become the mean and stay sparse",
          "zero; back rows(table, rank, 4, 4, (rank + step) % 6).sum() * 12 + p.sum() * rank; end; step",
          "sparse_as_dense=False", "sparse_as_dense=True", leaves=SPARSE_AND, steps=4),
    Program("a rank without a sparse gradient receives one",
            "zero; back p + (rows(table, 3).sum() * 12 if rank == turn else 0); end; step", leaves=SPARSE_AND, steps=4),
    Program("a rank may contribute no rows", "zero; back rows(table, *([] if rank else [2])) * 12; end; step",
    leaves=TABLE),
    Program("sparse on one rank and dense on others gives the dense mean",
            "zero; back (rows(table, 1) if rank == 0 else table) * 12; end", leaves=TABLE, **SEVERAL),
    Program("a sparse gradient that did not fire again is clean; one rank may add to it, sparse or dense",
            "back p*1; end; only assert table.grad is clean", steps=1, leaves=SPARSE_AND,
            first="back rows(table, rank).sum() * 12 + p.sum(); end; clean = table.grad",
            last="back p.sum() + (rows(table, 5).sum() * 12 if rank == 0 else 0); end; "
            "back p.sum() + (table.sum() * 12 if rank == 0 else 0); end", **SEVERAL),
    Program("rows may be added to a sparse gradient without any",
            "back rows(table, *([] if step == 0 else [rank, 5])); end", leaves=TABLE, steps=2),
    Program("SparseAdam trains like one process", "zero; back (rows(table, rank, 4, 4, rank) * t(1., 2.)).square(); "
    "step",
            leaves=TABLE, steps=5, make=lambda ps: torch.optim.SparseAdam(ps, lr=0.1)),
    Program("several sparse tables of any dtype travel together",
            "zero; back rows(p, rank, 5).sum() * 12 + rows(q, rank, 5).sum() * 12; end", tolerance=1e-2,
            leaves="p=ones(6, 3, dtype=torch.float64), q=ones(6, 3, dtype=torch.bfloat16)", **SEVERAL),
]  # fmt: skip

OWN_DTYPE = [] if not hasattr(torch.Tensor, "grad_dtype") else [
    *each("float32 gradients of bfloat16 weights lose nothing", "zero; back ToFloat.apply(p) * (FINE * 2**rank); end",
          "", "op=fl.Sum", leaves="p=half(torch.float32)", tolerance=1e-7),
    Program("a rank without a gradient receives it in the dtype that is set",
            "zero; p.grad = torch.full((3,), FINE * size) @ rank == turn; step", leaves="p=half(torch.float32)",
            tolerance=1e-7),
    Program("a gradient of any dtype keeps that of the last round: all ranks have one once, then only one has",
            "zero; back ToFloat.apply(p) * FINE @ step == 0 or rank == turn; step", leaves="p=half(None)", steps=4,
            tolerance=1e-7),
    Program("ranks that disagree on the dtype get an error by name",
            'p.grad = torch.ones(3, dtype=p.grad_dtype); fails MismatchError ".p.*float32.*bfloat16" step',
            last="zero; p.grad_dtype = torch.float32; p.grad = torch.full((3,), FINE); step", steps=1,
            leaves="p=half(torch.float32 if rank == 0 else torch.bfloat16)", tolerance=1e-7, **SEVERAL),
    Program("a dtype that changes in mid-pass is refused by name once",
            "zero; back ((p.float() * q.float()).sum() * r.float()).sum(); end", tolerance=1e-2,
            last='zero; fails ValueError|AbortedError ".p.*float32.*bfloat16" '
            "back ((ToFloat.apply(p) * q.float()).sum() * r.float()).sum() & end; "
            "zero; back ((ToFloat.apply(p) * q.float()).sum() * r.float()).sum(); end",
            leaves="p=half(None), q=half(None), r=half(None)", **SEVERAL),
    Program("float32 sparse gradients of bfloat16 weights lose nothing",
            "p.grad = torch.sparse_coo_tensor([[2]], torch.full((1, 2), FINE * 2**rank), (4, 2)); step", tolerance=1e-7,
            leaves="p=half(torch.float32, 4, 2)", **SEVERAL),
]  # fmt: skip

GAME = ("zero 1; back ((q * x - 1)**2 + (q * (p * x).detach())**2); step 1; zero 0; q.requires_grad_({plays}); "
        "back (q * p * x - 1)**2; q.requires_grad_(True); {ends}step 0")  # fmt: skip
SHARING = [
    *(Program(f"two optimizers of a GAN do not disturb each other, complete={complete}",
              "x = t(1. + rank + step); " + GAME.format(plays=complete == "backward",
              ends="end; " * (complete == "backward")), optimizers="p | q", steps=6,
              leaves="p=one(0.5), q=one(0.3)", make=functools.partial(torch.optim.SGD, lr=0.001), completes=(complete,))
      for complete in ("backward", "step")),
    Program("ranks may come to two optimizers in different orders",
            "zero; both = [lambda: p*2 + rows(table, 0).sum(), lambda: q*3]; both = both[::-1] @ rank % 2; "
            "made = [make() for make in both]; back made[0] + made[1]; end; step",
            leaves="p=one(), q=one(), table=ones(3, 1)", optimizers="p table | q", **SEVERAL),
    Program("a shared parameter is reduced once for both optimizers",
            "zero; back (p + q + r)*rank; step 1; step 0", optimizers="p q | r p"),
    Program("step() of the second optimizer takes part for a shared parameter",
            "back p*12 @ rank != turn; step 1; zero 1", optimizers="p | q p", steps=4),
    Program("a shared parameter stays reduced when the first optimizer goes", "zero; back p*rank; step",
            optimizers="p | q p", first="del opt; optimizers.pop(0)", **SEVERAL),
]  # fmt: skip

UNWRAPPED = [
    Program("an unwrapped optimizer is a plain one, a scheduler's made before, too, and can be wrapped again",
            "zero; back p*rank; step; early.step(); zero; only assert fl.unwrap(opt) is plain and "
            "set(vars(opt)) - {'_opt_called'} == known; "
            'only assert not getattr(p, "_post_accumulate_grad_hooks", None) and not p._backward_hooks; '
            'fails ValueError "is not wrapped" fl.unwrap(plain); zero; back p*rank; look; plain.step(); early.step(); '
            "look; p.data.fill_(1); only fl.DistributedOptimizer(plain, [('p', p)])", optimizers="p",
            before="early = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5); known = set(vars(plain))"),
    Program("unwrapping the second of two that share a parameter leaves the first",
            "zero 0; q.grad = None; back (p + q)*rank; end 0; only assert q.grad.item() == rank; step 0",
            optimizers="p | p q", first="only fl.unwrap(optimizers.pop())", **SEVERAL),
    *each("unwrapping with gradients on their way is refused",
          r'zero; back p*rank; fails ValueError "call step\(\), synchronize\(\) or" fl.unwrap(opt); step',
          "", "backward_passes_per_step=2", last="only fl.unwrap(opt)", steps=1, sizes=(2, 3), **AT_STEP),
    Program("copies of a wrapped optimizer are not wrapped",
            'fails ValueError "is not wrapped" fl.unwrap(copy.deepcopy(opt))', steps=1, **AT_BACKWARD),
]  # fmt: skip

COMPRESSED = [
    Program("a compression class with static methods is used", "zero; back loss_of(model, batch(rank, step, "
    "torch.float32));"
            " step", leaves=lambda: Branched(torch.float32), make=OPTIMIZERS["SGD"], steps=8,
            arguments="compression=Halved", tolerance=1e-5),
    Program("an object may change the shape that travels, also for a rank without a gradient",
            "zero; back p*12 @ rank != turn; step", leaves="p=ones(3, 2, 2)", arguments="compression=FirstColumn()",
            steps=4,
            **SEVERAL),
    Program("a shape that depends on the values is refused by name",
            r'fails ValueError|AbortedError ".p.. expected torch.float32 \[1\]" back p*2 & step', steps=1,
            arguments="compression=Growing", optimizers="p", **SEVERAL),
    Program("a complex first parameter goes with a compression class",
            "zero; back (c * (1 + 1j)).real.sum() * rank + p * rank; end; step", arguments="compression=AsReal",
            leaves="c=ones(3, dtype=torch.complex64), p=one()", **SEVERAL),
    *(program for dtype in ("torch.complex64", "torch.complex128") for program in each(
        f"{dtype} gradients are reduced as pairs, lazily conjugated and channels-last ones, too",
        "zero; w = torch.tensor(1 + rank + 1j * (step + rank), dtype=p.dtype); "
        "back (p * w).real.sum() + (image * factors * w).real.sum() + ((q * 2j).real.sum() if rank == 0 else 0); "
        "r.grad = torch.full((2, 2), w.item(), dtype=p.dtype).conj(); opt.synchronize(); end; "
        "with opt.skip_synchronize(): opt.step()",
        *(f"op={op}{more}" for op in ("fl.Average", "fl.Sum") for more in ("",
        ", groups=1000, gradient_as_bucket_view=True")),
        leaves=", ".join(f"{name}=ones(2, 2, dtype={dtype})" for name in "pqr")
        + f", image=torch.nn.Parameter(torch.zeros(2, 3, 4, 5, dtype={dtype}).to(memory_format=torch.channels_last))",
        first="factors = torch.arange(120).view(2, 3, 4, 5)", **SEVERAL)),
]  # fmt: skip

STARTS = "only model.load_state_dict({n: p + rank for n, p in model.state_dict().items()}); " \
         "only fl.broadcast_parameters(model.state_dict())"  # fmt: skip
BRANCHES = {"all": "True", "one rank skips": "not (rank == 1 and step % 2)", "in turns": "rank == step % 2",
"once": "step == 0"}


def training(name, uses="True", dtype=torch.float64, make="SGD", arguments="", **options):
    """Of a network with a branch, from weights that a broadcast has to make equal."""
    return Program(name, f"zero; back loss_of(model, batch(rank, step, torch.{str(dtype)[6:]}), {uses}); end; step",
                   first=STARTS, leaves=functools.partial(Branched, dtype), make=OPTIMIZERS[make], arguments=arguments,
                   **{"steps": 8} | options)  # fmt: skip


TRAINING = [
    *(training(f"float64 training by {make} is that of one process", make=make, **SEVERAL) for make in OPTIMIZERS),
    *(training(f"gradients made in memory that ranks share train as others, by {make}", make=make,
               arguments="share_gradients=True", **SEVERAL) for make in OPTIMIZERS),
    *(training(f"a branch that some ranks skip changes nothing: {who}", uses, **SEVERAL) for who,
    uses in BRANCHES.items()),
    training("float32 SGD stays within 1e-5 of one process", BRANCHES["one rank skips"], torch.float32, tolerance=1e-5,
             sizes=(2,)),
    *(training(f"replicas are bitwise the same with a 16-bit wire: {wire}", "True", torch.float32, "SGD",
               f"compression=fl.Compression.{wire}", tolerance=0.1, steps=5, sizes=(3,)) for wire in ("fp16", "bf16")),
    training("a predivided average is an average", arguments="gradient_predivide_factor=4.0", steps=5, sizes=(2, 3)),
    training("a sum is all ranks' sum", arguments="op=fl.Sum", steps=5, sizes=(2, 3)),
]  # fmt: skip

AFTER_IT = ('fails HorovodInternalError "step.. after a failed backward" step; '
            "zero; back p*(1 + rank); end; step; zero; back p*rank; end; step")  # fmt: skip
BREAKS = "back calling(p * 1, lambda: rank == 1 and fail()) * q & end"
FAILED = [
    *(Program(f"an exception in one backward() fails the round on every rank, after {rounds} rounds",
              f'fails ValueError "^bad batch 17$" {BREAKS} @ rank == 1; '
              f'fails AbortedError "rank 1.*ValueError: bad batch 17" {BREAKS} @ rank != 1; {AFTER_IT}',
              first="zero; back p*q; step; " * rounds + "zero", steps=1, **SEVERAL) for rounds in (0, 1, 3)),
    Program("a backward() right after a failed one works without zero_grad()",
    f'fails ValueError|AbortedError "bad batch 17" {BREAKS}; '
            "p.grad = None; q.grad = None; back p*rank + q; end", steps=1, **SEVERAL),
    *(Program(f"an exception in compress() fails the round on every rank, after {rounds} rounds",
              "only Refusing.now.refuses = True @ rank == 1; "
              'fails KeyError "no compressor" back p*1 & end @ rank == 1; only Refusing.now.refuses = False; '
              """fails AbortedError "rank 1.*KeyError: 'no compressor'" back p*1 & end @ rank != 1; """ + AFTER_IT,
              first="zero; back p*1; step; " * rounds + "zero", steps=1, arguments="compression=Refusing",
              optimizers="p",
              **SEVERAL) for rounds in (0, 1, 3)),
]  # fmt: skip

POWER = {"arguments": "compression=fl.PowerSGD(rank=2)", "tolerance": 1e-4} | SEVERAL
LOW_RANK = [
    Program("PowerSGD averages a matrix of no higher rank exactly", "zero; back p * low_rank(rank); end",
            leaves="p=ones(40, 30)", **POWER),
    Program("PowerSGD sends vectors and small matrices as they are",
            "zero; back (v * (rank + t(*range(50)))).sum() + (m * (rank - t(*range(36)).view(6, 6))).sum() + "
            "(p * low_rank(rank)).sum(); end", leaves="v=ones(50), m=ones(6, 6), p=ones(40, 30)", **POWER),
    Program("with PowerSGD a convolution in half precision keeps shape and dtype",
            "zero; back p * (rank + 1.); end", leaves="p=ones(32, 16, 3, 3, dtype=torch.bfloat16)",
            **POWER | {"tolerance": 1e-2}),
    Program("with PowerSGD a rank without a gradient takes part", "zero; back q if rank == 0 else p * low_rank(rank); "
    "end",
            leaves="p=ones(40, 30), q=one()", **POWER),
    Program("with PowerSGD a round of zeros, from which Q would stay zero, does not end learning",
            "zero; back p * (low_rank(rank, 5) * (step > 0)); opt.synchronize(); end @ step != 1",
            leaves="p=ones(40, 30)",
            **POWER),
]  # fmt: skip

SGD = torch.optim.SGD
SCALER = {"first": "scaler = torch.amp.GradScaler('cpu', init_scale=4.0, growth_interval=100); "
          "only warnings.filterwarnings('error', message='.*skip_synchronize')", "steps": 4}  # fmt: skip
OVERFLOW = "back scaler.scale(p * (math.inf if (rank, step) == (0, 1) else rank)); "
ENDS = "scaler.update(); end 1; only assert scaler.get_scale() == (2.0 if step else 4.0)"
TOOLS = [
    Program("schedulers made before and after the wrap act, and see that step() was called",
    "zero; back p*rank; step; early.step(); late.step()",
            before="early = torch.optim.lr_scheduler.StepLR(plain, 1)", optimizers="p",
            first="late = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5); "
            "only warnings.filterwarnings('error', message='.*lr_scheduler.step')"),
    Program("a subclass whose step() calls the base's runs one round",
            "zero; back p*rank; only n = batches(); step; only assert step == 0 or batches() - n <= 1",
            make=lambda ps: type("Own", (SGD,), {"step": lambda self, closure=None: SGD.step(self, closure)})(ps,
            lr=1.0)),
    Program("an instance's own zero_grad() is called, and comes back when it is unwrapped",
            "zeros; only assert calls == [False] * (step + 1); back p*rank; step", before="calls = []; "
            "plain.zero_grad = lambda set_to_none=True: calls.append(set_to_none) or type(plain).zero_grad(plain, "
            "set_to_none); own = plain.zero_grad", last="only assert fl.unwrap(opt).zero_grad is own"),
    Program("the profiler acts", "zero; profiler = torch.profiler.profile(); profiler.__enter__() @ rank == 0; "
    "back p*rank; "
            "step; profiler.__exit__(None, None, None) @ rank == 0", sizes=(2,), steps=1),
]  # fmt: skip
SCALED = [] if not hasattr(torch.amp, "GradScaler") else [
    *(Program(f"a GradScaler sees reduced gradients unasked, so that all ranks skip the same step: {how}",
              f"zero; {OVERFLOW}reduced; {unscale}scaler.step(opt); {ENDS}", optimizers="p | q",
              make=functools.partial(SGD, lr=1.0, fused=how == "fused"), **SCALER)
      for how, unscale in (("unscale_()", "scaler.unscale_(opt); "), ("step()", ""), ("fused", ""))),
    Program("synchronize() may come before unscale_()", f"zero; {OVERFLOW}opt.synchronize(); reduced; "
    f"scaler.unscale_(opt); "
            f"with opt.skip_synchronize(): scaler.step(opt); {ENDS}", optimizers="p | q", **SCALER),
    *(Program(f"a rank without a backward() takes part in the scaler's step{also}",
              f"zero; loss = scaler.scale(p * (math.inf if {lost} else 12)); back loss @ rank != turn or {lost}; "
              f"reduced; "
              "scaler.step(opt); scaler.update(); end 1", optimizers="p | q", **SCALER, **{"sizes": (2, 3, 4)})
      for also, lost in (("", "False"), (", also after one that all left out", "step == 1"))),
    Program("a GradScaler treats optimizers that are not wrapped as before", "zero; plain.zero_grad(); "
            "back scaler.scale(p * 0 + q * rank); reduced 0; scaler.step(opt); scaler.step(plain); scaler.update(); "
            "only assert q.grad.item() == rank and q.item() == 1 - rank * (step + 1)", optimizers="p", sizes=(2,),
            steps=3,
            first=SCALER["first"] + "; plain = torch.optim.SGD([q], lr=1.0)"),
]  # fmt: skip

PROGRAMS = [*FAILED, *LOW_RANK, *TOOLS, *SCALED, *PARTS, *WRITTEN, *MEMORY, *ASSIGNED, *WINDOWS, *THREADS, *PASSES,
            *SHAPES, *SPARSE, *OWN_DTYPE, *SHARING, *UNWRAPPED, *COMPRESSED, *TRAINING]  # fmt: skip


@of_all(PROGRAMS)
def test_the_contract(program, job):
    run(program, job)


def test_the_contract_in_processes():
    """Some that are drawn, in one start of ranks, in shared memory."""
    script = """
        import random
        import warnings
        import farandole.torch as fl
        from contract import SEED, Rank, expectation
        from jobs import Job
        from test_contract import PROGRAMS

        fl.init()
        for program in random.Random(SEED).sample(PROGRAMS, 50):  # none with a disagreement, which stays
            for complete in program.completes if 2 in program.sizes and "MismatchError" not in program.text else ():
                with warnings.catch_warnings(action="ignore"):
                    Rank(program, Job(2, complete), fl.rank(), expectation(program, 2)).run()
        tell("agrees")
    """
    assert run_forked(2, script) == ["agrees"] * 2


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_step_after_synchronize_warns_once_where_it_would_complete(size):
    job = Job(size, "step")

    def body(rank):
        optimizer = job.sgd(p := one())
        (p * rank).sum().backward()
        optimizer.synchronize()
        if rank:  # silently, as warnings are caught in the whole process
            with optimizer.skip_synchronize():
                return optimizer.step()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        return [str(warning.message) for warning in caught]

    texts = job.run(body)[0]
    assert len(texts) == (size > 1) and all("without optimizer.skip_synchronize()" in text for text in texts)


def test_without_overlap_nothing_is_sent_before_the_end():
    """What is sent is compressed before."""

    def body(rank, overlap):
        seen = []

        class Noted(Halved):
            @staticmethod
            def compress(tensor):
                seen.append("sent")
                return Halved.compress(tensor)

        p, q = one(), one()
        optimizer = Job(2).sgd(p, q, overlap=overlap, groups=1000, compression=Noted)
        for _ in range(3):
            optimizer.zero_grad()
            seen.clear()
            x = q * 1  # whose hook runs when p's gradient is there
            x.register_hook(lambda _: seen.append("hook") and None)
            (x * p).sum().backward()
        return seen

    assert run_threads(2, lambda rank: body(rank, False)) == [["hook", "sent", "sent"]] * 2


@pytest.mark.parametrize(
    "different",
    [{"op": fl.Sum}, {"gradient_predivide_factor": 2.0}, {"compression": fl.Compression.fp16}, {"overlap": False},
     {"backward_passes_per_step": 2}, {"sparse_as_dense": True}], ids=str,
)  # fmt: skip
def test_optimizers_that_share_a_parameter_must_agree(different):
    def body(rank):
        _first = Job(2).sgd(shared := one())
        text = f'"p0" belongs to another wrapped optimizer already.* another .*{next(iter(different))}'
        with pytest.raises(ValueError, match=text):
            Job(2).sgd(shared, **different)

    run_threads(2, body)


def test_one_rank_is_bit_identical_to_plain_torch_with_any_compression():
    for wire in ("none", "fp16", "bf16", "int8"):
        program = training("", "True", torch.float32, "AdamW", f"compression=fl.Compression.{wire}", steps=20)
        expected = expectation(program, 1)
        replica = expected[-1][0]
        rank = functools.partial(Rank, program, Job(1), 0, expected)
        (weights,) = Job(1).run(lambda _, rank=rank: rank().run())
        assert all(torch.equal(got, value) for got, (_, value) in zip(weights, replica.values(), strict=True))


@pytest.mark.parametrize("size", [2, 3])
def test_statistics_of_plain_batch_norm_are_each_ranks_own_until_they_are_broadcast(size):
    """What docs/guide.md says of checkpoints."""

    def body(rank):
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        optimizer = fl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        fl.broadcast_parameters(model.state_dict(), root_rank=0)
        model(torch.randn(8, 2, generator=torch.Generator().manual_seed(rank))).square().sum().backward()
        optimizer.step()
        trained = torch.cat([p.detach().flatten() for p in model.parameters()])
        before = model[1].running_mean.clone()
        fl.broadcast_parameters(dict(model.named_buffers()), root_rank=0)
        return trained, before, model[1].running_mean

    (trained, before, after), *others = run_threads(size, body)
    assert all(torch.equal(trained, other[0]) for other in others)
    assert not any(torch.equal(before, other[1]) for other in others)
    assert all(torch.equal(other[2], after) for other in others) and torch.equal(before, after)


@on_several
def test_a_rank_outside_of_a_set_keeps_its_gradient(job):
    def body(rank):
        inside = fl.add_process_set(range(job.size - 1) if job.size > 2 else [0])
        p, q = ones(1, 4096), ones(1, 4096)
        first, second = job.sgd(p), job.sgd(q, process_set=inside)
        for _ in range(3):
            first.zero_grad()
            second.zero_grad()
            ((p.view(-1) + q.view(-1)) * (1.0 + rank)).sum().backward()
            job.finish(first)
            job.finish(second)
            assert p.grad.eq(1 + job.mean_rank).all()
            members = inside.size() if inside.included() else 1
            mean = 1 + (members - 1) / 2 if inside.included() else 1.0 + rank
            assert q.grad.eq(mean).all()

    job.run(body)
