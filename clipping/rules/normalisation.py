"""Rules of layer, group, instance and RMS norm: y = γ x̂ + β with x̂ = (x - mean)·rstd, by statistics of one sample.

The per-sample gradients are Σ_t g x̂ of γ and Σ_t g of β. Group and instance norm run so that the kernel's own backward
pass computes them. Layer norm keeps the forward kernel's mean and rstd, so that x̂ needs no second normalisation. On a
GPU one pass computes the gradients of x, γ and β.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clipping.core.dtypes import norm_dtype
from clipping.core.microbatching import blocks
from clipping.numerics import kernels
from clipping.numerics.per_sample import part
from clipping.rules.base import Gradient, Refused
from clipping.rules.elementwise import Broadcast


class LayerNormWeight(Broadcast):
    """γ [*normalized]; x̂ from the statistics of the forward kernel.

    Args:
        share: `nodes.Share` of the operation's node. If there is one, a kernel computes the per-sample gradients of γ
            and β when g arrives, and the input's gradient in the same pass.
    """

    def __init__(self, weight: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, share: Any = None) -> None:
        super().__init__(weight, x.shape, x)
        self.x, self.mean, self.rstd = x, mean.detach(), rstd.detach()  # avoids a reference cycle with the node
        self.share = share

    def instantiate(self, g: Tensor, samples: slice, way: str = "") -> Tensor:
        if self.share is None or not self.share.input_only or samples != slice(0, len(g)):
            return super().instantiate(g, samples)
        found = self.share.left(g)
        if found is None:
            given = self.x.detach(), self.mean, self.rstd, self.parameter.detach(), g
            found = self.share.leave(g, kernels.fused.of_layer_norm(*given))
        return found[1][:, 0].reshape(-1, *self.parameter.shape)

    def terms(self, g: Tensor, at: slice) -> Tensor:
        x, mean, rstd, g = self._parts(g, at)
        return (x.to(norm_dtype(g.dtype)) - mean).mul_(rstd).mul_(g)

    def sizes(self, g: Tensor, at: slice) -> Tensor:
        x, mean, rstd, g = self._parts(g, at)
        return (x.to(norm_dtype(g.dtype)).abs() + mean.abs()).mul_(rstd).mul_(g)

    def _parts(self, g: Tensor, at: slice) -> tuple[Tensor, ...]:
        return tuple(part(each, at) for each in (self.x, self.mean, self.rstd, g))


class LayerNormBias(Broadcast):
    """β [*normalized]; its gradient is found along with that of γ, the rule before it.

    Args:
        share: as of `LayerNormWeight`.
    """

    def __init__(self, bias: Tensor, output: torch.Size, share: Any) -> None:
        super().__init__(bias, output)
        self.share = share

    def instantiate(self, g: Tensor, samples: slice, way: str = "") -> Tensor:
        found = self.share.left(g) if samples == slice(0, len(g)) else None
        return super().instantiate(g, samples) if found is None else found[1][:, 1].reshape(-1, *self.parameter.shape)


class RMSNormWeight(Broadcast):
    """γ of an RMS norm, [*normalized_shape]; recomputes x̂."""

    def __init__(self, weight: Tensor, x: Tensor, normalized_shape: list[int], eps: float | None) -> None:
        super().__init__(weight, x.shape, x)
        self.x, self.normalized_shape, self.eps = x, normalized_shape, eps

    def terms(self, g: Tensor, at: slice) -> Tensor:
        normalised = F.rms_norm(part(self.x, at).detach(), self.normalized_shape, None, self.eps)
        return normalised.to(norm_dtype(g.dtype)).mul_(part(g, at))


def layer_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Sequence[Gradient]]:
    """torch.nn.functional.layer_norm and the gradients of its parameters."""
    shape = list(normalized_shape)
    share = kernels.nodes.share_of_layer_norm(input, weight, bias)
    if not share:
        output, mean, rstd = torch.native_layer_norm(input, shape, weight, bias, eps)
        return output, ((weight, LayerNormWeight, input, mean, rstd), (bias, Broadcast, output.shape))
    output, mean, rstd = kernels.nodes.LayerNorm.apply(share, input, shape, weight, bias, eps)
    return output, ((weight, LayerNormWeight, input, mean, rstd, share), (bias, LayerNormBias, output.shape, share))


Each = Callable[[Tensor, int], Tensor]
"""(vector [C], n) -> [n·C], with C entries for each row of the batch: `clipping.tape.uses.Activations.each`."""


def group_norm(
    each: Each,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """torch.nn.functional.group_norm, run on one sample with B·C channels in B·G groups.

    The result is the same, and it is no slower. Each sample has its own channels, and so its own γ and β. The kernel
    computes their gradients anyway; these are the per-sample gradients, without a second pass over g and x.
    """
    batch, channels = input.shape[:2]
    scale, shift = (None if p is None else each(p, batch) for p in (weight, bias))

    def normalised(x: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
        """Normalise some samples as if they were one."""
        folded = x.reshape(1, -1, *x.shape[2:])
        return _as_own(torch.group_norm(folded, len(x) * num_groups, scale, shift, eps), x)

    counts = [samples.stop - samples.start for samples in blocks(batch, num_groups, most_groups(input))]
    if len(counts) == 1:
        return normalised(input, scale, shift)
    # the backward pass of split joins the portions once; each view would allocate a gradient of the whole batch
    of_channels = [count * channels for count in counts]
    own = ([None] * len(counts) if p is None else p.split(of_channels) for p in (scale, shift))
    return torch.cat([normalised(*each) for each in zip(input.split(counts), *own, strict=True)])


def most_groups(x: Tensor) -> int:
    """Return the largest number of groups in one call.

    CUDA's backward kernel uses one thread block for each group, in the second dimension of its grid
    (`dim3(N, G)` in aten/src/ATen/native/cuda/group_norm_kernel.cu), which is limited to 65,535.
    """
    return 65_535 if x.is_cuda else 2**31 - 1


def rms_norm(
    input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> tuple[Tensor, Sequence[Gradient]]:
    """torch.nn.functional.rms_norm and the gradient of its weight."""
    output = F.rms_norm(input, normalized_shape, weight, eps)
    return output, ((weight, RMSNormWeight, input, normalized_shape, eps),)


def instance_norm(
    each: Each,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """torch.nn.functional.instance_norm, as torch runs it: a batch norm of one sample with B·C channels."""
    if use_input_stats and running_mean is not None:
        raise Refused("running statistics are made of the batch and are not private", "track_running_stats=False")
    batch, channels = input.shape[:2]
    mean, variance = (None if kept is None else kept.repeat(batch) for kept in (running_mean, running_var))
    scale, shift = (None if p is None else each(p, batch) for p in (weight, bias))
    x = input.reshape(1, batch * channels, *input.shape[2:])
    return _as_own(F.batch_norm(x, mean, variance, scale, shift, use_input_stats, momentum, eps), input)


def _as_own(folded: Tensor, x: Tensor) -> Tensor:
    """Reshape to the shape of x without marking the result as a view, so that a ReLU may change it in place cheaply.

    For in-place operations on a view, autograd copies the whole gradient. Hiding the view is safe: nothing else refers
    to `folded`, and no norm's backward pass reads its own output.
    """
    return torch.ops.aten._unsafe_view(folded, x.shape)
