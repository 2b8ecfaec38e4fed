"""Memory that ranks share for fresh gradients: torch's allocator gives it to them where autograd makes them.

Only a class derived from torch's can be its allocator, and the extension links no torch. So the header that C++
programs use, farandole/torch_memory.h, is compiled against the torch at hand when it is first asked for.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import pathlib
import platform
import shlex
import stat
import subprocess
from collections.abc import Iterable

import torch

from farandole import _core, config

_SOURCE = """
#include <c10/core/StorageImpl.h>
#include <farandole/torch_memory.h>

using farandole::torch::detail::GradientAllocator;
using Storage = c10::intrusive_ptr<c10::StorageImpl>;

extern "C" std::size_t bytes_for(const std::size_t* sizes, std::size_t count) {
  return GradientAllocator::bytes_for({sizes, sizes + count});
}
extern "C" void offer(void* storage, void* begin, const std::size_t* sizes, std::size_t count) {
  const auto held = std::make_shared<Storage>(Storage::reclaim_copy(static_cast<c10::StorageImpl*>(storage)));
  GradientAllocator::instance().offer(std::shared_ptr<void>(held, begin), {sizes, sizes + count});
}
extern "C" void withdraw(const void* begin) { GradientAllocator::instance().withdraw(begin); }
"""


class GradientMemory:
    """Blocks for the gradients of some parameters; gradients are born in them while this object lives.

    Thread safety: any thread. Lifetime: blocks live as long as tensors have them.

    Args:
        context: Whose ranks reduce the gradients.
        sizes: Bytes of each gradient.
    """

    def __init__(self, context: _core.Context, sizes: Iterable[int]) -> None:
        self._begin = None
        each = list(sizes)
        array = (ctypes.c_size_t * len(each))(*each)
        total = allocator().bytes_for(array, len(each))
        if total == 0:
            return
        memory = torch.frombuffer(context.allocate(total), dtype=torch.uint8)
        self._begin = memory.data_ptr()
        allocator().offer(memory.untyped_storage()._cdata, self._begin, array, len(each))

    def __del__(self) -> None:
        if self._begin is not None:
            allocator().withdraw(self._begin)


@functools.cache
def allocator() -> ctypes.CDLL:
    """The compiled allocator, which the first offer installs.

    Raises:
        RuntimeError: It cannot be compiled.
    """
    try:
        library = ctypes.CDLL(str(_compiled()))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise RuntimeError(
            "share_gradients=True needs a C++ compiler (c++, or what CXX names), which compiles a small library "
            f"against torch {torch.__version__}, and a folder to keep it in (~/.cache, or XDG_CACHE_HOME). That "
            f"failed: {said.strip()[-1000:]}. Without share_gradients gradients are copied"
        ) from None
    library.bytes_for.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    library.bytes_for.restype = ctypes.c_size_t
    library.offer.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    library.withdraw.argtypes = (ctypes.c_void_p,)
    library.offer.restype = library.withdraw.restype = None
    return library


def _compiled() -> pathlib.Path:
    """The library of this torch and this Farandole; one process of those that ask compiles it.

    A lock that a killed process held is released by the system; a library that is there is whole.
    """
    root = pathlib.Path(torch.__file__).parent
    command = [
        *shlex.split(os.environ.get("CXX") or "c++"), "-std=c++20", "-O2", "-w", "-shared", "-fPIC",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{config.PREFIX / 'include'}", f"-isystem{root / 'include'}", "-x", "c++", "-",
        f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip
    header = (config.PREFIX / "include" / "farandole" / "torch_memory.h").read_text()
    parts = (torch.__version__, torch.version.git_version, platform.machine(), header, _SOURCE, *command)
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:20]
    folder = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "farandole")
    path = folder / f"gradient_memory-{digest}.so"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{folder} must belong to user {os.geteuid()} or root, and nobody else may write to it")
    if path.exists():
        return path
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            made = path.with_suffix(f".{os.getpid()}")
            try:
                subprocess.run([*command, "-o", str(made)], input=_SOURCE, text=True, capture_output=True, check=True)
                made.rename(path)
            finally:
                with contextlib.suppress(OSError):
                    made.unlink()
    return path
