"""A job whose ranks come and go: what ends is started again, hosts are added and dropped, the launcher may die.

The first start is that of ``hosts.py``. Once a rank has told where it listens for members, the job has begun: from then
on a rank that ends is a loss, and one that is started is a newcomer, which asks the living members. Ranks themselves
agree on who goes on; nothing here decides that.

Who lives: a rank that a supervisor of ours reports, until that says how it ended. Another one (an earlier launcher has
started it, or its supervisor is lost) as long as its note in the job's folder is locked; or if there is no note, as on
another host, as long as the port where it listens for members accepts connections.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import queue
import secrets
import signal
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from farandole.runner import supervisor
from farandole.runner.hosts import HERE, HostsJob, Placed, make_command, slots_by_name
from farandole.runner.job import Malformed, Peer
from farandole.runner.job_folder import JobFolder, Probe, is_address, probe
from farandole.runner.options import Host, Options, UsageError
from farandole.runner.output import FirstFailure, Writer, exit_code, list_ranks, signal_name
from farandole.runner.supervisor import Channel, start_thread

HALTED = 75  # the exit code of a rank that must not go on, as it reaches too few others
LEAVE_S = 30.0  # from the notice that a rank is to leave to SIGKILL: it finishes its step
FAULT_S = 0.5  # from the end of a rank by its own error until it is started again: all may end by it
LAST_S = 1.0  # that newcomers get after the last end with exit code 0, to say that they have joined
CALM_S = 60.0  # who has lived so long waits the least again
POLL_S = 1.0  # of the discovery script, and of the ports of ranks that no supervisor of ours reports
_MISSES = 2  # attempts in a row without an answer, until a rank is given up
# Exit codes that are not the program's own fault: those of a killed one, and of one that has left after a notice.
_FROM_OUTSIDE = (128 + signal.SIGKILL, 128 + signal.SIGTERM, HALTED)


@dataclasses.dataclass
class Backoff:
    """Waits that double, from the least to the most."""

    least_s: float
    most_s: float
    _next_s: float = 0.0

    def wait_s(self, lived_s: float) -> float:
        """How long to wait after a life of that length."""
        now_s = self.least_s if lived_s >= CALM_S else max(self._next_s, self.least_s)
        self._next_s = min(2 * now_s, self.most_s)
        return now_s


@dataclasses.dataclass(eq=False)
class _Host:
    """A host that was named, and its supervisor.

    Attributes:
        slots: 0: nothing is started there any more.
        number: Of its supervisor; None: it has none.
        is_up: Whether that can start ranks.
        is_dismissed: Whether it was told that it may end.
        is_going: Whether the host has given notice. It comes back once it was not listed meanwhile.
    """

    name: str
    slots: int
    backoff: Backoff
    number: int | None = None
    is_up: bool = False
    is_dismissed: bool = False
    is_going: bool = False
    start_at_s: float = 0.0
    started_s: float = 0.0


@dataclasses.dataclass(eq=False)
class _Place:
    """Where a rank runs, or is to be started again.

    Attributes:
        number: By which its output and messages about it name it, whatever its rank in the job has become.
        address: Where the rank listens for members; empty until it says so.
        is_running: Whether a rank is here, as far as is known.
        is_owned: Whether a supervisor of ours reports of it.
        is_adopted: Whether an earlier launcher has started it.
        kill_at_s: When a rank that was told to leave is killed.
        error: The last line of the error that ends the rank; ``is_consequence``: whether it is of another's failure.
        has_fault: Whether the last rank here ended by an error of its own.
        is_refused: Whether the last rank here ended by an error that means that it does not fit to the others.
        misses: Attempts in a row in which its port did not answer.
    """

    number: int
    host: str
    backoff: Backoff
    start_at_s: float = math.inf
    started_s: float = 0.0
    address: str = ""
    is_running: bool = False
    is_owned: bool = True
    is_adopted: bool = False
    is_leaving: bool = False
    kill_at_s: float = math.inf
    error: str = ""
    is_consequence: bool = False
    has_fault: bool = False
    is_refused: bool = False
    misses: int = 0


class _End(NamedTuple):
    """How a rank ended: in words, the exit code as a shell has it, and whether the reason is outside of the program."""

    who: str
    how: str
    code: int
    is_from_outside: bool
    is_fault: bool  # an error of its own

    @property
    def text(self) -> str:
        return f"{self.who} {self.how}"


class ElasticJob(HostsJob):
    """Runs an elastic job. Its states: hosts are gathered, the first ranks start, it has begun, it is done.

    Args:
        discover: Runs the discovery script once: returns the hosts, or raises UsageError; None: the hosts are those of
            the options.
    """

    kill_after_s = LEAVE_S

    def __init__(
        self, options: Options, writer: Writer, environment: dict[str, str], discover: Callable[[], list[Host]] | None
    ) -> None:  # fmt: skip
        super().__init__(options, writer, [], environment)
        self._discover = discover
        self._folder_of_job = JobFolder(options.job) if options.job else None
        self._hosts_by_name: dict[str, _Host] = {}
        self._places: dict[int, _Place] = {}
        self._numbers = 0  # of supervisors so far
        self._discovered: queue.SimpleQueue[list[Host] | str] = queue.SimpleQueue()
        self._probed: queue.SimpleQueue[tuple[_Place, Probe]] = queue.SimpleQueue()
        self._is_probing = False
        self._backoff = self._make_backoff()  # of the whole job
        self._resets = 0
        self._few_since_s = time.monotonic()
        self._last_code = 1  # of the last loss
        self._lost: list[tuple[_Place, _End]] = []  # of which is still to be said what follows,
        self._lost_by_s = math.inf  # by then
        self._late_code = 0  # of a rank that ended badly after others had ended well
        self._is_first = True
        self._is_gathering = True
        self._started_s = time.monotonic()
        self._rank_0: int | None = None  # the host of rank 0, until it has said where that listens
        self._has_begun = False
        self._anew_at_s: float | None = None  # when all ranks are started anew
        self._is_done = False  # training is over: nothing is started any more
        self._done_s = 0.0  # when a rank last ended with exit code 0
        self._is_concluded = False
        self._script_error = ""
        self._has_halted = False  # a rank, and none was let in since
        self._astray: dict[int, tuple[str, str]] = {}  # host and address of ranks given up out of reach, by number
        self._awaits_astray = False

    @property
    def is_waiting(self) -> bool:
        return not self._is_concluded and not self.is_stopping

    def _make_backoff(self) -> Backoff:
        return Backoff(*self.options.cooldown_s)

    def run(self) -> None:
        super().run()
        going_on = [one.number for one in self._places.values() if one.is_running and not one.is_owned]
        if going_on:
            self.writer.say(f"ranks {list_ranks(going_on)} go on, as an earlier farandolerun has started them")
            self.writer.flush()
        elif self._folder_of_job is not None:
            self._folder_of_job.clear()

    # The start

    def start(self, stack: contextlib.ExitStack) -> None:
        super().start(stack)
        self._set_hosts(slots_by_name(self.options.hosts))
        if self._folder_of_job is not None:
            self._find_members(self._folder_of_job)
        if self._discover is not None:
            start_thread(self._poll_script, self._discover)

    def _find_members(self, folder: JobFolder) -> None:
        """Finds the ranks of this job that an earlier launcher has started, and that live."""
        key, members = folder.read()
        probed = probe(folder, {number: address for number, (address, _) in members.items()})
        found = [number for number in members if probed[number].lives]
        if not found:
            folder.clear()
            return self._save()
        self.key, self._has_begun, self._is_gathering, self._is_first = key, True, False, False
        for number in found:
            self._places[number] = _Place(
                number, members[number][1], self._make_backoff(), started_s=self._started_s,
                address=probed[number].address, is_running=True, is_owned=False, is_adopted=True,
            )  # fmt: skip
        self._save()
        self.writer.say(
            f"ranks {list_ranks(sorted(found))} of this job live, started by an earlier farandolerun: "
            "their output is not shown"
        )

    def _save(self) -> None:
        """Keeps what a later launcher needs."""
        members = {one.number: (one.address, one.host) for one in self._places.values() if one.is_running}
        if self._folder_of_job is not None:
            try:
                self._folder_of_job.write(self.key, members)
            except OSError as error:
                self.writer.say(f'--job "{self.options.job}" cannot be written: {error.strerror}')
                self._folder_of_job = None

    # Hosts

    def _poll_script(self, discover: Callable[[], list[Host]]) -> None:
        while self.is_waiting:
            time.sleep(POLL_S)
            try:
                self._discovered.put(discover())
            except UsageError as error:
                self._discovered.put(str(error))

    def _take_discovered(self) -> None:
        """Takes what the script has said since; while it fails the last list counts."""
        while not self._discovered.empty():
            found = self._discovered.get()
            if not isinstance(found, str):
                self._set_hosts(slots_by_name(found))
            elif found != self._script_error:
                self.writer.say(f"{found}; the hosts stay as they were")
            self._script_error = found if isinstance(found, str) else ""

    def _set_hosts(self, slots: Mapping[str, int]) -> None:
        """Adds hosts that are listed now, and has ranks leave those that are not, or have fewer slots."""
        for name, count in slots.items():
            if name not in self._hosts_by_name:
                self._hosts_by_name[name] = _Host(name, count, self._make_backoff())
            elif not self._hosts_by_name[name].is_going:
                self._hosts_by_name[name].slots = count
        for host in [*self._hosts_by_name.values()]:
            if host.name not in slots:
                host.slots, host.is_going = 0, False
            places = sorted(self._places_on(host), key=lambda place: not place.address)  # newcomers have no state yet
            now = f"has {host.slots} slot{'s' * (host.slots > 1)} now" if host.slots else "is not listed any more"
            self._leave(places[host.slots :], f"{host.name} {now}")
            if not host.slots and not host.is_going and host.number is None and not places:
                del self._hosts_by_name[host.name]

    def _places_on(self, host: _Host) -> list[_Place]:
        return [place for _, place in sorted(self._places.items()) if place.host == host.name]

    def _leave(self, places: Collection[_Place], why: str, are_told: bool = False) -> None:
        """Has ranks leave with notice, unless they have it, and forgets places without one."""
        for place in places:
            if not place.is_running:
                del self._places[place.number]
        leaving = [place for place in places if place.is_running and place.is_owned and not place.is_leaving]
        for place in leaving:
            place.is_leaving, place.kill_at_s = True, time.monotonic() + LEAVE_S
            if not are_told:
                self._signal(place, signal.SIGTERM)
        if leaving:
            self.writer.say(f"{why}; told to leave: {list_ranks([place.number for place in leaving])}")

    def _signal(self, place: _Place, number: int) -> None:
        if place.is_owned and place.is_running:
            self.peers[place.number].channel.send(supervisor.SIGNAL, bytes([number]), place.number)

    def host_leaves(self, channel: Channel) -> None:
        host = self._host_of(self.number_of(channel))
        if host is not None and not self.is_stopping:
            host.slots, host.is_going = 0, True
            self._leave(self._places_on(host), f"{host.name} gives notice", are_told=True)

    def _host_of(self, number: int) -> _Host | None:
        return next((host for host in self._hosts_by_name.values() if host.number == number), None)

    def _start_supervisors(self, now_s: float) -> None:
        for host in self._hosts_by_name.values():
            if host.number is None and host.slots and now_s >= host.start_at_s:
                try:
                    is_here = host.name == HERE
                    command = make_command(host.name, is_here, self.options, self._environment)
                except UsageError as error:
                    self._host_failed(host, str(error), now_s)
                    continue
                host.number, host.is_up, host.is_dismissed, host.started_s = self._numbers, False, False, now_s
                self._numbers += 1
                self.hosts[host.number] = Placed(host.name, range(0), is_here, command)
                self.start_supervisor(host.number, is_elastic=True)

    def _check_supervisors(self, now_s: float) -> None:
        for host in self._hosts_by_name.values():
            if host.number is not None and not host.is_up and not host.is_dismissed:
                why = self.why_unstarted(host.number)
                if not why and now_s >= host.started_s + self.options.start_timeout_s:
                    why = f"{host.name} was not reached within {self.options.start_timeout_s:g} s (--start-timeout)"
                    os.killpg(self.starters[host.name].pid, signal.SIGKILL)
                if why:
                    self._host_failed(host, why, now_s)

    def _host_failed(self, host: _Host, why: str, now_s: float) -> None:
        """A host that was given and cannot be started at the beginning ends the job; others are tried again."""
        if host.number is not None:
            self._forget_supervisor(host)
        if self._is_first and self._discover is None:
            return self._end(1, why)
        for place in self._places_on(host):
            if not place.is_running:  # another host may have a free slot
                del self._places[place.number]
        wait_s = host.backoff.wait_s(now_s - host.started_s if host.is_up else 0.0)
        host.start_at_s, host.is_up = now_s + wait_s, False
        self.writer.say(f"{why}; it is tried again in {wait_s:g} s")

    def _forget_supervisor(self, host: _Host) -> None:
        assert host.number is not None
        self.hosts.pop(host.number, None)
        self.supervisors.pop(host.number, None)
        host.number = None

    def has_all_supervisors(self) -> bool:
        return False  # others may come at any time

    def has_loopback_only(self) -> bool:
        return self._discover is None and all(name == HERE for name in self._hosts_by_name)

    def host_is_up(self, number: int) -> None:
        host = self._host_of(number)
        if host is not None:
            host.is_up = True

    def lose(self, channel: Channel) -> None:
        number = next((number for number, one in self.supervisors.items() if one is channel), -1)
        host = self._host_of(number)
        super().lose(channel)
        if host is None:
            return
        now_s = time.monotonic()
        is_used = not self._has_begun and bool(self._places_on(host))  # its ranks may not have started yet
        if host.is_dismissed or self.is_stopping or self._is_done:
            self._forget_supervisor(host)
            host.is_up = False
        else:
            self._host_failed(host, f"{host.name} does not report its ranks any more", now_s)
            if is_used and self._anew_at_s is None:
                self._start_anew(f"{host.name} was lost before the job had begun", 1, now_s)

    # Ranks

    def _start_first(self, now_s: float) -> None:
        """Starts the first ranks, once each host has come or failed."""
        listed = [host for host in self._hosts_by_name.values() if host.slots]
        if not listed and self._discover is None:
            return self._end(128 + signal.SIGTERM, "no host is left: the job ends")
        slots = sum(host.slots for host in listed if host.is_up)
        if any(host.number is not None and not host.is_up for host in listed) or slots < self.options.min_np:
            return
        count = min(slots, self.options.np if self._is_first else self.options.most_np)
        self.options.np, number = int(count), 0
        self._is_gathering = self._is_first = False
        self._started_s = now_s
        for host in listed:
            for _ in range(host.slots if host.is_up else 0):
                if number < count:
                    self._places[number] = _Place(number, host.name, self._make_backoff())
                    number += 1
        self._rank_0 = self._hosts_by_name[self._places[0].host].number
        self.address = ""
        self._start_on(self._places[0].host, now_s, True)

    def _start_on(self, name: str, now_s: float, has_rank_0: bool) -> None:
        """Starts the first ranks of a host."""
        self._start([place for place in self._places.values() if place.host == name], now_s, has_rank_0)

    def _start(self, places: Collection[_Place], now_s: float, has_rank_0: bool = False, members: str = "") -> None:
        host = self._hosts_by_name[next(iter(places)).host]
        assert host.number is not None
        channel = self.supervisors[host.number]
        for place in places:
            place.start_at_s, place.started_s, place.kill_at_s = math.inf, now_s, math.inf
            place.is_running = place.is_owned = True
            place.is_leaving = place.is_consequence = place.is_refused = False
            place.address = place.error = ""
            self.peers[place.number] = Peer(place.number, channel, channel.host, None)
        self.options.np = max(self.options.np, len(self._places))
        self._save()
        self.start_ranks(
            host.number, [place.number for place in places], has_rank_0, members=members, slots=host.slots,
            job_folder=self._folder_of_job.path if self._folder_of_job else "", job_key=self.key,
        )  # fmt: skip

    def ready(self, channel: Channel, said: dict[str, Any]) -> None:
        self.say_threads(said["threads"])
        if self.number_of(channel) == self._rank_0:
            self._rank_0, self.address = None, said["address"]
            first = self._places[0].host
            for name in dict.fromkeys(place.host for place in self._places.values()):
                if name != first:
                    self._start_on(name, time.monotonic(), False)

    def _make_places(self, now_s: float) -> None:
        """Fills the slots of hosts, up to --max-np."""
        for host in self._hosts_by_name.values():
            free = host.slots - len(self._places_on(host)) if host.is_up else 0
            new: list[int] = []
            while free > len(new) and len(self._places) < self.options.most_np:
                number = next(number for number in range(len(self._places) + 1) if number not in self._places)
                self._places[number] = _Place(number, host.name, self._make_backoff(), start_at_s=now_s)
                new.append(number)
            if new:
                self.writer.say(f"{host.name} has free slots: started there as newcomers: {list_ranks(new)}")

    def _start_newcomers(self, now_s: float) -> None:
        members = ",".join(one.address for one in self._places.values() if one.is_running and one.address)
        for place in [one for one in self._places.values() if now_s >= one.start_at_s] if members else ():
            if self._hosts_by_name[place.host].is_up:
                self._start([place], now_s, members=members)

    def take_error(self, peer: Peer, report: dict[str, Any], now_s: float) -> None:
        place = self._places.get(peer.rank)
        if not self._has_begun:
            super().take_error(peer, report, now_s)
        if place is not None:
            place.error = (report["text"].splitlines() or [""])[-1]
            # Not an error of all ranks, which disagree or have diverged: they would again.
            place.is_consequence = report["is_consequence"] and bool(report["facts"].get("failed_ranks"))
            place.is_refused = bool(report["facts"].get("is_shared"))

    def take_member(self, peer: Peer, address: str) -> None:
        """Takes it that a rank listens for members there."""
        place = self._places.get(peer.rank)
        if not is_address(address):
            raise Malformed(f'"{address}" is no address of a member')
        if place is not None and place.is_running and place.address != address:
            if self._has_begun:  # it was let in: whoever is out of reach does not go on
                self._has_halted, self._astray = False, {}
            place.address, self._has_begun = address, True
            self._save()

    # Ends

    def take_end(self, peer: Peer, end: dict[str, Any], now_s: float) -> None:
        place = self._places.get(peer.rank)
        if place is not None:
            self._take_end(place, self._describe(place, end["code"], peer.host), now_s, end["code"])

    def take_loss(self, peer: Peer, now_s: float) -> None:
        place = self._places.get(peer.rank)
        if place is None or not place.is_running:
            return
        if place.address and self._anew_at_s is None:  # it may live: its port tells
            place.is_owned, place.misses = False, 0
        else:
            end = _End(f"rank {place.number}", f"was lost with host {peer.host}", 1, True, False)
            self._take_end(place, end, now_s)

    def _describe(self, place: _Place, code: int, host: str) -> _End:
        """The end of a rank with an exit code as subprocess has it."""
        how = f"ended by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        if code == HALTED:
            how = f"has halted (exit code {HALTED}), as it reached too few of the others"
        elif code > 0 and place.error:
            how += f": {place.error}"
        is_from_outside = exit_code(code) in _FROM_OUTSIDE
        is_fault = code != 0 and not is_from_outside and not place.is_consequence and bool(place.address)
        return _End(f"rank {place.number} on host {host}", how, exit_code(code), is_from_outside, is_fault)

    def _take_end(self, place: _Place, end: _End, now_s: float, code: int = 1) -> None:
        """Takes the end of a rank, and decides what becomes of its place and of the job."""
        has_joined = bool(place.address)
        place.is_running, place.address, place.has_fault = False, "", end.is_fault
        self._save()
        if self.is_stopping:
            self._dismiss_idle()
        elif self._anew_at_s is not None:
            pass  # all are to end
        elif code == 0 and not place.is_leaving:
            self._is_done, self._done_s = True, now_s
            self._note_early(place, code, now_s)
        elif self._is_done and self._has_begun and not has_joined and end.is_from_outside:
            pass  # a newcomer that came too late
        elif self._is_done:
            self._late_code = end.code or self._late_code
            if self._has_begun and code != 0:
                self.writer.say(f"{end.text}, after others had ended with exit code 0")
            self._note_early(place, code, now_s)
        elif self._has_begun:
            self._take_lost_rank(place, end, now_s)
        elif end.is_from_outside:
            self._start_anew(f"{end.text} before the job had begun", end.code, now_s)
        else:
            self._note_early(place, code, now_s)

    def _note_early(self, place: _Place, code: int, now_s: float) -> None:
        """Before the job has begun, as in a program that does not call init(), ends count as those of any job."""
        if not self._has_begun:
            self.failure.ended(place.number, code, now_s)

    def _take_lost_rank(self, place: _Place, end: _End, now_s: float) -> None:
        """Takes the loss of a rank while training goes on. If it ended by its own error, others may do so at once."""
        self._last_code = end.code
        self._has_halted = self._has_halted or end.code == HALTED
        self._lost.append((place, end))
        self._lost_by_s = min(self._lost_by_s, now_s + FAULT_S * end.is_fault)
        if not any(one.is_running for one in self._places.values()):
            self._lost_by_s = now_s
        self._check_lost(now_s)

    def _check_lost(self, now_s: float) -> None:
        """Once it is time, says how ranks ended and what follows."""
        living = sum(one.is_running for one in self._places.values())
        if not self._lost or (now_s < self._lost_by_s and (living or not self._is_done)):
            return
        lost, self._lost, self._lost_by_s = self._lost, [], math.inf
        is_lost_whole = not living and not self._is_done
        errors = {end.how for _, end in lost}
        if is_lost_whole and len(lost) > 1 and len(errors) == 1 and lost[0][1].is_fault:
            numbers = list_ranks(sorted(place.number for place, _ in lost))
            return self._end(lost[0][1].code, f"all ranks that were left, {numbers}, {errors.pop()}: the job ends")
        going_on = f"{living or 'no'} rank{'s' * (living > 1)} go{'es' * (living < 2)} on"
        for place, end in lost:
            host = self._hosts_by_name.get(place.host)
            restart = ""
            if self._places.get(place.number) is not place:
                pass  # another one is there by now
            elif place.is_leaving or host is None or not host.is_up:
                del self._places[place.number]  # a host that has a free slot gets another one
            elif living and not self._is_done:
                restart = self._plan_restart(place, now_s)
            self.writer.say("; ".join(filter(None, [end.text, going_on, restart])))
        if is_lost_whole:
            self._restart_all(lost[-1][1], now_s)

    def _plan_restart(self, place: _Place, now_s: float) -> str:
        """Says when a rank is started again at its place."""
        if place.is_refused:
            return "it is not started again, as the others would refuse it again"
        if why := self._use_reset():
            return f"it is not started again, as {why}"
        wait_s = place.backoff.wait_s(now_s - place.started_s)
        place.start_at_s = now_s + wait_s
        return f"it is started again in {wait_s:g} s"

    def _use_reset(self) -> str:
        """Counts a restart; says why there may be none."""
        limit = self.options.reset_limit
        if limit is not None and self._resets >= limit:
            return f"--reset-limit {limit} is reached"
        self._resets += 1
        return ""

    def _restart_all(self, end: _End, now_s: float) -> None:
        """No rank lives: begins anew, or ends the job if a program failed by itself, as it would again."""
        if end.is_fault or any(one.has_fault and not one.is_refused for one in self._places.values()):
            self._end(end.code, "no rank is left, and not all were ended from outside: the job ends")
        elif self._has_halted and self._astray:
            self._awaits_astray = True
            which, where = (
                list_ranks(sorted(self._astray)),
                ", ".join(sorted({one[0] for one in self._astray.values()})),
            )
            self.writer.say(f"{which} may go on: nothing is started anew before {where} can be reached")
        else:
            self._start_anew("all ranks are lost", end.code, now_s)

    def _find_astray(self, now_s: float) -> None:
        """Those that had halted go on with ranks that live on hosts that are reached again, or begin anew."""
        up = {one.name for one in self._hosts_by_name.values() if one.is_up}
        asked = {number: address for number, (host, address) in self._astray.items() if host in up}
        for number, answer in probe(self._folder_of_job, asked).items():
            host, address = self._astray.pop(number)
            while number in self._places:
                number += 1
            if answer.lives:
                self._places[number] = _Place(
                    number, host, self._make_backoff(), started_s=now_s, address=address, is_running=True,
                    is_owned=False, is_adopted=True,
                )  # fmt: skip
        if any(one.is_running for one in self._places.values()):
            self._awaits_astray = False
            for place in self._places.values():
                place.start_at_s = math.inf if place.is_running else now_s
        elif not self._astray:
            self._awaits_astray = False
            self._start_anew("all ranks are lost", HALTED, now_s)

    def _start_anew(self, why: str, code: int, now_s: float) -> None:
        """Ends all ranks, and starts a job that has no members yet, which goes on from its checkpoint if it has one."""
        if self._discover is None and not any(host.slots for host in self._hosts_by_name.values()):
            return self._end(code or 128 + signal.SIGTERM, f"{why}, and no host is left: the job ends")
        if limit := self._use_reset():
            return self._end(code, f"{why}; nothing is started again, as {limit}")
        wait_s = self._backoff.wait_s(now_s - self._started_s)
        self.writer.say(f"{why}; all are started anew in {wait_s:g} s")
        self._anew_at_s = now_s + wait_s
        for place in self._places.values():
            place.start_at_s = math.inf
            self._signal(place, signal.SIGKILL)

    def _gather_anew(self, now_s: float) -> None:
        """Begins anew, once all ranks have ended and it is time."""
        if self._anew_at_s is None or now_s < self._anew_at_s or any(one.is_running for one in self._places.values()):
            return
        self._anew_at_s, self._is_gathering, self._has_begun, self._rank_0 = None, True, False, None
        self._places.clear()
        self._has_halted, self._astray = False, {}
        self.key = secrets.token_hex(32)  # what may still run somewhere is not of this job
        self.failure = FirstFailure(self.writer)
        self._save()

    def _end(self, code: int, why: str) -> None:
        self.writer.say(why)
        self.code = code
        self.stop()

    def _dismiss_idle(self, but_listed: bool = False) -> None:
        """Lets supervisors without ranks end; ``but_listed``: only those of hosts where nothing is started any more."""
        for host in self._hosts_by_name.values():
            is_idle = not any(one.is_running and one.is_owned for one in self._places_on(host))
            if host.is_up and host.number is not None and is_idle and not (but_listed and host.slots):
                host.is_up, host.is_dismissed = False, True
                self.supervisors[host.number].send(supervisor.GO)

    def signal_ranks(self, number: int) -> None:
        super().signal_ranks(number)
        self._dismiss_idle()

    # Time

    def check(self, now_s: float) -> None:
        if self.failure.rank is not None:  # before the job has begun
            return self.stop()
        self._take_discovered()
        self._take_probed(now_s)
        self._check_lost(now_s)
        self._check_supervisors(now_s)
        if self.is_stopping:
            return
        if not self._is_done:
            self._start_supervisors(now_s)
            self._gather_anew(now_s)
            if self._awaits_astray:
                self._find_astray(now_s)
            elif self._is_gathering:
                self._start_first(now_s)
            elif self._has_begun and self._anew_at_s is None:
                self._make_places(now_s)
                self._start_newcomers(now_s)
        self._kill_late(now_s)
        if self._is_done and self._has_begun and now_s >= self._done_s + LAST_S:
            self._end_newcomers()
        self._dismiss_idle(but_listed=True)
        self._check_number(now_s)
        if self._is_done and not any(one.is_running for one in self._places.values()):
            self._conclude(now_s)

    def _kill_late(self, now_s: float) -> None:
        for place in self._places.values():
            if now_s >= place.kill_at_s:
                place.kill_at_s = math.inf
                self._signal(place, signal.SIGKILL)

    def _end_newcomers(self) -> None:
        """Ends those that nobody lets in any more, as none of the job's ranks runs."""
        running = [place for place in self._places.values() if place.is_running]
        if not any(place.address for place in running):
            for place in running:
                self._signal(place, signal.SIGKILL)

    def _check_number(self, now_s: float) -> None:
        """Ends a job that has had too few ranks for too long."""
        living, least = sum(one.is_running for one in self._places.values()), self.options.min_np
        if living >= least or self._is_done:
            self._few_since_s = now_s
        limit_s = self.options.elastic_timeout_s
        if self._is_first:  # supervisors are on their way
            limit_s = max(limit_s, self.options.start_timeout_s)
        if now_s >= self._few_since_s + limit_s:
            limit = f"{limit_s:g} s (--elastic-timeout)"
            self._end(self._last_code, f"for {limit} there have been fewer than {least} ranks (--min-np): {living}")

    def _conclude(self, now_s: float) -> None:
        if not self._is_concluded:
            self._is_concluded = True
            self.code = self._late_code if self._has_begun else 0
            self._dismiss_idle()
            self.finish(now_s)

    def should_join(self) -> bool:
        return not self._has_begun and super().should_join()

    def describe_end(self, has_all: bool) -> tuple[int, str]:
        return 0, ""

    # Ranks of which no supervisor of ours reports

    def _probe(self) -> None:
        """Finds out whether they live, on a thread of its own."""
        while self.is_waiting:
            asked = [place for place in [*self._places.values()] if place.is_running and not place.is_owned]
            found = probe(self._folder_of_job, {place.number: place.address for place in asked})
            for place in asked:
                self._probed.put((place, found[place.number]))
            time.sleep(POLL_S)

    def _take_probed(self, now_s: float) -> None:
        if not self._is_probing and any(not one.is_owned for one in self._places.values()):
            self._is_probing = True
            start_thread(self._probe)
        while not self._probed.empty():
            place, found = self._probed.get()
            if place.is_owned or not place.is_running:
                continue
            place.misses = 0 if found.lives else place.misses + 1
            if place.address != found.address:
                place.address = found.address
                self._save()
            if place.misses >= (1 if found.is_certain else _MISSES):
                self._take_gone(place, now_s)

    def _take_gone(self, place: _Place, now_s: float) -> None:
        note = None if self._folder_of_job is None else self._folder_of_job.read_note(place.number)
        if note is not None and note.code is not None:
            return self._take_end(place, self._describe(place, note.code, place.host), now_s, note.code)
        host = self._hosts_by_name.get(place.host)
        if note is None and (host is None or not host.is_up):
            self._astray[place.number] = (place.host, place.address)
        is_unknown = place.is_adopted and note is None  # it may have ended well, and is not to run once more
        who = f"rank {place.number} on host {place.host}"
        how = "has gone" + ", and how it ended is not known" * is_unknown
        code = 0 if is_unknown and self._is_done else 1
        self._take_end(place, _End(who, how, code, not is_unknown, is_unknown), now_s, code)
