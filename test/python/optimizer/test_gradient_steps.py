"""Ranks that run unequal numbers of backward passes before step(): one error, on all of them."""

import contextlib
import re
import textwrap
import time

import pytest
import torch

import farandole.torch as fl
from farandole import MismatchError
from jobs import on_several
from models import parameter
from ranks import mpirun, run_threads

_BOUND_S = 20  # of a job that today hangs; a loaded machine needs some


def train(job, passes, steps=4, after_step=lambda rank: None, **arguments):
    """Trains with ``passes(rank, step)``, a list of contexts' names, before each step.

    Args:
        after_step: Called with the rank after each step.

    Returns:
        Per rank the step it failed in, from 1, and the error.
    """

    def body(rank):
        p, q = parameter(1.0), parameter(2.0)
        optimizer = job.sgd(p, q, lr=0.125, **arguments)
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            try:
                for one in passes(rank, step):
                    if one == "no_sync":
                        with optimizer.no_sync():
                            (p + q).backward()
                    else:
                        (p + q).backward()
                optimizer.step()
                after_step(rank)
            except MismatchError as error:
                return step, str(error)
        return steps, None

    began = time.monotonic()
    results = run_to_the_error(job, body)
    assert time.monotonic() - began < _BOUND_S
    return results


def run_to_the_error(job, body):
    """As ``job.run``; shutdown() raises a final error once more."""
    results = {}
    with contextlib.suppress(MismatchError):
        job.run(lambda rank: results.update({rank: body(rank)}))
    assert sorted(results) == list(range(job.size)), results
    return [results[rank] for rank in range(job.size)]


def agreed_error(results):
    """The one error of all ranks, without the name of the tensors it was found in."""
    texts = {re.sub(r"^.*?: ", "", str(error)) for _, error in results}
    assert len(texts) == 1, results
    return texts.pop()


def one_pass_more_on_rank_0_in_step_3(rank, step):
    return ["sync"] * (2 if (rank, step) == (0, 3) else 1)


def went_on_in_step_3(job):
    """How the error of :func:`one_pass_more_on_rank_0_in_step_3` begins."""
    others = "rank 1" if job.size == 2 else f"ranks {', '.join(map(str, range(1, job.size)))}"
    return f"in step 3 rank 0 ran 2 backward passes, {others} ran 1 and called step(); all ranks "


@on_several
def test_one_backward_pass_more_on_one_rank_is_one_error_on_all(job):
    results = train(job, one_pass_more_on_rank_0_in_step_3)
    assert agreed_error(results).startswith(went_on_in_step_3(job))
    assert results[0][0] == 3


@on_several
@pytest.mark.parametrize("call", ["allreduce", "broadcast", "synchronize"])
def test_a_rank_that_goes_on_to_another_collective_gets_the_error_there(job, call):
    """The others average their loss while rank 0 waits in its second backward pass."""

    def average(rank):
        if call == "allreduce":
            fl.allreduce(torch.ones(1), name="loss")
        elif call == "broadcast":
            fl.broadcast(torch.ones(1), 1, name="loss")
        else:
            fl.synchronize(fl.allreduce_async(torch.ones(1), name="loss"))

    results = train(job, one_pass_more_on_rank_0_in_step_3, after_step=average)
    assert agreed_error(results).startswith(went_on_in_step_3(job))
    assert [step for step, _ in results] == [3] * job.size


@on_several
def test_a_rank_that_waits_gets_the_error_while_the_others_compute(job):
    """No collective of theirs is needed: what rank 0 does wrong is known when they call step()."""
    rank_0_knows = []

    def body(rank):
        p = parameter(1.0)
        optimizer = job.sgd(p)
        try:
            for step in (1, 2, 3):
                optimizer.zero_grad()
                for _ in one_pass_more_on_rank_0_in_step_3(rank, step):
                    (p * 1).backward()
                optimizer.step()
        except MismatchError as error:
            rank_0_knows.append(rank)
            return step, str(error)
        until = time.monotonic() + _BOUND_S
        while not rank_0_knows and time.monotonic() < until:
            time.sleep(0.01)
        try:
            fl.allreduce(torch.ones(1))
        except MismatchError as error:
            return step, str(error)
        return step, None

    results = run_to_the_error(job, body)
    assert agreed_error(results).startswith(went_on_in_step_3(job))
    assert rank_0_knows[0] == 0


@on_several
def test_a_rank_that_trains_another_optimizer_gets_the_error_there(job):
    def body(rank):
        p, q = parameter(1.0), parameter(1.0)
        first, second = job.sgd(p), job.sgd(q)
        for step in range(1, 5):
            try:
                for _ in one_pass_more_on_rank_0_in_step_3(rank, step):
                    (p * 1).backward()
                first.step()
                (q * 1).backward()
                second.step()
            except MismatchError as error:
                return step, str(error)
        return step, None

    results = run_to_the_error(job, body)
    assert agreed_error(results).startswith(went_on_in_step_3(job))
    assert [step for step, _ in results] == [3] * job.size


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

        for step in (1, 2, 3, 4):
            try:
                optimizer.step(closure)
            except MismatchError as error:
                return step, str(error)
        return step, None

    results = run_to_the_error(job, body)
    assert "rank 0 ran 2 backward passes" in agreed_error(results)
    assert [step for step, _ in results] == [3] * job.size


@on_several
def test_three_passes_against_two_in_windows_of_two(job):
    last = job.size - 1
    results = train(
        job,
        lambda rank, step: ["sync"] * (3 if (rank, step) == (last, 2) else 2),
        backward_passes_per_step=2,
    )
    text = agreed_error(results)
    assert text.startswith("in step 2 rank")
    assert "ran 2 backward passes and called step()" in text
    assert f"rank {last} ran 3" in text


@on_several
def test_one_pass_against_a_full_window_is_refused_before_it_is_used(job):
    results = train(
        job,
        lambda rank, step: ["sync"] * (1 if (rank, step) == (0, 2) else 2),
        backward_passes_per_step=2,
    )
    assert agreed_error(results).startswith("in step 2 rank 0 ran 1 backward pass, rank")
    assert [step for step, _ in results] == [2] * job.size


@on_several
def test_no_sync_on_one_rank_only_names_it(job):
    def passes(rank, step):
        return ["no_sync", "sync"] if rank == 1 and step == 3 else ["sync"]

    text = agreed_error(train(job, passes))
    assert text.startswith("in step 3 rank")
    assert "rank 1 ran 2 (1 in no_sync())" in text


@on_several
def test_passes_within_no_sync_count_even_where_the_rounds_match(job):
    """Both ranks reduce twice in the step, one of them with a pass more in the second round."""

    def passes(rank, step):
        return ["sync", "no_sync", "sync"] if rank == 0 and step == 2 else ["sync", "sync"]

    assert "in step 2 rank 0 ran 3 backward passes (1 in no_sync())" in agreed_error(
        train(job, passes)
    )


@on_several
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_equal_numbers_train_on(job, window, count):
    results = train(job, lambda rank, step: ["sync"] * count, backward_passes_per_step=window)
    assert results == [(4, None)] * job.size


@on_several
def test_a_rank_that_skips_backward_takes_part_in_the_step(job):
    results = train(job, lambda rank, step: [] if rank == step % job.size else ["sync"])
    assert results == [(4, None)] * job.size


@on_several
def test_no_sync_before_step_on_one_rank_is_as_good_as_a_backward_pass(job):
    """step() reduces what one rank accumulated with what the others have sent: the same sums."""
    results = train(job, lambda rank, step: ["no_sync"] if rank == 0 else ["sync"])
    assert results == [(4, None)] * job.size


@on_several
def test_ranks_that_catch_the_error_of_a_step_all_have_ended_and_restart_alike_train_on(job):
    def body(rank):
        p = parameter(1.0)
        optimizer = job.sgd(p, backward_passes_per_step=2)
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
        p = parameter(1.0)
        optimizer = job.sgd(p)
        for epoch in range(2):
            for _ in range(2 + rank):
                optimizer.zero_grad()
                (p * 1).backward()
                optimizer.step()
            fl.join()
        return True

    assert all(job.run(body))


@on_several
def test_a_failed_backward_does_not_shift_the_count(job):
    def body(rank):
        p, q = parameter(1.0), parameter(1.0)
        optimizer = job.sgd(p, q)
        for step in range(4):
            optimizer.zero_grad()
            try:
                if step == 1 and rank == 0:
                    (q + Raising.apply(p)).backward()
                else:
                    (p + q).backward()
                optimizer.step()
            except (fl.HorovodInternalError, ZeroDivisionError):
                continue
        return p.item(), q.item()

    assert job.run(body) == [(1.0 - 3, 1.0 - 3)] * job.size  # of the failed step no rank takes anything


class Raising(torch.autograd.Function):
    """Its backward raises once other gradients were accumulated."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError("no gradient")


@pytest.mark.mpi
@pytest.mark.once
@pytest.mark.parametrize("call", ["", "fl.allreduce(p.detach(), name='loss')"])
def test_processes_get_the_same_error(tmp_path, call):
    script = f"""
        import os, pathlib, time
        import torch
        import farandole.torch as fl
        fl.init()
        p = torch.ones(3, requires_grad=True)
        optimizer = fl.DistributedOptimizer(torch.optim.SGD([p], lr=0.1), [("p", p)])
        try:
            for step in range(1, 9):
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
        while len([*folder.glob("[0-9]")]) < 3 and time.monotonic() < until:
            time.sleep(0.01)
    """
    done = mpirun(3, ["-c", textwrap.dedent(script)])
    told = {file.name: file.read_text() for file in sorted(tmp_path.glob("[0-9]"))}
    expected = "in step 7 ranks 0, 1 ran 1 backward pass and called step(), rank 2 ran 2"
    assert told == dict.fromkeys("012", expected), done.stdout
    assert done.returncode != 0  # the ranks have parted for good


@pytest.mark.mpi
@pytest.mark.once
def test_a_process_that_ends_without_another_call_says_the_error():
    script = """
        import torch
        import farandole.torch as fl
        fl.init()
        p = torch.ones(3, requires_grad=True)
        optimizer = fl.DistributedOptimizer(torch.optim.SGD([p], lr=0.1), [("p", p)])
        for _ in range(2 if fl.rank() == 0 else 1):
            p.sum().backward()
        optimizer.step()
    """
    done = mpirun(2, ["-c", textwrap.dedent(script)])
    text = "in step 1 rank 0 ran 2 backward passes, rank 1 ran 1 and called step()"
    assert text in done.stdout, done.stdout


@pytest.mark.parametrize("only_allreduce", ["0", "1"])
@pytest.mark.parametrize("without_batch", [0, 1, 2])
def test_a_rank_without_any_batch_joins(without_batch, only_allreduce, monkeypatch):
    """Also the first rank, whose order of gradients the others would use; and on Horovod's terms."""
    monkeypatch.setenv("FARANDOLE_JOIN_ALLREDUCE_ONLY", only_allreduce)

    def body(rank):
        p, q = parameter(1.0), parameter(1.0)
        optimizer = fl.DistributedOptimizer(torch.optim.SGD([p, q], lr=1.0), op=fl.Sum)
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
