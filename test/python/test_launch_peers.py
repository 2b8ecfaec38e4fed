"""The launcher's end of a connection to a rank."""

import json
import socket
import time

import pytest

from farandole.run import arguments, peers, supervise


@pytest.fixture
def pair():
    """A peer and the socket its supervisor would hold."""
    mine, theirs = socket.socketpair()
    with mine, theirs:
        yield peers.Peer(mine, "secret"), theirs


def message(kind, payload, time_s=0.0):
    return supervise.HEADER.pack(kind, time_s, len(payload)) + payload


def hello(token="secret", time_s=0.0):
    payload = json.dumps({"token": token, "rank": 3, "host": "h"}).encode()
    return message(supervise.HELLO, payload, time_s)


def test_messages_come_out_whole_however_they_are_cut(pair):
    peer, theirs = pair
    data = hello() + message(supervise.OUT, b"abc") + message(supervise.EXIT, b"{}")
    found = []
    for byte in data:
        theirs.send(bytes([byte]))
        found += peer.read()
    assert (peer.rank, peer.host) == (3, "h")
    assert [(one.kind, one.payload) for one in found] == [
        (supervise.OUT, b"abc"), (supervise.EXIT, b"{}"),
    ]  # fmt: skip
    theirs.close()
    assert peer.read() is None


@pytest.mark.parametrize("said", [
    hello(token="guess"),
    message(supervise.OUT, b"x"),
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    message(supervise.HELLO, b"[]"),
])  # fmt: skip
def test_a_stranger_is_dropped_and_gets_no_rank(pair, said):
    peer, theirs = pair
    theirs.send(said)
    assert peer.read() is None
    assert peer.rank is None


def test_times_are_those_of_the_launchers_clock(pair):
    peer, theirs = pair
    theirs.send(hello(time_s=1000.0) + message(supervise.OUT, b"x", time_s=1002.5))
    before_s = time.time()
    (found,) = peer.read()
    assert before_s + 2.5 <= found.time_s <= time.time() + 2.5


def test_ranks_on_this_machine_connect_over_the_loopback_only():
    local = arguments.parse(["-np", "2", "-H", "localhost:2", "true"])
    assert peers.addresses_for(local, 5) == ["127.0.0.1:5"]
    far = arguments.parse(["-H", "no-such-host.invalid", "true"])
    assert not any(address.startswith("127.") for address in peers.addresses_for(far, 5))
