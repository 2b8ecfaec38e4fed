"""FARANDOLE_METRICS: two ranks' metrics by file and by port, as prometheus_client reads them, and as docs say."""

import collections
import contextlib
import gc
import os
import re
import socket
import subprocess
import sys
import threading
import types
import urllib.error
import urllib.request
import weakref

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families as read_text

import farandole as fl
from farandole import _metrics
from ranks import GUARD_S, PYTHON_PATH, REPOSITORY, free_port

pytestmark = pytest.mark.once

RUN = 'a \\ "b"'
RANK = """
import sys, time
import numpy as np
import farandole as fl

fl.init()
time.sleep(fl.rank())  # longer than a stall's warning
for _ in range(5):
    fl.allreduce(np.ones(1000, np.float32), name="x")
in_half = fl._core.Options(0, 1, wire=1)  # the sum of an allreduce
fl.basics.current().core.submit(in_half, np.ones(1000, np.float32), "z", 4)
try:
    fl.allreduce(np.ones(2 + fl.rank(), np.float32), name="y")
except fl.MismatchError:
    print("here", flush=True)
sys.stdin.readline()
fl.allreduce(np.ones(1000, np.float32), name="x")
"""


class Job:
    """Two ranks that wait for a line of input."""

    def __init__(self, metrics):
        common = {"FARANDOLE_SIZE": "2", "FARANDOLE_ADDRESS": f"127.0.0.1:{free_port()}", "PYTHONPATH": PYTHON_PATH}
        common |= {"FARANDOLE_STALL_WARNING_S": "0.2", "FARANDOLE_METRICS": metrics, "OMP_NUM_THREADS": "1"}
        self.ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK], env=os.environ | common | {"FARANDOLE_RANK": str(rank)},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(2)
        ]  # fmt: skip

    def __enter__(self):
        for rank in self.ranks:
            assert rank.stdout.readline() == "here\n", rank.communicate()
        return self

    def end(self):
        """What they said, once they have ended."""
        for rank in self.ranks:
            print(file=rank.stdin, flush=True)
        return [rank.communicate(timeout=GUARD_S)[1] for rank in self.ranks]

    def __exit__(self, *_):
        for rank in self.ranks:
            rank.kill()
            rank.communicate()


def two_free_ports():
    """The first of two in a row."""
    while True:
        first = free_port()
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", first + 1)):
            return first


def values(families):
    """Of a rank, by name and the labels kind and stage."""
    found = {}
    for family in families:
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("rank"), labels.pop("run")) in [("0", RUN), ("1", RUN)]
            words = [sample.name.removeprefix("farandole_"), labels.get("kind"), labels.get("stage")]
            found[" ".join(filter(None, words))] = sample.value
    return found


def get(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=GUARD_S) as answer:
        return answer.read().decode()


@pytest.fixture
def alone(monkeypatch):
    """Begins a job of one rank with this FARANDOLE_METRICS."""

    def begin(metrics):
        monkeypatch.setenv("FARANDOLE_METRICS", metrics)
        fl.init()

    yield begin
    fl.shutdown()


def raising(*_):
    raise ValueError("a fault")


def test_two_ranks_export_the_same_by_file_and_by_port(tmp_path):
    port = two_free_ports()
    with Job(f"file:{tmp_path}/m.prom,port:127.0.0.1:{port},label:run={RUN}") as job:
        for rank in range(2):
            text = get(port + rank)
            found = values(read_text(text))
            assert found["operations_total allreduce"] == 7
            assert found["operation_errors_total"] == 1
            assert found["batch_bytes_total"] == 6 * 4000
            assert found["wire_bytes_total"] == 6 * 4000 - 2000  # one in 16 bits
            assert found["cache_hits_total"] + found["cache_misses_total"] == 7
            assert found["cache_misses_total"] > 1  # y, and the first x
            assert found["stalls_total"] >= 1
            assert found["size"] == 2
            assert f'size="2",local_rank="{rank}",host="{socket.gethostname()}"' in text
            names = {f"farandole_{name.split()[0]}" for name in found}
            assert names == {metric.full_name for metric in _metrics.METRICS}
        waits = [values(read_text(get(port + r)))["operation_seconds_total negotiation"] for r in range(2)]
        assert waits[0] > waits[1]  # rank 0 has waited for rank 1
        job.end()
        assert [rank.returncode for rank in job.ranks] == [0, 0]
    for rank in range(2):
        found = values(read_text((tmp_path / f"m.rank{rank}.prom").read_text()))
        assert found["operations_total allreduce"] == 8
    assert sorted(os.listdir(tmp_path)) == ["m.rank0.prom", "m.rank1.prom"]


def test_what_cannot_be_had_is_a_warning(tmp_path):
    port = free_port()
    with socket.create_server(("127.0.0.1", port)), Job(f"port:127.0.0.1:{port},file:{tmp_path}/no/m.prom") as job:
        said = job.end()
        assert [rank.returncode for rank in job.ranks] == [0, 0]
    assert f"warning: FARANDOLE_METRICS: no metrics by port {port} of 127.0.0.1: [Errno 98]" in said[0]
    assert f"port {port}" not in said[1]
    assert all(text.count(f"no metrics in {tmp_path}/no/m.rank") == 1 for text in said)


JUNK = ["file:x", "port:0", "port:65536", "port:x", "prom", "otlp:x"]
JUNK += ["label:rank=1", "label:host=a", "label:part=a", "label:__a=b", "label:a=\udcff"]


@pytest.mark.parametrize("value", JUNK)
def test_junk_is_refused_by_init(monkeypatch, value):
    monkeypatch.setenv("FARANDOLE_METRICS", f"port:9400,{value}")
    with pytest.raises(ValueError, match=re.escape(f'FARANDOLE_METRICS="port:9400,{value}": "{value}" is not one of')):
        fl.init()
    assert not fl.is_initialized()


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setenv("FARANDOLE_METRICS", "otlp")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.metrics", None)
    said = 'FARANDOLE_METRICS="otlp" needs opentelemetry.sdk.metrics: pip install "farandole[otlp]"'
    with pytest.raises(ModuleNotFoundError, match=re.escape(said)):
        fl.init()


def test_counters_go_on_in_the_next_generation(monkeypatch, tmp_path):
    monkeypatch.setenv("FARANDOLE_METRICS", f"file:{tmp_path}/m{{rank}}.prom,label:run={RUN}")
    fl.init(elastic=True, size=1, rank=0, address=f"127.0.0.1:{free_port()}")
    fl.allreduce(np.ones(4), name="x")
    fl.reinit()
    fl.basics._Process.announce(fl.basics.current())  # once more, as an import of farandole.jax
    fl.allreduce(np.ones(4), name="x")
    fl.shutdown()
    found = values(read_text((tmp_path / "m0.prom").read_text()))
    assert found["generation"] == 2
    assert found["operations_total allreduce"] == 2


def test_a_slow_request_keeps_nobody_waiting(alone):
    port = free_port()
    alone(f"port:127.0.0.1:{port}")
    with socket.create_connection(("127.0.0.1", port), timeout=0.3) as slow, pytest.raises(ConnectionError):
        for _ in range(20):
            slow.sendall(b"x")
            with contextlib.suppress(TimeoutError):
                if not slow.recv(1):
                    raise ConnectionError
    assert "farandole_info" in get(port)


def test_a_page_that_cannot_be_had_is_an_error_of_this_request(alone, monkeypatch):
    port = free_port()
    alone(f"port:127.0.0.1:{port}")
    with monkeypatch.context() as patch, pytest.raises(urllib.error.HTTPError, match="503"):
        patch.setattr(_metrics, "_text", raising)
        get(port)
    assert "farandole_info" in get(port)


class Otlp:
    def __init__(self, *_):
        pass


@pytest.mark.parametrize("owner, name", [(threading.Thread, "start"), (Otlp, "__init__"), (Otlp, "end")])
def test_what_cannot_begin_or_end_is_a_warning(alone, monkeypatch, capsys, owner, name):
    for module in ("opentelemetry.sdk.metrics", _metrics._otlp_module()):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    monkeypatch.setattr(_metrics, "_OtlpExport", Otlp)
    monkeypatch.setattr(Otlp, "end", lambda _: None, raising=False)
    monkeypatch.setattr(owner, name, raising)
    alone(f"otlp,port:a..b:{free_port()}")
    fl.shutdown()
    said = capsys.readouterr().err
    assert said.count("warning: FARANDOLE_METRICS: no metrics by port") == 1  # there is no such name
    assert said.count("a fault") == 1


def test_a_link_in_place_of_the_new_file_is_not_followed(alone, tmp_path):
    (tmp_path / "other").write_text("kept")
    (tmp_path / f"m0.prom.{os.getpid()}").symlink_to(tmp_path / "other")
    alone(f"file:{tmp_path}/m{{rank}}.prom")
    fl.shutdown()
    assert (tmp_path / "other").read_text() == "kept"
    assert "farandole_info" in (tmp_path / "m0.prom").read_text()


def test_ended_contexts_go_and_count_once(alone, monkeypatch):
    alone(f"port:127.0.0.1:{free_port()}")
    fl.allreduce(np.ones(4), name="x")
    former, source = weakref.ref(fl.basics.current()), _metrics._Process.source
    fl.shutdown()
    gc.collect()
    assert former() is None
    counted = source._before["allreduces"] + source._latest["allreduces"]
    with monkeypatch.context() as patch:
        patch.setattr(_metrics._Source, "read", lambda _: None)  # as of one that closes before its first read
        fl.init()
        fl.shutdown()
    fl.init()
    assert source.read().counts["allreduces"] == counted


def test_a_former_ranks_file_goes_unless_another_has_written_it(tmp_path):
    def write(name):
        (tmp_path / "new").write_text("")
        os.replace(tmp_path / "new", tmp_path / name)
        return types.SimpleNamespace(path=str(tmp_path / name), file=(tmp_path / name).stat().st_ino)

    for export in [write("m.rank1.prom"), write("m.rank2.prom"), write("m.rank3.prom")]:
        _metrics._remove_file_of_former_rank(export)
    write("m.rank3.prom")
    _metrics._remove_file_of_former_rank(write("m.rank4.prom"))
    assert sorted(os.listdir(tmp_path)) == ["m.rank3.prom", "m.rank4.prom"]


def test_the_page_explains_what_is_exported():
    text = (REPOSITORY / "docs" / "metrics.md").read_text().partition("## All metrics")[2]
    items = re.findall(r"^- (\*\*`farandole_.*?)(?=\n- |\n\n|\Z)", text, re.DOTALL | re.MULTILINE)
    said = sorted(" ".join(item.split()).partition(" Look for: ")[0] for item in items)
    rank = _metrics.Rank(collections.Counter(), 1, 0, 1, 0, 0)
    assert said == sorted(explain(metric, metric.values(rank)) for metric in _metrics.METRICS)


def explain(metric, series):
    """As the page does."""
    what = metric.type + (f", {metric.unit}" if metric.unit else "")
    by = {label for labels, _ in series for label in labels} if metric.name != "info" else ()
    what += "".join(f"; by `{label}`" for label in by)
    assert all([*labels] == [*metric.labels] for labels, _ in series)
    return f"**`{metric.full_name}`** ({what}) {metric.meaning}"
