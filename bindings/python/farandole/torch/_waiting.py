"""Parameters that an exchange does not reduce yet: frozen ones, and those that came after the wrap.

They cost nothing: no description, no vote, no memory. A parameter that requires a gradient, or holds
one, on any rank is taken in by all ranks together: every round tells by one shared flag whether some
rank has such a parameter, and only then the ranks tell each other which. So all of them describe
their gradients anew in the same round, whatever made a parameter live on one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable

import torch

from farandole import ops
from farandole.basics import Context
from farandole.torch._hooks import GradientHooks
from farandole.torch._settings import Settings

Named = list[tuple[str, torch.Tensor]]


def is_live(parameter: torch.Tensor) -> bool:
    """Whether there is a gradient, or can be one."""
    return parameter.requires_grad or parameter.grad is not None


class WaitingParameters:
    """The parameters of one exchange that wait to be taken in.

    Args:
        rank: The context.
        prefix: Of the operations' names; distinct per exchange.
        settings: Of the rounds.
        fired: Called when a gradient of one of them was accumulated.
    """

    def __init__(
        self, rank: Context, prefix: str, settings: Settings, fired: Callable[[], None]
    ) -> None:
        self._rank = rank
        self._prefix = prefix
        self._settings = settings
        self._fired = fired
        self._named: Named = []
        self._hooks: dict[int, GradientHooks] = {}  # by the parameter's id

    def add(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """More of them; the same on every rank, in the same order."""
        self._named += named

    def wake(self) -> bool:
        """Sets hooks where a gradient can come from now on. Whether some want to be taken in."""
        # One comprehension, without calls: there may be thousands of frozen parameters.
        live = [p for _, p in self._named if p.requires_grad or p.grad is not None]
        for parameter in live:
            if id(parameter) not in self._hooks:
                self._hooks[id(parameter)] = GradientHooks(parameter, None, self._fired)
        return bool(live)

    def take(self) -> Generator[None, None, Named]:
        """Those that are live on some rank; they wait no longer.

        Yields before it waits for the other ranks.

        Raises:
            MismatchError: Ranks have different parameters here; the message names one.
        """
        named = self._named
        live = [int(is_live(parameter)) for _, parameter in named]
        wire = torch.tensor([len(named), *live], dtype=torch.int32)
        ones = [wire[i : i + 1] for i in range(len(wire))]
        labels = ["number of parameters", *(name for name, _ in named)]
        name = f"{self._prefix}parameters that became live"
        flags = ops.GROUP | ops.IN_PLACE
        handle = self._rank.core.submit(
            self._settings.plain(ops.ALLREDUCE), ones, name, flags, labels=labels
        )
        yield
        handle.wait()
        is_taken = wire[1:].tolist()
        taken = [item for item, taken in zip(named, is_taken, strict=True) if taken]
        self._named = [item for item, taken in zip(named, is_taken, strict=True) if not taken]
        for _, parameter in taken:
            hooks = self._hooks.pop(id(parameter), None)
            if hooks is not None:
                hooks.remove()
        return taken

    def remove_hooks(self) -> None:
        """For an exchange that ends."""
        for hooks in self._hooks.values():
            hooks.remove()
        self._hooks.clear()
