"""Slurm on this machine, with nodes that are all this one; for tests. Needs root, slurmctld, slurmd and munged."""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import shutil
import socket
import subprocess
import time

_COMMANDS = ("unshare", "munged", "slurmctld", "slurmd", "salloc", "srun", "scontrol")
_PORTS = range(16000, 30000)  # none that the system gives away by itself
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPort={port}
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def _free_ports(count: int) -> int:
    """The first of so many in a row: another cluster may be there."""
    while True:
        first = random.choice(_PORTS)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


class Slurm:
    """A context: a cluster of ``nodes`` nodes n1, n2 ... with two CPUs each.

    Raises:
        RuntimeError: This machine does not allow it; says why.
    """

    def __init__(self, folder: pathlib.Path, nodes: int = 2) -> None:
        self._folder, self._nodes = folder, [f"n{number + 1}" for number in range(nodes)]
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        names = folder / "hosts"  # which the nodes' programs can look up
        names.write_text("".join(f"127.0.0.1 {name}\n" for name in ["localhost", *self._nodes]))
        script = 'mount --bind "$0" /etc/hosts && exec "$@"'
        self._with_names = ["unshare", "--mount", "sh", "-c", script, str(names)]

    def __enter__(self) -> Slurm:
        missing = [name for name in _COMMANDS if shutil.which(name) is None]
        if missing or os.geteuid() != 0:
            raise RuntimeError(f"Slurm cannot be started here: {missing or 'not root'}")
        try:
            self._start()
        except (OSError, subprocess.SubprocessError, RuntimeError) as error:
            self.__exit__()
            raise RuntimeError(f"Slurm cannot be started here: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        for file in sorted(self._folder.glob("*.pid"), reverse=True):
            if text := file.read_text().strip():
                subprocess.run(["kill", text], check=False, capture_output=True)

    def run(
        self, *command: str, nodes: int = 1, tasks: int = 2, timeout_s: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command in an allocation, as a batch script would; stdout holds stderr too."""
        return subprocess.run(
            [*self._with_names, "salloc", "--quiet", f"--nodes={nodes}", f"--ntasks={tasks}", *command],
            env=self.environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def _start(self) -> None:
        host, port = socket.gethostname(), _free_ports(1 + len(self._nodes))
        lines = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port + 1 + number} CPUs=2 State=UNKNOWN"
            for number, name in enumerate(self._nodes)
        ]
        text = _CONFIGURATION.format(host=host, folder=self._folder, port=port, nodes="\n".join(lines))
        (self._folder / "slurm.conf").write_text(text)
        (self._folder / "state").mkdir()
        key = self._folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        files = {"socket": "sock", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        munged = [f"--{flag}={self._folder}/munge.{ending}" for flag, ending in files.items()]
        self._run("munged", "--force", f"--key-file={key}", *munged)
        self._run("slurmctld")
        for name in self._nodes:
            self._run("slurmd", "-N", name)
        end_s = time.monotonic() + 30
        while self._run("sinfo", "--noheader", "--format=%T %D").split() != ["idle", str(len(self._nodes))]:
            if time.monotonic() > end_s:
                raise RuntimeError("its nodes do not come up")
            time.sleep(0.2)

    def _run(self, *command: str) -> str:
        done = subprocess.run(
            [*self._with_names, *command], env=self.environment, text=True, timeout=30, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if done.returncode != 0:
            raise RuntimeError(f"{command[0]}: {done.stdout.strip()}")
        return done.stdout
