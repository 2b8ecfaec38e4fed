"""Optimizers of tf.keras, which are Keras's."""

from __future__ import annotations

from typing import Any


def DistributedOptimizer(
    optimizer: Any, name: str | None = None, use_locking: bool = False, *arguments: Any, **named: Any
) -> Any:
    """:func:`farandole.keras.DistributedOptimizer`; ``use_locking`` is ignored, for compatibility with Horovod."""
    from farandole import keras  # here: Keras takes a second, and scripts with tapes do not need it

    del use_locking
    return keras.DistributedOptimizer(optimizer, name, *arguments, **named)
