"""What makes the work of a slot repeatable: its random generators, torch's threads, deterministic kernels."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import Any

import torch

try:
    import numpy
except ImportError:  # torch works without it
    numpy = None  # type: ignore[assignment]

_deterministic: Any = torch.utils.deterministic  # whose type has no attributes


def seed_generators(*place: int | str) -> None:
    """Seeds torch's CPU generator, NumPy's and Python's by a hash of ``place``, such as (seed, step, slot)."""
    digest = hashlib.blake2b(repr(place).encode(), digest_size=16).digest()
    torch.default_generator.manual_seed(int.from_bytes(digest[:7], "little"))
    random.seed(int.from_bytes(digest[:8], "little"))
    if numpy is not None:
        numpy.random.seed(int.from_bytes(digest[8:12], "little"))


@contextlib.contextmanager
def repeatable(threads: int) -> Iterator[None]:
    """Inside, torch uses ``threads`` threads and deterministic kernels; afterwards all is as it was, generators too.

    The number of threads is part of the result: gradients of convolutions and sums over a million elements have other
    bits with two threads than with one (torch 2.13).
    """
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy is not None else None
    threads_before = torch.get_num_threads()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = _deterministic.fill_uninitialized_memory
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    _deterministic.fill_uninitialized_memory = False  # which every torch.empty() would pay for
    try:
        yield
    finally:
        _deterministic.fill_uninitialized_memory = fills
        torch.use_deterministic_algorithms(is_deterministic, warn_only=warns_only)
        torch.set_num_threads(threads_before)
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        if numpy is not None and states[2] is not None:
            numpy.random.set_state(states[2])
