"""One line of the doctor's report."""

from __future__ import annotations

import dataclasses
import sys

PIP = f"{sys.executable} -m pip install"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked for.

    Attributes:
        name: What it is called in the report.
        version: Empty if it was not found.
        where: The file or folder it is taken from; empty if it was not found.
        note: What else there is to say.
        why: What is lost without it; empty if it is there, or nobody needs it here.
        command: The one command that brings it; empty as ``why``.
    """

    name: str
    version: str = ""
    where: str = ""
    note: str = ""
    why: str = ""
    command: str = ""

    @property
    def is_missing(self) -> bool:
        """Whether it would be of use here and is not there."""
        return bool(self.why)
