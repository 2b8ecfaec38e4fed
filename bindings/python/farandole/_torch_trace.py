"""Files for torch's analyser (``torch.distributed.flight_recorder.fr_trace``) from those of our flight recorders."""

from __future__ import annotations

import pathlib
import pickle
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farandole.flight import Event, Flight

_VERSION = "2.10"  # of the format
#: What the analyser calls kinds; by these names it compares no sizes where ranks may give unequal ones.
_NAMES = {"allreduce": "all_reduce", "broadcast": "broadcast", "allgather": "all_gather_v",
          "reducescatter": "reduce_scatter_v", "alltoall": "all_to_all_v_single", "barrier": "barrier"}  # fmt: skip
_EQUAL = ("allreduce", "broadcast", "reducescatter")
#: Before torch 2.15 the analyser refuses names of libraries that it does not know.
_LIBRARY = "gloo"


def write(flights: Sequence[Flight], folder: pathlib.Path) -> None:
    """One file for each rank, ``farandole_RANK``, of the calls that all ranks make.

    Args:
        flights: Of one job, whose ranks make their calls in one order, as torch requires: the analyser compares the
            n-th of one rank with the n-th of the others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    calls = {flight.rank: [one for one in flight.events if one.call and one.kind in _NAMES] for flight in flights}
    group = next((found[1] for events in calls.values() for one in events
                  if (found := re.match(r"group (\S+): ", one.name))), "0")  # fmt: skip
    for flight in flights:
        members = {"name": group, "desc": "farandole", "ranks": str(list(range(flight.size)))}
        dump = {
            "version": _VERSION,
            "pg_config": {group: members},
            "entries": [_entry(event, group) for event in calls[flight.rank]],
            "host_name": flight.host,
        }
        (folder / f"farandole_{flight.rank}").write_bytes(pickle.dumps(dump))


def _entry(event: Event, group: str) -> dict[str, Any]:
    sizes, dtypes = _sizes(event), [event.dtype] if event.bytes else []
    return {
        "record_id": event.call,
        "collective_seq_id": event.call,
        "p2p_seq_id": 0,
        "op_id": event.call,
        "is_p2p": False,
        "process_group": (group, "farandole"),
        "profiling_name": f"{_LIBRARY}:{_NAMES[event.kind]}",
        "input_sizes": sizes,
        "output_sizes": sizes,
        "input_dtypes": dtypes,
        "output_dtypes": dtypes,
        "state": "completed" if event.is_finished and event.code == "OK" else "scheduled",
        "time_created_ns": int(event.at_s * 1e9),
        "retired": event.is_finished,
        "frames": [{"name": event.name, "filename": "farandole", "line": 0}],
    }


def _sizes(event: Event) -> list[list[int]]:
    """In elements, of what must be equal on all ranks."""
    if event.kind not in _EQUAL:
        return [[]]
    bits = re.match(r"[a-z]+(\d+)", event.dtype)
    return [[event.bytes // (int(bits[1]) // 8 if bits else 1)]]
