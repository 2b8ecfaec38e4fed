"""Draws the SVG files of README.md and of these documents: `python docs/drawings.py`. A test compares them.

The chart's figures are read from docs/performance.md: column Xeon, all of which was measured within seven minutes, and
the table beside the MPI libraries; those of scaling.svg from the table of docs/scaling.md. What trace.svg shows is
docs/trace.json, a part of what `farandole trace` wrote of four ranks on two hosts.
"""

import json
import math
import pathlib
import re
from html import escape

DOCS = pathlib.Path(__file__).resolve().parent
FONT = "Helvetica, Arial, 'DejaVu Sans', sans-serif"
INK, GREY, LINE = "#24292f", "#57606a", "#8c959f"
BLUE, ORANGE, GREEN, RED = "#1f77b4", "#ff7f0e", "#2ca02c", "#d62728"  # the order of farandole.bench's picture
PALE_BLUE, PALE_ORANGE, PALE_GREY = "#ddeaf6", "#ffeedd", "#f3f5f7"


class Drawing:
    """An SVG on white, so that it can be read on a dark page, too; units are pixels."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" font-family="{FONT}" font-size="14">',
            f"<title>{escape(title)}</title>",
            *[_arrow_head(name, colour) for name, colour in (("ink", INK), ("blue", BLUE), ("orange", ORANGE))],
            f'<rect width="{width}" height="{height}" rx="8" fill="white"/>',
        ]  # fmt: skip

    def text(self, x: float, y: float, words: str, anchor: str = "middle", colour: str = INK, bold: bool = False,
             size: int = 14) -> None:  # fmt: skip
        """Lines of text, 19 pixels apart; y is the base line of the first."""
        weight = ' font-weight="bold"' if bold else ""
        for number, line in enumerate(words.split("\n")):
            self._parts.append(f'<text x="{x}" y="{y + 19 * number}" text-anchor="{anchor}" fill="{colour}" '
                               f'font-size="{size}"{weight}>{escape(line)}</text>')  # fmt: skip

    def box(self, x: float, y: float, width: float, height: float, words: str = "", fill: str = "white",
            stroke: str = LINE, dashed: bool = False, title: str = "") -> None:  # fmt: skip
        """A box with lines in its middle, or with a title in bold at its top."""
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{fill}" '
                           f'stroke="{stroke}" stroke-width="1.5"{dashes}/>')  # fmt: skip
        if title:
            self.text(x + width / 2, y + 23, title, bold=True)
        if words:
            top = y + (30 if title else 0)
            middle = (top + y + height) / 2 - 19 * words.count("\n") / 2
            self.text(x + width / 2, middle + 5, words)

    def line(self, start: tuple[float, float], end: tuple[float, float], head: str = "ink", both: bool = False,
             dashed: bool = False) -> None:  # fmt: skip
        """A line with an arrow head at its end, or at both; head: its colour, or "" for a grey line without one."""
        colour = {"ink": INK, "blue": BLUE, "orange": ORANGE, "": LINE}[head]
        marks = f' marker-end="url(#{head})"' if head else ""
        marks += f' marker-start="url(#{head})"' if both else ""
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(f'<line x1="{start[0]}" y1="{start[1]}" x2="{end[0]}" y2="{end[1]}" stroke="{colour}" '
                           f'stroke-width="1.8"{dashes}{marks}/>')  # fmt: skip

    def curve(self, points: list[tuple[float, float]], colour: str) -> None:
        """A line through points, with a dot on each."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        for x, y in points:
            self.dot(x, y, colour)

    def bar(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        """A filled rectangle."""
        self._parts.append(f'<rect x="{x}" y="{y}" width="{width:.1f}" height="{height}" fill="{fill}"/>')

    def dot(self, x: float, y: float, fill: str) -> None:
        """A small disc."""
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{fill}"/>')

    def svg(self) -> str:
        """The file's text."""
        return "\n".join([*self._parts, "</svg>", ""])


def _arrow_head(name: str, colour: str) -> str:
    return (f'<marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="{colour}"/></marker>')  # fmt: skip


def _row(page: str, pattern: str) -> list[float]:
    found = re.search(pattern, page)
    assert found, pattern
    return [float(one) for one in found.groups()]


def chart() -> str:
    """ResNet-50's gradients in milliseconds, and smaller tensors beside MPI libraries; narrow, for telephones."""
    page = (DOCS / "performance.md").read_text()
    table = page.partition("All of run A on the Xeon")[2]
    farandole, mpi, gloo = _row(table, r"\| ResNet-50 \(run B\) \| ([\d.]+) ms \|.*?\| ([\d.]+) ms \|.*?\| (\d+) ms \|")
    horovod, _ = _row(page, r"ResNet-50's gradients by Horovod .*\(([\d.]+) and ([\d.]+) ms\) \| I, B")
    step_horovod, step = _row(page, r"`DistributedOptimizer` by Horovod's .*\((\d+) and (\d+) ms\)")
    step_ddp, _ = _row(page, r"gradients by DDP's .*\*\* \((\d+) and (\d+)\) \| B")
    groups = [
        ("ms added to a step by ResNet-50's gradients (97 MiB)",
         [("Farandole", step, BLUE), ("Horovod, MPI", step_horovod, RED), ("DDP, gloo", step_ddp, GREEN)]),
        ("ms for them as 161 allreduces, waited for together",
         [("Farandole", farandole, BLUE), ("Open MPI", mpi, ORANGE), ("Horovod, MPI", horovod, RED),
          ("gloo", gloo, GREEN)]),
    ]  # fmt: skip
    drawing = Drawing(480, 594, "Times of Farandole and other libraries between two ranks")
    drawing.text(16, 30, "Two ranks of one host; less time is better", "start", bold=True, size=15)
    y, scale = 58, 290 / max(value for _, bars in groups for _, value, _ in bars)
    for heading, bars in groups:
        drawing.text(16, y, heading, "start", GREY)
        for name, value, colour in bars:
            y += 26
            drawing.text(116, y, name, "end")
            drawing.bar(126, y - 14, value * scale, 18, colour)
            drawing.text(133 + value * scale, y, f"{value:g}", "start", bold=name == "Farandole")
        y += 36
    _sizes(drawing, page, y)
    return drawing.svg()


def _sizes(drawing: Drawing, page: str, y: float) -> None:
    """An allreduce of each size: the other libraries' time by Farandole's, on a logarithmic axis."""
    table = page.partition("## Beside the MPI libraries")[2].partition("| allgather |")[0].replace("*", "")
    libraries = [("Intel MPI", INK), ("MPICH", GREEN), ("Open MPI", ORANGE), ("DeepSpeed", RED)]

    def at(ratio: float) -> float:
        return 256 + 140 * math.log2(ratio)

    drawing.text(16, y, "an allreduce by others, in times of Farandole's", "start", GREY)
    for number, (name, colour) in enumerate(libraries):
        drawing.text(16 + 104 * number, y + 24, f"\u25cf {name}", "start", colour)
    rows = [
        (size, [float(cell.replace(",", "")) for cell in cells.split(" | ")])
        for size, cells in re.findall(r"^\| (?:allreduce)? \| ([\d KMi]+) \| (.*) \|$", table, re.M)
    ]
    bottom = y + 44 + 26 * len(rows)
    for ratio in (0.5, 1, 2):
        drawing.line((at(ratio), y + 38), (at(ratio), bottom), "")
        drawing.text(at(ratio), bottom + 18, {0.5: "0.5", 1: "1: as fast", 2: "2"}[ratio], colour=GREY)
    for number, (size, (own, *others, _)) in enumerate(rows):
        middle = y + 57 + 26 * number
        drawing.text(80, middle + 5, f"{size} B" if size.isdigit() else f"{size}B", "end")
        for (_, colour), other in zip(libraries, others, strict=True):
            drawing.dot(at(other / own), middle, colour)
    gloo = sorted(times[-1] / times[0] for _, times in rows)
    words = f"Left of 1 others are faster. gloo takes {gloo[0]:.0f} to {gloo[-1]:.0f} times as long."
    drawing.text(16, bottom + 40, words, "start", GREY)


def scaling() -> str:
    """Time of a round of the negotiation by ranks, a line for each number of tensors; both axes are logarithmic."""
    table = (DOCS / "scaling.md").read_text().partition("## Figures")[2].partition("![")[0]
    rows = re.findall(r"\| (\d+) \| (\d+) \| ([\d.]+) ", table)
    drawing = Drawing(860, 420, "Microseconds until all ranks know that all tensors are ready, by ranks")
    drawing.text(24, 32, "A round of the negotiation, simulated, in microseconds by ranks", "start", bold=True, size=15)

    def at(ranks: float, us: float) -> tuple[float, float]:
        return 70 + 130 * math.log10(ranks), 370 - 105 * math.log10(us)

    for us in (1, 10, 100, 1000):
        drawing.line(at(1, us), at(100_000, us), "")
        drawing.text(60, at(1, us)[1] + 5, f"{us:,}", "end", GREY)
    for ranks in (1, 10, 100, 1000, 10_000, 100_000):
        drawing.text(at(ranks, 1)[0], 395, f"{ranks:,}", colour=GREY)
    for tensors, colour in ((10_000, ORANGE), (200, BLUE), (19, GREEN)):
        points = [at(int(ranks), float(us)) for ranks, count, us in rows if int(count) == tensors]
        drawing.curve(points, colour)
        drawing.text(points[-1][0] + 12, points[-1][1] + 14, f"{tensors:,} tensors", "start", colour, bold=True)
    return drawing.svg()


def job() -> str:
    """The processes and threads of a job."""
    drawing = Drawing(860, 520, "The processes and threads of a job")
    drawing.box(180, 14, 500, 68, "starts the ranks, marks their output, names the first to fail", PALE_GREY,
                title="farandolerun: a process on each host")  # fmt: skip
    for rank, x in enumerate((30, 450)):
        drawing.line((x + 190, 82), (x + 190, 118))
        drawing.box(x, 120, 380, 278, fill="white", title=f"rank {rank}: a process")
        drawing.box(x + 20, 158, 340, 62, "threads of the program\nbackward(), step(), allreduce()", PALE_ORANGE,
                    ORANGE)  # fmt: skip
        drawing.line((x + 190, 220), (x + 190, 246), "orange", both=True)
        drawing.box(x + 20, 248, 340, 62, "engine thread\nagrees with the other ranks, adds up tensors", PALE_BLUE,
                    BLUE)  # fmt: skip
        drawing.box(x + 20, 322, 162, 62, "watchdog thread\ndead, stuck ranks", PALE_BLUE, BLUE)
        drawing.box(x + 198, 322, 162, 62, "socket thread\nother hosts", PALE_BLUE, BLUE, dashed=True)
        drawing.line((x + 190, 310), (x + 190, 428), "blue", both=True)
    drawing.box(30, 430, 800, 70, "slots for tensors, rings for messages, and the flags on which idle threads sleep",
                PALE_GREY, title="memory shared by the ranks of the host")  # fmt: skip
    return drawing.svg()


def gradient() -> str:
    """The path of a gradient, as a sequence of events between two ranks."""
    drawing = Drawing(860, 560, "The path of a gradient from backward() to step()")
    columns = [100, 320, 540, 760]
    names = ["rank 0: program", "rank 0: engine", "rank 1: engine", "rank 1: program"]
    for number, (x, name) in enumerate(zip(columns, names, strict=True)):
        program = number in (0, 3)
        drawing.line((x, 60), (x, 545), "")
        drawing.box(x - 80, 20, 160, 40, name, PALE_ORANGE if program else PALE_BLUE, ORANGE if program else BLUE)
    for x in (100, 760):
        drawing.box(x - 80, 76, 160, 62, "backward() adds\ngradients to .grad", PALE_ORANGE, ORANGE)
        drawing.box(x - 80, 212, 160, 62, "backward() goes on\nwith earlier layers", PALE_ORANGE, ORANGE)
        drawing.box(x - 80, 396, 160, 62, "backward() returns:\n.grad is the average", PALE_ORANGE, ORANGE)
        drawing.box(x - 80, 484, 160, 44, "step()", PALE_ORANGE, ORANGE)
    _message(drawing, (180, 168), (316, 168), "1. a group, 4 MiB", "orange")
    _message(drawing, (680, 168), (544, 168), "1. a group, 4 MiB", "orange")
    _message(drawing, (536, 216), (324, 216), "2. vote: ready here (an id, 4 bytes)", "blue")
    _message(drawing, (324, 264), (536, 264), "3. decision: ready on all ranks", "blue")
    drawing.box(240, 286, 380, 82, "each rank adds up its share of the groups, in the\norder of the ranks, "
                "and reads the others' shares", PALE_BLUE, BLUE,
                title="4. the batch is reduced in shared memory")  # fmt: skip
    _message(drawing, (316, 427), (184, 427), "5. complete", "blue")
    _message(drawing, (544, 427), (676, 427), "5. complete", "blue")
    return drawing.svg()


def _message(drawing: Drawing, start: tuple[float, float], end: tuple[float, float], words: str, head: str) -> None:
    drawing.line(start, end, head)
    drawing.text((start[0] + end[0]) / 2, start[1] - 8, words, size=12)


def hosts() -> str:
    """An allreduce of ranks on two hosts, and the tree of control messages."""
    drawing = Drawing(860, 440, "Two hosts of two ranks: an allreduce, and the tree of control messages")
    for host, x in zip("ab", (30, 550), strict=True):
        drawing.box(x, 20, 280, 330, fill=PALE_GREY, title=f"host {host}")
        first = 0 if host == "a" else 2
        drawing.box(x + 20, 60, 240, 62, f"rank {first}\nreduces shard 0 of the tensor", "white")
        drawing.box(x + 20, 154, 196, 84, "1. reduce-scatter\n\n3. allgather", PALE_BLUE, BLUE)
        drawing.text(x + 118, 201, "then 2., between hosts, then", colour=GREY, size=12)
        drawing.box(x + 20, 270, 240, 62, f"rank {first + 1}\nreduces shard 1 of the tensor", "white")
        drawing.line((x + 118, 122), (x + 118, 152), "blue", both=True)
        drawing.line((x + 118, 238), (x + 118, 268), "blue", both=True)
        drawing.line((x + 238, 268), (x + 238, 124), "orange", both=True, dashed=True)
    for y, shard in ((91, 0), (301, 1)):
        drawing.line((290, y), (570, y), "blue", both=True)
        drawing.text(430, y - 10, f"2. allreduce of shard {shard}")
    drawing.line((290, 110), (570, 110), "orange", both=True, dashed=True)
    drawing.text(430, 182, "Each host sends and\nreceives each byte once,\nhowever many ranks\nit has.", colour=GREY)
    drawing.line((40, 380), (100, 380), "blue", both=True)
    drawing.text(112, 385, "tensors: shared memory inside a host, TCP or MPI between hosts", "start")
    drawing.line((40, 412), (100, 412), "orange", both=True, dashed=True)
    drawing.text(112, 417, "control messages: a tree of the hosts' lowest ranks below rank 0", "start")
    return drawing.svg()


def trace() -> str:
    """A trace of four ranks: a row for each, an arrow from the rank that was last to each other one."""
    events = json.loads((DOCS / "trace.json").read_text())["traceEvents"]
    fills = {"waiting": PALE_ORANGE, "negotiation": GREEN, "reduction": BLUE}
    scale = 700 / max(event["ts"] + event["dur"] for event in events)
    drawing = Drawing(860, 268, "Three allreduces of four ranks on one clock: each time another rank is the last")
    drawing.text(24, 32, "farandole trace: three operations of four ranks on two hosts", "start", bold=True, size=15)

    def at(event: dict[str, int]) -> tuple[float, float]:
        return round(120 + event["ts"] * scale, 1), 64 + 44 * event["pid"]

    for rank in sorted({event["pid"] for event in events}):
        drawing.text(24, 79 + 44 * rank, f"rank {rank}", "start")
    for event in events:
        if phase := fills.get(event["name"]):
            drawing.bar(*at(event), event["dur"] * scale, 20, phase)
    operations = [event for event in events if event["cat"] == "farandole"]
    for event in operations:
        *before, _ = (one for one in operations if one["pid"] == event["pid"] and one["ts"] <= event["ts"])
        last = [one for one in operations if one["pid"] == event["args"]["last rank"]][len(before)]
        if last is not event:
            (x, y), below = at(last), event["pid"] > last["pid"]
            drawing.line((x, y + 20 if below else y), (x, at(event)[1] + (0 if below else 20)))
    for number, (phase, fill) in enumerate(fills.items()):
        drawing.bar(120 + 180 * number, 240, 20, 14, fill)
        drawing.text(148 + 180 * number, 252, {"waiting": "waits for the last"}.get(phase, phase), "start", GREY)
    return drawing.svg()


DRAWINGS = {
    "chart.svg": chart, "scaling.svg": scaling, "job.svg": job, "gradient.svg": gradient, "hosts.svg": hosts,
    "trace.svg": trace,
}  # fmt: skip

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (DOCS / name).write_text(draw())
