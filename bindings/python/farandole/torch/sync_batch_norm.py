"""Batch normalization over the batches of all ranks, on CPU and GPU.

One collective in the forward pass, an allgather of each rank's count, mean and sum of squared
deviations; one in the backward pass, an allreduce of two sums per channel.
"""

from __future__ import annotations

import warnings
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from farandole import basics
from farandole.basics import global_process_set
from farandole.ops import Sum
from farandole.torch import ops

#: What is converted: these classes, and none that somebody derived from them.
_OF_TORCH: Final = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
    nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d,
)  # fmt: skip


class SyncBatchNorm(_BatchNorm):
    """Normalizes each channel as ``BatchNorm`` does on the concatenated batch of all ranks.

    Batches may differ in size between ranks and may be empty. In training mode every rank must run it,
    forward and backward, the same number of times. In eval mode, and with one rank, it is torch's own batch
    norm and communicates nothing. Gradients of ``weight`` and ``bias`` are those of this rank's batch;
    ``DistributedOptimizer`` reduces them like any others. Statistics are combined in float64.

    Arguments are torch's, for inputs of shape [batch, num_features, ...] with 2 to 5 dimensions and any
    floating dtype; ``process_set`` says whose batches, None: those of all ranks.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: Any = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_set = process_set

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_set: Any = None) -> nn.Module:
        """Replaces every batch norm of torch's in ``module`` by this class.

        The new layers keep the parameter and buffer objects, so an optimizer that holds them stays valid, but
        not forward and backward hooks. Layers that are of this class already keep their process sets. Other
        subclasses of torch's batch norm may do more than normalize, so they are not replaced; a warning names
        them.

        Returns:
            ``module``, changed in place; its replacement if it is a batch norm itself.
        """
        found = [
            (name, layer)
            for name, layer in module.named_modules()
            if isinstance(layer, _BatchNorm) and not isinstance(layer, SyncBatchNorm)
        ]
        replaced: dict[Any, nn.Module] = {
            layer: cls._converted(layer, process_set) for _, layer in found if type(layer) in _OF_TORCH
        }
        left = [f'{type(layer).__name__} "{name}"' for name, layer in found if layer not in replaced]
        if left:
            warnings.warn(
                "convert_sync_batchnorm converts torch's own BatchNorm layers; each rank's statistics "
                f"are its own in {', '.join(left)}",
                stacklevel=2,
            )
        for parent in list(module.modules()):
            for name, child in list(parent._modules.items()):
                if child in replaced:  # a layer in two places stays one layer
                    setattr(parent, name, replaced[child])
        return replaced.get(module, module)

    @classmethod
    def _converted(cls, layer: _BatchNorm, process_set: Any) -> SyncBatchNorm:
        if isinstance(layer, nn.modules.lazy.LazyModuleMixin):
            raise ValueError(
                f"{type(layer).__name__} has no parameters before its first forward: "
                "call the model once before convert_sync_batchnorm()"
            )
        new = cls(
            layer.num_features, layer.eps, layer.momentum, layer.affine,
            layer.track_running_stats, process_set, device="meta",
        )  # fmt: skip
        new._parameters, new._buffers = layer._parameters.copy(), layer._buffers.copy()
        return new.train(layer.training)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if not 2 <= input.dim() <= 5 or input.shape[1] != self.num_features:
            raise ValueError(
                f"SyncBatchNorm: expected an input of shape [batch, {self.num_features}, ...] with "
                f"2 to 5 dimensions, got {list(input.shape)}"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The normalized batch, of the shape and dtype of ``input``.

        Raises:
            ValueError: The shape is wrong; or, on every rank, all batches together have fewer than
                two values per channel (seen on the CPU only).
        """
        self._check_input_dim(input)
        members = global_process_set if self.process_set is None else self.process_set
        size = basics.size() if self.process_set is None else members.size()
        if size is None:
            raise ValueError(f"SyncBatchNorm: {members} is not registered")
        if not self.training or size == 1:
            return super().forward(input)
        with torch.no_grad():
            mean, variance, count = _statistics(input, members)
            self._track(mean, variance, count)
        inverse = (variance + self.eps).rsqrt()
        output: torch.Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]
            members, input, self.weight, self.bias, mean, inverse, count
        )
        return output

    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return  # a user may switch it off later, as for torch's own
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        weight = self.num_batches_tracked.double().reciprocal()
        unbiased = variance * (count / (count - 1))
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            change = new - running
            running.copy_(running + change * (weight if self.momentum is None else self.momentum))


def _statistics(input: torch.Tensor, members: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean [C], biased variance [C] and number of values per channel [] over all ranks; float64.

    Ranks' means and sums of squared deviations are combined, not sums of squares, of which little is
    left where the mean is large.
    Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances", COMPSTAT 1982, doi:10.1007/978-3-642-51461-6_3.
    """
    channels = input.shape[1]
    row = input.new_zeros(1, 2 * channels + 1, dtype=torch.float64)
    count = input.numel() // channels
    if count:
        wide, dimensions = input.to(_wide(input)), _all_but_channels(input)
        mean = wide.mean(dimensions)
        deviations = (wide - _aligned(mean, wide)).square_().sum(dimensions)
        row[0, -1] = count
        row[0, :-1] = torch.cat([mean, deviations])
    rows = ops.allgather(row, name=f"sync_batch_norm.forward.{channels}", process_set=members)
    means, deviations, counts = torch.split(rows, [channels, channels, 1], dim=1)
    total = counts.sum()
    if not input.is_cuda and total < 2:  # on a GPU the host would have to wait
        raise ValueError(
            "SyncBatchNorm: expected more than 1 value per channel when training; the batches "
            f"of all ranks together have {int(total)}"
        )
    mean = (counts * means).sum(0) / total
    deviations = (deviations + counts * (means - mean).square()).sum(0)
    return mean, deviations / total, total


class _Normalize(torch.autograd.Function):
    """weight * (input - mean) * inverse + bias, where mean and inverse depend on all ranks' inputs."""

    @staticmethod
    def forward(ctx: Any, members: Any, input: torch.Tensor, weight: Any, bias: Any, *statistics: Any) -> torch.Tensor:
        mean, inverse, _ = statistics
        ctx.save_for_backward(input, weight, *statistics)
        ctx.members, ctx.context = members, basics.current()
        scale = inverse if weight is None else inverse * weight
        output = (input - _aligned(mean, input)) * _aligned(scale, input)
        if bias is not None:
            output = output.add_(_aligned(bias, input))
        return output.to(input.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """With x = input - mean(input), and means over all ranks:

        d input = weight * inverse * (grad - mean(grad) - x * inverse^2 * mean(grad * x)).
        Source: Ioffe and Szegedy, "Batch Normalization", ICML 2015, arXiv:1502.03167, section 3.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "SyncBatchNorm has no second derivative: call backward() without create_graph=True, "
                "or use torch.nn.BatchNorm"
            )
        input, weight, mean, inverse, count = ctx.saved_tensors
        centered = input - _aligned(mean, input)
        grad = grad.to(centered.dtype)
        dimensions = _all_but_channels(input)
        sums = torch.stack([grad.sum(dimensions), (grad * centered).sum(dimensions)])
        grad_input = None
        if ctx.needs_input_grad[1]:
            name = f"sync_batch_norm.backward.{input.shape[1]}"
            with basics.using(ctx.context):  # autograd has threads of its own for GPUs
                total = ops.allreduce(sums.double(), op=Sum, name=name, process_set=ctx.members)
            means = total / count
            scale = inverse if weight is None else inverse * weight
            grad_input = grad - _aligned(means[0], input)
            grad_input.addcmul_(centered, _aligned(-means[1] * inverse.square(), input))
            grad_input = grad_input.mul_(_aligned(scale, input)).to(input.dtype)
        grad_weight = sums[1] * inverse if ctx.needs_input_grad[2] else None
        grad_bias = sums[0] if ctx.needs_input_grad[3] else None
        return None, grad_input, grad_weight, grad_bias, None, None, None


def _all_but_channels(input: torch.Tensor) -> list[int]:
    return [0, *range(2, input.dim())]


def _aligned(values: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """Values [C], in the dtype of the arithmetic, to be broadcast over ``input``."""
    return values.to(_wide(input)).view(1, -1, *[1] * (input.dim() - 2))


def _wide(input: torch.Tensor) -> torch.dtype:
    return torch.float64 if input.dtype == torch.float64 else torch.float32
