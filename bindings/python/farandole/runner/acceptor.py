"""The launcher's port for supervisors: strangers reach it, too, so both ends of a connection prove the job's token.

``supervisor.py`` has the bytes of the proof, and its other end.
"""

from __future__ import annotations

import collections
import contextlib
import os
import selectors
import socket
import time
from collections.abc import Callable

from farandole.runner import supervisor

MAX_PENDING = 64  # connections that have not proven the token
PROOF_S = 2.0  # for the whole proof
_SLOW_S = 0.1  # after which a connection may have to make way
_PAUSE_S = 0.01
_MOST_REFUSED = 4


class _Pending:
    """A connection that has not proven the token; at most 64 bytes are read from it."""

    def __init__(self, connection: socket.socket, where: str) -> None:
        self.connection, self.where = connection, where
        self.since_s = time.monotonic()
        self._hello, self._received = b"", b""
        self._nonce = os.urandom(supervisor.PROOF_BYTES)

    @property
    def is_silent(self) -> bool:
        return not self._hello and not self._received

    def advance(self, token: str) -> bool:
        """Takes what has come. Returns whether the token is proven now; OSError: it will not be."""
        more = self.connection.recv(supervisor.PROOF_BYTES - len(self._received))
        if not more:
            raise ConnectionError("closed the connection before it had proven the job's token")
        self._received += more
        magic = supervisor.MAGIC
        if not self._hello and self._received[: len(magic)] != magic[: len(self._received)]:
            raise ConnectionError("does not speak as a supervisor of this version of Farandole does")
        if len(self._received) < supervisor.PROOF_BYTES:
            return False
        said, self._received = self._received, b""
        if not self._hello:
            self._hello = said
            self.connection.sendall(self._nonce + supervisor.proof(token, "challenge", said, self._nonce))
            return False
        if not supervisor.is_proof(said, token, "proof", self._hello, self._nonce):
            raise ConnectionError("does not know the token of this job")
        self.connection.sendall(supervisor.proof(token, "welcome", self._hello, self._nonce))
        return True


class Acceptor:
    """Accepts supervisors on a thread of its own until it is closed.

    At most MAX_PENDING connections have not proven the token, each for PROOF_S. A further one takes the place of one
    that has been there for _SLOW_S, of the oldest silent one first; the others wait in the kernel meanwhile. So
    strangers cost no threads and keep no supervisor out: one that was dropped tries again. Thread safety: any thread.

    Args:
        listener: Is taken over.
        take: Is called on the thread for each connection that has proven the token; must not block.
    """

    def __init__(self, listener: socket.socket, token: str, take: Callable[[socket.socket], None]) -> None:
        listener.setblocking(False)
        self._listener, self._token, self._take = listener, token, take
        self._selector = selectors.DefaultSelector()
        self._pending: list[_Pending] = []  # the oldest first
        self._refused: collections.deque[str] = collections.deque(maxlen=_MOST_REFUSED)
        self._is_paused = self._is_closed = False
        self._thread = supervisor.start_thread(self._run)

    @property
    def refused(self) -> str:
        """The last connections that were dropped, and why; empty if there was none."""
        return "; ".join(self._refused)

    def close(self) -> None:
        """Ends the listener and the connections that have not proven the token."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()

    def _run(self) -> None:
        with self._listener, self._selector:
            self._selector.register(self._listener, selectors.EVENT_READ)
            while not self._is_closed:
                is_idle = not self._pending and not self._is_paused
                ready = self._selector.select(None if is_idle else _PAUSE_S)
                if self._is_paused:
                    self._selector.register(self._listener, selectors.EVENT_READ)
                    self._is_paused = False
                for key, _ in ready:
                    if key.data is None:
                        self._accept()
                    else:
                        self._advance(key.data)
                for late in [one for one in self._pending if time.monotonic() > one.since_s + PROOF_S]:
                    self._refuse(late, "has not proven the job's token in time")
            for one in self._pending:
                one.connection.close()

    def _accept(self) -> None:
        """Accepts what waits, as far as there is room."""
        for _ in range(MAX_PENDING):
            if not self._has_room():
                return self._pause()
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                return  # there is none, or it has gone again
            except OSError:
                return self._pause()  # too few descriptors, or the end
            connection.setblocking(False)
            where = supervisor.join_address(supervisor.plain_host(address[0]), address[1])
            one = _Pending(connection, where)
            self._pending.append(one)
            self._selector.register(connection, selectors.EVENT_READ, one)

    def _has_room(self) -> bool:
        if len(self._pending) < MAX_PENDING:
            return True
        slow = [one for one in self._pending if time.monotonic() > one.since_s + _SLOW_S]
        if not slow:
            return False
        oldest = next((one for one in slow if one.is_silent), slow[0])
        self._refuse(oldest, "made way for a further connection before it had proven the job's token")
        return True

    def _pause(self) -> None:
        """Else a connection that cannot be accepted would wake the thread again and again."""
        self._selector.unregister(self._listener)
        self._is_paused = True

    def _advance(self, one: _Pending) -> None:
        if one not in self._pending:
            return  # it has made way since it was ready
        try:
            if one.advance(self._token):
                self._forget(one)
                self._take(one.connection)
        except BlockingIOError:
            return
        except (OSError, RuntimeError) as error:  # the latter: no more threads can be started
            self._refuse(one, str(error))

    def _refuse(self, one: _Pending, why: str) -> None:
        self._refused.append(f"{one.where} {why}")
        self._forget(one)
        one.connection.close()

    def _forget(self, one: _Pending) -> None:
        if one in self._pending:
            self._pending.remove(one)
            self._selector.unregister(one.connection)
