"""Waiting for input, where torch's loader is waited for, is told apart from computing."""

from __future__ import annotations

from typing import Any

from torch.utils.data import dataloader

from farandole import _step_times

_kind: Any = dataloader._BaseDataLoaderIter
if not hasattr(_kind, "_farandole_notes_input"):
    _kind.__next__ = _step_times.note_input(_kind.__next__)
    _kind._farandole_notes_input = True
