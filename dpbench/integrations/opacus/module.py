"""The modules of `make_private`: the model itself, under Opacus' names."""

from collections.abc import Callable
from typing import Any

from torch import nn

from dpbench.engine import Misuse
from dpbench.integrations.opacus.by_hand import ByEngine


class GradSampleHooks(ByEngine):
    """Returned by `wrap_model=False`: removes the hooks from the model, which trains as it is.

    Args:
        model: trains privately.
        loss_reduction: "mean" or "sum".
        close: restores model and optimizer.
    """

    batch_first = True

    def _begin(self, model: nn.Module, loss_reduction: str, close: Callable[[], None]) -> None:
        self._module, self.loss_reduction, self._close_all = model, loss_reduction, close

    def cleanup(self) -> None:
        """Restore model and optimizer; may be called twice."""
        self._close_all()

    remove_hooks = cleanup

    def forbid_grad_accumulation(self) -> None:
        """Does nothing, as a step always has one backward pass."""

    def set_grad_sample_to_none(self) -> None:
        """Does nothing, as no per-sample gradient is stored."""

    del_grad_sample = set_grad_sample_to_none

    def disable_hooks(self) -> None:
        """Always raises Misuse, as the hooks ignore what is evaluated."""
        raise Misuse(
            "expected eval mode or torch.no_grad() for what is not trained, got disable_hooks(); remove_hooks() ends "
            "private training"
        )


class GradSampleModule(GradSampleHooks, nn.Module):
    """Returned by `wrap_model=True`: calls the model, and finds its submodules by name.

    As in Opacus, the names of its parameters begin with ``_module.``; `to_standard_module()` returns the model alone.
    """

    def _begin(self, model: nn.Module, loss_reduction: str, close: Callable[[], None]) -> None:
        nn.Module.__init__(self)
        super()._begin(model, loss_reduction, close)
        self.train(model.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_module":  # a copy in construction
                raise
        return getattr(self._module, name)

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no engine, and an ordinary model."""
        return {**self.__dict__, "_close_all": _nothing}

    def to_standard_module(self) -> nn.Module:
        """Return the model itself, without hooks."""
        self.cleanup()
        return self._module

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._module!r})"


def _nothing() -> None:
    """Does nothing."""


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the model inside our wrapper.

    Args:
        module: a model, wrapped or not.

    Raises:
        TypeError: one of Opacus' own wrappers, with hooks on the model.
    """
    if isinstance(module, GradSampleModule):
        return module._module
    if type(module).__module__.startswith("opacus.grad_sample"):
        raise TypeError(
            f"expected a module without Opacus' hooks, got its {type(module).__name__}: hand in "
            "module.to_standard_module()"
        )
    return module
