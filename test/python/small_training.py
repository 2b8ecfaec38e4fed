"""A small training, which each rank of any launcher runs: prints the SHA-256 of the weights.

Arguments, as ``name=value``, go to ``init()``; ``rank`` and ``size`` as numbers.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import numpy as np

import farandole

STEPS, BATCH, INPUTS = 20, 16, 50


def train(**place: Any) -> str:
    """A linear model of seeded data, each rank with its own share. Returns the digest, the same on all ranks."""
    farandole.init(**place)
    generator = np.random.default_rng(farandole.rank())
    truth = np.random.default_rng(99).normal(size=INPUTS).astype(np.float32)
    weights = farandole.broadcast(generator.normal(size=INPUTS).astype(np.float32), 0, name="weights")
    for _ in range(STEPS):
        inputs = generator.normal(size=(BATCH, INPUTS)).astype(np.float32)
        gradient = inputs.T @ (inputs @ weights - inputs @ truth) / np.float32(BATCH)
        weights -= np.float32(0.05) * farandole.allreduce(gradient, name="gradient")
    return hashlib.sha256(weights.tobytes()).hexdigest()


def tell(digest: str) -> None:
    """Prints a line at once, as launchers mix what comes in pieces."""
    sys.stdout.write(f"weights {digest} of {farandole.size()} ranks\n")
    sys.stdout.flush()


def train_and_print(_rank: int = -1) -> None:
    """For ``spawn``."""
    tell(train())


if __name__ == "__main__":
    place = dict(word.split("=", 1) for word in sys.argv[1:])
    digest = train(**{name: int(text) if name in ("rank", "size") else text for name, text in place.items()})
    tell(digest)
