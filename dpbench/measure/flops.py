"""Counts the floating-point operations of a model's forward and backward pass with torch's counter."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, flop_registry, shape_wrapper

from clipping.core.batches import losses_of, map_tensors
from dpbench.models.workload import Workload


def model_flops(workload: Workload, inputs: Any, targets: Any, batch_size: int) -> int | None:
    """Operations of ordinary training's forward and backward pass on a batch; a multiplication and an addition are 2.

    Counts matrix products, convolutions and attention only, on one sample, times B. Excludes what a backend computes in
    addition or twice: that is the definition of "model FLOPs" (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).
    Returns None for recurrent layers, which torch's counter does not see, and for a model that rejects a single sample.
    """
    parameters = [p for p in workload.model.parameters() if p.requires_grad]
    if any(isinstance(module, nn.RNNBase) for module in workload.model.modules()):
        return None
    try:
        # compute attention by matrix products: the counter does not know its CPU kernel
        with (
            FlopCounterMode(display=False, custom_mapping=_OURS) as counter,
            sdpa_kernel(SDPBackend.MATH),
            torch.enable_grad(),
        ):
            sample, target = map_tensors(lambda x: x[:1], (inputs, targets))
            losses = losses_of(workload.model, workload.loss_fn, sample, target, 1)
            torch.autograd.grad(losses.sum(), parameters, allow_unused=True)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None
    return int(counter.get_total_flops()) * batch_size


def _of_convolution_backward(
    g: Sequence[int], x: Sequence[int], weight: Sequence[int], *others: Any, **result: Any
) -> int:
    """Each gradient takes as many operations as the forward pass; torch's formula for the weight's ignores groups."""
    *_, transposed, _, _, (of_input, of_weight, _) = others
    positions = x[0] * math.prod((x if transposed else g)[2:])
    return 2 * math.prod(weight) * positions * (of_input + of_weight)


_OURS = {torch.ops.aten.convolution_backward: _of_convolution_backward}
#: Operation -> a function of its arguments and result that returns its floating-point operations.
FORMULAS = flop_registry | {operation: shape_wrapper(formula) for operation, formula in _OURS.items()}
