"""The loss of one sample as a function of parameters, for torch.func."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from clipping.core.batches import losses_of, map_tensors
from clipping.core.types import LossFunction


def loss_of_one(model: nn.Module, loss_fn: LossFunction) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function (parameters, sample, target) -> (loss, detached loss) of a sample without batch dimension."""
    of_batch = _Losses(model, loss_fn)

    def one(values: dict[str, Tensor], sample: Any, target: Any) -> tuple[Tensor, Tensor]:
        batch = map_tensors(lambda x: x[None], (sample, target))
        (loss,) = functional_call(of_batch, {f"model.{name}": value for name, value in values.items()}, batch)
        return loss, loss.detach()

    return one


class _Losses(nn.Module):
    """Wraps a model and its loss, so that `functional_call` accepts inputs in a tensor, a tuple or a dict."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, inputs: Any, targets: Any) -> Tensor:
        return losses_of(self.model, self.loss_fn, inputs, targets, batch_size=1)
