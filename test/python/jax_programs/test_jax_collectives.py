"""farandole.jax on ranks that are processes: collectives in traced code, failures, training."""

import os
import subprocess
import sys
from importlib import metadata

import pytest

import framework_ranks

if framework_ranks.missing("jaxlib"):
    pytest.skip("not installed: ['jaxlib']", allow_module_level=True)

import collective_checks
import failure_checks
import skew_checks
import training_checks
from ranks import GUARD_S, REPOSITORY, environment

DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}


@pytest.fixture(scope="module", params=[2, 3, 4])
def told(request):
    """By check, what each rank said."""
    results = {}
    for module in ("collective_checks", "training_checks"):
        results |= framework_ranks.run(request.param, module, **DEVICES)
    return results


def fail_if(text):
    if text:
        pytest.fail(text, pytrace=False)


@pytest.mark.parametrize("name", framework_ranks.names_of(collective_checks, training_checks))
def test_each_rank_finds(name, told):
    fail_if("".join(told[name]))


@pytest.mark.parametrize("name", framework_ranks.names_of(failure_checks))
def test_after_a_failure(name):
    told = framework_ranks.run(2, "failure_checks", name)[name]
    survivors = told[:1] if "killed" in name else told
    fail_if("".join(survivors))


def test_programs_before_and_after_reinit():
    name = "of_an_elastic_job"
    told = framework_ranks.run(3, "failure_checks", name, FARANDOLE_ELASTIC="1")[name]
    fail_if("".join(told[:2]))


@pytest.mark.parametrize("devices", ["1", "4"])
@pytest.mark.parametrize("name", framework_ranks.names_of(skew_checks))
def test_ranks_that_differ(name, devices):
    flags = f"--xla_force_host_platform_device_count={devices}"
    fail_if("".join(framework_ranks.run(2, "skew_checks", name, XLA_FLAGS=flags)[name]))


def test_the_example_learns():
    script = REPOSITORY / "examples" / "jax_mlp.py"
    command = [sys.executable, "-m", "farandole.runner", "-np", "2", sys.executable, str(script)]
    ended = subprocess.run(
        command, env=environment(JAX_PLATFORMS="cpu"), timeout=GUARD_S, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def run_script(text):
    command = [sys.executable, "-c", text]
    given = environment(JAX_PLATFORMS="cpu")
    return subprocess.run(command, env=given, timeout=GUARD_S, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("body", ["import farandole.jax as hvd, jax; hvd.init(); print(jax.numpy.ones(3))",
                                  "import farandole.jax as hvd; hvd.init(); hvd.shutdown(); hvd.init()"])  # fmt: skip
def test_a_process_ends_without_a_client_that_only_farandole_uses(body):
    show = "import atexit, sys; atexit.register(lambda: print('left:', sys.modules['jax._src.xla_bridge']._backends))\n"
    ended = run_script(show + body)
    assert "left: {}" in ended.stdout, ended.stdout + ended.stderr


def test_an_unknown_jax_is_refused_by_its_version():
    ended = run_script("import sys, jax; sys.modules['jax._src.source_info_util'] = None; import farandole.jax")
    assert f"farandole.jax does not know jax {metadata.version('jax')}" in ended.stderr


@pytest.mark.parametrize("size", [2, 3, 4])
def test_random_programs_give_what_one_process_gives(size):
    first = int(os.environ.get("FARANDOLE_TEST_SEED", "1")) * 1000
    count = 300 if os.environ.get("FARANDOLE_TEST_FULL") == "1" else 6
    told = framework_ranks.run(size, "random_checks", FARANDOLE_TEST_PROGRAMS=f"{first} {count}")
    fail_if("".join(told["check_random_programs"]))
