"""Ranks that a process forks which has imported torch and its compiler: seconds of a processor less for each.

Its own programs, its output, exit code and variables are as those of a new interpreter; farandole is imported anew.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Mapping, Sequence


class WarmRank:
    """A program that `start` has started, as a subprocess.Popen whose output is text and holds stderr, too."""

    def __init__(self, server: _Server, pid: int, output: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server
        self._text = ""
        self._reader = threading.Thread(target=self._read, args=[output], daemon=True)
        self._reader.start()

    def _read(self, output: int) -> None:
        with open(output, encoding="utf-8") as file:
            self._text = file.read()

    def communicate(self, timeout: float) -> tuple[str, None]:
        """All it has written, once it has ended."""
        self._reader.join(timeout)
        if self._reader.is_alive():
            raise subprocess.TimeoutExpired(f"rank with pid {self.pid}", timeout)
        self.wait()
        return self._text, None

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        if self.returncode is None:
            self.returncode = self._server.ask({"wait": self.pid})
        return self.returncode

    def kill(self) -> None:
        """Ends it, if it has not ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait()


class _Server:
    def __init__(self, environment: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:  # it ends with this process, which closes the socket
            command = [sys.executable, __file__, str(theirs.fileno())]
            process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        atexit.register(process.wait, 60)
        atexit.register(self._socket.close)

    def ask(self, request: Mapping[str, object], *files: int) -> int:
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode()], files)
            answer = self._socket.recv(100)
            return int(answer)
        except BaseException:  # a test's time-out, too: the next test has another server
            _server.cache_clear()
            raise


@functools.cache
def _server(path: str) -> _Server:
    return _Server(os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"})


def start(arguments: Sequence[object], environment: Mapping[str, str]) -> WarmRank:
    """Starts ``python *arguments``: "-c" and a program, or the path of one and its own arguments."""
    server = _server(environment["PYTHONPATH"])
    ours, theirs = os.pipe()
    request = {"arguments": [str(argument) for argument in arguments], "environment": dict(environment)}
    pid = server.ask(request, theirs)
    os.close(theirs)
    return WarmRank(server, pid, ours)


def _fork_as_told(requests: socket.socket) -> list[str]:
    """In the process that forks, returns never; in a child, its program and arguments."""
    while True:
        message, files, _, _ = socket.recv_fds(requests, 1 << 20, 1)
        if not message:
            os._exit(0)
        request = json.loads(message)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            requests.send(str(os.waitstatus_to_exitcode(status)).encode())
        elif (pid := os.fork()) > 0:
            os.close(files[0])
            requests.send(str(pid).encode())
        else:
            requests.close()
            os.dup2(files[0], 1)
            os.dup2(files[0], 2)
            os.close(files[0])
            os.environ.clear()
            os.environ.update(request["environment"])
            return request["arguments"]


def _main() -> None:
    import torch._dynamo
    import torch.distributed  # noqa: F401  (torch._dynamo brings it, today)

    gc.collect()
    gc.freeze()  # or a collection in a rank writes to, and so copies, the memory of all that was imported
    atexit.register(gc.unfreeze)  # or triton 3.9 prints, at a rank's end, what is still there
    arguments = _fork_as_told(socket.socket(fileno=int(sys.argv[1])))
    sys.argv = arguments
    if arguments[0] == "-c":
        sys.argv, program = ["-c", *arguments[2:]], compile(arguments[1], "<string>", "exec")
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(program, module.__dict__)
    else:
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    _main()
