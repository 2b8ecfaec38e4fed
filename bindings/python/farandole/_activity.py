"""What the program of this process does, for reports about ranks that others wait for."""

from __future__ import annotations

import os
import sys
import threading
from types import CodeType, FrameType

_PACKAGE = os.path.dirname(__file__) + os.sep
_MOST_FRAMES = 3
_MOST_THREADS = 3


def libraries() -> tuple[str, ...]:
    """The folders of this package and, where it is loaded, of torch: what a program calls, and not its own."""
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    return (_PACKAGE,) if torch is None else (_PACKAGE, os.path.dirname(torch) + os.sep)


def place(code: CodeType, line: int) -> str:
    """Files as seen from the program's folder, others with their own folder only."""
    file = code.co_filename
    program = os.path.dirname(getattr(sys.modules.get("__main__"), "__file__", None) or "") + os.sep
    is_programs = file.startswith(program) and program != os.sep
    file = file[len(program) :] if is_programs else os.sep.join(file.split(os.sep)[-2:])
    return f"{file}:{line} in {code.co_name}"


def _places(top: FrameType) -> str:
    """The innermost frames of a thread that are neither of this package nor, but for the first one, of torch.

    If there are none: of all.
    """
    frames: list[FrameType] = []
    frame: FrameType | None = top
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    skipped = libraries()
    inside = (frame for frame in frames[1:] if not frame.f_code.co_filename.startswith(skipped))
    first = [] if top.f_code.co_filename.startswith(_PACKAGE) else [top]
    users = [*first, *inside] or frames
    return ", called at ".join(place(frame.f_code, frame.f_lineno) for frame in users[:_MOST_FRAMES])


def describe(callers: list[int]) -> str:
    """Where the threads are that have called Farandole, or the main thread.

    Args:
        callers: Their identifiers, as of ``threading.get_ident``.
    """
    tops = sys._current_frames()
    main = threading.main_thread().ident or 0
    idents = sorted({*callers} & tops.keys() or {main} & tops.keys(), key=lambda ident: (ident != main, ident))
    if len(idents) <= 1:
        return "".join(_places(tops[ident]) for ident in idents)
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    idents = [ident for ident in idents if not names.get(ident, "").startswith("farandole-")] or idents  # its own
    waits = [ident for ident in idents if not tops[ident].f_code.co_filename.startswith(_PACKAGE)]
    shown = (waits or idents)[:_MOST_THREADS]
    if len(shown) == 1:
        return _places(tops[shown[0]])
    return "; ".join(f"thread {names.get(ident, ident)}: {_places(tops[ident])}" for ident in shown)
