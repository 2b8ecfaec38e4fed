"""Blocking calls that an exception, such as KeyboardInterrupt, ended before their operation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farandole import _context

if TYPE_CHECKING:
    from farandole._work import Handle

Label = tuple[str, str | None]  #: Function and name, as users know them.


def keep(rank: _context.Rank, label: Label, handle: Handle) -> None:
    """For :func:`interrupted`, at the end of a blocking call; the handle may be spent."""
    if handle.work is not None:
        rank.interrupted.append((label, handle))


def tell_way_on(rank: _context.Rank, label: Label, error: ValueError) -> None:
    """Raises ``error`` with more to it, if an interrupted call is why the name is in flight."""
    function, name = label
    for known, handle in list(rank.interrupted):
        work = handle.work
        if known == label and name is not None and work is not None and not work.poll():
            raise ValueError(
                f"{error}; an interrupted call of {function} left it in flight: "
                f"farandole.synchronize(farandole.interrupted({name!r})) waits for it and gives "
                "its result"
            ) from None


def interrupted(name: str | None = None) -> Handle:
    """The handle of a blocking call that an exception ended, such as KeyboardInterrupt.

    Its operation goes on, as the other ranks count on it, and its name is in use until it has
    finished; ``synchronize`` waits for that and gives what the call would have returned. To call
    the function again then is another operation, for which all ranks must call it again.

    Args:
        name: Of the call; None: of the last such call, whatever its name.
    Raises:
        ValueError: There is none that was not synchronized.
        HorovodInternalError: Not initialized.
    """
    for (_, known), handle in reversed(list(_context.current().interrupted)):
        if handle.work is not None and name in (None, known):
            return handle
    which = "" if name is None else f" with name {name!r}"
    raise ValueError(f"there is no interrupted call{which} that was not synchronized")
