"""What the program of this process does, for reports about ranks that others wait for."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from farandole import _core

PACKAGE = os.path.dirname(__file__) + os.sep
_FRAMEWORKS = ("torch", "tensorflow", "keras", "jax")
_MOST_FRAMES = 3
_MOST_THREADS = 3

#: How many threads besides the program's own may yet start an operation: asked by a thread that waits for one.
may_start: list[Callable[[], int]] = []
_MANY = 1 << 20


def count_only_waiting() -> None:
    """For a library whose threads call Farandole in place of the program's, which wait for them: from here on only
    threads that wait count among those of which all must wait for a divergence."""
    if _count_apart not in may_start:
        may_start.append(_count_apart)
        _core.count_waiting_threads()


def _count_apart() -> int:
    """Daemons, if the calling thread is one, as it waits in place of no other. A thread of a library waits in place of
    the main one, if that is in a library; else it may start anything."""
    caller, main = threading.get_ident(), threading.main_thread().ident or 0
    threads = [thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)]
    for own in threads:
        if own.ident == caller:
            daemons = [thread for thread in threads if thread.daemon and not thread.name.startswith("farandole-")]
            return len(daemons) if own.daemon else 0
    code = getattr(sys._current_frames().get(main), "f_code", None)
    return 0 if code is not None and code.co_filename.startswith(libraries()) else _MANY


def count_threads() -> tuple[int, int]:
    """The threads of the program, and its helpers: daemons and workers of a ThreadPoolExecutor that have nothing to do,
    as Keras leaves them. Those of ``may_start`` count among the former.

    Looks at no frames: one that is held keeps what it refers to, when another thread leaves it."""
    threads = threading.enumerate()
    own = [each.name == "farandole-futures" or not each.daemon for each in threads]
    helpers = [not is_own and not each.name.startswith("farandole-") for is_own, each in zip(own, threads, strict=True)]
    idle = _count_idle_workers(threads)
    return max(sum(own) - idle + sum(count() for count in may_start), 1), sum(helpers) + idle


def _count_idle_workers(threads: list[threading.Thread]) -> int:
    """Of executors, which count them to know when they need another one."""
    kind: Any = getattr(sys.modules.get("concurrent.futures.thread"), "ThreadPoolExecutor", ())
    executors = {}
    for each in threads if kind else ():
        reference = (getattr(each, "_args", None) or [None])[0]
        executor = reference() if isinstance(reference, weakref.ref) else None
        if isinstance(executor, kind):
            executors[id(executor)] = executor
    return sum(executor._idle_semaphore._value for executor in executors.values())


def libraries() -> tuple[str, ...]:
    """The folders of this package and, where they are loaded, of frameworks: what a program calls, and not its own."""
    files = [getattr(sys.modules.get(name), "__file__", None) for name in _FRAMEWORKS]
    return (PACKAGE, *(os.path.dirname(file) + os.sep for file in files if file is not None))


def place(code: CodeType, line: int) -> str:
    """Files as seen from the program's folder, others with their own folder only."""
    file = code.co_filename
    program = os.path.dirname(getattr(sys.modules.get("__main__"), "__file__", None) or "") + os.sep
    is_programs = file.startswith(program) and program != os.sep
    file = file[len(program) :] if is_programs else os.sep.join(file.split(os.sep)[-2:])
    return f"{file}:{line} in {code.co_name}"


def _frames(top: FrameType) -> list[FrameType]:
    """Of a thread, the innermost first."""
    frames: list[FrameType] = []
    frame: FrameType | None = top
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _users(top: FrameType) -> list[FrameType]:
    """Those that are neither of this package nor, but for the first one, of a framework."""
    skipped = libraries()
    inside = [frame for frame in _frames(top)[1:] if not frame.f_code.co_filename.startswith(skipped)]
    return inside if top.f_code.co_filename.startswith(PACKAGE) else [top, *inside]


def _places(top: FrameType) -> str:
    """The innermost frames of a thread that are the user's; if there are none: of all."""
    users = _users(top) or _frames(top)
    return ", called at ".join(place(frame.f_code, frame.f_lineno) for frame in users[:_MOST_FRAMES])


def describe(callers: list[int]) -> str:
    """Where the threads are that have called Farandole, or the main thread.

    Args:
        callers: Their identifiers, as of ``threading.get_ident``.
    """
    tops = sys._current_frames()
    main = threading.main_thread().ident or 0
    idents = sorted({*callers} & tops.keys() or {main} & tops.keys(), key=lambda ident: (ident != main, ident))
    if main in tops and not any(_users(tops[ident]) for ident in idents):
        idents = [main]  # which waits for a thread of a framework's
    if len(idents) <= 1:
        return "".join(_places(tops[ident]) for ident in idents)
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    idents = [ident for ident in idents if not names.get(ident, "").startswith("farandole-")] or idents  # its own
    waits = [ident for ident in idents if not tops[ident].f_code.co_filename.startswith(PACKAGE)]
    shown = (waits or idents)[:_MOST_THREADS]
    if len(shown) == 1:
        return _places(tops[shown[0]])
    return "; ".join(f"thread {names.get(ident, ident)}: {_places(tops[ident])}" for ident in shown)
