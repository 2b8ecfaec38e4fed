"""Scripts written for Horovod, unchanged: the package ``horovod`` of farandole.compat."""

import importlib
import os
import pathlib
import re
import subprocess
import sys
import textwrap

import pytest

from farandole import compat
from ranks import communicate, start_forked
from test_migrating import NAMES

pytestmark = [pytest.mark.mpi, pytest.mark.once]

SCRIPTS = pathlib.Path(__file__).parent / "horovod_scripts"
PATH = compat.path()


def run_python(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120,
        env=os.environ | environment,
    )  # fmt: skip


def run_horovodrun(*arguments):
    program = pathlib.Path(sys.executable).parent / "horovodrun"
    is_installed = program.exists()  # not beside the second Python that the tests run with
    words = [program] if is_installed else [sys.executable, "-m", "farandole.runner", "--horovod"]
    return subprocess.run([*words, "-np", "2", sys.executable, *arguments], capture_output=True, text=True, timeout=180)


def job(code):
    """Runs code on 2 ranks with the package ``horovod`` on the path; its lines, sorted."""
    code = f"import sys\nsys.path.insert(0, {PATH!r})\n" + textwrap.dedent(code)
    return sorted("".join(communicate(start_forked(2, ["-c", code]))).splitlines())


@pytest.mark.parametrize("arguments", [["--use-adasum"], ["--gradient-predivide-factor", "2.0"]])
def test_a_script_on_images_learns_under_horovodrun(arguments):
    done = run_horovodrun(SCRIPTS / "mnist.py", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"data-0 epoch 2: loss [\d.]+, accuracy ([\d.]+)", done.stdout)
    assert len(found) == 1 and float(found[0]) >= 0.9, done.stdout


def test_a_script_runs_by_module_and_by_path(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys\nimport horovod.torch as hvd\nhvd.init()\nprint(hvd.size(), sys.argv, __name__)\n")
    done = run_python("-m", "farandole.compat", str(script), "--flag")
    assert done.stdout.split(maxsplit=1) == ["1", f"['{script}', '--flag'] __main__\n"], done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "farandole.compat", "-m", "script", "--flag"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.startswith("1 [") and "--flag'] __main__" in done.stdout, done.stderr
    path = run_python("-m", "farandole.compat", "--path").stdout.strip()
    done = run_python(str(script), PYTHONPATH=os.pathsep.join([path, os.environ.get("PYTHONPATH", "")]))
    assert done.stdout.startswith("1 ["), done.stderr


@pytest.mark.parametrize("arguments", [[], ["-m"], ["--flag"], ["no_such_script.py"]])
def test_wrong_use_is_a_message(arguments):
    done = run_python("-m", "farandole.compat", *arguments)
    assert done.returncode == 2 and done.stdout == "" and "compat" in done.stderr
    assert "Traceback" not in done.stderr


def test_horovod_is_not_installed_at_top_level():
    code = "import importlib.util as u; print(u.find_spec('horovod'))"
    assert run_python("-c", code).stdout == "None\n"


MODULES = {
    "horovod": "run __version__",
    "horovod.torch": " ".join([*NAMES, "_check_has_gpu"]),
    "horovod.torch.mpi_ops": "allreduce_async_ synchronize is_homogeneous _basics Sum",
    "horovod.torch.compression": "Compression Compressor NoneCompressor FP16Compressor",
    "horovod.torch.functions": "broadcast_parameters broadcast_object allgather_object",
    "horovod.torch.optimizer": "DistributedOptimizer",
    "horovod.torch.sync_batch_norm": "SyncBatchNorm",
    "horovod.torch.elastic": "run run_fn init shutdown TorchState ElasticSampler",
    "horovod.torch.elastic.sampler": "ElasticSampler",
    "horovod.torch.elastic.state": "TorchState StateHandler ModelStateHandler OptimizerStateHandler "
    "SamplerStateHandler get_handler_registry set_handler_registry",
    "horovod.common.basics": "HorovodBasics",
    "horovod.common.elastic": "State ObjectState run_fn notification_manager",
    "horovod.common.exceptions": "HorovodInternalError HostsUpdatedInterrupt HorovodVersionMismatchError "
    "get_version_mismatch_message",
    "horovod.common.process_sets": "ProcessSet global_process_set add_process_set remove_process_set",
    "horovod.common.util": "check_extension gpu_available num_rank_is_power_2 split_list",
    "horovod.runner": "run",
    "horovod.runner.util.threads": "in_thread",
}


@pytest.mark.parametrize("module", MODULES)
def test_modules_have_the_names_that_scripts_import(module, monkeypatch):
    monkeypatch.syspath_prepend(PATH)
    found = importlib.import_module(module)
    missing = [name for name in MODULES[module].split() if not hasattr(found, name)]
    assert missing == []


def test_a_mismatch_of_versions_is_an_import_error_that_knows_them(monkeypatch):
    monkeypatch.syspath_prepend(PATH)
    exceptions = importlib.import_module("horovod.common.exceptions")
    error = exceptions.HorovodVersionMismatchError("torch", "2.0", "1.0")
    assert isinstance(error, ImportError)
    assert (error.name, error.version, error.installed_version) == ("torch", "2.0", "1.0")
    assert str(error) == exceptions.get_version_mismatch_message("torch", "2.0", "1.0")


@pytest.mark.parametrize("module", ["horovod", "horovod.torch.mpi_ops", "horovod.common.util"])
def test_other_private_names_are_refused_with_a_reason(module, monkeypatch):
    monkeypatch.syspath_prepend(PATH)
    with pytest.raises(ImportError, match=f"cannot import name '_handle_map' from '{module}': this is Farandole's"):
        exec(f"from {module} import _handle_map")
    assert not hasattr(importlib.import_module(module), "_handle_map")


def test_the_optimizer_reduces_in_step_as_horovods():
    lines = job("""
        import torch, warnings
        import horovod.torch as hvd
        from horovod.torch.optimizer import _DistributedOptimizer  # as Ludwig and Ray Train do
        hvd.init()
        p = torch.nn.Parameter(torch.zeros(1))
        plain = torch.optim.SGD([p], lr=1.0)
        assert not isinstance(plain, _DistributedOptimizer)
        optimizer = hvd.DistributedOptimizer(plain, [("p", p)])
        assert isinstance(optimizer, _DistributedOptimizer)
        (p * (1 + hvd.rank())).sum().backward()
        optimizer.synchronize()
        grad = p.grad.item()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            optimizer.step()
        print(grad, p.item(), len(seen), "skip_synchronize" in str(seen[0].message))
    """)
    assert lines == ["1.5 -1.5 1 True"] * 2


def test_the_class_of_a_wrapped_optimizer_names_horovod():
    """By which Lightning 1.9 knows it, and whose base it takes for the plain class; copies and pickles are plain."""
    lines = job("""
        import copy, pickle
        import torch
        import horovod.torch as hvd
        hvd.init()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
        kind = optimizer.__class__
        print("horovod" in str(kind), kind.__name__, kind.__bases__[0] is torch.optim.SGD)
        print(*(type(one) is torch.optim.SGD for one in (copy.copy(optimizer), pickle.loads(pickle.dumps(optimizer)))))
    """)
    assert lines == ["True SGD True"] * 2 + ["True True"] * 2


def test_an_optimizer_of_ones_own_may_say_how_it_is_pickled():
    lines = job("""
        import copy, pickle
        import torch
        import horovod.torch as hvd

        class Own(torch.optim.SGD):
            def __reduce__(self):
                return type(self), (self.param_groups[0]["params"], 0.5), {"extra": 7}

        hvd.init()
        optimizer = hvd.DistributedOptimizer(Own([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
        for one in (copy.copy(optimizer), *(pickle.loads(pickle.dumps(optimizer, how)) for how in (0, 4))):
            print(type(one) is Own, one.param_groups[0]["lr"], one.extra)
    """)
    assert lines == ["True 0.5 7"] * 6


def test_every_gradient_is_there_from_the_wrap_on():
    """Also of parameters that no backward pass uses, or only that of one rank."""
    lines = job("""
        import torch
        import horovod.torch as hvd
        hvd.init()
        for op in (hvd.Average, hvd.Adasum):
            used, once, never, frozen = (torch.nn.Parameter(torch.ones(2)) for _ in range(4))
            frozen.requires_grad_(False)
            named = {"used": used, "once": once, "never": never, "frozen": frozen}
            optimizer = torch.optim.SGD(named.values(), lr=1.0)
            optimizer = hvd.DistributedOptimizer(optimizer, named.items(), op=op)
            print(*(None if p.grad is None else p.grad.tolist() for p in named.values()))
            for step in range(2):
                loss = (used * (1 + hvd.rank())).sum()
                (loss + once.sum() if hvd.rank() == 0 else loss).backward()
                optimizer.step()
                optimizer.zero_grad()
            if op == hvd.Average:
                print(*(p.tolist() for p in named.values()))
    """)
    assert lines[:2] == ["[-2.0, -2.0] [0.0, 0.0] [1.0, 1.0] [1.0, 1.0]"] * 2
    assert lines[2:] == ["[0.0, 0.0] [0.0, 0.0] [0.0, 0.0] None"] * 4


def test_a_reducescatter_refuses_adasum_by_a_runtime_error():
    lines = job("""
        import torch
        import horovod.torch as hvd
        hvd.init()
        one = torch.ones(4)
        for call in (
            lambda: hvd.reducescatter(one, op=hvd.Adasum),
            lambda: hvd.reducescatter_async(one, None, hvd.Adasum),
            lambda: hvd.grouped_reducescatter([one], op=hvd.Adasum),
            lambda: hvd.grouped_reducescatter_async([one], op=hvd.Adasum),
        ):
            try:
                call()
            except RuntimeError as error:
                print(type(error).__name__, "expected an allreduce" in str(error))
        try:
            hvd.reducescatter(torch.tensor(1.0), op=hvd.Sum)
        except ValueError:
            print("another ValueError")
        print(hvd.reducescatter(one, op=hvd.Sum).tolist())
    """)
    assert lines == ["HorovodInternalError True"] * 8 + ["[2.0, 2.0]"] * 2 + ["another ValueError"] * 2


def test_other_frontends_of_horovod_are_said_to_be_missing(monkeypatch):
    monkeypatch.syspath_prepend(PATH)
    util = importlib.import_module("horovod.common.util")
    util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
    has = "horovod.torch, horovod.tensorflow, horovod.keras"
    with pytest.raises(ImportError, match=f"horovod.mxnet: Farandole has {has}"):
        util.check_extension("horovod.mxnet", "HOROVOD_WITH_MXNET", __file__, "mpi_lib")


def test_other_collectives_fail_while_a_rank_has_joined():
    lines = job("""
        import torch
        import horovod.torch as hvd
        hvd.init()
        if hvd.rank() == 0:
            print(hvd.allreduce(torch.ones(2), op=hvd.Sum, name="sum").tolist())
            for call in (hvd.allgather, lambda t: hvd.broadcast(t, 0)):
                try:
                    call(torch.ones(2))
                except hvd.HorovodInternalError as error:
                    print("not possible while a rank has joined" in str(error))
        last = hvd.join()
        print("last", last)
    """)
    assert lines == ["True", "True", "[1.0, 1.0]", "last 0", "last 0"]


def test_horovod_basics_answers_as_the_package():
    lines = job("""
        from horovod.common.basics import HorovodBasics
        basics = HorovodBasics("/a/file/of/horovod", "mpi_lib_v2")
        basics.init()
        print(basics.rank(), basics.size(), basics.is_homogeneous(), basics.Sum, bool(basics.mpi_built()))
    """)
    assert lines == ["0 2 True 1 True", "1 2 True 1 True"]
