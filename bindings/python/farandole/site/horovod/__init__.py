"""The package ``horovod`` of scripts written for Horovod 0.28, over Farandole.

Its modules are made when they are imported: each has the public names of a module of Farandole, or of
this file, which has what Farandole has not. Some functions are changed:

* ``DistributedOptimizer`` of torch reduces at the latest in ``step()``, and ``backward()`` does not wait. Every
  parameter has a gradient from the start: zeros. The optimizer gets a class in ``horovod.torch.optimizer``.
* ``init``: once a rank has called ``join()``, collectives other than allreduce fail.
* ``reducescatter`` and its other forms refuse ``op=Adasum`` by a RuntimeError.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import importlib
import importlib.abc
import importlib.machinery
import inspect
import os
import sys
import threading
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import farandole
from farandole.runner import run

__all__ = [
    "HorovodBasics", "check_extension", "gpu_available", "in_thread", "num_rank_is_power_2", "run", "split_list",
]  # fmt: skip
__version__ = f"0.28.1+farandole.{farandole.__version__}"

#: Module of Farandole -> those of Horovod that have its names.
_MODULES_BY_SOURCE = {
    "farandole.torch": "torch torch.mpi_ops torch.functions torch.optimizer torch.sync_batch_norm common.process_sets",
    "farandole.torch.compression": "torch.compression",
    "farandole.torch.elastic": "torch.elastic torch.elastic.sampler torch.elastic.state "
    "common.elastic common.exceptions",
    "farandole.tensorflow": "tensorflow tensorflow.mpi_ops tensorflow.functions",
    "farandole.compression": "tensorflow.compression",
    "farandole.keras": "keras tensorflow.keras",
    "farandole.keras.callbacks": "keras.callbacks tensorflow.keras.callbacks",
    "farandole.runner": "runner",
    "horovod": "common common.basics common.util runner.util runner.util.threads",  # this file
}
#: Module of Horovod -> what it has of this file besides.
_EXTRA = {"horovod.common.exceptions": ("HorovodVersionMismatchError", "get_version_mismatch_message")}
_SOURCES = {f"horovod.{module}": source for source, modules in _MODULES_BY_SOURCE.items() for module in modules.split()}


class _Modules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and makes the modules of the table."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        package, _, leaf = name.rpartition(".")
        if leaf[0] == "_" != leaf[1:2] and (package == "horovod" or package in _SOURCES):  # from package import _leaf
            raise ImportError(
                f"cannot import name {leaf!r} from {package!r}: this is Farandole's, version {farandole.__version__}, "
                "in place of Horovod's, and has its public names only"
            )
        if name not in _SOURCES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: types.ModuleType) -> None:
        source = importlib.import_module(_SOURCES[module.__name__])
        public = getattr(source, "__all__", [name for name in vars(source) if name[0] != "_"])
        names = {name: getattr(source, name) for name in public}
        names |= {name: globals()[name] for name in _EXTRA.get(module.__name__, ())}
        changes = _CHANGES | (_CHANGES_OF_TORCH if source.__name__.startswith("farandole.torch") else {})
        names |= {name: change(names[name]) for name, change in changes.items() if name in names}
        if module.__name__ == _OPTIMIZER:
            module.__dict__["_DistributedOptimizer"] = source.Distributed  # for isinstance()
        module.__dict__.update(names, __all__=list(names), _basics=module, _check_has_gpu=gpu_available)
        module.__doc__ = f"{module.__name__} of Horovod, over Farandole."
        if module.__name__ in _WITH_SUBMODULES:
            for child in _SOURCES:
                if child.startswith(f"{module.__name__}."):
                    importlib.import_module(child)


def _with_joins_of_horovod(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def changed(*args: Any, **kwargs: Any) -> None:
        os.environ.setdefault("FARANDOLE_JOIN_ALLREDUCE_ONLY", "1")
        init(*args, **kwargs)

    return changed


def _as_horovods(wrap: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(wrap)
    def changed(*args: Any, **kwargs: Any) -> Any:
        import torch

        optimizer = wrap(*args, **{"complete": "step"} | kwargs)
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if type(optimizer).__module__ != _OPTIMIZER:
            with contextlib.suppress(TypeError):  # of a class whose slots make another layout
                optimizer.__class__ = _named_as_horovods(type(optimizer))
        return optimizer

    return changed


def _named_as_horovods(kind: Any) -> Any:
    """A class of the same name in Horovod's module, as Lightning 1.9 expects; copies and pickles stay ``kind``."""

    def __reduce_ex__(self: object, protocol: Any) -> Any:
        how = kind.__reduce_ex__(self, max(protocol, 2))
        if how[0] is getattr(copyreg, "__newobj__", None):
            return kind.__new__, (kind, *how[1][1:]), *how[2:]
        return (kind, *how[1:]) if how[0] is type(self) else how  # a __reduce__ of its own

    return type(kind.__name__, (kind,), {"__module__": _OPTIMIZER, "__reduce_ex__": __reduce_ex__})


def _refusing_adasum_at_run_time(reduce: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(reduce)
    def changed(*args: Any, **kwargs: Any) -> Any:
        try:
            return reduce(*args, **kwargs)
        except ValueError as error:
            given = inspect.signature(reduce).bind(*args, **kwargs).arguments
            if given.get("op") != farandole.Adasum:
                raise
            raise farandole.HorovodInternalError(str(error)) from error

    return changed


_OPTIMIZER = "horovod.torch.optimizer"
#: Have their submodules as attributes.
_WITH_SUBMODULES = ("horovod.torch", "horovod.keras", "horovod.tensorflow.keras")
_CHANGES_OF_TORCH = {"DistributedOptimizer": _as_horovods}
_CHANGES = {
    "init": _with_joins_of_horovod,
    "reducescatter": _refusing_adasum_at_run_time,
    "reducescatter_async": _refusing_adasum_at_run_time,
    "grouped_reducescatter": _refusing_adasum_at_run_time,
    "grouped_reducescatter_async": _refusing_adasum_at_run_time,
}


def HorovodBasics(*_: object, **__: object) -> types.ModuleType:
    """What has the functions of ``horovod.torch``; the arguments name a library of Horovod's."""
    return importlib.import_module("horovod.torch")


def check_extension(ext_name: str, *_: object) -> None:
    """Raises ImportError for Horovod's frontends that are not here."""
    here = ("horovod.torch", "horovod.tensorflow", "horovod.keras")
    if ext_name not in here:
        raise ImportError(f"{ext_name}: Farandole has {', '.join(here)}")


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """What :class:`HorovodVersionMismatchError` says."""
    return f"{name} is version {version}, but the package was built for version {installed_version}: build it again"


class HorovodVersionMismatchError(ImportError):
    """A framework of another version than at build time. For programs that catch it: Farandole never raises it."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name, self.version, self.installed_version = name, version, installed_version


def gpu_available(*_: object, **__: object) -> bool:
    """Whether torch sees a GPU."""
    import torch

    return torch.cuda.is_available()


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether the number is a power of 2."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(l: Sequence[Any], n: int) -> list[list[Any]]:  # noqa: E741 (Horovod's name)
    """``n`` lists of nearly equal length, the longer ones first."""
    few, rest = divmod(len(l), n)
    return [list(l[i * few + min(i, rest) : (i + 1) * few + min(i + 1, rest)]) for i in range(n)]


def in_thread(
    target: Callable[..., object],
    args: Iterable[Any] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Starts a thread; ``silent`` swallows what the function raises."""

    def body(*arguments: Any) -> None:
        try:
            target(*arguments)
        except Exception:
            if not silent:
                raise

    thread = threading.Thread(target=body, args=tuple(args), name=name, daemon=daemon)
    thread.start()
    return thread


sys.meta_path.append(_Modules())
