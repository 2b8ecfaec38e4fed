"""Ranks on a Ray cluster: ``farandole.ray.run(fn, args, num_workers=4)``. Needs ``pip install 'farandole[ray]'``."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from farandole import basics
from farandole._spawn import take_place
from farandole.runner import supervisor
from farandole.runner.output import FirstFailure, Writer

_TICK_S = 0.2
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def run(
    fn: Callable[..., Any], args: Sequence[Any] = (), num_workers: int = 1,
    resources_per_worker: Mapping[str, float] | None = None, timeout_s: float = 60.0,
) -> list[Any]:  # fmt: skip
    """Calls ``fn(*args)`` on ``num_workers`` ranks of a Ray cluster; the function calls ``init()`` itself.

    It uses the Ray cluster that this process is connected to, else the one at RAY_ADDRESS, else it starts one on
    this host. Ranks of a node have consecutive numbers. With GPUs each rank sees those of all ranks of its node, so
    that ``local_rank()`` is its device, as under the other launchers.

    Args:
        resources_per_worker: Such as ``{"CPU": 4, "GPU": 1}``; default: one CPU.
        timeout_s: How long to wait until the cluster has room for all workers.

    Returns:
        The results by rank.

    Raises:
        RuntimeError: A rank failed, and the others were ended; the message names the rank that failed first and
            ends with its traceback. Or the cluster has no room.
    """
    if not ray.is_initialized():
        ray.init()
    resources = {"CPU": 1.0, **(resources_per_worker or {})}
    group = placement_group([resources] * num_workers, strategy="PACK")
    workers: list[_Worker] = []
    try:
        if not group.wait(timeout_s):
            has = {name: amount for name, amount in ray.cluster_resources().items() if name in resources}
            wanted = f"{num_workers} workers of {resources}"
            raise RuntimeError(f"no room for {wanted} within {timeout_s:g} s; Ray has {has}")
        workers = _start_workers(group, resources, num_workers)
        return _collect(workers, _call_on_all(workers, fn, args))
    finally:
        for worker in workers:
            ray.kill(worker.actor)
        remove_placement_group(group)


class _Rank:
    """The actor that becomes a rank."""

    def where(self) -> tuple[str, str, str, str]:
        """Its node, that one's name and address, and the GPUs that Ray gave it."""
        node = ray.get_runtime_context().get_node_id()
        return node, socket.gethostname(), ray.util.get_node_ip_address(), os.environ.get(_VISIBLE, "")

    def listen(self) -> int:
        """Opens the port of rank 0."""
        self._listener = supervisor.open_listener()
        return int(self._listener.getsockname()[1])

    def call(
        self, fn: Callable[..., Any], args: Sequence[Any], numbers: Mapping[str, int], address: str, key: bytes,
        devices: str,
    ) -> tuple[Any, str]:  # fmt: skip
        """What ``fn`` returned, or what :func:`basics.describe_failure` says of its error."""
        if devices:
            os.environ[_VISIBLE] = devices
        take_place(numbers, address, key, getattr(self, "_listener", None))
        try:
            result = fn(*args)
            basics.shutdown()
        except Exception as error:
            return None, basics.describe_failure(error)
        return result, ""


class _Worker:
    """An actor and where it lives."""

    def __init__(self, actor: Any, node: str, host: str, address: str, devices: str) -> None:
        self.actor, self.node, self.host, self.address, self.devices = actor, node, host, address, devices


def _start_workers(group: Any, resources: Mapping[str, float], count: int) -> list[_Worker]:
    """Actors in the order of their ranks: those of a node together."""
    others = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
    kind = ray.remote(num_cpus=resources["CPU"], num_gpus=resources.get("GPU", 0), resources=others)(_Rank)
    bundles = (PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index) for index in range(count))
    actors = [kind.options(scheduling_strategy=bundle).remote() for bundle in bundles]
    places = ray.get([actor.where.remote() for actor in actors])
    workers = [_Worker(actor, *place) for actor, place in zip(actors, places)]
    nodes = list(dict.fromkeys(worker.node for worker in workers))
    return sorted(workers, key=lambda worker: nodes.index(worker.node))


def _call_on_all(workers: Sequence[_Worker], fn: Callable[..., Any], args: Sequence[Any]) -> dict[Any, int]:
    """Starts the ranks. Returns what to wait for, with the rank of each."""
    address = supervisor.join_address(workers[0].address, ray.get(workers[0].actor.listen.remote()))
    key, calls = secrets.token_bytes(32), {}
    for rank, worker in enumerate(workers):
        neighbours = [other for other in workers if other.node == worker.node]
        numbers = {
            "RANK": rank, "SIZE": len(workers),
            "LOCAL_RANK": neighbours.index(worker), "LOCAL_SIZE": len(neighbours),
        }  # fmt: skip
        devices = ",".join(filter(None, (other.devices for other in neighbours)))
        calls[worker.actor.call.remote(fn, args, numbers, address, key, devices)] = rank
    return calls


def _collect(workers: Sequence[_Worker], calls: dict[Any, int]) -> list[Any]:
    """Waits until all have returned, or until it is known which failed first."""
    failure = FirstFailure(Writer(None, None))
    results: list[Any] = [None] * len(workers)
    while calls and failure.rank is None:
        done, _ = ray.wait([*calls], timeout=_TICK_S)
        for call in done:
            rank, now_s = calls.pop(call), time.monotonic()
            try:
                results[rank], report = ray.get(call)
            except ray.exceptions.RayError as error:
                failure.reported(rank, str(error) + "\n", False, now_s)
                failure.ended(rank, 1, now_s, lost_host=workers[rank].host)
                continue
            if report:
                failure.reported(rank, **json.loads(report), now_s=now_s)
            failure.ended(rank, int(bool(report)), now_s)
        failure.tick(time.monotonic())
    failure.finish()
    if failure.rank is not None:
        raise RuntimeError(f"{failure.message}\n{failure.error_text}".rstrip())
    return results
