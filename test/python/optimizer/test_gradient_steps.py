"""Ranks that run unequal numbers of backward passes before step(): one error, on all of them."""

import contextlib
import re
import textwrap
import time

import pytest
import torch

import farandole.torch as fl
from contract import Program, Rank
from farandole import MismatchError
from jobs import Job, on_several
from models import parameter
from ranks import mpirun, run_threads

_BOUND_S = 20  # of a job that would hang; a loaded machine needs some


class Parting(Rank):
    """A rank that compares nothing, up to an error that all must get."""

    def __init__(self, job, rank, text, optimizers="", arguments=""):
        super().__init__(Program("", text, leaves="p=one(), q=one()", optimizers=optimizers, arguments=arguments,
        steps=4),
                         job, rank, [])  # fmt: skip

    def compare(self, compares=True):
        pass

    def outcome(self):
        """The step of the error, from 1, and its text."""
        try:
            self.run()
        except MismatchError as error:
            return self.names["step"] + 1, str(error)
        return self.names["step"] + 1, None


def outcomes(job, body):
    """What ``body`` gives by rank; shutdown() raises a final error once more."""
    results, began = {}, time.monotonic()
    with contextlib.suppress(MismatchError):
        job.run(lambda rank: results.update({rank: body(rank)}))
    assert sorted(results) == list(range(job.size)), results
    assert time.monotonic() - began < _BOUND_S
    return [results[rank] for rank in range(job.size)]


def agreed_error(results):
    """The one error of all ranks, without the name of the tensors it was found in."""
    texts = {re.sub(r"^.*?: ", "", str(error)) for _, error in results}
    assert len(texts) == 1, results
    return texts.pop()


MORE = "zero; back p + q; back p + q @ (rank, step) == (0, 2); "
OTHERS = r"ranks? [\d, ]+ ran 1 and called step\(\); all ranks "
WENT_ON = rf"in step 3 rank 0 ran 2 backward passes, {OTHERS}"
WINDOW = "backward_passes_per_step=2"
#: What ranks do differently: (actions, arguments, beginning of the error, its step where all get it at once)
PARTINGS = {
    "one pass more on one rank": (f"{MORE}step", "", WENT_ON, None),
    "the others reduce their loss": (MORE + "step; only fl.allreduce(torch.ones(1), name='loss')", "", WENT_ON, 3),
    "the others broadcast": (MORE + "step; only fl.broadcast(torch.ones(1), 1, name='loss')", "", WENT_ON, 3),
    "the others synchronize": (MORE + "step; only fl.synchronize(fl.allreduce_async(torch.ones(1)))", "", WENT_ON, 3),
    "the others train another optimizer": (
        "zero; back p; back p @ (rank, step) == (0, 2); step 0; back q; step 1", "", WENT_ON, 3),
    "three passes against two in windows of two": (
        "zero; back p; back p; back p @ (rank, step) == (size - 1, 1); step", WINDOW,
        r"in step 2 rank.*ran 2 backward passes and called step\(\).*rank \d ran 3", None),
    "one pass against a full window": (
        "zero; back p; back p @ (rank, step) != (0, 1); step", WINDOW, "in step 2 rank 0 ran 1 backward pass, rank", 2),
    "no_sync() on one rank": (
        "zero; apart p @ (rank, step) == (1, 2); back p; step", "",
        r"in step 3 rank.*rank 1 ran 2 \(1 in no_sync\(\)\)", None),
    "a pass in no_sync() more where the rounds match": (
        "zero; back p; apart p @ (rank, step) == (0, 1); back p; step", "",
        r"in step 2 rank 0 ran 3 backward passes \(1 in no_sync\(\)\)", None),
}  # fmt: skip


@on_several
@pytest.mark.parametrize("what", PARTINGS)
def test_unequal_numbers_of_passes_are_one_error_on_all(job, what):
    text, arguments, expected, at = PARTINGS[what]
    optimizers = "p | q" if "step 1" in text else ""
    results = outcomes(job, lambda rank: Parting(job, rank, text, optimizers, arguments).outcome())
    assert re.match(expected, agreed_error(results)), results
    if at:
        assert [step for step, _ in results] == [at] * job.size


@on_several
def test_a_gradient_that_only_one_rank_assigns_fails_on_all(job):
    if job.complete == "backward":
        text = "zero; back p; q.grad = torch.ones(1) @ (rank, step) == (0, 1); step"
        with pytest.raises(fl.HorovodInternalError, match="step"):
            job.run(lambda rank: Parting(job, rank, text).run())


@on_several
def test_a_rank_that_waits_gets_the_error_while_the_others_compute(job):
    """No collective of theirs is needed: what rank 0 does wrong is known when they call step()."""
    knows = []

    def body(rank):
        me = Parting(job, rank, MORE + "step; only compute(); only fl.allreduce(torch.ones(1), name='loss')")

        def compute():
            until = time.monotonic() + _BOUND_S
            while me.names["step"] == 2 and not knows and time.monotonic() < until:
                time.sleep(0.01)

        me.names["compute"] = compute
        result = me.outcome()
        knows.append(rank)
        return result

    assert re.match(WENT_ON, agreed_error(outcomes(job, body)))
    assert knows[0] == 0


@on_several
@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SGD])
def test_a_pass_more_in_a_closure_whose_loss_is_reduced(job, kind):
    """The others reduce the loss inside step(), before they could be said to have taken it."""

    def body(rank):
        p = parameter(1.0)
        optimizer = job.wrap(kind([p], lr=0.01), [("p", p)], reduce_loss=True)

        def closure():
            optimizer.zero_grad()
            for _ in range(2 if rank == 0 and step == 3 else 1):
                loss = (p * p).sum()
                loss.backward()
            return loss

        for step in (1, 2, 3):
            try:
                optimizer.step(closure)
            except MismatchError as error:
                return step, str(error)
        return step, None

    results = outcomes(job, body)
    assert "rank 0 ran 2 backward passes" in agreed_error(results)
    assert [step for step, _ in results] == [3] * job.size


@on_several
def test_ranks_that_catch_the_error_of_a_step_all_have_ended_and_restart_alike_train_on(job):
    def body(rank):
        optimizer = job.sgd(p := parameter(1.0), backward_passes_per_step=2)
        done = failures = 0
        while done < 5:
            optimizer.zero_grad()
            try:
                for _ in range(1 if (rank, done, failures) == (0, 2, 0) else 2):
                    (p * 0.5).backward()
                optimizer.step()
            except MismatchError:
                failures, done = failures + 1, 2
                continue
            done += 1
        optimizer.zero_grad()
        (p * rank).backward()
        (p * 1).backward()
        job.finish(optimizer)
        return failures, p.grad.item()

    assert job.run(body) == [(1, 1 + job.mean_rank)] * job.size


@on_several
def test_steps_are_counted_anew_after_a_join(job):
    """Ranks with unequal numbers of batches may be in different steps when all have joined."""

    def body(rank):
        optimizer = job.sgd(p := parameter(1.0))
        for epoch in range(2):
            for _ in range(2 + rank):
                optimizer.zero_grad()
                (p * 1).backward()
                optimizer.step()
            fl.join()

    job.run(body)


@on_several
def test_a_failed_backward_does_not_shift_the_count(job):
    text = ("zero; back p + q @ step != 1; step @ step != 1; "
            'fails HorovodInternalError|ValueError "batch 17" back q + calling(p, '
            'lambda: rank == 0 and fail()) & step @ step == 1')
    assert job.run(lambda rank: [p.item() for p in Parting(job, rank, text).run()]) == [[1 - 3, 1 - 3]] * job.size


@pytest.mark.mpi
@pytest.mark.once
@pytest.mark.parametrize("call", ["", "fl.allreduce(p.detach(), name='loss')"])
def test_processes_get_the_same_error_and_one_that_ends_without_another_call_says_it(tmp_path, call):
    script = f"""
        import os, pathlib, time
        import torch
        import farandole.torch as fl
        fl.init()
        p = torch.ones(3, requires_grad=True)
        optimizer = fl.DistributedOptimizer(torch.optim.SGD([p], lr=0.1), [("p", p)])
        try:
            for step in range(1, 9 if {call!r} else 8):
                optimizer.zero_grad()
                for _ in range(2 if step == 7 and fl.rank() == 2 else 1):
                    p.sum().backward()
                optimizer.step()
                {call}
        except fl.MismatchError as error:
            folder = pathlib.Path({str(tmp_path)!r})
            (folder / f"part{{fl.rank()}}").write_text(str(error).split(": ", 1)[1].split(";")[0])
            (folder / f"part{{fl.rank()}}").rename(folder / str(fl.rank()))
            # No rank ends before all have heard, so that the launcher ends nobody.
            until = time.monotonic() + {_BOUND_S}
            while {bool(call)} and len([*folder.glob("[0-9]")]) < 3 and time.monotonic() < until:
                time.sleep(0.01)
    """
    done = mpirun(3, ["-c", textwrap.dedent(script)])
    told = {file.name: file.read_text() for file in sorted(tmp_path.glob("[0-9]"))}
    expected = "in step 7 ranks 0, 1 ran 1 backward pass and called step(), rank 2 ran 2"
    assert (told == dict.fromkeys("012", expected)) if call else expected in done.stdout, done.stdout
    assert done.returncode != 0  # the ranks have parted for good


@pytest.mark.parametrize("only_allreduce", ["0", "1"])
@pytest.mark.parametrize("without_batch", [0, 1, 2])
def test_a_rank_without_any_batch_joins(without_batch, only_allreduce, monkeypatch):
    """Also the first rank, whose order of gradients the others would use; and on Horovod's terms."""
    monkeypatch.setenv("FARANDOLE_JOIN_ALLREDUCE_ONLY", only_allreduce)

    def body(rank):
        optimizer = Job(3).sgd(p := parameter(1.0), q := parameter(1.0), op=fl.Sum)
        for _ in range(0 if rank == without_batch else 3):
            optimizer.zero_grad()
            (p + 2 * q).backward()
            optimizer.step()
        fl.join()
        optimizer.zero_grad()
        (p + 2 * q).backward()
        grads = p.grad.item(), q.grad.item()
        optimizer.step()
        fl.join()
        return grads

    assert run_threads(3, body) == [(3.0, 6.0)] * 3
