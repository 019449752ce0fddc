"""Check that the gradient at a sample's outputs depends on that sample alone, by rerunning the loss.

The check records what the caller computes from the outputs and from the loader's tensors (labels, masks, weights), in
the first few batches, in the batch after each new kind of loss, and in one of 200 later ones
(`dpbench.engine.trace`). At `optimizer.step()` it reruns this:

others   with the samples outside of S replaced by samples of S, in inputs, outputs and labels, for several S. The
         model's inputs for S, and the gradients of the outputs of S, must not change. This detects a mean over the
         tokens that are not padding, or weighted by classes, which is divided by a number of the whole batch; and
         samples that were mixed before the model. Numbers kept from an earlier batch become NaN: a loss that reads
         them (over a running mean, beside a queue of outputs) depends on samples that are not clipped with it.
twice    with each sample twice: a mean halves the gradients, a sum does not. This detects a sum declared as a mean,
         whose gradients would be multiplied by the size of the batch.

If something cannot be rerun (numbers that left torch, tensors of another loader), a warning says so once.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from clipping.checks.rerun import TOLERANCE, Change, coarsest, differing, replaced, same
from clipping.checks.sample_independence import separating
from clipping.core.batches import tensors_of
from clipping.core.types import Problem, UnsupportedModel
from clipping.numerics.rng_replay import Draws
from dpbench.engine import PrivacyWarning
from dpbench.engine.mixing_check import require_own_rows
from dpbench.engine.trace import Trace, Traced, plain

DIVISIONS = {"div", "div_", "true_divide", "__truediv__", "__div__", "__itruediv__", "__idiv__", "divide"}
MIXES = (
    "samples mix: the gradient of the loss of sample {} changes with the other samples, of this batch or an earlier one"
)
REMEDY = (
    "let the loss of a sample depend on it alone: reduction='sum' with loss_reduction='sum', or pass make_private the "
    "criterion with grad_sample_mode='ghost', which takes the losses of the samples"
)
Made = Callable[[Tensor], Tensor]


def _itself(x: Tensor) -> Tensor:
    return x


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone()


class Look(Trace):
    """Records the operations on one batch, and checks its loss.

    Args:
        model: in training.

    Attributes:
        done: the batch was checked.

    Methods take:
        batch_size: B.
    """

    done, room = False, math.inf

    def __init__(self, model: nn.Module) -> None:
        super().__init__(id(model))
        self._model = model
        self._inputs: list[Tensor] = []  # the model's inputs
        self._handed: list[Tensor] = []  # the model's outputs, in order
        self._losses: list[tuple[int, Any]] = []  # (identity of backward()'s tensor, its gradient)

    def read(self, *trees: Any) -> None:
        """Remember the model's inputs."""
        self._inputs += tensors_of(trees)

    def begun(self, handed: Tensor) -> Tensor:
        """Make an output of the model record the operations on it.

        Args:
            handed: an output, with a graph of its own.
        """
        traced = self._begun(handed)
        self._handed.append(traced)
        return traced

    def noted(self, x: Tensor) -> Tensor:
        """The recorded tensor behind one that lost its class inside the model.

        Args:
            x: an output of the model.
        """
        node = _computed_by(x)
        for note in reversed(self._notes):
            if isinstance(note.result, Traced) and _computed_by(plain(note.result)) is node:
                return note.result
        return x

    def run(self, operation: Any, args: Any, kwargs: Any) -> Any:
        if operation is Tensor.backward:
            gradient = kwargs.get("gradient", args[1] if len(args) > 1 else None)
            self._losses.append((id(args[0]), gradient))
            return operation(*args, **kwargs)
        return super().run(operation, args, kwargs)

    def close(self) -> None:
        super().close()
        self._inputs.clear()
        self._handed.clear()
        self._losses.clear()

    def judge(self, arrived: Sequence[Tensor | None], batch_size: int, *, mean: bool) -> None:
        """Raise an UnsupportedModel unless each sample's gradient at the outputs, [B, ...], depends on it alone.

        Args:
            arrived: gradient at each output given to the caller; None without one.
            mean: whether the loss is a mean over the batch.
        """
        require_own_rows(self._model, "make_private", self, self._inputs)
        was = [x for x in arrived if x is not None]
        if batch_size < 2 or not self._handed or not any(bool(x.any()) for x in was):
            return
        self.done = True
        draws = Draws()
        tolerance = 10 * coarsest(was, TOLERANCE)
        reached = [x is not None for x in arrived]

        def gradients(change: Made, fixed: Made = _itself, draws: Draws = draws) -> list[Tensor] | None:
            """Of the outputs that a gradient had reached; None if the loss cannot run so."""
            found = _run(draws, partial(self._gradients, change, fixed))
            return None if found is None else [x for x, wanted in zip(found, reached, strict=True) if wanted]

        everybody = same(batch_size)
        base = gradients(_copy) if len(reached) == len(self._handed) else None
        if base is not None and _differ(was, base, everybody, tolerance):
            with draws.again():  # other random numbers show whether the loss draws any
                torch.rand(1)
                later = Draws()
            other = gradients(_copy, draws=later)
            base = base if other is not None and _differ(other, base, everybody, tolerance) else None
        if base is None:
            _unknown("it cannot be run again")
            return
        for others in map(replaced, separating(batch_size)):
            now = gradients(others.of, partial(self._of_earlier, others._replace(poison=True)))
            if now is None or _shapes(base) != _shapes(now):
                _unknown("it cannot be run with other labels")
                break
            sample = differing(base, now, others, tolerance)
            if sample is not None:
                raise UnsupportedModel("grad_sample_mode='hooks'", [Problem("criterion", MIXES.format(sample), REMEDY)])
        twice = gradients(lambda x: _twice(x, batch_size), lambda x: _twice(x, batch_size)) or []
        first, second = [x[:batch_size] for x in twice], [x[batch_size:] for x in twice]
        if not twice or _differ(first, second, everybody, tolerance):
            if mean != self._averaged(batch_size):
                _unknown("it cannot be run with each sample twice")
            return
        of_mean = not _differ([x / 2 for x in base], first, everybody, tolerance)
        of_sum = not _differ(base, first, everybody, tolerance)
        if of_mean if mean else of_sum:
            return
        if not mean:
            reason = "the loss is a mean over the batch, whose size divides each gradient, with loss_reduction='sum'"
            remedy = "say loss_reduction='mean', or give the criterion reduction='sum'"
        elif not self._divided(batch_size):
            reason = "the loss is a sum over the batch, and loss_reduction='mean' multiplies by the size of the batch"
            remedy = "say loss_reduction='sum', or give the criterion reduction='mean'"
        else:
            return
        raise UnsupportedModel("grad_sample_mode='hooks'", [Problem("criterion", reason, remedy)])

    def _of_earlier(self, change: Change, x: Tensor) -> Tensor:
        """Change a tensor that was kept from an earlier batch; others are unchanged."""
        return change.of_kept(plain(x)) if self.is_kept(x) else x

    def _gradients(self, change: Made, fixed: Made) -> list[Tensor]:
        """Gradients of the loss at the outputs, with `change` of the initial tensors and `fixed` of constants."""
        leaves: dict[int, Tensor] = {}
        handed = {id(x) for x in self._handed}

        def begin(x: Tensor) -> Tensor:
            found = change(plain(x))
            if id(x) not in handed:
                return found
            leaves[id(x)] = found.requires_grad_()
            return found.clone()  # may be changed in place

        values = self._again(begin, fixed)
        outputs = [leaves[id(x)] for x in self._handed]
        total: list[Tensor] = [torch.zeros_like(x) for x in outputs]
        for loss, gradient in self._losses:
            found = torch.autograd.grad(values[loss], outputs, gradient, retain_graph=True, allow_unused=True)
            total = [sum_ if x is None else sum_ + x for sum_, x in zip(total, found, strict=True)]
        return total

    def _averaged(self, batch_size: int) -> bool:
        """Whether the names of the operations show a mean."""
        for note in self._notes:
            name = getattr(note.operation, "__name__", "")
            reduction = note.kwargs.get("reduction", "mean" if name.endswith(("loss", "entropy")) else "")
            if name == "mean" or reduction == "mean":
                return True
        return self._divided(batch_size)

    def _divided(self, batch_size: int) -> bool:
        """Whether the caller divided by a multiple of B, or multiplied by 1/B, which makes a sum a mean."""
        for note in self._notes:
            name = getattr(note.operation, "__name__", "")
            for number in note.args:
                if isinstance(number, Tensor) and not isinstance(number, Traced) and not number.dim():
                    number = number.item()
                if isinstance(number, bool) or not isinstance(number, Real) or not number:
                    continue
                divisor = float(number) if name in DIVISIONS else 1 / float(number)
                if (name in DIVISIONS or "mul" in name) and divisor >= 1 and abs(divisor / batch_size % 1) < 1e-6:
                    return True
        return False


def _computed_by(x: Tensor) -> Any:
    """The autograd node of a tensor's computation, whatever its class."""
    node: Any = x.grad_fn
    while node is not None and node.name().startswith("AliasBackward"):
        node = node.next_functions[0][0]
    return node


def _run(draws: Draws, again: Callable[[], list[Tensor]]) -> list[Tensor] | None:
    """The result with the random numbers of `draws`; None if it cannot run."""
    try:
        with draws.again(), torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
            return again()
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError):
        return None


def _differ(one: Sequence[Tensor], other: Sequence[Tensor], everybody: Change, tolerance: float) -> bool:
    return _shapes(one) != _shapes(other) or differing(one, other, everybody, tolerance) is not None


def _shapes(tensors: Sequence[Tensor]) -> list[torch.Size]:
    return [x.shape for x in tensors]


def _twice(x: Tensor, batch_size: int) -> Tensor:
    """Repeat a tensor of B·k rows: [2B·k, ...]; copy any other."""
    if isinstance(x, nn.Parameter) or not x.dim() or not len(x) or len(x) % batch_size:
        return x.detach().clone()
    return torch.cat([x.detach(), x.detach()])


def _unknown(why: str) -> None:
    warnings.warn(
        f"whether the loss mixes samples could not be checked: {why}; take the batches as make_private "
        "hands them out, and keep to torch's operations",
        PrivacyWarning,
        stacklevel=2,
    )
