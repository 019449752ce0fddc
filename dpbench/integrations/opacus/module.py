"""What `make_private` returns for the model: the model itself underneath, with Opacus' names around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class GradSampleHooks:
    """What `wrap_model=False` returns: the model is used as it is, and this takes the hooks off.

    Args:
        model: that trains privately.
        loss_reduction: "mean" or "sum".
        close: takes everything off the model and the optimizer.
    """

    batch_first = True

    def __init__(self, model: nn.Module, loss_reduction: str, close: Callable[[], None]) -> None:
        self._module, self.loss_reduction, self._close_all = model, loss_reduction, close

    def cleanup(self) -> None:
        """Leave model and optimizer as they were before `make_private`. Twice is fine."""
        self._close_all()

    remove_hooks = cleanup

    def forbid_grad_accumulation(self) -> None:
        """It never is allowed here: one backward pass a step."""


class GradSampleModule(nn.Module):
    """What `wrap_model=True` returns: calls the model, whose submodules are found by name here, too.

    As in Opacus, the names of its parameters begin with ``_module.``; `to_standard_module()` is the model alone.
    """

    batch_first = True

    def __init__(self, model: nn.Module, loss_reduction: str, close: Callable[[], None]) -> None:
        super().__init__()
        self._module = model
        self.loss_reduction = loss_reduction
        self._close_all = close
        self.train(model.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_module":  # of a copy that is being made
                raise
        return getattr(self._module, name)

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, which has no engine: its model is an ordinary one."""
        return {**self.__dict__, "_close_all": _nothing}

    def cleanup(self) -> None:
        """Leave model and optimizer as they were before `make_private`. Twice is fine."""
        self._close_all()

    remove_hooks = cleanup

    def to_standard_module(self) -> nn.Module:
        """The model itself, without hooks: an ordinary one again."""
        self.cleanup()
        model: nn.Module = self._module
        return model

    def forbid_grad_accumulation(self) -> None:
        """It never is allowed here: one backward pass a step."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._module!r})"


def _nothing() -> None:
    """There is nothing to take off."""


def unwrapped(module: nn.Module) -> nn.Module:
    """The model under one of ours.

    Args:
        module: a model, wrapped or not.

    Raises:
        TypeError: one of Opacus' own wrappers, whose hooks are on the model.
    """
    if isinstance(module, GradSampleModule):
        return module._module
    if type(module).__module__.startswith("opacus.grad_sample"):
        raise TypeError(
            f"expected a module without Opacus' hooks, got its {type(module).__name__}: hand in "
            "module.to_standard_module()"
        )
    return module
