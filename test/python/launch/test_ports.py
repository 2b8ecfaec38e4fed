"""FARANDOLE_PORTS: where a job listens, behind a packet filter, beside another job, and where there is no room."""

import os
import re
import subprocess
import sys

import pytest

from farandole.runner import supervisor
from hosts import FIRST_ADDRESS, TwoHosts, or_skip
from ranks import PYTHON_PATH

pytestmark = [pytest.mark.mpi, pytest.mark.once]

FIRST, LAST = 50000, 50019
PORTS = f"{FIRST}-{LAST}"

#: Each rank prints at which ports somebody listens on its host, while all ranks are there.
LISTENS = """
import pathlib
import sys
import small_training

small_training.train()
lines = [line.split() for name in ("tcp", "tcp6") for line in pathlib.Path("/proc/net", name).read_text().splitlines()]
ports = {int(words[1].rpartition(":")[2], 16) for words in lines if words[3] == "0A"}
sys.stdout.write(f"listens at {sorted(ports)}\\n")
"""
#: Connects from the second host to the first, where nobody listens.
TRIES = """
import socket
import sys

for port in sys.argv[2:]:
    with socket.socket() as one:
        one.settimeout(1)
        try:
            one.connect((sys.argv[1], int(port)))
        except OSError as error:
            print(type(error).__name__)
"""
#: Ports are taken, given up and kept by one process, of a range of eight, where the first two are for named ones.
IN_TURN = """
from farandole.runner import supervisor

def open_and_close():
    with supervisor.open_listener() as listener:
        return listener.getsockname()[1]

print(sorted(open_and_close() for _ in range(6)))
kept = [supervisor.reserve_port() for _ in range(3)]
print(sorted(one.getsockname()[1] for one in kept)[:2], len({one.getsockname()[1] for one in kept}))
kept.pop().close()
kept += [supervisor.open_listener() for _ in range(6)]
print(sorted(one.getsockname()[1] for one in kept))
kept += [supervisor.open_listener() for _ in range(2)]  # at reserved ones, rather than nowhere
try:
    supervisor.open_listener()
except OSError as error:
    print(error)
"""
#: The side that listens ends connections first, so that the kernel keeps their port for a minute.
ENDS_FIRST = """
import socket
from farandole.runner import supervisor

with supervisor.open_listener("127.0.0.1") as listener, socket.create_connection(listener.getsockname()) as one:
    listener.accept()[0].close()
    one.recv(1)
port = supervisor.reserve_port().getsockname()[1]
socket.create_server(("", port))
print("kept", port)
"""
#: Has a port while a command runs.
TAKEN = "import socket, subprocess, sys; s = socket.create_server(('', 50000)); sys.exit(subprocess.call(sys.argv[1:]))"


@pytest.fixture
def hosts(tmp_path):
    with or_skip(TwoHosts(tmp_path)) as played:
        yield played


def end_of(job):
    text, _ = job.communicate(timeout=90)
    return job.returncode, text


def launch(hosts, ranks, *command, **variables):
    """On the first host alone."""
    words = [sys.executable, "-m", "farandole.runner", "-np", str(ranks), *command]
    return hosts.start_rank(0, words, **variables)


def check_listens(text, count):
    """So many ranks have said where somebody listens on their host: at ports of the range, and no others."""
    said = [line.partition("listens at ")[2] for line in text.splitlines() if "listens at " in line]
    used = {int(port) for ports in said for port in ports.strip("[]").split(", ")}
    assert len(said) == count and used <= {*range(FIRST, LAST + 1)}, text
    return used


@pytest.mark.parametrize("kind", ["--gloo", "--elastic"])
def test_a_job_needs_no_other_ports_than_those_of_the_range(hosts, kind):
    try:
        hosts.filter_packets(f"{FIRST}:{LAST}")
    except RuntimeError as error:
        pytest.skip(str(error))
    code, text = end_of(hosts.farandolerun(2, [sys.executable, "-c", LISTENS], kind, FARANDOLE_PORTS=PORTS))
    assert code == 0, text
    check_listens(text, 4)
    # The filter was there.
    code, text = end_of(hosts.start_rank(1, [sys.executable, "-c", TRIES, FIRST_ADDRESS, str(LAST), str(LAST + 1)]))
    assert text.split() == ["ConnectionRefusedError", "TimeoutError"]


def test_open_mpi_has_variables_of_its_own(hosts):
    """As docs/cluster.md says. Without FARANDOLE_PORTS the ranks of two hosts would not watch each other."""
    try:
        hosts.filter_packets(f"{FIRST}:{LAST}")
    except RuntimeError as error:
        pytest.skip(str(error))
    variables = {
        "OMPI_MCA_oob_tcp_dynamic_ipv4_ports": f"{FIRST}-{FIRST + 3}",  # mpirun listens at all of them
        "OMPI_MCA_btl_tcp_port_min_v4": str(FIRST + 4), "OMPI_MCA_btl_tcp_port_range_v4": "6",
        "FARANDOLE_PORTS": f"{FIRST + 12}-{LAST}",
    }  # fmt: skip
    code, text = end_of(hosts.start(1, [sys.executable, "-c", LISTENS], **variables))
    assert code == 0 and text.count("listens at ") == 2, text
    assert "not watched" not in text


def test_two_jobs_of_a_host_share_the_range(hosts):
    ports = f"{FIRST}-{FIRST + 3}"  # each job listens at two
    jobs = [launch(hosts, 2, sys.executable, "-c", LISTENS, FARANDOLE_PORTS=ports) for _ in range(2)]
    for code, text in map(end_of, jobs):
        assert code == 0 and text.count("listens at ") == 2, text


def test_a_range_that_is_used_up_is_named(hosts):
    code, text = end_of(launch(hosts, 3, sys.executable, "-c", LISTENS, FARANDOLE_PORTS=f"{FIRST}-{FIRST + 1}"))
    assert code != 0 and "Address already in use, as are all ports of FARANDOLE_PORTS=50000-50001" in text
    words = [sys.executable, "-m", "farandole.runner", "-np", "2", "true"]
    code, text = end_of(hosts.start_rank(0, [sys.executable, "-c", TAKEN, *words], FARANDOLE_PORTS="50000-50000"))
    why = "rank 0: cannot listen at 127.0.0.1: all ports of FARANDOLE_PORTS=50000-50000 are in use\n"
    assert code == 1 and why in text, text


@pytest.mark.torch
def test_the_store_for_torch_has_a_port_of_the_range(hosts):
    script = """
import torch.distributed as dist
import farandole.torch.distributed
dist.init_process_group("farandole", init_method="farandole://")
"""
    code, text = end_of(launch(hosts, 2, sys.executable, "-c", script + LISTENS, FARANDOLE_PORTS=PORTS))
    assert code == 0, text
    check_listens(text, 2)


@pytest.mark.torch
def test_torchs_own_store_has_a_port_of_the_range(hosts):
    """And alone has one of the range's first quarter."""
    script = """
import torch.distributed as dist
import farandole.torch.distributed
dist.init_process_group("farandole", init_method="env://")
"""
    try:
        hosts.filter_packets(f"{FIRST}:{LAST}")
    except RuntimeError as error:
        pytest.skip(str(error))
    code, text = end_of(hosts.farandolerun(1, [sys.executable, "-c", script + LISTENS], FARANDOLE_PORTS=PORTS))
    assert code == 0, text
    assert len(check_listens(text, 2) & {*range(FIRST, FIRST + 5)}) == 1, text


def test_mpirun_keeps_a_port_of_the_range_for_torchs_store(hosts):
    show = ["--mpi", "sh", "-c", "echo has $MASTER_PORT"]
    code, text = end_of(launch(hosts, 1, *show, FARANDOLE_PORTS=f"{FIRST}-{FIRST + 7}"))
    assert code == 0 and re.search(f"has {FIRST // 10}[01]$", text, re.MULTILINE), text
    words = [sys.executable, "-c", TAKEN, sys.executable, "-m", "farandole.runner", "-np", "1", *show]
    code, text = end_of(hosts.start_rank(0, words, FARANDOLE_PORTS="50000-50000"))
    used = "farandolerun: cannot listen at any address: all ports of FARANDOLE_PORTS=50000-50000 are in use\n"
    assert code == 2 and used in text, text


def test_a_process_takes_ports_in_turn_and_named_ones_last(hosts):
    words = [sys.executable, "-c", IN_TURN]
    _, text = end_of(hosts.start_rank(0, words, FARANDOLE_PORTS=f"{FIRST}-{FIRST + 7}"))
    ports = [*range(FIRST, FIRST + 8)]
    used = "cannot listen at any address: all ports of FARANDOLE_PORTS=50000-50007 are in use"
    assert text.splitlines() == [f"{ports[2:]}", f"{ports[:2]} 3", f"{ports}", used]


def test_a_port_whose_connections_have_just_ended_can_be_kept(hosts):
    _, text = end_of(hosts.start_rank(0, [sys.executable, "-c", ENDS_FIRST], FARANDOLE_PORTS=f"{FIRST}-{FIRST}"))
    assert text == f"kept {FIRST}\n"


def test_ports_that_need_a_right_are_passed_over(hosts):
    """Of 1000 to 1025 a user may have two."""
    words = ["setpriv", "--bounding-set", "-net_bind_service", sys.executable, "-m", "farandole.runner", "-np", "2"]
    train = [sys.executable, "-c", LISTENS]
    code, text = end_of(hosts.start_rank(0, [*words, *train], FARANDOLE_PORTS="1000-1025"))
    assert code == 0 and text.count("listens at [1024, 1025]") == 2, text
    code, text = end_of(hosts.start_rank(0, [*words, *train], FARANDOLE_PORTS="1000-1010"))
    assert code == 1 and "rank 0: [Errno 13] Permission denied" in text, text


@pytest.mark.torch
def test_a_store_that_torch_refuses_leaves_no_socket():
    from farandole.torch.distributed._members import serve_store

    before = os.listdir("/proc/self/fd")
    with pytest.raises(TypeError):
        serve_store(timeout="long")
    assert {*os.listdir("/proc/self/fd")} <= {*before}


@pytest.mark.parametrize("text", ["50000", "50100-50000", "0-9", "1-65536", " 1-2", "1-2,4-5", "-5", "\u0663-9"])
def test_launcher_and_library_refuse_the_same(monkeypatch, text):
    environment = os.environ | {"FARANDOLE_PORTS": text, "PYTHONPATH": PYTHON_PATH}
    library = [sys.executable, "-c", "import farandole; farandole.init()"]
    done = subprocess.run(library, env=environment, text=True, capture_output=True, check=False, timeout=60)
    monkeypatch.setenv("FARANDOLE_PORTS", text)
    with pytest.raises(ValueError, match="is not FIRST-LAST") as refused:
        supervisor.allowed_ports()
    assert str(refused.value) in done.stderr


def test_the_launcher_refuses_junk_as_wrong_use():
    words = [sys.executable, "-m", "farandole.runner", "-np", "2", "true"]
    environment = os.environ | {"FARANDOLE_PORTS": "x", "PYTHONPATH": PYTHON_PATH}
    done = subprocess.run(words, env=environment, text=True, capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (
        2, 'farandolerun: FARANDOLE_PORTS="x" is not FIRST-LAST, ports from 1 to 65535, as 50000-50100\n'
    )  # fmt: skip
