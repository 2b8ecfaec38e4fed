"""farandole.torch.elastic on a fixed world: what a failed collective goes back to."""

import collections
import copy
import signal
import warnings

import pytest
import torch
from torch import nn

import farandole.torch as fl
import warm_ranks
from farandole.torch import elastic
from jobs import on_several
from models import parameter, wrapped
from ranks import communicate, environment, run_forked, run_threads

pytestmark = pytest.mark.filterwarnings("ignore:going on from the last commit:RuntimeWarning")


def fail_together(rank):
    """A collective about which the ranks disagree: refused on all of them, and the next one works."""
    fl.allreduce(torch.zeros(2 + rank), name="disagreement")


def make_model(rank):
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(1.0 + rank)
        model.bias.fill_(0.5)
    return model


def one_step(model, optimizer, rank, batch):
    optimizer.zero_grad()
    model(torch.tensor([[1.0, batch + rank]])).square().sum().backward()
    optimizer.step()


def train_until(state, rank, end, fails_at=(), commits=True):
    """Steps state.batch up to ``end``; fails once at each of ``fails_at``, within the step."""
    while state.batch < end:
        one_step(state.model, state.optimizer, rank, state.batch)
        if state.batch in fails_at:
            fails_at.remove(state.batch)
            fail_together(rank)
        state.batch += 1
        if commits:
            state.commit()
    return [p.detach().clone() for p in state.model.parameters()]


def make_state(job, rank, **values):
    model = make_model(rank)
    optimizer = job.wrap(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), model.named_parameters())
    return elastic.TorchState(model, optimizer, batch=0, **values)


@on_several
def test_a_failed_collective_goes_on_from_the_last_commit_as_if_it_had_not_failed(job):
    def body(rank):
        straight = train_until(make_synced(job, rank), rank, 6)
        fails_at = [1, 2, 5]
        run = elastic.run(train_until)
        recovered = run(make_state(job, rank), rank, 6, fails_at=fails_at)
        assert not fails_at
        return straight, recovered

    told = job.run(body)
    for straight, recovered in told:
        assert all(map(torch.equal, straight, recovered))
        assert all(map(torch.equal, recovered, told[0][1]))


def make_synced(job, rank):
    state = make_state(job, rank)
    state.sync()
    return state


class FailingBackward(torch.autograd.Function):
    """Identity whose backward raises what it is given."""

    @staticmethod
    def forward(ctx, x, error):
        ctx.error = error
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        if ctx.error is not None:
            raise ctx.error
        return grad, None


@on_several
def test_a_failed_backward_pass_is_recovered_from_where_its_rank_says_so(job):
    """The others get an AbortedError; the rank itself raises what it raised."""

    def trained(rank, failures):
        @elastic.run
        def train(state):
            while state.batch < 4:
                error = failures.pop() if failures and rank == 1 and state.batch == 2 else None
                state.optimizer.zero_grad()
                # The weight's gradient comes before the function of the bias's branch raises.
                branch = FailingBackward.apply(state.model.bias * 1, error)
                (branch * state.model.weight).sum().backward()
                state.optimizer.step()
                state.batch += 1
                if state.batch == 1:  # the step after it is taken twice where the next one fails
                    state.commit()
            return state.model.weight.detach().clone()

        return train(make_state(job, rank))

    def body(rank):
        straight = trained(rank, [])
        failures = [fl.HorovodInternalError("the data of this rank are gone")]
        recovered = trained(rank, failures)
        assert rank != 1 or not failures
        return torch.equal(straight, recovered)

    assert all(job.run(body))


def test_all_kinds_of_attributes_are_saved_restored_and_synchronized():
    def body(rank):
        model = nn.Sequential(make_model(rank), nn.BatchNorm1d(1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (1 + rank))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        sampler = elastic.ElasticSampler(range(10))
        state = elastic.TorchState(model, optimizer, scheduler=scheduler, sampler=sampler, epoch=rank, log=[rank])
        objects = state.model, state.optimizer, state.scheduler, state.sampler

        def snapshot():
            parts = [model, optimizer, scheduler, sampler]
            return copy.deepcopy([part.state_dict() for part in parts] + [state.epoch, state.log])

        def change():
            model(torch.randn(4, 2, generator=torch.Generator().manual_seed(rank))).sum().backward()
            optimizer.step()
            scheduler.step()
            sampler.record_batch(0, 2)
            state.epoch += 1
            state.log.append("changed")

        change()
        state.commit()
        committed = snapshot()
        for _ in range(2):
            change()
            state.restore()
            assert str(snapshot()) == str(committed)
            assert all(p.grad is None or not p.grad.any() for p in model.parameters())
        change()
        state.sync()
        synced = snapshot()
        change()
        state.restore()
        assert str(snapshot()) == str(synced)
        now = state.model, state.optimizer, state.scheduler, state.sampler
        assert all(a is b for a, b in zip(objects, now, strict=True))
        return str(synced), state.epoch

    told = run_threads(3, body)
    assert told == [told[0]] * 3
    assert told[0][1] == 2


def test_what_was_set_before_the_function_runs_is_what_it_gets():
    def body(rank):
        state = elastic.ObjectState(epoch=0)
        state.epoch = 7 + rank

        @elastic.run
        def train(state):
            if not calls:
                calls.append(state.epoch)
                fail_together(rank)
            calls.append(state.epoch)

        calls = []
        train(state)
        return calls

    assert run_threads(2, body) == [[7, 7]] * 2


def test_callbacks_run_after_each_restore_in_their_order():
    def body(rank):
        told = []

        class Reset(elastic.ObjectState):
            def reset(self):
                told.append(("reset", self.step))

        state = Reset(step=0)
        state.register_reset_callbacks([lambda name=name: told.append(name) for name in ("first", "second")])
        state.register_reset_callbacks([lambda: told.append("third")])

        @elastic.run
        def train(state, end, *, tail):
            while state.step < end:
                state.step += 1
                if state.step in fails:
                    fails.remove(state.step)
                    fail_together(rank)
                state.commit()
            return told + tail

        fails = [1, 3]
        return train(state, 4, tail=["done"])

    callbacks = ["first", "second", "third"]
    expected = [("reset", 0), *callbacks, ("reset", 2), *callbacks, "done"]
    assert run_threads(2, body) == [expected] * 2


def test_a_reset_function_is_called_after_each_restore_and_before_callbacks():
    def body(rank):
        told = []
        state = elastic.ObjectState(step=1)
        state.register_reset_callbacks([lambda: told.append("callback")])

        def train(state):
            state.step += 1
            if not told:
                fail_together(rank)
            return state.step

        wrapped_train = elastic.run_fn(train, lambda: told.append(("reset", state.step)))
        return wrapped_train(state), told

    assert run_threads(2, body) == [(2, [("reset", 1), "callback"])] * 2


def test_a_state_of_the_users_own_class():
    class Counter(elastic.State):
        def __init__(self):
            super().__init__()
            self.value = self.saved = 0

        def save(self):
            self.saved = self.value

        def restore(self):
            self.value = self.saved

        def sync(self):
            self.value = fl.broadcast_object(self.value)
            self.save()

    def body(rank):
        fails = [2]

        @elastic.run
        def count(state):
            while state.value < 4:
                state.value += 1
                if state.value in fails:
                    fails.pop()
                    fail_together(rank)
                state.commit()
            return state.value

        return count(Counter())

    assert run_threads(2, body) == [4, 4]


def test_what_fails_again_and_again_without_a_commit_is_raised():
    def body(rank):
        runs = []

        @elastic.run
        def train(state):
            runs.append(1)
            if len(runs) == 2:
                state.commit()
            fail_together(rank)

        with pytest.raises(fl.MismatchError) as raised:
            train(elastic.ObjectState(step=0))
        assert fl.allreduce(torch.ones(1), op=fl.Sum) == 2
        return len(runs), str(raised.value)

    for runs, text in run_threads(2, body):
        assert runs == 4  # the commit in the second run makes that its first failure
        assert 'allreduce "disagreement": rank 0 sent' in text
        assert text.endswith("; given up after 3 failures without a commit in between")


def test_other_exceptions_and_interrupts_leave_the_function():
    def body(rank):
        for kind in (ValueError, KeyboardInterrupt, elastic.HostsUpdatedInterrupt):

            @elastic.run
            def train(state, kind=kind):
                raise kind()

            with pytest.raises(kind):
                train(elastic.ObjectState(step=0))

    run_threads(2, body)
    assert elastic.HostsUpdatedInterrupt().skip_sync is False
    assert elastic.HostsUpdatedInterrupt(True).skip_sync is True


def test_rank_0_warns_of_a_restore(recwarn):
    def body(rank):
        fails = [1]

        @elastic.run
        def train(state):
            if fails:
                fails.pop()
                fail_together(rank)

        train(elastic.ObjectState(step=0))

    warnings.simplefilter("always")
    run_threads(2, body)
    texts = [str(w.message) for w in recwarn if "last commit" in str(w.message)]
    assert len(texts) == 1
    assert texts[0].startswith('going on from the last commit after: allreduce "disagreement": ')


def test_names_of_methods_are_refused_as_attributes():
    with pytest.raises(ValueError, match="ObjectState: an attribute cannot be named commit"):
        elastic.ObjectState(commit=1)


def test_types_can_have_handlers_of_their_own_and_attributes_be_reassigned():
    class Counter:
        value = 0

    class Handler(elastic.StateHandler):
        def save(self):
            self.saved = self.value.value

        def restore(self):
            self.value.value = self.saved

        def sync(self):
            self.value.value = fl.broadcast_object(self.value.value)
            self.save()

    def body(rank):
        state = elastic.TorchState(nn.Linear(2, 1), counter=Counter(), step=0)
        first, state.counter = state.counter, Counter()
        state.counter.value = 3 + rank
        state.sync()
        state.counter.value = 9
        state.model = nn.Linear(3, 1)  # from now on this one's state is saved
        with torch.no_grad():
            state.model.weight.zero_()
        state.restore()
        return first.value, state.counter.value, bool(state.model.weight.any())

    before = elastic.get_handler_registry()
    assert [kind for kind, _ in before] == [nn.Module, torch.optim.Optimizer, elastic.ElasticSampler]
    elastic.set_handler_registry([(Counter, Handler), *before])
    try:
        assert run_threads(2, body) == [(0, 3, True)] * 2
    finally:
        elastic.set_handler_registry(before)


#: What hosts are said to be by whom, and what then becomes of a value that each rank has for itself.
HOSTS_CHANGE = """
import farandole.torch as fl
from farandole.torch import elastic

fl.init(elastic=True)
calls = []

@elastic.run
def train(state):
    calls.append((state.own, fl.generation()))
    if len(calls) > 3:
        return
    state.own = 10 * len(calls) + fl.rank()
    if fl.rank() == 1:
        elastic.notification_manager.handle_hosts_updated(0.0, 1)  # removed
    if fl.rank() == 0 and len(calls) == 2:
        state.on_hosts_updated(0.0, 2)  # added
    state.check_host_updates() if len(calls) < 3 else state.commit()

state = elastic.ObjectState(own=fl.rank())
resets = []
state.register_reset_callbacks([lambda: resets.append(fl.size())])
train(state)
elastic.notification_manager.handle_hosts_updated(0.0, 1)  # nobody listens any more
fl.barrier()
state.check_host_updates()
tell(f"{calls} {resets}")
"""


@pytest.mark.once
def test_what_is_said_of_hosts_interrupts_all_ranks_without_a_step_back():
    """Rank 0's value is everyone's again unless hosts were only removed."""
    told = run_forked(2, HOSTS_CHANGE, FARANDOLE_ELASTIC="1")
    generations = [1, 2, 3, 4]
    expected = [list(zip(values, generations, strict=True)) for values in ([0, 10, 20, 30], [0, 11, 20, 31])]
    assert told == [f"{calls} [2, 2, 2]" for calls in expected]


def test_horovods_first_arguments_are_taken():
    state = elastic.ObjectState(lambda obj: {"step": 9}, lambda: 0, step=1)
    state.sync()
    state.step = 3
    state.restore()
    assert state.step == 9


def test_an_exception_that_leaves_the_function_on_one_rank_ends_it_on_the_others():
    """They could wait for ever for the rank to come back."""

    def body(rank):
        @elastic.run
        def train(state):
            p, q = parameter(1.0), parameter(1.0)
            optimizer = wrapped(p, q)
            error = ValueError("bad batch 17") if rank == 1 else None
            (FailingBackward.apply(p * 1, error) * q).sum().backward()
            optimizer.step()

        with pytest.raises((ValueError, fl.HorovodInternalError)) as raised:
            train(elastic.ObjectState(step=0))
        return str(raised.value)

    told = run_threads(3, body)
    assert told.pop(1) == "bad batch 17"
    for text in told:
        assert "bad batch 17" in text and text.endswith("start it again from a checkpoint")


@pytest.mark.once
def test_a_lost_rank_ends_the_function_with_one_sentence():
    told = run_forked(
        2,
        """
        import sys
        import torch
        import farandole.torch as fl
        from farandole.torch import elastic

        fl.init()

        @elastic.run
        def train(state):
            fl.allreduce(torch.ones(1), name="first")
            if fl.rank() == 1:
                fl.shutdown()
                sys.exit(0)
            fl.allreduce(torch.ones(1), name="second")

        try:
            train(elastic.ObjectState(step=0))
        except fl.HorovodInternalError as error:
            tell(error)
        """,
    )
    assert told[0].endswith(
        "; the job is over and cannot go on from its last commit: start it again from a checkpoint"
    ), told


# ElasticSampler.


def samples(sampler):
    return list(sampler)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("count", "size"), [(12, 3), (10, 4), (2, 3), (0, 2), (7, 1)])
def test_the_ranks_share_out_the_whole_data_set(count, size, shuffle):
    def body(rank):
        sampler = elastic.ElasticSampler(range(count), shuffle=shuffle)
        assert (sampler.num_replicas, sampler.rank, len(sampler)) == (size, rank, -(-count // size))
        epochs = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            epochs.append(samples(sampler))
        return epochs

    told = run_threads(size, body)
    for epoch in range(2):
        together = [index for one in told for index in one[epoch]]
        assert len(together) == -(-count // size) * size
        assert set(together) == set(range(count))
        assert max(collections.Counter(together).values(), default=1) <= max(2, size - count + 1)
    if count == 12:
        assert (told[0][0] != told[0][1]) == shuffle
    if not shuffle and count == 12:
        assert told[1][0] == [1, 4, 7, 10]


@pytest.mark.parametrize("by", ["batch", "indices"])
def test_an_epoch_is_gone_on_with_after_a_commit(by):
    """23 samples on 2 ranks in batches of 3; left after the second."""

    def body(rank):
        sampler = elastic.ElasticSampler(range(23), seed=5)
        sampler.set_epoch(4)
        state = elastic.ObjectState(sampler=sampler)
        seen, lost = [], []
        for number in range(3):
            mine = samples(sampler)[3 * number : 3 * number + 3]
            if by == "batch":
                sampler.record_batch(number, 3)
            else:
                sampler.record_indices(mine)
            if number < 2:
                state.commit()
                seen += mine
            else:
                lost = mine
        assert sampler.state_dict() == {"epoch": 4, "processed_num": 18}
        state.restore()
        assert sampler.state_dict() == {"epoch": 4, "processed_num": 12}
        sampler.set_epoch(4)  # as a loop does that begins an epoch or goes on with one
        rest = samples(sampler)
        assert rest[:3] == lost and len(sampler) == 6 and len(sampler.remaining_indices) == 11
        sampler.record_batch(0, 6)
        assert sampler.processed_num == 23
        sampler.set_epoch(5)
        assert sampler.processed_num == 0 and len(sampler) == 12
        return seen + rest

    together = [index for one in run_threads(2, body) for index in one]
    assert sorted(set(together)) == list(range(23)) and len(together) == 24


def test_a_sampler_goes_where_another_one_stood():
    def body(rank):
        one, other = (elastic.ElasticSampler(range(9), shuffle=False) for _ in range(2))
        one.set_epoch(2)
        one.record_batch(0, 1)
        one.record_batch(1, 1)
        assert one.remaining_indices == list(range(9))  # until reset()
        other.load_state_dict(one.state_dict())
        one.reset()
        assert other.state_dict() == {"epoch": 2, "processed_num": 4}
        assert (other.epoch, other.processed_num, other.remaining_indices) == (2, 4, [4, 5, 6, 7, 8])
        assert list(one) == list(other) == ([4, 6, 8], [5, 7, 4])[rank]
        for number in range(9):
            other.record_batch(number, 1)
        return other.processed_num

    assert run_threads(2, body) == [9, 9]


def test_indices_that_are_not_the_next_ones_are_refused():
    def body(rank):
        sampler = elastic.ElasticSampler(range(8), shuffle=False)
        sampler.record_indices([2 + rank, 0 + rank])
        text = rf"the next samples of rank {rank} are \[{4 + rank}\], not \[{6 + rank}\]"
        with pytest.raises(ValueError, match=text):
            sampler.record_indices([6 + rank])
        assert sampler.processed_num == 4

    run_threads(2, body)


#: Arguments: the folder of the store, this rank, the first job and the last. In each job of four ranks number 3 dies,
#: the others go on in one of three, and with a newcomer in the next job of four.
GOES_ON = """
import contextlib, os, sys, time
import torch
import torch.distributed as dist
import farandole.torch as fl

me, begin, end = map(int, sys.argv[2:])
p, q = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)

def join(job, size):
    fl.init(rank=me, size=size, store=dist.FileStore(f"{sys.argv[1]} {job} {size}", -1))

def train(size, optimizers, steps=3):
    for _ in range(steps):
        for optimizer, w in zip(optimizers, (q, p)):
            optimizer.zero_grad()
            (w.sum() * me).backward()
            assert w.grad.tolist() == [(size - 1) / 2] * len(w), w.grad
            optimizer.step()

join(begin, 4)
made = [fl.DistributedOptimizer(torch.optim.SGD([w], lr=0.0), [(n, w)]) for n, w in (("p", p), ("q", q))][::-1]
for job in range(begin, end):
    try:  # the last round before the death may fail on some ranks
        train(4, made)
        if me == 3:
            os.kill(os.getpid(), 9)
        train(4, made)
    except fl.PeerLostError as error:
        assert error.failed_ranks == (3,), error
        lost_s = time.monotonic()
    with contextlib.suppress(fl.HorovodInternalError):  # it may raise the loss again
        fl.shutdown()
    (p.sum() * me).backward()  # plain in between
    join(job, 3)
    train(3, made, 1)
    took_s = time.monotonic() - lost_s
    train(3, made)
    fl.shutdown()
    print(f"{job} {took_s * 1000:.0f} ms", *open("/proc/self/statm").read().split()[1:2],
          len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), flush=True)
    join(job + 1, 4) if job + 1 < end else None
"""


def test_a_wrapped_optimizer_goes_on_where_ranks_have_died_and_others_come(tmp_path):
    def start(rank, begin, end):
        return warm_ranks.start(["-c", GOES_ON, tmp_path / "store", rank, begin, end], environment())

    jobs = 3
    ranks = [start(rank, 0, jobs) for rank in range(3)] + [start(3, job, job + 1) for job in range(jobs)]
    outputs = communicate(ranks, [0, 0, 0] + [-signal.SIGKILL] * jobs)
    assert [len(output.splitlines()) for output in outputs[:3]] == [jobs] * 3
