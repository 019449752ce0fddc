"""The criterion of `grad_sample_mode="ghost"`: stores per-sample losses, and shows their mean or sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from dpbench.engine import Misuse
from dpbench.engine.recorder import Hook
from dpbench.integrations.opacus.outputs import ACCUMULATION, barred, in_training, refuse_trained


class Backward:
    """The losses that `backward()` was called on, until the step.

    Args:
        model: its own losses are refused.
        forget: called when forward passes are dropped without a step.
    """

    def __init__(self, model: nn.Module, forget: Callable[[], None]) -> None:
        self._model, self._forget = model, forget
        self._losses: Tensor | None = None
        self._handles = [
            model.register_forward_pre_hook(Hook(self._before), prepend=True, with_kwargs=True),
            model.register_forward_hook(Hook(self._after), with_kwargs=True),
        ]

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if in_training(module, self._model):
            refuse_trained(args, kwargs)

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return barred(args, kwargs, output) if in_training(module, self._model) else None

    @property
    def pending(self) -> bool:
        """Whether there are losses without a step."""
        return self._losses is not None

    def arrived(self, losses: Tensor) -> None:
        """Store the losses of a `backward()`; the step computes the gradients.

        Args:
            losses: [B], with their graph.
        """
        if self._losses is not None:
            raise Misuse(f"{ACCUMULATION}; several losses of one batch are added first: (loss_a + loss_b).backward()")
        self._losses = losses

    def take(self) -> Tensor:
        """Return the losses [B] of this step.

        Raises:
            Misuse: no backward pass.
        """
        losses, self._losses = self._losses, None
        if losses is None:
            raise Misuse(
                "expected loss.backward() of the criterion that make_private returned before optimizer.step(), got none"
            )
        return losses

    def clear(self) -> None:
        """Drop the losses, for `zero_grad()`."""
        if self._losses is not None:
            self._losses = None
            self._forget()

    def close(self) -> None:
        """Remove the hooks, and drop the losses."""
        for handle in self._handles:
            handle.remove()
        self._losses = None


class DPTensor:
    """Per-sample losses [B] that act as one number: `item()`, `float()`, `detach()`, sums and multiples.

    `backward()` selects them for `optimizer.step()`. Losses of one batch may be added.
    """

    def __init__(self, losses: Tensor, reduction: str, backward: Backward) -> None:
        self.loss_per_sample, self.loss_reduction, self._backward = losses, reduction, backward

    def detach(self) -> Tensor:
        """The mean or the sum of the losses, as in the criterion, without a graph."""
        losses = self.loss_per_sample.detach()
        return losses.mean() if self.loss_reduction == "mean" else losses.sum()

    def item(self) -> float:
        """The same as a Python float."""
        return float(self.detach())

    __float__ = item

    def __iter__(self) -> Any:  # a GradScaler iterates over anything but a tensor
        raise Misuse("expected no GradScaler: scaled gradients would be clipped; bfloat16 autocast needs none")

    def backward(self) -> None:
        """Select these losses; `optimizer.step()` computes the clipped gradients."""
        self._backward.arrived(self.loss_per_sample)

    def _with(self, losses: Tensor) -> DPTensor:
        return DPTensor(losses, self.loss_reduction, self._backward)

    def _other(self, other: Any) -> Any:
        if not isinstance(other, DPTensor):
            if isinstance(other, Tensor) and (other.dim() or other.requires_grad):
                raise Misuse(
                    "expected a number or a loss of make_private's criterion beside another one, got a tensor "
                    f"{list(other.shape)}: what has a gradient of its own would not be clipped with the sample's"
                )
            return other
        if other.loss_reduction != self.loss_reduction:
            raise ValueError(f"expected losses of one reduction, got {self.loss_reduction} and {other.loss_reduction}")
        return other.loss_per_sample

    def __add__(self, other: Any) -> DPTensor:
        return self._with(self.loss_per_sample + self._other(other))

    __radd__ = __add__

    def __sub__(self, other: Any) -> DPTensor:
        return self._with(self.loss_per_sample - self._other(other))

    def __rsub__(self, other: Any) -> DPTensor:
        return self._with(self._other(other) - self.loss_per_sample)

    def __mul__(self, other: Any) -> DPTensor:
        return self._with(self.loss_per_sample * other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> DPTensor:
        return self._with(self.loss_per_sample / other)

    def __neg__(self) -> DPTensor:
        return self._with(-self.loss_per_sample)

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    def __repr__(self) -> str:
        return f"DPTensor({self.item():.4f}, loss_reduction={self.loss_reduction!r})"


class DPLoss:
    """Wraps a criterion to compute per-sample losses, with the same call.

    It averages (or sums) a loss with several numbers a sample [B, ...] over them. Pass ``shape=logits.shape`` for
    losses of tokens in one row [B·T]; the mean of a sample is then over its own tokens that are not `ignore_index`.

    Args:
        criterion: has an attribute `reduction`, as torch's; or a function that returns one loss a sample.
        reduction: "mean" or "sum".
        backward: receives the losses of `backward()`.

    Raises:
        ValueError: a criterion of another reduction.
    """

    def __init__(self, criterion: Any, reduction: str, backward: Backward) -> None:
        own = getattr(criterion, "reduction", reduction)
        if own not in (reduction, "none"):
            raise ValueError(f"expected a criterion with reduction={reduction!r} as loss_reduction says, got {own!r}")
        self.criterion, self.loss_reduction, self._backward = criterion, reduction, backward

    def __call__(self, *args: Any, shape: Any = None, **kwargs: Any) -> DPTensor:
        losses = self._unreduced(*args, **kwargs)
        if not isinstance(losses, Tensor):
            raise Misuse(f"expected a criterion that gives a tensor of losses, got {type(losses).__name__}")
        mean = self.loss_reduction == "mean"
        if shape is not None and losses.dim() == 1 and len(losses) == shape[0] * shape[1]:
            losses = losses.view(shape[0], shape[1])
            ignored = getattr(self.criterion, "ignore_index", None)
            targets = kwargs.get("target", args[1] if len(args) > 1 else None)
            if mean and ignored is not None and targets is not None:
                count = (targets.view(shape[0], shape[1]) != ignored).sum(1).clamp(min=1)
                losses = losses.sum(1) / count
        if losses.dim() > 1:
            losses = losses.flatten(1).mean(1) if mean else losses.flatten(1).sum(1)
        return DPTensor(losses, self.loss_reduction, self._backward)

    def _unreduced(self, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self.criterion, "reduction"):
            return self.criterion(*args, **kwargs)
        before = self.criterion.reduction
        self.criterion.reduction = "none"
        try:
            return self.criterion(*args, **kwargs)
        finally:
            self.criterion.reduction = before
