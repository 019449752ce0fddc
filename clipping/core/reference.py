"""The reference result: Σ_i c_i g_i, one sample at a time, accumulated in float64.

Functions take:
    together: samples whose mean gradient is clipped as one.
    bounds: upper bounds of the norms, which the factors are computed from instead; None for the norms themselves.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from clipping.core.batches import leading_dimension, losses_of, map_tensors
from clipping.core.clip_functions import ClipFunction, Flat, factors_by_name
from clipping.core.dtypes import norm_dtype, wide_dtype
from clipping.core.microbatching import Parts, each, sum_dtype
from clipping.core.types import ClippedGradient, LossFunction, Parameters

WIDENED = 2**22
"""Entries of a gradient to accumulate in float64 in one operation."""


def definition(
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: Any,
    targets: Any,
    *,
    clip: ClipFunction,
    together: int = 1,
    bounds: Tensor | None = None,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> ClippedGradient:
    """The result that every backend must return, computed one sample at a time.

    Args:
        around: returns a context manager to enter around each sample's run.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    alone = []
    for i in range(leading_dimension(inputs, targets)):
        sample, target = map_tensors(lambda x, i=i: x[i : i + 1].detach(), (inputs, targets))  # type: ignore[misc]
        with around(), torch.enable_grad():
            alone.append(one_by_one(model, loss_fn, parameters, sample, target, clip=Flat(math.inf)))
    return of_means(alone, clip, together, bounds)


def one_by_one(
    model: nn.Module,
    loss_fn: LossFunction,
    parameters: Parameters,
    inputs: Any,
    targets: Any,
    *,
    clip: ClipFunction,
    together: int = 1,
) -> ClippedGradient:
    """Σ_i c_i g_i by a forward and a backward pass for each sample, or for each mean of `together` samples."""
    batch_size = leading_dimension(inputs, targets)
    sums = Sums(parameters)

    def one(at: slice) -> Parts:
        sample, target = map_tensors(lambda x: x[at], (inputs, targets))
        loss = losses_of(model, loss_fn, sample, target, batch_size=at.stop - at.start)
        grads = with_zeros(gradients(loss.mean(), parameters), parameters)
        return sums.add(grads, clip, loss), loss.detach()

    starts = range(0, batch_size, together)
    norms, losses = zip(*each(one, [slice(i, min(i + together, batch_size)) for i in starts]), strict=True)
    return ClippedGradient(sums.rounded(), torch.cat(norms), torch.cat(losses))


def of_means(
    samples: Sequence[ClippedGradient], clip: ClipFunction, together: int, bounds: Tensor | None = None
) -> ClippedGradient:
    """Σ_k c_k ḡ_k, where ḡ_k is the mean of `together` consecutive samples.

    Args:
        samples: unclipped results of batches of one.
    """
    names, sums = list(samples[0].grads), Sums(samples[0].grads)
    losses = torch.cat([sample.losses for sample in samples])
    norms = []
    for k, start in enumerate(range(0, len(samples), together)):
        few = samples[start : start + together]
        mean = {name: torch.stack([sample.grads[name] for sample in few]).mean(0) for name in names}
        norms.append(sums.add(mean, clip, losses, None if bounds is None else bounds[k]))
    return ClippedGradient(sums.rounded(), torch.cat(norms), losses, bounds)


class Sums:
    """Accumulates clipped gradients in float64."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._wide = {name: wide_dtype(p.dtype) for name, p in parameters.items()}
        self._totals = {
            name: torch.zeros_like(p, dtype=sum_dtype(p), memory_format=torch.contiguous_format)
            for name, p in parameters.items()
        }

    def add(self, grads: dict[str, Tensor], clip: ClipFunction, like: Tensor, bound: Tensor | None = None) -> Tensor:
        """Clip and add one gradient; return its norm [1] before clipping.

        Args:
            grads: parameter name -> gradient, of the parameter's shape; every parameter has one.
            like: any tensor of the gradients' device.
            bound: of the whole norm, to clip by.
        """
        layers = [
            torch.linalg.vector_norm(g, dtype=sum_dtype(g)).to(norm_dtype(g.dtype)).view(1) for g in grads.values()
        ]
        if not layers:
            return like.new_zeros(1, dtype=norm_dtype(like.dtype))
        norm, factors = factors_by_name(torch.stack(layers), list(grads), clip, sum(g.numel() for g in grads.values()))
        if bound is not None:
            factors = dict.fromkeys(grads, clip.factors(torch.maximum(norm, bound.to(norm))))
        for name, grad in grads.items():
            pieces = (x.view(-1).split(WIDENED) for x in (self._totals[name], grad.contiguous()))
            for total, piece in zip(*pieces, strict=True):
                total.addcmul_(piece, factors[name][0])
        return norm

    def rounded(self) -> dict[str, Tensor]:
        """Return the sums in float32 or the parameters' wider dtype, and free the accumulators."""
        return {name: self._totals.pop(name).to(self._wide[name]) for name in list(self._totals)}


def gradients(loss: Tensor, parameters: Parameters, *, keep_graph: bool = False) -> dict[str, Tensor]:
    """∂loss/∂θ for each parameter in the graph, dense; does not touch `.grad`.

    Args:
        loss: a scalar.
    """
    if not parameters or not loss.requires_grad:
        return {}
    grads = torch.autograd.grad(loss, list(parameters.values()), retain_graph=keep_graph, allow_unused=True)
    return {
        name: grad.to_dense() if grad.is_sparse else grad
        for name, grad in zip(parameters, grads, strict=True)
        if grad is not None
    }


def with_zeros(grads: dict[str, Tensor], parameters: Parameters) -> dict[str, Tensor]:
    """Return `grads` in the order of `parameters`, with zeros where the loss does not depend on one."""
    wide = norm_dtype(next(iter(grads.values())).dtype) if grads else torch.float32
    return {
        name: grads[name] if name in grads else torch.zeros_like(p, dtype=torch.promote_types(wide, p.dtype))
        for name, p in parameters.items()
    }
