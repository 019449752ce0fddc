"""The two ends of every comparison: one sample at a time, which defines the answer, and no clipping at all.

And a third that is not to be compared with them: `TfMicrobatch`, which clips the mean of several samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import nn

from clipping.blocks import Parts, each, sum_dtype
from clipping.functions import ClipFunction, Flat
from clipping.interface import (
    Backend,
    ClippedGradient,
    LossFunction,
    Parameters,
    leading_dimension,
    map_tensors,
    norm_dtype,
    wide_dtype,
)
from clipping.rounding import excess
from clipping.samples import WIDENED, factors_by_name
from clipping.squares import sum_of_squares


class Microbatch(Backend):
    """Forward and backward for one sample after the other: Σ_i c_i g_i by its definition.

    Exact for whatever model autograd can differentiate, and slow: B small steps in place of one large one.
    """

    name = "microbatch"
    trusted = True

    def _rounding(self, batch_size: int) -> tuple[float, float] | None:
        return excess(batch_size, 0, 0, 1, self._dtype())

    def _clipped(self, parameters: Parameters, inputs: Any, targets: Any, batch_size: int) -> ClippedGradient:
        sums = Sums(parameters)

        def one(at: slice) -> Parts:
            sample, target = map_tensors(lambda x: x[at], (inputs, targets))
            loss = self.losses(sample, target, batch_size=at.stop - at.start)
            grads = with_zeros(gradients(loss.mean(), parameters), parameters)
            return sums.add(grads, self.clip, loss), loss.detach()

        starts = range(0, batch_size, self.together)
        microbatches = [slice(start, min(start + self.together, batch_size)) for start in starts]
        norms, losses = zip(*each(one, microbatches), strict=True)
        self.coverage = {"ghost": 0.0, "instantiated": 1.0, "fallback": 0.0}
        return ClippedGradient(sums.rounded(), torch.cat(norms), torch.cat(losses))


class TfMicrobatch(Microbatch):
    """TF Privacy's microbatches: the mean gradient of each m = `together` samples in a row is clipped, Σ_k c_k ḡ_k.

    **Another mechanism than per-sample clipping**, unless m = 1. One sample replaced moves one clipped mean anywhere in
    the ball of radius C, so the sum by 2C, not C; one added or removed moves those after it to other microbatches, and
    the sum by up to 2C for each. Larger m is faster, and the signal smaller: K = B/m means of length C at the most
    beside the same noise. (TF Privacy, `num_microbatches` = K of `DPKerasSGDOptimizer`, whose l2_norm_clip is the "max
    L2 norm of per microbatch gradients"; it then divides by K, as nothing here does.)

    The last microbatch of a batch that m does not divide is smaller; TF Privacy refuses such a batch. `norms` are [K],
    of the means.
    """

    trusted = False

    def _rounding(self, batch_size: int) -> None:
        return None  # one record moves more than one mean


@cache
def tf_microbatch(together: int) -> type[TfMicrobatch]:
    """``tf_microbatch:M``: the backend for microbatches of M samples."""
    return type(f"TfMicrobatch{together}", (TfMicrobatch,), {"name": f"tf_microbatch:{together}", "together": together})


def definition(
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: Any,
    targets: Any,
    *,
    clip: ClipFunction,
    together: int = 1,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> ClippedGradient:
    """What a backend must give, from one sample at a time; of means where it clips those.

    Args:
        model, loss_fn, inputs, targets, clip: as for every backend.
        together: samples in a mean.
        around: entered for each sample's run.
    """
    each_clip = clip if together == 1 else Flat(max_grad_norm=float("inf"))
    microbatch = Microbatch(model, loss_fn, clip=each_clip)
    microbatch.refuses_no_numbers = False
    alone = []
    for i in range(leading_dimension(inputs, targets)):
        with around():
            alone.append(microbatch(*map_tensors(lambda x, i=i: x[i : i + 1], (inputs, targets))))  # type: ignore[misc]
    if together > 1:
        return of_means(alone, clip, together)
    sums = {name: torch.stack([sample.grads[name] for sample in alone]).sum(0) for name in alone[0].grads}
    norms = [sample.norms for sample in alone if sample.norms is not None]
    return ClippedGradient(sums, torch.cat(norms), torch.cat([sample.losses for sample in alone]))


def of_means(samples: Sequence[ClippedGradient], clip: ClipFunction, together: int) -> ClippedGradient:
    """Σ_k c_k ḡ_k, with ḡ_k the mean of `together` samples in a row.

    Args:
        samples: unclipped batches of one.
    """
    names, sums = list(samples[0].grads), Sums(samples[0].grads)
    losses = torch.cat([sample.losses for sample in samples])
    norms = []
    for start in range(0, len(samples), together):
        few = samples[start : start + together]
        mean = {name: torch.stack([sample.grads[name] for sample in few]).mean(0) for name in names}
        norms.append(sums.add(mean, clip, losses))
    return ClippedGradient(sums.rounded(), torch.cat(norms), losses)


class Sums:
    """Clipped gradients, added up one at a time in float64.

    Args:
        parameters: of which the gradients are.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._wide = {name: wide_dtype(p.dtype) for name, p in parameters.items()}
        self._totals = {name: torch.zeros_like(p, dtype=sum_dtype(p)) for name, p in parameters.items()}

    def add(self, grads: dict[str, torch.Tensor], clip: ClipFunction, like: torch.Tensor) -> torch.Tensor:
        """Add one gradient, clipped; its norm before clipping, [1], of the device of `like`."""
        layers = [sum_of_squares(g[None]).sqrt() for g in grads.values()]
        if not layers:
            return like.new_zeros(1, dtype=norm_dtype(like.dtype))
        norm, factors = factors_by_name(torch.stack(layers), list(grads), clip, sum(g.numel() for g in grads.values()))
        for name, grad in grads.items():
            pieces = (x.view(-1).split(WIDENED) for x in (self._totals[name], grad.contiguous()))
            for total, piece in zip(*pieces, strict=True):
                total.addcmul_(piece, factors[name][0])
        return norm

    def rounded(self) -> dict[str, torch.Tensor]:
        """The sums, in float32 or as wide as the parameters; used up."""
        return {name: self._totals.pop(name).to(self._wide[name]) for name in list(self._totals)}


class NonPrivate(Backend):
    """Ordinary training: ∂(Σ_i ℓ_i)/∂θ. The baseline of every ratio; `clip` is ignored and norms are not known."""

    name = "nonprivate"
    private = False
    trusted = True

    def problems(self) -> list[Any]:
        return []  # nothing per sample is asked of the model, BatchNorm included

    def _clipped(self, parameters: Parameters, inputs: Any, targets: Any, batch_size: int) -> ClippedGradient:
        losses = self.losses(inputs, targets, batch_size)
        grads = gradients(losses.sum(), parameters)
        return ClippedGradient(with_zeros(grads, parameters), None, losses.detach())


def gradients(loss: torch.Tensor, parameters: Parameters, *, keep_graph: bool = False) -> dict[str, torch.Tensor]:
    """∂loss/∂θ for the parameters that it depends on; `.grad` is neither read nor written."""
    if not parameters or not loss.requires_grad:
        return {}
    grads = torch.autograd.grad(loss, list(parameters.values()), retain_graph=keep_graph, allow_unused=True)
    return {name: grad for name, grad in zip(parameters, grads, strict=True) if grad is not None}


def with_zeros(grads: dict[str, torch.Tensor], parameters: Parameters) -> dict[str, torch.Tensor]:
    """`grads` in the order of `parameters`, zeros where the loss did not depend on one."""
    wide = norm_dtype(next(iter(grads.values())).dtype) if grads else torch.float32
    return {
        name: grads[name] if name in grads else torch.zeros_like(p, dtype=torch.promote_types(wide, p.dtype))
        for name, p in parameters.items()
    }
