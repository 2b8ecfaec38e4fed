"""What a collective of a group gives its caller."""

from __future__ import annotations

import contextlib
import datetime
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import Work as _TorchWork

from farandole.torch.distributed._futures import of_tensor_list
from farandole.torch.distributed._job import Job

#: What calls autograd's engine; before torch 2.3 backward() itself.
_RUN_BACKWARD = getattr(torch.autograd.graph, "_engine_run_backward", torch.autograd.backward).__code__


class Work(_TorchWork):
    """A collective in flight, as ``async_op=True`` returns it.

    Args:
        handles: The operations.
        outputs: The value of the future: the tensors that receive something.
        finish: Called once with the operations' results, in whatever thread comes first.
        ranks: Of the job that the operations belong to, by their numbers in torch's job; None: those of the group.
        timeout: Of wait().

    What is no override of torch's begins with ``fl_``: a later torch may take any other name.

    Thread safety: any thread.
    """

    # Of few works another value: set where it is known, since a work is made with each call.
    fl_copied: Any = None  # the event after what `finish` has launched on a GPU
    fl_error: BaseException | None = None
    fl_ended: Any = None  # the future that this sets
    fl_future: Any = None  # what follows it, for the user

    def __init__(
        self, job: Job, handles: list[Any], outputs: list[torch.Tensor],
        finish: Callable[[list[Any]], None] | None = None, ranks: list[int] | None = None,
        timeout: datetime.timedelta | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.fl_job, self.fl_handles, self.fl_outputs, self.fl_finish = job, handles, outputs, finish
        self.fl_ranks, self.fl_timeout = ranks, timeout
        self.fl_lock = threading.Lock()
        self.fl_is_done = not handles  # on a GPU: launched
        self.fl_future_lock = threading.Lock()

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Waits until the tensors hold the result, or, on a GPU, makes the current stream wait for it.

        Raises:
            TimeoutError: ``timeout`` has passed; the collective is still in flight.
            HorovodInternalError: It failed; the message says why and names the rank.
        """
        timeout = timeout or self.fl_timeout
        if timeout is not None and timeout.total_seconds() > 0 and not self.fl_poll_until(timeout.total_seconds()):
            raise TimeoutError(f"farandole: a collective of group {self.fl_job.name} did not end within {timeout}")
        self.fl_complete()
        if self.fl_error is not None:
            raise self.fl_error
        return True

    def synchronize(self) -> None:
        """As :meth:`wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the tensors hold the result, on a GPU too."""
        if not self.fl_is_done and self.fl_lock.acquire(blocking=False):  # else somebody waits for it
            try:
                if all(handle.poll() and handle.is_complete for handle in self.fl_handles):
                    self.fl_finish_locked()
            finally:
                self.fl_lock.release()
        if not self.fl_is_done or not all(handle.is_complete for handle in self.fl_handles):
            return False
        return self.fl_copied is None or bool(self.fl_copied.query())

    def is_success(self) -> bool:
        return self.fl_is_done and self.fl_error is None

    def exception(self) -> BaseException | None:
        return self.fl_error

    def result(self) -> list[torch.Tensor]:
        return self.fl_outputs

    def _source_rank(self) -> int:
        """Of a ``recv`` from any rank of a group of two."""
        return 1 - self.fl_job.rank

    def get_future(self) -> Any:
        """A future of the list of tensors that receive something."""
        with self.fl_future_lock:
            if self.fl_future is not None:
                return self.fl_future
            devices: list[Any] = sorted({t.device for t in self.fl_outputs if t.is_cuda}, key=str)
            self.fl_ended = torch.futures.Future(devices=devices) if devices else torch.futures.Future()
            # An error set by set_exception() is a value to torch's C++, such as DDP's; one raised here is an error.
            self.fl_future = self.fl_ended.then(self.fl_value)
            if not devices and self.fl_outputs and self.fl_outputs[0].dtype == torch.float16:
                self.fl_future = of_tensor_list(self.fl_future, self.fl_outputs)
        # On a GPU the host waits only until it is in a stream; the future belongs to the caller's.
        is_of_pass = _is_called_by_reducer()
        if not is_of_pass:
            for one in list(self.fl_job.at_end):  # DDP may wait for all in a pass inside another one
                one.leave()
        if is_of_pass and not devices:
            torch.autograd.Variable._execution_engine.queue_callback(_AtEnd(self))
        elif devices or self.is_completed():
            self.fl_end()
        else:
            self.fl_job.completer.add(self)
        return self.fl_future

    def fl_end(self) -> None:
        """Waits, and ends the future, whatever its callbacks raise: their own futures have it."""
        self.fl_complete()
        with contextlib.suppress(Exception):
            self.fl_ended.set_result(self.fl_outputs)

    def fl_value(self, _: Any) -> list[torch.Tensor]:
        if self.fl_error is not None:
            raise self.fl_error
        return self.fl_outputs

    def fl_poll_until(self, timeout_s: float) -> bool:
        until_s = time.monotonic() + timeout_s
        while not self.is_completed():
            if time.monotonic() >= until_s:
                return False
            time.sleep(0.0005)
        return True

    def fl_complete(self) -> None:
        """Waits for the operations, on a GPU in the current stream: each time, as that may be another one."""
        with self.fl_lock:
            if not self.fl_is_done:
                self.fl_finish_locked()
                return
            for handle in self.fl_handles:
                handle.order_stream()
            if self.fl_copied is not None:
                self.fl_copied.wait(torch.cuda.current_stream(self.fl_outputs[0].device))

    def fl_finish_locked(self) -> None:
        """The first wait; KeyboardInterrupt leaves the operations in flight."""
        try:
            results = [handle.wait() for handle in self.fl_handles]
            if self.fl_finish is not None:
                with torch.no_grad():
                    self.fl_finish(results)
                self.fl_copied = _event_after(self.fl_outputs)
        except Exception as error:
            self.fl_error = self.fl_job.renumber(error, self.fl_ranks)
        is_at_it = self.fl_error is None
        self.fl_handles = [handle for handle in self.fl_handles if is_at_it and not handle.is_complete]  # on a GPU
        self.fl_is_done = True
        self.fl_finish = None


def _is_called_by_reducer() -> bool:
    """Whether DistributedDataParallel's C++ calls get_future() in a backward pass, at whose end it waits for all its
    futures: the thread that does so ends them itself just before, which spares two wake-ups. Not in a pass inside
    another one, whose end is an earlier one."""
    if torch._C._current_autograd_node() is None:
        return False
    called_from = sys._getframe(1).f_back
    if called_from is None or called_from.f_code is not _RUN_BACKWARD:
        return False
    outer = called_from.f_back
    while outer is not None and outer.f_code is not _RUN_BACKWARD:
        outer = outer.f_back
    return outer is None


class _AtEnd:
    """What autograd calls at the end of a pass. Should the pass fail, it is not called but dropped, and the future ends
    as others do."""

    def __init__(self, work: Work) -> None:
        self._work: Work | None = work
        work.fl_job.at_end.add(self)

    def __call__(self) -> None:
        if self._work is not None:
            self._work.fl_end()
            self._work.fl_job.pass_ended(self)
            self._work = None

    def leave(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.fl_job.at_end.discard(self)
            work.fl_job.completer.add(work)

    __del__ = leave


def _event_after(outputs: list[torch.Tensor]) -> Any:
    """An event after what the current stream has been told to do with tensors on a GPU; None for others."""
    if not outputs or not outputs[0].is_cuda:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(outputs[0].device))
    return event
