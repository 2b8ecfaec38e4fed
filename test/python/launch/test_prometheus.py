"""A real Prometheus scrapes two ranks, and the dashboard's queries give data; a collector gets what OTLP sends."""

import contextlib
import http.server
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest

from farandole import _metrics
from ranks import GUARD_S, PYTHON_PATH, REPOSITORY, free_port
from test_exported_metrics import two_free_ports

pytestmark = pytest.mark.once

RANK = """
import os, sys
import numpy as np
import farandole as fl

fl.init()
while True:
    handles = [fl.allreduce_async(np.ones(1000, np.float32), name=f"x{i}") for i in range(8)]
    for handle in handles:
        fl.synchronize(handle)
    fl.end_step()
    if fl.allreduce(np.array([float(os.path.exists(sys.argv[1]))]), op=fl.Max, name="end")[0]:
        break
"""


@contextlib.contextmanager
def running(command, **options):
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def job(size, folder, **variables):
    """Ranks that reduce until the end of this."""
    common = {"FARANDOLE_SIZE": str(size), "FARANDOLE_ADDRESS": f"127.0.0.1:{free_port()}", "PYTHONPATH": PYTHON_PATH}
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(running([sys.executable, "-c", RANK, folder / "end"],
                                        env=os.environ | common | variables | {"FARANDOLE_RANK": str(rank)}))
            for rank in range(size)
        ]  # fmt: skip
        yield
        (folder / "end").touch()
        assert [rank.wait(timeout=GUARD_S) for rank in ranks] == [0] * size


@contextlib.contextmanager
def prometheus(folder, first):
    """Where it listens. It scrapes two ports each second."""
    port = free_port()
    targets = [f"127.0.0.1:{first + rank}" for rank in range(2)]
    scrapes = [{"job_name": "farandole", "static_configs": [{"targets": targets}]}]
    said = {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": scrapes}
    (folder / "prometheus.yml").write_text(json.dumps(said))
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with running([*command, f"--web.listen-address=127.0.0.1:{port}"], stderr=subprocess.DEVNULL):
        yield f"http://127.0.0.1:{port}"


def ask(address, query):
    """What it says: labels and values."""
    said = urllib.parse.urlencode({"query": query})
    try:
        with urllib.request.urlopen(f"{address}/api/v1/query?{said}", timeout=GUARD_S) as answer:
            result = json.load(answer)["data"]["result"]
    except urllib.error.HTTPError as error:
        if error.code == 503:  # it begins
            return []
        raise AssertionError(query + error.read().decode()) from None
    except urllib.error.URLError:
        return []
    return [(one["metric"], float(one["value"][1])) for one in result]


def wait_for_data(address, query):
    """Until each value is a number, of which there is at least one."""
    end_s = time.monotonic() + 60
    while not (found := ask(address, query)) or not all(math.isfinite(value) for _, value in found):
        assert time.monotonic() < end_s, (query, found)
        time.sleep(0.2)
    return found


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_prometheus_scrapes_ranks_and_answers_the_dashboard(tmp_path):
    first = two_free_ports()
    panels = json.loads((REPOSITORY / "docs" / "grafana.json").read_text())["panels"]
    queries = [target["expr"].replace("$__rate_interval", "5s") for panel in panels for target in panel["targets"]]
    with job(2, tmp_path, FARANDOLE_METRICS=f"port:127.0.0.1:{first}"), prometheus(tmp_path, first) as address:
        end_s = time.monotonic() + 60
        while wait_for_data(address, "count(farandole_info)")[0][1] < 2:
            assert time.monotonic() < end_s
        for query in queries:
            wait_for_data(address, query)
        names = {labels["__name__"] for labels, _ in ask(address, '{__name__=~"farandole_.*"}')}
        assert names == {metric.full_name for metric in _metrics.METRICS}
        assert wait_for_data(address, "min(rate(farandole_operations_total{kind='allreduce'}[5s]))")[0][1] > 0
        with urllib.request.urlopen(f"http://127.0.0.1:{first}/metrics", timeout=GUARD_S) as page:
            check = ["promtool", "check", "metrics"]
            done = subprocess.run(check, input=page.read(), capture_output=True, timeout=GUARD_S)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


class Collector(http.server.BaseHTTPRequestHandler):
    """Keeps what is sent to it by OTLP."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append((self.path, body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


def test_otlp_sends_the_last_values(tmp_path):
    service = pytest.importorskip("opentelemetry.proto.collector.metrics.v1.metrics_service_pb2")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        server.received = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        (tmp_path / "end").touch()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        with job(1, tmp_path, FARANDOLE_METRICS="otlp,label:run=a", OTEL_EXPORTER_OTLP_ENDPOINT=endpoint):
            pass
        server.shutdown()
    path, body = server.received[-1]
    assert path == "/v1/metrics"
    sent = service.ExportMetricsServiceRequest.FromString(body).resource_metrics[0].scope_metrics[0].metrics
    found = {metric.name: metric for metric in sent}
    assert found.keys() == {f"farandole_{metric.name}" for metric in _metrics.METRICS}
    points = found["farandole_operations"].sum.data_points
    by_kind = {one.attributes[-1].value.string_value: one.as_double for one in points}
    assert by_kind["allreduce"] > 8
    assert {(one.key, one.value.string_value) for one in points[0].attributes} >= {("rank", "0"), ("run", "a")}
    assert found["farandole_batch_bytes"].unit == "By"
