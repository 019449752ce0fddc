"""The loss of one sample as a function of parameters, for torch.func."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from clipping.core.batches import forward, map_tensors
from clipping.core.types import LossFunction


def loss_of_one(model: nn.Module, loss_fn: LossFunction) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function (parameters, sample, target) -> (its loss, the same detached), of one sample without batch."""
    caller = _Caller(model)

    def one(values: dict[str, Tensor], sample: Any, target: Any) -> tuple[Tensor, Tensor]:
        sample, target = map_tensors(lambda x: x[None], (sample, target))
        named = {f"model.{name}": value for name, value in values.items()}
        losses = loss_fn(functional_call(caller, named, (sample,)), target)
        if tuple(losses.shape) != (1,):
            raise ValueError(
                f"expected loss_fn to return one loss a sample, shape [1] for one sample, got {list(losses.shape)}; "
                "use reduction='none' and reduce all but the first dimension"
            )
        return losses[0], losses[0].detach()

    return one


class _Caller(nn.Module):
    """Wraps a model so that `functional_call` accepts inputs in a tensor, a tuple or a dict."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Any) -> Any:
        return forward(self.model, inputs)
