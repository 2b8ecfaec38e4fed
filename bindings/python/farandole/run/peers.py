"""The launcher's end of the connections to the ranks' supervisors."""

from __future__ import annotations

import fcntl
import hmac
import json
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from farandole.run import supervise
from farandole.run.arguments import Options
from farandole.run.hosts import address_towards

_MAX_PAYLOAD_BYTES = 1 << 20
_SIOCGIFADDR = 0x8915


class Message(NamedTuple):
    """What a supervisor sent; see supervise.py."""

    kind: int
    time_s: float  # seconds since the epoch, by the launcher's clock
    payload: bytes


class Peer:
    """One connection. A stranger (wrong token) is never told apart from silence and is dropped.

    Attributes:
        rank: None until it has said hello.
        has_ended: Its program's end is known.
    """

    def __init__(self, connection: socket.socket, token: str) -> None:
        self._connection = connection
        self._token = token
        self._data = bytearray()
        self._clock_lead_s = 0.0  # of this machine's clock over the other's
        self.rank: int | None = None
        self.host = ""
        self.has_ended = False

    def fileno(self) -> int:
        """For selectors."""
        return self._connection.fileno()

    def read(self) -> list[Message] | None:
        """What has come; None when the connection is over."""
        try:
            data = self._connection.recv(1 << 18)
        except OSError:
            return None
        self._data += data
        try:
            messages = list(self._messages())
        except (ValueError, KeyError, TypeError):
            return None  # no supervisor of ours
        return messages if data else None

    def _messages(self) -> Iterator[Message]:
        size = supervise.HEADER.size
        while len(self._data) >= size:
            kind, time_s, length = supervise.HEADER.unpack_from(self._data)
            if length > _MAX_PAYLOAD_BYTES:
                raise ValueError("too long")
            if len(self._data) < size + length:
                return
            payload = bytes(self._data[size : size + length])
            del self._data[: size + length]
            if self.rank is None:
                self._greet(kind, time_s, payload)
            else:
                yield Message(kind, time_s + self._clock_lead_s, payload)

    def _greet(self, kind: int, time_s: float, payload: bytes) -> None:
        hello: dict[str, Any] = json.loads(payload)
        if kind != supervise.HELLO or not hmac.compare_digest(str(hello["token"]), self._token):
            raise ValueError("a stranger")
        self.rank, self.host = int(hello["rank"]), str(hello["host"])
        self._clock_lead_s = time.time() - time_s

    def signal(self, number: int) -> None:
        """Sends a signal to the program, or GO (0); nothing happens if the supervisor is gone."""
        try:
            self._connection.send(bytes([number]), socket.MSG_DONTWAIT)
        except OSError:
            pass  # its end is noticed by reading

    def close(self) -> None:
        """Closes the connection; a program that still runs is ended by its supervisor."""
        self._connection.close()


def interface_addresses() -> list[str]:
    """The IPv4 addresses of this machine's network interfaces, but the loopback's."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # it has none
            found.append(socket.inet_ntoa(answer[20:24]))
    return [address for address in found if not address.startswith("127.")]


def addresses_for(options: Options, port: int) -> list[str]:
    """Where the supervisors may find the launcher ("1.2.3.4:5678"), likeliest first."""
    if options.is_local:
        return [f"127.0.0.1:{port}"]
    # Where a name is known to ssh alone, one of the interfaces' addresses will do.
    towards = [address_towards(host.name) for host in options.hosts]
    found = [address for address in towards if address] + interface_addresses()
    return [
        f"{address}:{port}" for address in dict.fromkeys(found) if not address.startswith("127.")
    ]
