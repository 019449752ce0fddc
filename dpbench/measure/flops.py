"""Floating-point operations of a model's forward and backward pass, as torch's counter has them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from clipping.core.batches import losses_of, map_tensors
from dpbench.models.workload import Workload


def model_flops(workload: Workload, inputs: Any, targets: Any, batch_size: int) -> int | None:
    """Operations of ordinary training's forward and backward pass on a batch: 2 for a multiplication and an addition.

    Matrix products, convolutions and attention count, and nothing else. They are counted on one sample, times B. What a
    backend computes besides or twice does not count: so "model FLOPs" are defined (Chowdhery et al. 2022,
    arXiv:2204.02311, appendix B). None for recurrent layers, which torch's counter does not see, and for a model that
    takes no single sample.

    Args:
        workload: model and loss.
        inputs, targets: of a batch.
        batch_size: B.
    """
    parameters = [p for p in workload.model.parameters() if p.requires_grad]
    if any(isinstance(module, nn.RNNBase) for module in workload.model.modules()):
        return None
    try:
        # attention as matrix products: its kernel for a CPU is none that the counter knows
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


def of_convolution_backward(
    g: Sequence[int], x: Sequence[int], weight: Sequence[int], *others: Any, **result: Any
) -> int:
    """Each gradient takes as many as the forward pass; torch's formula for the weight's leaves groups out.

    Args:
        g, x, weight: shapes of the output's gradient, the input and the weight.
        others: of `aten.convolution_backward`, after the weight.
        result: what it gives; not read.
    """
    *_, transposed, _, _, (of_input, of_weight, _) = others
    positions = x[0] * math.prod((x if transposed else g)[2:])
    return 2 * math.prod(weight) * positions * (of_input + of_weight)


_OURS = {torch.ops.aten.convolution_backward: of_convolution_backward}
