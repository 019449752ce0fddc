"""Find the logits of a model that computes its own loss, as in transformers: ``model(**batch).loss.backward()``.

The logits that `F.cross_entropy` reads inside the model count as its outputs (`dpbench.integrations.opacus.outputs`),
if the loss is a mean over samples: all samples have equally many counted labels. The returned loss must depend on the
parameters through these logits alone, which is checked.
"""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from clipping.core.autograd import nodes

MANY = 256
"""Largest number of a loss's nodes to follow."""


class LossInside(TorchFunctionMode):
    """Watches a forward pass for `F.cross_entropy` with a mean over samples.

    Args:
        batch_size: B.
        take: replaces logits [B·k, classes] by equal ones with a graph of their own.
        reduction: the caller's, "mean" or "sum".
    """

    def __init__(self, batch_size: int, take: Callable[[Tensor], Tensor], reduction: str) -> None:
        super().__init__()
        self._batch_size, self._take, self._reduction = batch_size, take, reduction

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            given = (
                dict(zip(("input", "target", "weight", "size_average", "ignore_index"), args, strict=False)) | kwargs
            )
            if self._of_samples(given):
                rest = {name: x for name, x in given.items() if name not in ("input", "size_average", "reduce")}
                return func(self._take(given["input"]), **rest)
        return func(*args, **kwargs)

    def _of_samples(self, given: dict[str, Any]) -> bool:
        logits, labels = given["input"], given["target"]
        if not logits.requires_grad or logits.dim() != 2 or labels.shape != logits.shape[:1] or not self._batch_size:
            return False
        if given.get("reduction", "mean") != self._reduction or len(labels) % self._batch_size:
            return False
        if self._reduction == "sum":
            return True
        count = (labels != given.get("ignore_index", -100)).view(self._batch_size, -1).sum(1)
        return given.get("weight") is None and bool((count == count[0]).all())


def depends_on(x: Tensor, anchors: set[int]) -> bool:
    """Returns whether the gradient of `x` ends at these tensors and nowhere else.

    Args:
        x: with or without a graph.
        anchors: identities of tensors without a graph of their own.
    """
    for number, node in enumerate(nodes([x.grad_fn])):
        variable = getattr(node, "variable", None)
        if number >= MANY or (variable is not None and id(variable) not in anchors):
            return False
    return True
