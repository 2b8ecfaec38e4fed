"""Connections of strangers to a port, for tests of what listens there: ``strangers.py 127.0.0.1:5000 4000 30``."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import threading
import time

from farandole.runner import supervisor

_AT_ONCE = 256  # connections, so that a process needs few descriptors
_STEP_S = 0.02
_DROP_AFTER_S = 60


def hello() -> bytes:
    """As a supervisor's begins, which needs to know nothing for it."""
    return supervisor.MAGIC + os.urandom(supervisor.PROOF_BYTES - len(supervisor.MAGIC))


def _kinds(number: int) -> tuple[bytes, int]:
    """What the stranger with a number says, and how many bytes at a time."""
    return [(b"", 0), (hello(), 1), (hello() + b"x" * 8192, 8192), (hello() + os.urandom(supervisor.PROOF_BYTES), 64)][
        number % 4
    ]


class Strangers:
    """A context: a thread that keeps connections open, silent or slow ones, and such that say too much or wrong things.

    A dropped one is followed by the next until ``count`` have been there.
    """

    def __init__(self, address: str, count: int) -> None:
        self._address, self._count = supervisor.split_address(address), count
        self._open: dict[socket.socket, tuple[bytes, int]] = {}
        self._selector = selectors.DefaultSelector()
        self.came = 0
        self._is_over = False
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Strangers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join()

    def wait_for(self, count: int) -> None:
        """Until so many have connected."""
        end_s = time.monotonic() + _DROP_AFTER_S
        while self.came < count:
            assert time.monotonic() < end_s, f"{self.came} of {count} strangers have come"
            time.sleep(_STEP_S)

    def wait_until_all_are_dropped(self) -> None:
        end_s = time.monotonic() + _DROP_AFTER_S
        while self._open:
            assert time.monotonic() < end_s, f"{len(self._open)} strangers are still there"
            time.sleep(_STEP_S)

    def _run(self) -> None:
        with self._selector:
            while not self._is_over:
                while self.came < self._count and len(self._open) < _AT_ONCE and self._come():
                    pass
                for key, _ in self._selector.select(_STEP_S):
                    self._hear(key.fileobj)
                for one in [*self._open]:
                    self._say(one)
            for one in [*self._open]:
                self._leave(one)

    def _come(self) -> bool:
        one = socket.socket()
        one.settimeout(1)
        try:
            one.connect(self._address)
        except OSError:  # nobody listens any more, or has no time
            one.close()
            return False
        one.setblocking(False)
        self._open[one] = _kinds(self.came)
        self._selector.register(one, selectors.EVENT_READ)
        self.came += 1
        return True

    def _hear(self, one: object) -> None:
        assert isinstance(one, socket.socket)
        try:
            is_over = not one.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            is_over = True
        if is_over:
            self._leave(one)

    def _say(self, one: socket.socket) -> None:
        text, step = self._open[one]
        with contextlib.suppress(OSError):
            if text:
                self._open[one] = text[one.send(text[:step]) :], step

    def _leave(self, one: socket.socket) -> None:
        del self._open[one]
        self._selector.unregister(one)
        one.close()


if __name__ == "__main__":
    with Strangers(sys.argv[1], int(sys.argv[2])) as strangers:
        time.sleep(float(sys.argv[3]))
    print(strangers.came, "strangers came")
