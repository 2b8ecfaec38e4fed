"""The package ``horovod`` of scripts written for Horovod 0.28, over Farandole.

Its modules are made when they are imported: each is a list of names below, which ``farandole.torch``
and its neighbours have. What differs from theirs is in the functions of this file:

* ``DistributedOptimizer`` reduces at the latest in ``step()``, and ``backward()`` does not wait.
* Once a rank has called ``join()``, collectives other than allreduce fail.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import threading
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import farandole

__version__ = f"0.28.1+farandole.{farandole.__version__}"

_LIFE = """init shutdown is_initialized start_timeline stop_timeline size local_size cross_size rank
    local_rank cross_rank mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built
    ddl_built ccl_built cuda_built rocm_built""".split()
_SETS = "ProcessSet global_process_set add_process_set remove_process_set".split()
_OPS = """Average Sum Adasum Min Max Product
    allreduce allreduce_async allreduce_ allreduce_async_
    grouped_allreduce grouped_allreduce_async grouped_allreduce_ grouped_allreduce_async_
    sparse_allreduce_async allgather allgather_async grouped_allgather grouped_allgather_async
    broadcast broadcast_async broadcast_ broadcast_async_ alltoall alltoall_async
    reducescatter reducescatter_async grouped_reducescatter grouped_reducescatter_async
    join barrier poll synchronize""".split()
_FUNCTIONS = """broadcast_parameters broadcast_optimizer_state broadcast_object
    allgather_object""".split()

# Module -> where its names come from: (module of Farandole, names).
_NAMES: dict[str, list[tuple[str, Sequence[str]]]] = {
    "horovod.torch": [
        ("farandole.torch", [*_LIFE, *_SETS, *_OPS, *_FUNCTIONS, "SyncBatchNorm", "Compression"]),
        ("farandole", ["HorovodInternalError"]),
    ],
    "horovod.torch.mpi_ops": [("farandole.torch", [*_LIFE, *_SETS, *_OPS, "is_homogeneous"])],
    "horovod.torch.compression": [
        ("farandole.torch.compression", ["Compression", "Compressor", "NoneCompressor", "FP16Compressor"])
    ],
    "horovod.torch.functions": [("farandole.torch", _FUNCTIONS)],
    "horovod.torch.optimizer": [],
    "horovod.torch.sync_batch_norm": [("farandole.torch", ["SyncBatchNorm"])],
    "horovod.torch.elastic": [("farandole.torch.elastic", ["ElasticSampler", "TorchState", "run"])],
    "horovod.torch.elastic.sampler": [("farandole.torch.elastic", ["ElasticSampler"])],
    "horovod.torch.elastic.state": [("farandole.torch.elastic", ["TorchState"])],
    "horovod.common": [],
    "horovod.common.basics": [],
    "horovod.common.elastic": [("farandole.torch.elastic", ["ObjectState", "State"])],
    "horovod.common.exceptions": [
        ("farandole", ["HorovodInternalError"]),
        ("farandole.torch.elastic", ["HostsUpdatedInterrupt"]),
    ],
    "horovod.common.process_sets": [("farandole.torch", _SETS)],
    "horovod.common.util": [],
    "horovod.runner": [("farandole.runner", ["run"])],
    "horovod.runner.util": [],
    "horovod.runner.util.threads": [],
}


def init(*args: Any, **kwargs: Any) -> None:
    """``farandole.init``, on terms of Horovod for ranks that have joined."""
    os.environ.setdefault("FARANDOLE_JOIN_ALLREDUCE_ONLY", "1")
    farandole.init(*args, **kwargs)


def run(*args: Any, **kwargs: Any) -> list[Any]:
    """``farandole.runner.run``."""
    results: list[Any] = importlib.import_module("farandole.runner").run(*args, **kwargs)
    return results


def _distributed_optimizer() -> Callable[..., Any]:
    import farandole.torch

    @functools.wraps(farandole.torch.DistributedOptimizer)
    def make(*args: Any, **kwargs: Any) -> Any:
        return farandole.torch.DistributedOptimizer(*args, **{"complete": "step"} | kwargs)

    return make


def _basics() -> type:
    """A class whose objects have the functions of a library that Horovod loads by name."""
    names = [*_LIFE, "is_homogeneous", "Average", "Sum", "Adasum", "Min", "Max", "Product"]
    functions = dict(_take([("farandole.torch", names)]), init=init)

    class HorovodBasics:
        """The arguments name a library of Horovod's and mean nothing here."""

        def __init__(self, *_: object, **__: object) -> None:
            for name, value in functions.items():
                setattr(self, name, value)

    return HorovodBasics


def _gpu_available(*_: object, **__: object) -> bool:
    import torch

    return torch.cuda.is_available()


def _number_is_power_of_2(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _split_list(items: Sequence[Any], parts: int) -> list[list[Any]]:
    """``parts`` lists of nearly equal length, the longer ones first."""
    few, left_over = divmod(len(items), parts)
    ends = [few * (i + 1) + min(i + 1, left_over) for i in range(parts)]
    return [list(items[begin:end]) for begin, end in zip([0, *ends], ends)]


def _in_thread(
    target: Callable[..., object],
    args: Iterable[Any] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Starts a thread; ``silent`` swallows what the function raises."""

    def quietly(*arguments: Any) -> None:
        try:
            target(*arguments)
        except Exception:
            pass

    thread = threading.Thread(
        target=quietly if silent else target, args=tuple(args), name=name, daemon=daemon
    )
    thread.start()
    return thread


def _extras(name: str) -> dict[str, Any]:
    """What a module has that Farandole has not, or has otherwise."""
    if name == "horovod.torch":
        children = "mpi_ops compression functions optimizer sync_batch_norm elastic".split()
        modules = {child: importlib.import_module(f"{name}.{child}") for child in children}
        extras = {"init": init, "DistributedOptimizer": _distributed_optimizer()}
        return modules | extras | {"_check_has_gpu": _gpu_available}
    if name == "horovod.torch.mpi_ops":
        return {"init": init, "_basics": _basics()()}
    if name == "horovod.torch.optimizer":
        return {"DistributedOptimizer": _distributed_optimizer()}
    if name == "horovod.common.basics":
        return {"HorovodBasics": _basics()}
    if name == "horovod.common.util":
        return {
            "gpu_available": _gpu_available,
            "num_rank_is_power_2": _number_is_power_of_2,
            "split_list": _split_list,
        }
    if name == "horovod.runner.util.threads":
        return {"in_thread": _in_thread}
    return {}


def _take(sources: Iterable[tuple[str, Sequence[str]]]) -> dict[str, Any]:
    return {
        name: getattr(importlib.import_module(module), name)
        for module, names in sources
        for name in names
    }


class _Modules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and makes the modules of ``_NAMES``."""

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _NAMES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: types.ModuleType) -> None:
        names = _take(_NAMES[module.__name__]) | _extras(module.__name__)
        module.__dict__.update(names, __all__=[name for name in names if name[0] != "_"])
        module.__doc__ = f"{module.__name__} of Horovod, over Farandole."


sys.meta_path.append(_Modules())
