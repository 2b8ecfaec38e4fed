"""farandole.reinit: a wrapped optimizer goes on with the ranks that are left and those that come."""

import collections
import json
import os
import pathlib
import secrets
import signal
import time

import pytest

import farandole as fl
import warm_ranks
from farandole.__main__ import main
from ranks import environment, free_port, on_threads

pytestmark = pytest.mark.once

RANKS, PATIENCE_S = 4, 60.0

MEMBER = """
import json, os, pathlib, signal, sys
import torch
import farandole as fl
import farandole.torch as ft

folder = pathlib.Path(sys.argv[1])
notes = open(folder / f"{os.getpid()}.json", "w")
leaves = []
signal.signal(signal.SIGUSR1, lambda *_: leaves.append(True))
fl.init(elastic=True)
torch.manual_seed(fl.generation())  # whoever comes has other weights
model = torch.nn.Linear(8, 1)
optimizer = ft.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), model.named_parameters())
pairs = fl.add_process_set([0, 1]) if fl.generation() == 1 else None
is_new, step = True, 0
while not leaves:
    try:
        if is_new:
            (folder / "members").write_text(fl.members())
            step = fl.broadcast_object(step, 0)
            ft.broadcast_parameters(model.state_dict(), 0)
            is_new = False
        optimizer.zero_grad()
        model(torch.full((2, 8), 1.0 + step % 3)).sum().backward()
        optimizer.step()
        step += 1
        is_due = ft.allreduce(torch.tensor(float(fl.change_is_due())), op=ft.Max)
        weights = [round(x, 4) for x in model.weight.flatten().tolist()]
        notes.write(json.dumps([fl.generation(), fl.rank(), fl.size(), step, weights]) + "\\n")
        notes.flush()
        if is_due:
            fl.reinit()
            is_new = True
    except fl.HorovodInternalError as error:
        fl.reinit()
        assert pairs is None or pairs.process_set_id is None
        is_new = True
fl.shutdown()
"""

TRACED = """
import os, sys
os.environ["FARANDOLE_TIMELINE"] = sys.argv[1] + "/timeline.{rank}.json"
"""

#: The same with Horovod's interface.
WITH_A_STATE = """
import json, os, pathlib, signal, sys, warnings
import torch
import farandole.torch as hvd
from farandole.torch import elastic

folder = pathlib.Path(sys.argv[1])
warnings.simplefilter("ignore")  # of each commit that it goes back to
notes = open(folder / f"{os.getpid()}.json", "w")
leaves = []
signal.signal(signal.SIGUSR1, lambda *_: leaves.append(True))
hvd.init(elastic=True)
torch.manual_seed(hvd.generation())
model = torch.nn.Linear(8, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), model.named_parameters())
state = elastic.TorchState(model, optimizer, sampler=elastic.ElasticSampler(range(1000)), step=0)
resets = []
state.register_reset_callbacks([lambda: resets.append(hvd.size())])

@elastic.run
def train(state):
    (folder / "members").write_text(hvd.members())
    assert resets[-1:] in ([], [hvd.size()]) and state.sampler.num_replicas == hvd.size()
    while not leaves:
        optimizer.zero_grad()
        model(torch.full((2, 8), 1.0 + state.step % 3)).sum().backward()
        optimizer.step()
        state.step += 1
        state.sampler.record_batch(0, 1)
        weights = [round(x, 4) for x in model.weight.flatten().tolist()]
        notes.write(json.dumps([hvd.generation(), hvd.rank(), hvd.size(), state.step, weights]) + "\\n")
        notes.flush()
        if state.step % 3 == 0:
            state.commit()

train(state)
hvd.shutdown()
"""


class Members:
    """Processes of one elastic job, and what each has noted: [generation, rank, size, step, weights]."""

    def __init__(self, folder, program):
        self.folder, self.program = folder, program
        key = folder / "key"
        key.write_bytes(secrets.token_bytes(32))
        key.chmod(0o600)
        self.own = {"FARANDOLE_KEY_FILE": str(key), "FARANDOLE_HASH_STEPS": "1"}
        self.address = f"127.0.0.1:{free_port()}"
        self.processes = [self.start(rank) for rank in range(RANKS)]

    def start(self, rank=None, **variables):
        place = {"FARANDOLE_RANK": str(rank), "FARANDOLE_SIZE": str(RANKS), "FARANDOLE_ADDRESS": self.address}
        if rank is None:
            place = {"FARANDOLE_MEMBERS": (self.folder / "members").read_text()}
        return warm_ranks.start(["-c", self.program, self.folder], environment(**self.own, **place, **variables))

    def notes(self, process):
        file = self.folder / f"{process.pid}.json"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines]

    def await_size(self, size, newer_than=0):
        """Until all have taken a step in a generation of that size; its number and the processes by rank."""
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s:
            last = [notes[-1] if (notes := self.notes(process)) else [0, 0, 0] for process in self.processes]
            if len({note[0] for note in last}) == 1 and last[0][0] > newer_than and last[0][2] == size:
                return last[0][0], [process for _, process in sorted(zip([n[1] for n in last], self.processes))]
            time.sleep(0.01)
        raise AssertionError([self.notes(process)[-3:] for process in self.processes])

    def await_timelines(self, generation, size):
        files = [self.folder / f"timeline.{rank}.json" for rank in range(size)]
        mark = f'"size":{size},"job":"","generation":{generation},'
        until_s = time.monotonic() + PATIENCE_S
        while not all(file.exists() and mark in file.read_text() for file in files):
            assert time.monotonic() < until_s, [file.exists() and file.read_text()[:300] for file in files]
            time.sleep(0.01)
        return files

    def lose(self, process, signal_number):
        os.kill(process.pid, signal_number)
        self.processes.remove(process)
        return self.await_size(len(self.processes))

    def check_steps(self, *lost):
        """Whoever took a step had the weights that the others had after it."""
        by_step = collections.defaultdict(set)
        for process in [*self.processes, *lost]:
            for generation, _, _, step, weights in self.notes(process):
                by_step[generation, step].add(tuple(weights))
        assert by_step and all(len(weights) == 1 for weights in by_step.values())


@pytest.fixture
def members(tmp_path, request):
    made = Members(pathlib.Path(tmp_path), request.param)
    everybody = list(made.processes)
    yield made
    for process in {*everybody, *made.processes}:
        process.kill()


@pytest.mark.parametrize("members", [MEMBER, WITH_A_STATE], indirect=True, ids=["reinit", "elastic.run"])
def test_the_same_optimizer_goes_on_whoever_is_lost_and_whoever_comes(members):
    generation, by_rank = members.await_size(RANKS)
    assert generation == 1
    first, second = by_rank[0], by_rank[2]
    members.lose(first, signal.SIGKILL)
    members.processes.append(members.start())
    generation, by_rank = members.await_size(RANKS)
    members.lose(by_rank[1], signal.SIGUSR1)  # leaves with notice
    assert by_rank[1].communicate(PATIENCE_S) == ("", None) and by_rank[1].returncode == 0
    stopped = members.processes[0]
    members.lose(stopped, signal.SIGSTOP)
    os.kill(stopped.pid, signal.SIGCONT)
    said, _ = stopped.communicate(PATIENCE_S)
    assert stopped.returncode == 75 and said.startswith("farandole: the job has gone on without this process"), said
    assert len(said.splitlines()) == 1, said
    members.check_steps(first, second, by_rank[1], stopped)


@pytest.mark.parametrize("members", [MEMBER], indirect=True, ids=[""])
def test_a_newcomer_with_another_setting_is_refused_alone(members):
    members.await_size(RANKS)
    other = members.start(FARANDOLE_TCP_STREAMS="2")
    said, _ = other.communicate(PATIENCE_S)
    what = 'FARANDOLE_TCP_STREAMS differs between ranks: rank 0 has "1", rank 4 has "2"'
    assert other.returncode == 1 and said.count(what) == 1, said
    members.processes.append(members.start())
    members.await_size(RANKS + 1)
    members.check_steps(other)


@pytest.mark.parametrize("members", [TRACED + MEMBER], indirect=True, ids=[""])
def test_timelines_of_an_earlier_generation_are_told_from_those_of_the_last(members, capsys):
    _, by_rank = members.await_size(RANKS)
    files = members.await_timelines(1, RANKS)
    generation, _ = members.lose(by_rank[0], signal.SIGKILL)
    members.await_timelines(generation, RANKS - 1)
    assert main(["trace", str(members.folder), "-o", str(members.folder / "out")]) == 0
    assert f'{files[-1]}: of job "", generation 1 of {RANKS} ranks; passed over' in capsys.readouterr().err


@on_threads(2)
def test_what_is_not_elastic_says_how_it_would_be(rank):
    with pytest.raises(ValueError, match=r"not elastic.*elastic=True"):
        fl.basics.current().core.reinit()
    assert fl.generation() == 1 and not fl.change_is_due() and fl.members() == ""
