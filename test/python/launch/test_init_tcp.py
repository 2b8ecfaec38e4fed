"""Jobs without MPI: ranks that are told by variables, arguments, stores or torchrun where rank 0 is."""

import os
import re
import subprocess
import sys
import textwrap

import pytest

import warm_ranks
from ranks import communicate, environment, free_port

BODY = """
import datetime, os, sys, time
import numpy as np
import farandole as fl

def check():
    total = fl.allreduce(np.full(1000, fl.rank() + 1.0), op=fl.Sum)
    assert not fl.mpi_enabled()
    # In one write: ranks of torchrun share a pipe, and print() may write the end of the line by itself.
    print(f"rank {fl.rank()} of {fl.size()}: {total[0]:g}\\n", end="", flush=True)
"""
def env_of(rank, port):
    """The variables of env://, for two ranks."""
    return {
        "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "localhost", "MASTER_PORT": port,
    }  # fmt: skip


def ours(size=2, port=None):
    """By rank, our own variables."""
    address = f"127.0.0.1:{port or free_port()}"
    return lambda rank: {"FARANDOLE_RANK": str(rank), "FARANDOLE_SIZE": str(size), "FARANDOLE_ADDRESS": address}


def start(script, **variables):
    """A process that has imported torch."""
    return warm_ranks.start(["-c", BODY + textwrap.dedent(script)], environment(**variables))


def run(size, script, variables_of=lambda rank: {}):
    """Runs ranks with ``sys.argv``-free scripts that read R and N; returns the outputs by rank."""
    script = textwrap.dedent(script)
    return communicate([start(f"R, N = {r}, {size}\n" + script, **variables_of(r)) for r in range(size)])


def output_of(script, **variables):
    """Of one process."""
    return start(script, **variables).communicate(timeout=60)[0]


def expect_sums(size, outputs):
    total = size * (size + 1) // 2
    for rank, output in enumerate(outputs):
        assert f"rank {rank} of {size}: {total}" in output


@pytest.mark.parametrize("size", [2, 4])
def test_our_variables_join_a_job(size):
    expect_sums(size, run(size, "fl.init(); check()", ours(size)))


def test_the_variables_of_env_join_a_job():
    port = str(free_port())
    outputs = run(2, "fl.init(address='env://'); check()", lambda rank: env_of(rank, port))
    expect_sums(2, outputs)


@pytest.mark.parametrize("first", ["farandole", "torch"])
def test_torch_distributed_shares_the_port_of_env(first):
    port = str(free_port())
    script = f"""
        import torch
        import torch.distributed as dist
        if {first!r} == "torch":
            dist.init_process_group("gloo")
        fl.init()
        check()
        if {first!r} == "farandole":
            dist.init_process_group("gloo")
        one = torch.ones(1)
        dist.all_reduce(one)
        assert one.item() == 2
        dist.destroy_process_group()
    """
    expect_sums(2, run(2, script, lambda rank: env_of(rank, port)))


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_arguments_join_a_job_twice(host):
    address = f"tcp://{host}:{free_port()}"
    script = f"""
        for _ in range(2):
            fl.init(rank=R, size=N, local_rank=R, address={address!r})
            check()
            fl.shutdown()
    """
    outputs = run(2, script)
    expect_sums(2, outputs)
    assert all(output.count("of 2: 3") == 2 for output in outputs)


def test_sums_over_slots_have_the_same_bits_for_any_number_of_ranks():
    script = """
        import hashlib, torch, farandole.torch
        fl.init(rank=R, size=N, address="127.0.0.1:{}", slots=8)
        nodes = []
        for slot in range(*fl.slot_range()):
            nodes.append((1, np.random.default_rng(slot).standard_normal(70_000, np.float32)))
            while len(nodes) > 1 and nodes[-2][0] == nodes[-1][0]:
                (width, right), (_, left) = nodes.pop(), nodes.pop()
                nodes.append((2 * width, left + right))
        ((_, mine),) = nodes
        sums = [fl.allreduce(mine[:count], op=fl.Sum) for count in (5, 70_000)]
        print("sums", hashlib.sha256(b"".join(one.tobytes() for one in sums)).hexdigest())
        try:
            fl.torch.allreduce(torch.from_numpy(mine), op=fl.Sum, compression=fl.torch.Compression.int8)
        except ValueError as error:
            print(error)
    """
    outputs = [text for size in (1, 2, 3, 4) for text in run(size, script.format(free_port()))]
    assert len({re.search("sums .*", text)[0] for text in outputs}) == 1
    assert all("in a job with 8 slots: an 8-bit wire" in text for text in outputs)


@pytest.mark.parametrize(
    ("slots", "wanted"),
    [
        ("8 + R", 'MismatchError .*FARANDOLE_SLOTS.*: rank 0 has "8", rank 1 has "9"'),
        ("1", "MismatchError .*1 slots and 2 ranks"),
        ("-1", "ValueError .*slots is -1; expected 0 to 65536"),
    ],
)
def test_slots_that_do_not_fit_are_refused_on_all_ranks(slots, wanted):
    script = f"""
        try:
            fl.init(rank=R, size=N, address="127.0.0.1:{free_port()}", slots={slots})
        except Exception as error:
            print(type(error).__name__, error)
    """
    assert all(re.search(wanted, output) for output in run(2, script))


def test_a_folder_joins_a_job(tmp_path):
    outputs = run(4, f"fl.init(rank=R, size=N, address='file://{tmp_path}/job'); check()")
    expect_sums(4, outputs)


def test_a_store_of_torch_joins_a_job_twice():
    script = f"""
        import torch.distributed as dist
        store = dist.TCPStore("127.0.0.1", {free_port()}, is_master=R == 0, wait_for_workers=False)
        for _ in range(2):
            fl.init(rank=R, size=N, store=store)
            check()
            fl.shutdown()
    """
    outputs = run(2, script)
    assert all(output.count("of 2: 3") == 2 for output in outputs)


def test_ranks_that_torchruns_agents_start_again_meet_though_each_agent_counts_its_own_restarts():
    dist = pytest.importorskip("torch.distributed")
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    port = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for counts in ("00", "10", "11"):
        agents = [env_of(rank, "") | port | {"TORCHELASTIC_RESTART_COUNT": counts[rank]} for rank in range(2)]
        expect_sums(2, run(2, "fl.init(); check()", agents.__getitem__))


@pytest.mark.parametrize("latency_s", [0, 0.15])  # as of a store far away
def test_a_store_of_three_functions_joins_a_job(tmp_path, latency_s):
    script = f"""
        import pathlib
        class Store:
            folder = pathlib.Path({str(tmp_path)!r})
            def set(self, key, value):
                (self.folder / (key + ".new")).write_text(value)
                (self.folder / (key + ".new")).rename(self.folder / key)
            def get(self, key):
                time.sleep({latency_s})
                return (self.folder / key).read_bytes()
            def wait(self, keys, timeout):
                time.sleep({latency_s})
                until = time.monotonic() + timeout.total_seconds()
                while not all((self.folder / key).exists() for key in keys):
                    if time.monotonic() > until:
                        raise TimeoutError
                    time.sleep(0.001)
        fl.init(rank=R, size=N, store=Store())
        check()
    """
    expect_sums(2, run(2, script))


def test_an_initialized_torch_distributed_is_enough():
    script = f"""
        import torch.distributed as dist
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:{free_port()}", rank=R, world_size=N)
        fl.init()
        check()
    """
    expect_sums(2, run(2, script))


def test_ctrl_c_ends_a_wait_for_the_store_and_the_next_init_goes_on(tmp_path):
    script = f"""
        import pathlib, signal
        done = pathlib.Path({str(tmp_path)!r}) / "interrupted"
        import torch.distributed as dist
        store = dist.FileStore({str(tmp_path / "store")!r}, 2)
        if R == 1:
            signal.setitimer(signal.ITIMER_REAL, 1)
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            try:
                fl.init(rank=R, size=N, store=store)
            except KeyboardInterrupt:
                done.touch()
        else:
            while not done.exists():
                time.sleep(0.01)
        fl.init(rank=R, size=N, store=store)
        check()
    """
    expect_sums(2, run(2, script))
    assert (tmp_path / "interrupted").exists()


JOINS = int(os.environ.get("FARANDOLE_TEST_JOINS") or 9)  # 200 now and then


def test_joins_that_fail_leave_nothing_and_the_process_joins_with_other_arguments(tmp_path):
    script = f"""
        import pathlib, signal
        import torch.distributed as dist
        import farandole.torch.distributed

        done = pathlib.Path({str(tmp_path)!r}) / "done"

        class Broken:
            def set(self, key, value): raise LookupError("broken")
            get = wait = set

        def used():
            return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

        def fail(number):
            store = dist.FileStore({str(tmp_path)!r} + f"/{{number}}", 5)
            rank, kind = number // 4 % 2, number % 4  # rank 0 listens, another one looks for it
            error = [KeyboardInterrupt, KeyboardInterrupt, LookupError, fl.OperationTimeoutError][kind]
            if error is KeyboardInterrupt:
                signal.setitimer(signal.ITIMER_REAL, 0.05)
            elif error is fl.OperationTimeoutError:
                os.environ["FARANDOLE_INIT_TIMEOUT_S"] = "0.05"
            try:
                if kind == 0:
                    dist.init_process_group("farandole", store=store, rank=rank, world_size=5)
                else:
                    fl.init(rank=rank, size=5, store=Broken() if kind == 2 else store)
                raise AssertionError("joined")
            except error:
                assert not fl.is_initialized() and not dist.is_initialized()
            os.environ.pop("FARANDOLE_INIT_TIMEOUT_S", None)

        if R == 1:
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            fail(0)  # what stays once
            before = used()
            for number in range({JOINS}):
                fail(number)
            until = time.monotonic() + 10
            while used() != before and time.monotonic() < until:  # threads of a store that have yet to end
                time.sleep(0.01)
            assert used() == before, (used(), before)
            done.touch()
        while not done.exists():
            time.sleep(0.01)
        fl.init(rank=R, size=N, address="tcp://127.0.0.1:{free_port()}")
        check()
    """
    expect_sums(2, run(2, script))


@pytest.mark.parametrize("prefix", ["job {job}", ""])
def test_processes_that_have_joined_before_meet_a_new_one_at_a_store(tmp_path, prefix):
    script = f"""
        import torch.distributed as dist
        store = dist.FileStore({str(tmp_path / "store")!r}, 3)
        if R < 2:
            fl.init(rank=R, size=2, store=dist.PrefixStore({prefix!r}.format(job=0), store))
            check()
            fl.shutdown()
            store.set(f"over {{R}}", "")
        store.wait(["over 0", "over 1"])
        fl.init(rank=R, size=3, store=dist.PrefixStore({prefix!r}.format(job=1), store))
        check()
    """
    expect_sums(3, run(3, script))


STORE = "fl.init(rank={}, size=2, store=Store())"


@pytest.mark.parametrize(
    ("call", "kind", "wanted"),
    [
        ("fl.init(size=2)", "ValueError", "size 2 without a rank"),
        ("fl.init(rank=0, address='h:1')", "ValueError", "no size was given"),
        ("fl.init(rank=2, size=2, address='h:1')", "ValueError", "rank 2 of a job of size 2"),
        ("fl.init(rank=0, size=2)", "ValueError", "nobody says where rank 0 is"),
        ("fl.init(rank=0, size=2, address='nowhere')", "ValueError", "is not host:port"),
        ("fl.init(rank=0, size=2, address='env://')", "ValueError", "MASTER_ADDR is not set"),
        ("os.environ.update(FARANDOLE_RANK='1', FARANDOLE_SIZE='2'); fl.init(size=3)", "ValueError", "says size 3"),
        ("fl.init(rank=0, size=2, store=object())", "TypeError", "expected an object with set, get and wait"),
        ("Store.set = lambda *_: {}['it is on holiday']; " + STORE.format(0), "KeyError", "it is on holiday"),
        # Holds init no longer than its limit.
        ("Store.set = still; " + STORE.format(0), "OperationTimeoutError", "the store has not taken"),
        ("Store.wait = still; " + STORE.format(1), "OperationTimeoutError", "the store has not given"),
        ("Store.get = still; " + STORE.format(1), "OperationTimeoutError", "the store has not given"),
        (
            "os.environ['FARANDOLE_KEY_FD'] = str(os.pipe()[0]); fl.init(rank=0, size=2, address='127.0.0.1:1')",
            "OperationTimeoutError",
            r"FARANDOLE_KEY_FD=.*only 0 of 32 bytes have come",
        ),
    ],
)
def test_what_is_missing_contradictory_or_does_not_come_is_named(call, kind, wanted):
    script = f"""
        import threading
        def still(*_): threading.Event().wait()
        class Store:
            def set(self, key, value): pass
            def wait(self, keys, timeout): pass
            def get(self, key): return b""
        os.environ["FARANDOLE_INIT_TIMEOUT_S"] = "0.5"
        try:
            {call}
        except Exception as error:
            print(type(error).__name__, error)
    """
    assert re.search(f"{kind} .*{wanted}", output_of(script))


def test_a_key_that_others_may_read_is_refused(tmp_path):
    key = tmp_path / "key"
    key.write_bytes(bytes(32))
    key.chmod(0o644)
    assert "its mode should be 0600" in output_of("fl.init()", FARANDOLE_KEY_FILE=str(key), **ours(port=1)(0))


def test_a_key_is_read_once_from_its_descriptor_and_no_child_inherits_it():
    script = """
        import subprocess
        secret, write = os.pipe()
        os.write(write, bytes(range(32)))
        if R == 1:  # rank 0's stays open
            os.close(write)
        os.environ["FARANDOLE_KEY_FD"] = str(secret)
        fl.init()
        check()
        shows = subprocess.run(["env"], env=dict(os.environ), capture_output=True, text=True).stdout
        assert "FARANDOLE_KEY_FD" not in shows
        fl.shutdown()
        fl.init()  # with the same key, which is not there to be read again
        check()
    """
    assert all(output.count("of 2: 3") == 2 for output in run(2, script, ours()))


def test_an_interrupted_wait_for_the_key_goes_on_with_the_next_init():
    address = f"127.0.0.1:{free_port()}"
    script = f"""
        import signal
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        secret, write = os.pipe()
        os.write(write, bytes(10))
        os.environ["FARANDOLE_KEY_FD"] = str(secret)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            fl.init(rank=R, size=N, address="{address}")
        except KeyboardInterrupt:
            os.write(write, bytes(22))
        fl.init(rank=R, size=N, address="{address}")
        check()
    """
    expect_sums(2, run(2, script))


def test_the_listening_socket_of_rank_0_stays_its_own_between_two_jobs():
    port = free_port()
    script = f"""
        import socket
        if R == 0:
            own = socket.create_server(("127.0.0.1", {port}))
            os.environ["FARANDOLE_LISTEN_FD"] = str(own.detach())
        fl.init()
        check()
        fl.shutdown()
        try:
            socket.create_server(("127.0.0.1", {port}))
        except OSError as error:
            print(error)
        fl.init()
        check()
    """
    outputs = run(2, script, ours(port=port))
    assert all(output.count("of 2: 3") == 2 and "already in use" in output for output in outputs)


def test_a_rank_of_another_program_is_not_let_in(tmp_path):
    port = str(free_port())

    def start_program(name, rank):
        (tmp_path / name).write_text("import farandole as fl\nfl.init()\nprint('size', fl.size())")
        return subprocess.Popen(
            [sys.executable, tmp_path / name], env=environment(**env_of(rank, port)), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    first = start_program("one.py", 0)
    refused = communicate([start_program("other.py", 1)], codes=[1])[0]
    assert f"but rank 0 is process {first.pid} on host" in refused and "(one.py of user " in refused
    assert communicate([first, start_program("one.py", 1)]) == ["size 2\n"] * 2


def test_a_descendant_of_a_rank_cannot_join_as_that_rank():
    script = """
        import subprocess
        fl.init()
        code = "import farandole as fl\\ntry: fl.init()\\nexcept fl.HorovodInternalError as e: print(e)"
        print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
        check()
    """
    assert all("of this job has joined as process" in output for output in run(2, script, ours()))
