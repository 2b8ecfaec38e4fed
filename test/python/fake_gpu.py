"""Fake GPUs for Python tests: host memory poses as a GPU's, on the streams of libfarandole_fake_cuda.so.

They prove order, lifetimes and arithmetic, and nothing about a GPU. See test/fakes/fake_cuda.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from farandole import _core, basics
from farandole.torch import _compat
from farandole.torch import _library as torch_library
from farandole.torch.optimizer import _codecs

BUILD = pathlib.Path(os.environ.get("FARANDOLE_TEST_BUILD_DIR", "nowhere"))
PLUGIN = BUILD / "test/fakes/libfarandole_fake_cuda.so"
NCCL = BUILD / "test/fakes/nccl/libnccl.so.2"
VARIABLES = {"FARANDOLE_CUDA_PLUGIN": str(PLUGIN), "FARANDOLE_NCCL": str(NCCL)}

needs_fake_gpu = pytest.mark.skipif(
    not PLUGIN.exists() or not NCCL.exists() or torch.version.cuda is not None,  # that one has loaded NVIDIA's NCCL
    reason=f"there are no fake GPUs in {BUILD}/test/fakes (FARANDOLE_TEST_BUILD_DIR), or torch is built for real ones",
)


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(PLUGIN))
    library.farandole_fake_stream_create.restype = ctypes.c_void_p
    library.farandole_fake_device_count.restype = ctypes.c_int64
    return library


def _size_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class FakeGpu:
    """One fake GPU as one rank's framework uses it; a DeviceContext.

    Its current stream is a new one unless ``using`` says otherwise.
    """

    def __init__(self, device: int) -> None:
        self.device = device
        self._fake = _library()
        self._own = self.new_stream()
        self._current = threading.local()
        self._written: list[torch.Tensor] = []

    def new_stream(self) -> tuple[int, int]:
        """Another stream of it."""
        handle = self._fake.farandole_fake_stream_create(self.device)
        assert handle, f"there is no fake GPU {self.device}"
        return self.device, handle

    def stream(self) -> tuple[int, int]:
        """The calling thread's current one."""
        return getattr(self._current, "stream", self._own)

    @contextlib.contextmanager
    def using(self, stream: tuple[int, int]) -> Iterator[None]:
        """Makes it the calling thread's current one."""
        before, self._current.stream = self.stream(), stream
        try:
            yield
        finally:
            self._current.stream = before

    def write(
        self, tensor: torch.Tensor, values: torch.Tensor, delay_ms: int = 20, holds: bool = True
    ) -> None:
        """A producer in the current stream that takes its time.

        It ``holds`` the memory, so that a mistake of the test is no crash; a kernel would not.
        """
        assert tensor.shape == values.shape and tensor.dtype == values.dtype
        if holds:
            self._written.append(tensor.detach())
        self._call(
            "write", ctypes.c_void_p(tensor.data_ptr()), ctypes.c_void_p(values.data_ptr()),
            ctypes.c_int64(_size_bytes(values)), ctypes.c_int64(1000 * delay_ms),
        )  # fmt: skip

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a consumer in the current stream sees."""
        seen = self.begin_reading(tensor)
        self.synchronize(self.stream())
        return seen

    def begin_reading(self, tensor: torch.Tensor) -> torch.Tensor:
        """As read, without waiting for the stream."""
        seen = torch.empty_like(tensor)
        self._call(
            "copy", ctypes.c_void_p(seen.data_ptr()), ctypes.c_void_p(tensor.data_ptr()),
            ctypes.c_int64(_size_bytes(tensor)),
        )  # fmt: skip
        return seen

    def hold(self) -> None:
        """Nothing further begins in the current stream until the release."""
        self._call("hold")

    def release(self) -> None:
        """Ends the hold."""
        self._call("release")

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """The current stream is captured into a graph."""
        self._call("begin_capture")
        try:
            yield
        finally:
            self._call("end_capture")

    def synchronize(self, stream: tuple[int, int]) -> None:
        """The host waits for the stream."""
        device, handle = stream
        self._fake.farandole_fake_stream_synchronize(device, ctypes.c_void_p(handle))

    def is_idle(self) -> bool:
        """Whether the current stream has run all that was put in."""
        device, handle = self.stream()
        return bool(self._fake.farandole_fake_stream_is_idle(device, ctypes.c_void_p(handle)))

    def fail(self) -> None:
        """Every call fails from now on, until the process ends."""
        self._fake.farandole_fake_device_fail(self.device)

    def count(self, what: str) -> int:
        """How often the device did something; see fake_cuda.h."""
        return int(self._fake.farandole_fake_device_count(self.device, what.encode()))

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._fake, f"farandole_fake_stream_{name}")
        device, handle = self.stream()
        assert function(device, ctypes.c_void_p(handle), *arguments) == 0, name


class FakeGpus:
    """A GPU for each rank: its own, or all of them the first.

    Args:
        shared: All ranks use one GPU, so that batches travel through host memory.
    """

    def __init__(self, shared: bool) -> None:
        self._shared = shared
        self._gpus: dict[int, FakeGpu] = {}
        self._lock = threading.Lock()

    @property
    def mine(self) -> FakeGpu:
        """That of the calling rank."""
        rank = basics.current().topology.rank
        with self._lock:
            if rank not in self._gpus:
                self._gpus[rank] = FakeGpu(0 if self._shared else rank)
            return self._gpus[rank]


class FakeTorch(type(_compat.with_reading(torch_library.Torch))):
    """What reads torch's tensors as those of a fake GPU where ``gpu_of`` gives one."""

    host_waits = False
    written_in_place = None  # written() is called instead, which waits

    def __init__(self, gpu_of: Callable[[torch.Tensor], FakeGpu | None]) -> None:
        self._gpu_of = gpu_of

    def read(self, tensor: torch.Tensor) -> Any:
        said, gpu = super().read(tensor), self._gpu_of(tensor)
        return said if said is None or gpu is None else (*said[:4], gpu.stream()[0], said[5])

    def look(self, tensor: torch.Tensor) -> Any:
        said, gpu = super().look(tensor), self._gpu_of(tensor)
        return said if said is None or gpu is None else (*said[:4], gpu.device)

    def stream(self, tensor: torch.Tensor) -> tuple[int, int]:
        gpu = self._gpu_of(tensor)
        assert gpu is not None
        return gpu.stream()

    def written(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._synchronize(source)
        super().written(target, source)

    def use_here(self, made: torch.Tensor, target: object) -> torch.Tensor:
        self._synchronize(made)
        return super().use_here(made, target)

    def wrap(self, memory: Any, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        self._synchronize(like)
        return super().wrap(memory, like, shape)

    def _synchronize(self, tensor: torch.Tensor) -> None:
        gpu = self._gpu_of(tensor)
        if self.host_waits and gpu is not None:
            gpu.synchronize(gpu.stream())


@contextlib.contextmanager
def reading(gpu_of: Callable[[torch.Tensor], FakeGpu | None]) -> Iterator[None]:
    """Torch's tensors pose as tensors on what ``gpu_of`` gives, for collectives and gradients."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_codecs, "context_of", gpu_of)
        _core.use_library(torch.Tensor, FakeTorch(gpu_of))
        try:
            yield
        finally:
            _core.use_library(torch.Tensor, torch_library.TORCH)


def late(gpu: FakeGpu, values: torch.Tensor) -> torch.Tensor:
    """A tensor of zeros that its stream fills after a while."""
    tensor = torch.zeros_like(values)
    gpu.write(tensor, values)
    return tensor


def pose(shared: bool) -> Iterator[FakeGpus]:
    """All torch tensors of ranks pose as tensors on fake GPUs, in jobs started from now on."""
    gpus = FakeGpus(shared)
    with pytest.MonkeyPatch.context() as patch, reading(lambda tensor: gpus.mine):
        for name, value in VARIABLES.items():
            patch.setenv(name, value)
        yield gpus


def read_by_the_host(gpus: FakeGpus) -> Iterator[FakeGpus]:
    """What torch does stands for kernels, but runs at once: so a wait by the current stream is one by the host.

    The host waits for that stream alone: a result for which it was not made to wait is not there yet.
    """
    wait = _core.Gradients.wait

    def waits(self: Any) -> None:
        wait(self)
        gpus.mine.synchronize(gpus.mine.stream())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_core.Gradients, "wait", waits)
        patch.setattr(FakeTorch, "host_waits", True)
        patch.setenv("FARANDOLE_TEST_CUDA_SLOW_US", "1000")
        yield gpus
