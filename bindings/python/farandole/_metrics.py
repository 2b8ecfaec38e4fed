"""``FARANDOLE_METRICS``: what a rank has counted, for Prometheus and OpenTelemetry.

``METRICS`` defines what is exported; docs/metrics.md says what to look for.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import resource
import socket
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from farandole import _core, _record
from farandole.exceptions import HorovodInternalError

if TYPE_CHECKING:
    from farandole.basics import Context, Topology

_VARIABLE = "FARANDOLE_METRICS"
_RECORD = "FARANDOLE_RECORD"
_EXPECTED = (
    "file:PATH.prom, port:NUMBER, port:ADDRESS:NUMBER, otlp and label:NAME=VALUE, separated by commas; "
    "a number is from 1 to 65535"
)
_FILE_PERIOD_S = 15
_ASK_S = 1  # for a request and its answer
_PAUSE_S = 0.1  # after an error
_END_S = 5
_LONGEST_REQUEST = 1 << 13
_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_PAGE = resource.getpagesize()
_KINDS = ("allreduce", "broadcast", "allgather", "reducescatter", "alltoall", "barrier")

#: Of each series of a metric, its own labels and the value.
Values = Sequence[tuple[Mapping[str, str], float]]


class Rank(NamedTuple):
    """What values are computed from."""

    counts: Mapping[str, int]  # the engine's counters, over all generations
    size: int
    local_rank: int
    generation: int
    in_flight: int
    fusion_threshold_bytes: int


class Metric(NamedTuple):
    """One that is exported."""

    name: str  # after "farandole_", and before "_total" of a counter
    type: str  # counter or gauge
    unit: str  # bytes, seconds, or none
    meaning: str
    values: Callable[[Rank], Values]
    labels: Sequence[str] = ()  # of the values

    @property
    def full_name(self) -> str:
        """Prometheus's."""
        return f"farandole_{self.name}" + ("_total" if self.type == "counter" else "")


def _counter(name: str, meaning: str, counter: str | Callable[[Mapping[str, int]], float], unit: str = "") -> Metric:
    """One of the engine's, or computed from them."""
    count = counter if callable(counter) else lambda counts: counts[counter]
    return Metric(name, "counter", unit, meaning, lambda rank: [({}, count(rank.counts))])


def _counters(name: str, meaning: str, label: str, counters: Mapping[str, str], unit: str = "", of: int = 1) -> Metric:
    """By value of the label."""

    def values(rank: Rank) -> Values:
        return [({label: value}, rank.counts[counter] / of) for value, counter in counters.items()]

    return Metric(name, "counter", unit, meaning, values, [label])


def _gauge(name: str, meaning: str, value: Callable[[Rank], float], unit: str = "") -> Metric:
    return Metric(name, "gauge", unit, meaning, lambda rank: [({}, value(rank))])


def _info(rank: Rank) -> Values:
    host, version = socket.gethostname(), _core.version
    return [({"size": f"{rank.size}", "local_rank": f"{rank.local_rank}", "host": host, "version": version}, 1)]


def _resident_bytes(_rank: Rank) -> float:
    with open("/proc/self/statm", "rb", 0) as file:
        return int(file.read().split()[1]) * _PAGE


METRICS: Sequence[Metric] = (
    Metric("info", "gauge", "", "Always 1; what the rank is stands in the labels.", _info,
           ["size", "local_rank", "host", "version"]),
    _counters("operations", "Operations of this rank that have ended.", "kind", {kind: f"{kind}s" for kind in _KINDS}),
    _counter("operation_errors", "Of these, ended by an error while the job went on.", "operation_errors"),
    _counters("operation_seconds", "Time of operations, added up though they overlap: in negotiation until all ranks "
              "have submitted them, then in execution until their results are ready.", "stage",
              {"negotiation": "negotiation_ns", "execution": "execution_ns"}, "seconds", 10**9),
    _counter("steps", "Steps of training that this rank has ended.", "steps"),
    _counter("step_seconds", "The time of these steps.", lambda counts: counts["step_ns"] / 1e9, "seconds"),
    _counters("step_parts_seconds", "Of this time, in which the training thread did not compute; parts may overlap.",
              "part", {"blocked": "blocked_ns", "input": "input_ns", "no_processor": "queued_ns",
                       "garbage_collection": "collecting_ns", "other_groups": "other_groups_ns"}, "seconds", 10**9),
    _counter("link_seconds", "The time in which the network carries what was sent to another host in steps, on the "
             "fastest connection.", lambda counts: counts["link_ns"] / 1e9, "seconds"),
    _counter("batches", "Batches of fused tensors that were started.", "batches"),
    _counter("tensors", "Tensors in these batches.", "tensors"),
    _counter("batch_bytes", "Data of these tensors.", "batch_bytes", "bytes"),
    _counter("wire_bytes", "The same as it travels: half of it where float32 travels as 16 bits.", "wire_bytes",
             "bytes"),
    _gauge("fusion_threshold_bytes", "The most that a batch in host memory holds.",
           lambda rank: rank.fusion_threshold_bytes, "bytes"),
    _counter("sent_bytes", "Data handed to the network or to another rank's memory, by this rank.", "bulk_bytes_sent",
             "bytes"),
    _counter("copied_bytes", "Data copied into and out of fusion buffers.", "bytes_copied", "bytes"),
    _counter("in_place_bytes", "Data reduced where it lies, without copies.", "in_place_bytes", "bytes"),
    _counter("cache_hits", "Operations announced by the number of a known tensor, or run without a vote.",
             lambda counts: counts["submissions"] - counts["votes_by_name"]),
    _counter("cache_misses", "Operations announced in full, by name, dtype and shape.", "votes_by_name"),
    _counter("agreements", "Of the hits, operations that ranks of a host ran without a vote.", "agreements"),
    _counter("control_messages", "Control messages sent by this rank.",
             lambda counts: counts["messages_up"] + counts["messages_down"]),
    _counter("control_bytes", "Bytes of these messages.", "control_bytes_sent", "bytes"),
    _counter("stalls", "Reports of tensors that have waited for a rank for longer than FARANDOLE_STALL_WARNING_S.",
             "stall_reports"),
    _counter("wake_ups", "Threads of the library that were woken.", "wake_ups"),
    _counter("kernel_launches", "Kernels of the library launched on a GPU, without NCCL's.", "device_launches"),
    _gauge("in_flight_operations", "Operations whose memory the library holds at present.",
           lambda rank: rank.in_flight),
    _gauge("resident_memory_bytes", "Physical memory of the rank's process.", _resident_bytes, "bytes"),
    _gauge("quarantined_bytes", "Buffers given up, as a library or a device may still write to them.",
           lambda rank: rank.counts["quarantined_bytes"], "bytes"),
    _gauge("size", "Ranks of the job.", lambda rank: rank.size),
    _gauge("generation", "Generation of an elastic job; else 1.", lambda rank: rank.generation),
)  # fmt: skip
_RESERVED = {"rank"}.union(*[metric.labels for metric in METRICS])


def values_by_name(rank: Rank) -> dict[str, float]:
    """What the records of a rank have: of several series of a metric with its label, "operations.barrier"."""
    series = ((metric, *one) for metric in METRICS if metric.name != "info" for one in metric.values(rank))
    return {".".join([metric.name, *labels.values()]): value for metric, labels, value in series}


class Targets(NamedTuple):
    """What FARANDOLE_METRICS asks for."""

    path: str = ""
    address: tuple[str, int] | None = None  # of the first rank of a host
    is_otlp: bool = False
    labels: Mapping[str, str] = {}


def read_targets() -> Targets:
    """From the environment.

    Raises:
        ValueError: The variable holds something else.
        ModuleNotFoundError: OpenTelemetry is asked for, and not installed.
    """
    text = os.environ.get(_VARIABLE, "")
    targets, labels = Targets(), {}
    for word in filter(None, text.split(",")):
        kind, _, rest = word.partition(":")
        host, _, port = rest.rpartition(":")
        label = re.fullmatch(r"(?!__)([a-zA-Z_]\w*)=([^\n\ud800-\udfff]*)", rest, re.ASCII)  # no bytes but UTF-8
        if kind == "file" and rest.endswith(".prom"):
            targets = targets._replace(path=rest)
        elif kind == "port" and port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16:
            targets = targets._replace(address=(host, int(port)))
        elif word == "otlp":
            targets = targets._replace(is_otlp=True)
        elif kind == "label" and label is not None and label[1] not in _RESERVED:
            labels[label[1]] = label[2]
        else:
            raise ValueError(f'{_VARIABLE}="{text}": "{word}" is not one of {_EXPECTED}')
    for module in ("opentelemetry.sdk.metrics", _otlp_module()) if targets.is_otlp else ():
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            why = f'{_VARIABLE}="{text}" needs {module}: pip install "farandole[otlp]"'
            raise ModuleNotFoundError(why, name=error.name) from None
    return targets._replace(labels=labels)


def _otlp_module() -> str:
    names = ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next(filter(None, map(os.environ.get, names)), "http/protobuf")
    return f"opentelemetry.exporter.otlp.proto.{'grpc' if protocol == 'grpc' else 'http'}.metric_exporter"


class _Source:
    """The values of this process's rank; counters go on over generations, and over a shutdown and a further init."""

    def __init__(self) -> None:
        self._found: Callable[[], Context | None] = lambda: None  # weakly: one that has ended can go
        self._is_open = False
        self._fusion_threshold_bytes = 0
        self._before: Counter[str] = Counter()  # the context
        self._latest: Mapping[str, int] = {}

    @property
    def context(self) -> Context | None:
        return self._found()

    def begin(self, context: Context) -> None:
        """Perhaps the one that has ended, where no other could follow it."""
        if context is not self.context:
            self._before.update(self._latest)
            self._latest = {}
        self._found, self._is_open = weakref.ref(context), True
        self._fusion_threshold_bytes = int(context.core.setting("FARANDOLE_FUSION_THRESHOLD"))

    def is_of(self, context: Context) -> bool:
        return self._is_open and context is self.context

    def end(self) -> None:
        """Before the context closes."""
        self.read()
        self._is_open = False

    def read(self) -> Rank | None:
        """None: there is no open context."""
        with contextlib.suppress(HorovodInternalError):  # it closes
            if self._is_open and (context := self.context) is not None:
                core, (_, size, local_rank, *_) = context.core, context.topology
                self._latest = core.counters()
                counts = {name: count + self._before[name] for name, count in self._latest.items()}
                threshold_bytes = self._fusion_threshold_bytes
                return Rank(counts, size, local_rank, core.generation(), core.in_flight, threshold_bytes)
        return None


def _text(rank: Rank | None, common: str) -> str:
    """Prometheus's text format, version 0.0.4. By hand: prometheus_client takes several times as long.

    Args:
        common: What :func:`_said` makes of the labels that all have.
    """
    if rank is None:
        return ""
    lines = []
    for metric in METRICS:
        name = metric.full_name
        lines += [f"# HELP {name} {metric.meaning}", f"# TYPE {name} {metric.type}"]
        for labels, value in metric.values(rank):
            lines.append(f"{name}{{{common}{_said(labels)}}} {value}")
    return "\n".join([*lines, ""])


def _said(labels: Mapping[str, str]) -> str:
    return "".join([f'{name}="{value.translate(_ESCAPED)}",' for name, value in labels.items()])


class _Warnings:
    """What of the metrics cannot be had; each once. It ends no job."""

    def __init__(self, context: Context, variable: str) -> None:
        rank, size, *_ = context.topology
        self._head = f"[farandole {rank}/{size}] warning: {variable}"
        self._is_on = context.core.setting("FARANDOLE_LOG_LEVEL") not in ("error", "off")
        self._said: set[str] = set()

    @contextlib.contextmanager
    def instead(self, what: str) -> Iterator[None]:
        """Of an exception."""
        try:
            yield
        except Exception as error:  # of the system, of OpenTelemetry, of the encoding of a name
            text = f"{self._head}: {what}: {error}"
            if self._is_on and text not in self._said:
                self._said.add(text)
                with contextlib.suppress(OSError, ValueError):  # stderr is closed
                    print(text, file=sys.stderr, flush=True)


class _Export:
    """The file and the port, on a thread of their own."""

    def __init__(
        self, targets: Targets, source: _Source, labels: Mapping[str, str], topology: Topology, warnings: _Warnings
    ) -> None:
        self._source, self._common, self._warnings = source, _said(labels), warnings
        self.path, self.file = _path_of(targets.path, topology.rank), 0
        host, first = targets.address or ("", 0)
        port = first + topology.local_rank
        self._no_page = f"no metrics by port {port}" + (f" of {host}" if host else "")
        self._server: socket.socket | None = None
        with warnings.instead(self._no_page):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._server = socket.create_server((host.strip("[]"), port), family=family) if first else None
        self._is_ended, self._is_left = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="farandole-metrics", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self.forget()
            raise

    def _run(self) -> None:
        self._write()
        due_s = time.monotonic() + _FILE_PERIOD_S
        while not self._is_ended.is_set():
            left_s = max(due_s - time.monotonic(), 0)
            if self._server is None:
                self._is_ended.wait(left_s)
            else:
                self._serve(self._server, left_s)
            if time.monotonic() >= due_s:
                due_s += _FILE_PERIOD_S
                self._write()
        self._write()

    def _text(self) -> bytes:
        """Nothing if it cannot be had."""
        with self._warnings.instead("no metrics"):
            return _text(self._source.read(), self._common).encode()
        return b""

    def _serve(self, server: socket.socket, limit_s: float) -> None:
        """Whoever comes within this time."""
        with self._warnings.instead(self._no_page):
            server.settimeout(limit_s)
            try:
                connection, _ = server.accept()
            except (TimeoutError, BlockingIOError):
                return
            except OSError:
                if self._is_ended.wait(_PAUSE_S):  # no descriptor is left: the next ends at once, too
                    return
                raise
            with connection, contextlib.suppress(OSError):  # of one who asks and goes
                self._answer(connection, time.monotonic() + _ASK_S)

    def _answer(self, connection: socket.socket, end_s: float) -> None:
        """Whatever is asked. By hand: http.server reads headers as those of a mail, which takes longest of all."""
        asked = b""
        while b"\n\n" not in asked.replace(b"\r", b""):
            connection.settimeout(max(end_s - time.monotonic(), 0))
            part = connection.recv(_LONGEST_REQUEST - len(asked))
            if not part:  # there are no more, or too many
                return
            asked += part
        body = self._text()
        status, kind = "200 OK" if body else "503 Service Unavailable", "text/plain; version=0.0.4"
        head = f"HTTP/1.0 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.settimeout(max(end_s - time.monotonic(), 0))
        connection.sendall(head.encode() + body)

    def _write(self) -> None:
        if self.path and not self._is_left and (text := self._text()):
            new = f"{self.path}.{os.getpid()}"
            with self._warnings.instead(f"no metrics in {self.path}"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(new)  # of a process that was killed, or a link that somebody laid
                with open(new, "xb", opener=_create) as file:
                    file.write(text)
                    number = os.fstat(file.fileno()).st_ino
                if not self._is_left:
                    os.replace(new, self.path)
                    self.file = number

    def end(self) -> None:
        """Writes the file once more, or leaves the thread, which then writes no more."""
        self._is_ended.set()
        if self._server is not None:
            with contextlib.suppress(OSError):
                self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(_END_S)
        self._is_left = True
        self.forget()

    def forget(self) -> None:
        """Leaves the port; alone in a forked child, where there is no thread."""
        if self._server is not None:
            self._server.close()


def _create(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o644)


class _OtlpExport:
    """By OpenTelemetry's SDK, which has a thread of its own and reads the OTEL_* variables."""

    def __init__(self, source: _Source, labels: Mapping[str, str]) -> None:
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

        exporter: Any = importlib.import_module(_otlp_module()).OTLPMetricExporter()
        self._provider = MeterProvider([PeriodicExportingMetricReader(exporter)], shutdown_on_exit=False)
        self._source, self._labels = source, labels
        meter = self._provider.get_meter("farandole", _core.version)
        for metric in METRICS:
            create = meter.create_observable_counter if metric.type == "counter" else meter.create_observable_gauge
            unit = {"bytes": "By", "seconds": "s"}.get(metric.unit, "1")
            create(f"farandole_{metric.name}", [functools.partial(self._observe, metric)], unit, metric.meaning)

    def _observe(self, metric: Metric, _options: object) -> Iterator[Any]:
        from opentelemetry.metrics import Observation

        if (rank := self._source.read()) is not None:
            for labels, value in metric.values(rank):
                yield Observation(value, {**self._labels, **labels})

    def end(self) -> None:
        """Sends the last values."""
        self._provider.shutdown(timeout_millis=_END_S * 1000)

    def forget(self) -> None:
        """It is not told."""


def _path_of(path: str, rank: int) -> str:
    """With the rank in it, as ranks of a host write a file each."""
    text = path if "{rank}" in path or not path else f"{path.removesuffix('.prom')}.rank{{rank}}.prom"
    return text.replace("{rank}", str(rank))


class _Process:
    lock = threading.RLock()  # of what follows
    source = _Source()
    exports: list[_Export | _OtlpExport | _record.Recording] = []
    warnings: _Warnings
    last: _Export | None = None  # with a file
    record: _record.File | None = None


def follow(context: Context | None) -> None:
    """Ends what is exported of the process's rank, and begins anew if there is a context.

    To be called before a context closes, too. What cannot be exported is a warning.
    """
    with _Process.lock:
        if context is not None and _Process.source.is_of(context):
            return
        while _Process.exports:
            export = _Process.exports.pop()
            with _Process.warnings.instead("the last metrics may be missing"):
                export.end()
        _Process.source.end()
        if context is not None:
            _begin(context)


def _begin(context: Context) -> None:
    warnings = _Process.warnings = _Warnings(context, _VARIABLE)
    targets, folder = Targets(), context.core.setting(_RECORD)
    with warnings.instead("no metrics"):
        targets = read_targets()
    if targets == Targets() and not folder:
        return
    source, topology = _Process.source, context.topology
    source.begin(context)
    if folder:
        _record_run(folder, context)
    with warnings.instead("no metrics"):
        labels = {"rank": str(topology.rank), **targets.labels}
        if targets.path or targets.address:
            with warnings.instead("no metrics by file and port"):
                export = _Export(targets, source, labels, topology, warnings)
                _Process.exports.append(export)
                _remove_file_of_former_rank(export)
        if targets.is_otlp:
            with warnings.instead("no metrics by otlp"):
                _Process.exports.append(_OtlpExport(source, labels))


def _record_run(folder: str, context: Context) -> None:
    def values() -> dict[str, float] | None:
        rank = _Process.source.read()
        return rank and values_by_name(rank)

    instead = functools.partial(_Warnings(context, _RECORD).instead, f"no more is recorded in {folder}")
    with instead():
        if _Process.record is None:
            _Process.record = _record.File(folder, _record.head(context, [*(values() or ())]))
        _Process.exports.append(_record.Recording(context, _Process.record, values, instead))


def follow_group(context: Context) -> None:
    """As :func:`follow`, of a group of all ranks of torch.distributed, unless there is a context already."""
    with _Process.lock:
        current = _Process.source.context
        if current is None or not current.core.is_open:
            follow(context)


def leave_group(context: Context) -> None:
    """Before the group's context closes."""
    with _Process.lock:
        if _Process.source.is_of(context):
            follow(None)


def _remove_file_of_former_rank(export: _Export) -> None:
    """Unless another process has written it meanwhile."""
    last, _Process.last = _Process.last, export
    with contextlib.suppress(OSError):
        if last is not None and last.path != export.path and os.stat(last.path).st_ino == last.file:
            os.unlink(last.path)


def _forget() -> None:
    for export in _Process.exports:
        export.forget()
    if _Process.record is not None:
        _Process.record.close()
    _Process.source, _Process.exports, _Process.last, _Process.record = _Source(), [], None, None
    _Process.lock = threading.RLock()


os.register_at_fork(after_in_child=_forget)
