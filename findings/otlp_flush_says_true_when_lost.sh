#!/usr/bin/env bash
# opentelemetry-sdk 1.45.2 and its OTLP exporter over HTTP 1.45.2: MeterProvider.force_flush().
#
# Expected: force_flush(timeout_millis=500) is true if the metrics have reached the collector, and false after half a
#   second if not: OpenTelemetry's specification wants ForceFlush to let its caller know whether it succeeded, failed
#   or timed out.
# Seen: it is True though nothing has arrived: where the collector accepts a connection and never answers, where it
#   refuses the connection, where it answers 503 to each attempt, and where it refuses what was sent (400). It returns
#   when the exporter's own timeout (2 s here, 10 s by default) is over, not after the half second. The loss is a line in
#   the log only. A program that flushes before it exits, and looks at the result, loses its last values.
# Output seen: silent: True; refused: True; answers 503: True; answers 400: True; accepts: True
source "$(dirname "$0")/packages.sh"
install opentelemetry-sdk==1.45.2 opentelemetry-exporter-otlp-proto-http==1.45.2

"$python" - <<'PYTHON'
import logging
import socket
import threading
import time

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

logging.disable(logging.CRITICAL)


def collector(answer):
    """Listens and gives ``answer`` to each request; None: never any."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        kept = []
        while True:
            connection, _ = listener.accept()
            kept.append(connection)
            if answer:
                connection.recv(1 << 16)
                connection.sendall(f"HTTP/1.1 {answer}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
                connection.close()

    threading.Thread(target=serve, daemon=True).start()
    return listener.getsockname()[1]


def unused_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def flush(port):
    exporter = OTLPMetricExporter(endpoint=f"http://127.0.0.1:{port}/v1/metrics", timeout=2)
    reader = PeriodicExportingMetricReader(exporter, export_interval_millis=3_600_000, export_timeout_millis=500)
    provider = MeterProvider(metric_readers=[reader])
    provider.get_meter("finding").create_counter("bytes").add(1)
    began_s = time.monotonic()
    return provider.force_flush(timeout_millis=500), time.monotonic() - began_s


ports = {
    "silent": collector(None),
    "refused": unused_port(),
    "answers 503": collector("503 Service Unavailable"),
    "answers 400": collector("400 Bad Request"),
    "accepts": collector("200 OK"),
}
found = {name: flush(port) for name, port in ports.items()}
print("; ".join(f"{name}: {is_said} after {took_s:.1f} s" for name, (is_said, took_s) in found.items()))
assert all(is_said is True for is_said, _ in found.values()), "false where nothing arrived"
assert found["silent"][1] > 1.5, "it returned within its time"
PYTHON
