"""Makes a `Workload` of a user's model, records and loss; turns its errors into one line with a working example."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipping.core.batches import leading_dimension, losses_of, map_tensors
from dpbench.errors import their_code
from dpbench.models.losses import classification_loss, logits_of, token_loss
from dpbench.models.workload import ModelError, Workload

#: A complete working function, in a line.
EXAMPLE = "def build(): return nn.Linear(20, 3), (torch.randn(16, 20), torch.randint(0, 3, (16,)))"
HINT = (
    f"what works: `{EXAMPLE}`, a model and (inputs, targets) of a few records, perhaps a loss after them; "
    "`python -m dpbench template mine.py` writes such a file"
)


@contextmanager
def hinting() -> Iterator[None]:
    """Add to a ModelError raised in the body how to use any other model."""
    try:
        yield
    except ModelError as error:
        error.args = (f"{error}; {HINT}",)
        raise


def one_line(expected: str, path: Path | None = None) -> AbstractContextManager[None]:
    """Turn an error raised in the body into a ModelError, with the line of `path` where it happened.

    Args:
        expected: for the error.
        path: the user's file, or None.
    """
    return their_code(expected, (ModelError, MemoryError, torch.OutOfMemoryError), path, ModelError)


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
