"""farandole.tensorflow on ranks that are processes: collectives, gradients, training, failures."""

import pytest

import framework_ranks
import tensorflow_checks
import tensorflow_failures
from ranks import run_mpi

framework_ranks.skip_without("tensorflow")


@pytest.fixture(scope="module", params=[2, 3])
def told(request):
    """By check, what each rank said."""
    return framework_ranks.run(request.param, tensorflow_checks)


@pytest.mark.parametrize("name", framework_ranks.names_of(tensorflow_checks))
def test_each_rank_finds(name, told):
    assert told[name] == [""] * len(told[name]), "".join(told[name])


@pytest.mark.parametrize("name", framework_ranks.names_of(tensorflow_failures))
def test_after_a_failure(name):
    told = framework_ranks.run(2, tensorflow_failures, name)[name]
    survivors = told[:1] if "killed" in name else told
    assert survivors == [""] * len(survivors), "".join(survivors)


@pytest.mark.mpi
@pytest.mark.once
@pytest.mark.parametrize("modules", ["tensorflow, farandole", "farandole, tensorflow"])
def test_the_plugin_for_mpi_beside_tensorflows_protobuf(modules):
    script = f"import {modules}\nfarandole.init()\ntell(farandole.allgather_object(farandole.mpi_enabled()))"
    assert run_mpi(2, script) == [str([True, True])] * 2
