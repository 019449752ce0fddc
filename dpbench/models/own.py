"""Makes a `Workload` of the user's own model, a few records and a loss; and holds the template file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipping.core.batches import leading_dimension, losses_of, map_tensors
from dpbench.models.complaints import one_line
from dpbench.models.losses import classification_loss, logits_of, token_loss
from dpbench.models.workload import ModelError, Workload


def own_workload(where: str, returned: tuple[Any, ...]) -> Workload:
    """The workload of (model, (inputs, targets)) or (model, (inputs, targets), loss_fn).

    Args:
        where: the function, for errors.
        returned: its result.

    Raises:
        ModelError: it is something else, or the tensors disagree about the number of records.
    """
    model, batch, *rest = returned
    wanted = f"{where} to return a model and (inputs, targets)"
    if not isinstance(model, nn.Module) or len(rest) > 1 or (rest and not callable(rest[0])):
        came = ", ".join(type(each).__name__ for each in returned)
        raise ModelError(f"{wanted}, perhaps with a loss function", came)
    if not isinstance(batch, tuple) or len(batch) != 2:
        raise ModelError(wanted, f"{type(batch).__name__} as the batch")
    try:
        records = leading_dimension(*batch)
    except ValueError as error:
        raise ModelError(f"{where} to return tensors [B, ...], of B records each", str(error)) from error
    if not records:
        raise ModelError(f"{where} to return at least one record", "none")
    loss_fn: Callable[[Any, Any], Tensor] = rest[0] if rest else loss_of_targets

    def of_size(batch_size: int) -> tuple[Any, Any]:
        places = torch.arange(batch_size) % records
        inputs, targets = map_tensors(lambda x: x.detach()[places.to(x.device)], batch)
        return inputs, targets

    with one_line(f"{where} to return a model that takes its own records"), torch.no_grad():
        losses_of(model, loss_fn, *of_size(2), 2)
    return Workload(model, loss_fn, of_size)


def loss_of_targets(outputs: Any, targets: Tensor) -> Tensor:
    """The loss [B] by kind of targets.

    Cross entropy for classes [B], pixels [B, ...] and tokens [B, T], else squared errors.

    Args:
        outputs: of the model: scores [B, K], [B, K, ...] or [B, T, V], or numbers of the targets' shape.
        targets: int64 for classes, floating otherwise.
    """
    scores = logits_of(outputs)
    if targets.is_floating_point():
        return (scores.reshape(targets.shape) - targets).square().reshape(len(targets), -1).mean(1)
    if targets.dim() == 1:
        return classification_loss(scores, targets)
    if scores.dim() == targets.dim() + 1 == 3 and scores.shape[1] == targets.shape[1]:
        return token_loss(scores, targets)
    return F.cross_entropy(scores, targets, reduction="none").flatten(1).mean(1)
