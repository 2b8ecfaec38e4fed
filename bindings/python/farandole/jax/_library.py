"""Loads the handlers that XLA calls, and tells them in which context programs run."""

from __future__ import annotations

import atexit
import ctypes
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from farandole import _activity, _core, basics, exceptions
from farandole.jax import _chain

_OLDEST = (0, 6)
_QUIET_LOOKS = 4
_LONGEST_QUIET_S = 5.0


def _load() -> ctypes.CDLL:
    if jax.__version_info__ < _OLDEST:
        raise ImportError(f"farandole.jax needs jax 0.6 or newer; this is {jax.__version__}")
    path = pathlib.Path(_core.__file__).with_name("libfarandole_xla.so")
    if not path.exists():
        raise ImportError(
            f"{path} does not exist: Farandole was built without a header of jaxlib's, which pip's isolated builds do "
            "not see. Install it again with CMAKE_ARGS=-DFARANDOLE_XLA_INCLUDE="
            f"{jax.ffi.include_dir()} pip install --force-reinstall --no-deps --no-cache-dir farandole"
        )
    library = ctypes.CDLL(str(path))
    library.farandole_xla_use_context.argtypes = [ctypes.c_void_p]
    library.farandole_xla_use_context.restype = None
    library.farandole_xla_leave_thread.restype = None
    library.farandole_xla_may_run.restype = ctypes.c_bool
    library.farandole_xla_is_in_flight.restype = ctypes.c_bool
    library.farandole_xla_has_pending.restype = ctypes.c_bool
    library.farandole_xla_has_run.restype = ctypes.c_bool
    library.farandole_xla_is_quiet.restype = ctypes.c_bool
    numbers = ctypes.POINTER(ctypes.c_int64)
    library.farandole_xla_set_threads.argtypes = [numbers, ctypes.c_int64, numbers, ctypes.c_int64, ctypes.c_bool]
    library.farandole_xla_set_threads.restype = None
    try:
        jax.ffi.register_ffi_target(_chain.TARGET, jax.ffi.pycapsule(library.farandole_xla_collective), platform="cpu")
    except Exception as error:
        raise ImportError(
            f"jaxlib {jax.lib.__version__} refuses the handlers of Farandole, which are written for version 0.1 of "
            f"XLA's FFI: {error}"
        ) from error
    return library


_library = _load()
#: After a collective that Python called: the thread is not one of those that must wait for a divergence, as it may
#: wait for a program next.
leave_thread = _library.farandole_xla_leave_thread


def run_eagerly(run: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What ``run`` gives, a collective outside of jit."""
    try:
        return run(*arguments, **options)
    finally:
        leave_thread()


def _tell_threads() -> None:
    """Which threads are Python's, each time that bindings/xla/watch.h looks."""
    while True:
        threads = [thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)]
        has_callback = not sys._current_exceptions().keys() <= {thread.ident for thread in threads}
        daemons = [thread.native_id for thread in threads if thread.daemon and thread.native_id]
        others = [thread.native_id for thread in threads if not thread.daemon and thread.native_id]
        told = [(ctypes.c_int64 * len(ids))(*ids) for ids in (daemons, others)]
        _library.farandole_xla_set_threads(told[0], len(daemons), told[1], len(others), has_callback)


class _Jax:
    #: At exit: asked for anything afterwards, it would begin anew.
    has_ended = False


def _wait_for_programs() -> None:
    """Until those that were called have ended, as other ranks may need their part of them. Threads that go on running
    may do something else."""
    process = os.getpid()
    if basics._Process.default is None or basics._Process.is_forked_child or not _has_programs():
        return
    quiet_looks, busy = 0, time.monotonic()
    while quiet_looks < _QUIET_LOOKS and time.monotonic() - busy < _LONGEST_QUIET_S and os.getpid() == process:
        try:
            basics._Process.default.core.raise_if_ended()
        except exceptions.HorovodInternalError:
            return
        may_run = _library.farandole_xla_may_run()  # so that this thread, which sleeps here, is no program's
        is_in_flight = _library.farandole_xla_is_in_flight()
        if is_in_flight and not may_run and not _library.farandole_xla_has_pending():
            return  # it waits for one of this process's own devices
        are_ready = all(map(_is_ready, jax.live_arrays()))
        if is_in_flight or not are_ready:
            busy = time.monotonic()
        quiet_looks = quiet_looks + 1 if are_ready and _library.farandole_xla_is_quiet() else 0
        time.sleep(0.005)


def _has_programs() -> bool:
    """Whether there may be some with collectives. Else JAX, which may not have begun, is left alone."""
    return not _Jax.has_ended and (_chain.has_programs() or _library.farandole_xla_has_run())


def _is_ready(array: jax.Array) -> bool:
    try:
        return array.is_deleted() or bool(array.is_ready())
    except RuntimeError:  # it was donated meanwhile
        return False


def _wait_at_exit() -> None:
    """JAX, too, ends at exit, and does so after this, which was registered later."""
    try:
        _wait_for_programs()
    finally:
        _Jax.has_ended = True


def _use(address: int) -> None:
    if not address:
        _wait_for_programs()
    _library.farandole_xla_use_context(address)
    leave_thread()


threading.Thread(target=_tell_threads, name="farandole-threads", daemon=True).start()
_activity.may_start.append(_library.farandole_xla_may_run)
basics._Process.listeners.append(_use)
basics._Process.announce(basics._Process.default)
atexit.register(_wait_at_exit)
