"""What is noted of a step's time: each time once."""

import pytest

from farandole import _core, _step_times


@pytest.fixture
def noted(monkeypatch):
    found = []
    for name in ("note_input", "note_garbage_collection"):
        monkeypatch.setattr(_core, name, found.append)
    return found


def test_an_end_of_a_collection_without_a_beginning_is_nothing(noted):
    collections = _step_times._Collections()
    for phase in ("stop", "start", "stop", "stop"):
        collections(phase, {})
    assert len(noted) == 1 and noted[0] < 60e9


def test_of_loaders_within_one_another_the_outermost_counts(noted):
    following = _step_times.note_input(lambda depth: depth and following(depth - 1))
    following(2)
    following(0)
    assert len(noted) == 2
