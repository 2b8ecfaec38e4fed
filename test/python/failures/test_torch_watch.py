"""farandole.torch.watch, between processes whose groups are gloo's."""

import re
import signal
import textwrap

import pytest
import torch

from test_torch_distributed import run

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
PRELUDE = """
import ctypes, hashlib, os, signal, sys, threading, time
import torch
import torch.distributed as dist
import farandole
import farandole.torch as flt
torch.set_num_threads(1)
R, N = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
x = torch.ones(4)

def tell(text):
    sys.stdout.write(f"{text}\\n")
    sys.stdout.flush()
"""
STUCK = "this process is inside a collective of group 0 that cannot end, and exits"


@pytest.fixture(autouse=True)
def _without_settings(monkeypatch):
    for name in ("FARANDOLE_STALL_WARNING_S", "FARANDOLE_STALL_SHUTDOWN_S"):
        monkeypatch.delenv(name, raising=False)


def run_script(size, script, **options):
    return run(size, ["-c", PRELUDE + textwrap.dedent(script)], **options)


DIFFERENCES = {
    "the collective": (
        "dist.broadcast(x, 1) if R == 1 else dist.all_reduce(x)",
        "broadcast of float32[4] from rank 1 at <string>",
        "all_reduce of float32[4] with SUM at <string>",
    ),
    "the shape": ("dist.broadcast(torch.ones(4 + (R == 1)), 0)", "broadcast of float32[5]", "float32[4] from rank 0"),
    "the dtype": ("dist.all_reduce(x.int() if R == 1 else x)", "all_reduce of int32[4]", "all_reduce of float32[4]"),
    "the operation": ("dist.all_reduce(x, dist.ReduceOp.MAX if R == 1 else dist.ReduceOp.SUM)", "with MAX", "with SUM"),
    "the root": ("dist.broadcast(x, int(R == 1))", "from rank 1", "from rank 0"),
    "one that is skipped": (
        "if R != 1: dist.all_gather([torch.empty(4) for _ in range(N)], x)\ndist.barrier()",
        "barrier at <string>",
        "all_gather of float32[4], float32[4]",
    ),
}


@pytest.mark.parametrize(
    ("what", "size"), [*((what, 2) for what in DIFFERENCES), ("the collective", 3), ("one that is skipped", 3)]
)
def test_ranks_that_differ_are_named_with_both_calls_and_their_lines(what, size):
    call, odd, others = DIFFERENCES[what]
    script = f"""
flt.watch()
for _ in range(3):
    dist.all_reduce(x)
def differ():
{textwrap.indent(call, "    ")}
differ()
while True:
    time.sleep(0.05)
    dist.barrier()
"""
    # Processes that hang are ended, others get the error by their next call.
    for output in run_script(size, script, codes=[1] * size):
        said = re.search("error: ranks of group 0 differ in its collective 4: (.*)", output)
        assert said, output
        # Two ranks are enough: the third may have yet to come.
        other, own = sorted(said[1].split("; "), key=lambda text: text.startswith("rank 1 called "))
        assert own.startswith("rank 1 called ") and odd in own and own.endswith(" in differ"), output
        assert other.startswith(("rank 0 ", "rank 2 ", "ranks 0, 2 ")) and others in other, output
        assert other.endswith(" in differ"), output


def test_a_rank_that_dies_is_named_with_the_last_collective_of_the_others():
    script = """
        flt.watch()
        def train():
            for step in range(10):
                if R == 1 and step == 5: os.kill(os.getpid(), signal.SIGKILL)
                dist.all_reduce(x)
        train()
    """
    outputs = run_script(3, script, codes=[1, -signal.SIGKILL, 1])
    for output in (outputs[0], outputs[2]):
        said = re.search(r"error: rank 1 .* was killed by signal 9 .*; this rank called collective 6, (.*)", output)
        assert said and said[1].startswith("all_reduce of float32[4] with SUM at <string>") and "in train" in said[1]


def test_an_exception_is_named_with_its_text():
    script = """
        flt.watch()
        if R == 1: raise KeyError("what happened")
        dist.all_reduce(x)
    """
    for output in run_script(2, script, codes=[1, 1])[:1]:
        assert re.search("error: .*rank 1 .* has left after it failed: KeyError: 'what happened'; this rank", output)


CALLED = r"collective 2 of group 0: ranks 0, 2 called all_reduce of float32\[4\] with SUM at <string>:\d+ in <module>"
MISSING = r"; after {} s rank 1 did not: at .*<string>:\d+ in load"
STALL = """
flt.watch()
def load(): time.sleep(4)
dist.all_reduce(x)
if R == 1: load()
dist.all_reduce(x)
dist.destroy_process_group()
tell("done")
"""


def test_a_stall_is_reported_with_the_place_of_the_rank_that_is_missing(monkeypatch):
    monkeypatch.setenv("FARANDOLE_STALL_WARNING_S", "1")
    outputs = run_script(3, STALL)
    warnings = [re.findall("warning: " + CALLED + MISSING.format(1), output) for output in outputs]
    assert list(map(len, warnings)) == [1, 0, 0], outputs
    assert all("done" in output and "error" not in output for output in outputs), outputs


def test_a_stall_that_lasts_ends_the_processes_that_wait_and_is_raised_where_it_was(monkeypatch):
    monkeypatch.setenv("FARANDOLE_STALL_SHUTDOWN_S", "1")
    outputs = run_script(3, STALL, codes=[1, 1, 1])
    for output in outputs:
        assert re.search("error: " + CALLED + MISSING.format(1), output), output
    assert STUCK in outputs[0] and STUCK in outputs[2]
    assert "OperationTimeoutError: collective 2 of group 0: " in outputs[1] and STUCK not in outputs[1]


def test_a_rank_that_holds_the_interpreters_lock_is_reported(monkeypatch):
    monkeypatch.setenv("FARANDOLE_STALL_WARNING_S", "1")
    script = """
        flt.watch()
        dist.all_reduce(x)
        if R == 1: ctypes.PyDLL(None).sleep(4)
        dist.all_reduce(x)
    """
    output = "".join(run_script(2, script))
    assert re.search('"watch of group 0".*rank 1', output) and "lock" in output, output


def test_a_process_is_left_alone_where_that_is_asked():
    script = """
        flt.watch(on_failure="raise")
        work = dist.all_reduce(x, async_op=True) if R == 0 else dist.broadcast(x, 1, async_op=True)
        time.sleep(5)
        for _ in range(2):
            try: dist.all_reduce(x)
            except farandole.MismatchError as error: tell(f"raised {error}")
        sys.stdout.flush()
        os._exit(0)
    """
    for output in run_script(2, script):
        assert output.count("raised ranks of group 0 differ in its collective 1: rank 0 called all_reduce") == 2, output
        assert STUCK not in output


def test_training_is_bitwise_the_same_and_nothing_is_said():
    script = """
        def train(steps=30):
            torch.manual_seed(1)
            model = torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.ReLU(), torch.nn.Linear(50, 3))
            ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            for step in range(steps):
                optimizer.zero_grad()
                ddp(torch.randn(8, 20, generator=torch.Generator().manual_seed(R + 9 * step))).square().sum().backward()
                optimizer.step()
            return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
        before = train()
        flt.watch()
        flt.watch()
        after = train()
        with torch.inference_mode():
            dist.all_reduce(torch.ones(2))
            objects = [None] * N
            dist.all_gather_object(objects, "a" * R)
        dist.all_to_all_single(torch.empty(sum([R + 1] * N)), torch.ones(sum(range(1, N + 1))), [R + 1] * N,
                               list(range(1, N + 1)))
        dist.monitored_barrier()
        if R < 2: dist.send(x, 1) if R == 0 else dist.recv(x, 0)
        from farandole.torch._watch import _watches
        watch, = _watches.values()
        made = watch._compared + len(watch._calls)
        tell(f"{before == after} {made > 30}")
        dist.destroy_process_group()
        watch._thread.join(10)
        tell(f"left: {not watch._thread.is_alive()} {_watches} {watch._compared == made}")
    """
    for size in (2, 3):
        assert run_script(size, script) == ["True True\nleft: True {} True\n"] * size


def test_a_part_of_the_ranks_can_be_watched_and_fails_alone():
    script = """
        part = dist.new_group([0, 2])
        flt.watch(part)
        flt.watch(part)
        try:
            if R == 0: dist.all_reduce(x, dist.ReduceOp.MAX, group=part)
            if R == 2: dist.all_reduce(x, group=part)
            while R != 1:
                dist.barrier(group=part, async_op=True)  # waits for nobody who has left by the error
                time.sleep(0.05)
        except RuntimeError: pass
        dist.all_reduce(x)  # not watched
        tell("the others go on")
        dist.destroy_process_group()
    """
    outputs = run_script(3, script)
    assert outputs[1] == "the others go on\n"
    for output in (outputs[0], outputs[2]):
        said = "collective 1: rank 0 called all_reduce of float32[4] with MAX at <string>"
        assert said in output and "; rank 2 called" in output and "the others go on" in output, output


def test_a_rank_that_leaves_before_the_others_is_named():
    script = """
        flt.watch()
        dist.all_reduce(x)
        if R == 1: sys.exit()
        time.sleep(1)
        dist.all_reduce(x)
    """
    outputs = run_script(2, script, codes=[1, 0])
    assert "rank 1 has left group 0 after 1 collectives, and this rank calls another one: all_reduce" in outputs[0]


def test_what_cannot_be_watched_is_refused():
    script = """
        for call in (lambda: flt.watch(on_failure="abort"), lambda: (dist.destroy_process_group(), flt.watch())):
            try: call()
            except ValueError as error: tell(error)
    """
    expected = ['watch(on_failure=...): expected "exit" or "raise", got \'abort\'']
    expected += ["watch(): torch.distributed has no default process group yet"]
    assert run_script(1, script) == ["\n".join(expected) + "\n"]
