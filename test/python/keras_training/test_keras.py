"""farandole.keras on ranks that are processes, with each of Keras's backends."""

import pytest

import framework_ranks
import keras_checks
import keras_failures

framework_ranks.skip_without("keras")

BACKENDS = ("torch", "jax", "tensorflow")


@pytest.fixture(scope="module", params=BACKENDS)
def told(request):
    """By check, what each rank said."""
    framework_ranks.skip_without(request.param)
    return framework_ranks.run(2, keras_checks, KERAS_BACKEND=request.param)


@pytest.mark.parametrize("name", framework_ranks.names_of(keras_checks))
def test_each_rank_finds(name, told):
    assert told[name] == [""] * len(told[name]), "".join(told[name])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", framework_ranks.names_of(keras_failures))
def test_after_a_failure(name, backend):
    framework_ranks.skip_without(backend)
    told = framework_ranks.run(2, keras_failures, name, KERAS_BACKEND=backend)[name]
    survivors = told[:1] if "killed" in name else told
    assert survivors == [""] * len(survivors), "".join(survivors)
