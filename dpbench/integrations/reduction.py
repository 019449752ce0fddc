"""Is the gradient that arrives at the outputs of a sample that sample's own? The loss is run again to see.

What the caller computes from the outputs and from the loader's tensors (labels, masks, weights) is noted in the first
few batches, in the one after each new kind of loss, and in one of 200 later (`dpbench.engine.loss_mixing_check`). At
`optimizer.step()` it runs again:

others   with the samples outside of S replaced by one of S, inputs, outputs and labels alike, for several S: what the
         model reads for S, and the gradients of the outputs of S, must be the same. A mean over the tokens that are no
         padding, or weighted by classes, is divided by what the whole batch holds, and is found so; and so are pairs
         of samples that were mixed before the model.
twice    with each sample there twice: under a mean gradients are halved, under a sum they stay. So a sum that was said
         to be a mean is found, whose gradients would be multiplied by the size of the batch.

What cannot run again (numbers that left torch, tensors of another loader) is said once, and not looked at.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from clipping.checks.sample_independence import separating
from clipping.checks.second_look import TOLERANCE, Change, differing, replaced, same
from clipping.core.batches import map_tensors, tensors_of
from clipping.core.dtypes import coarsest
from clipping.core.types import Problem, UnsupportedModel
from clipping.numerics.rng_replay import Draws
from dpbench.engine import PrivacyWarning
from dpbench.engine.loss_mixing_check import Trace, Traced, plain

FIRST, RATE, KNOWN = 3, 1 / 200, 32
"""Batches that are looked at first, the share of later ones, and how many losses are told apart."""
DIVISIONS = {"div", "div_", "true_divide", "__truediv__", "__div__", "__itruediv__", "__idiv__", "divide"}
REMEDY = (
    "let the loss of a sample depend on it alone: reduction='sum' with loss_reduction='sum', or hand make_private the "
    "criterion with grad_sample_mode='ghost', which takes the losses of the samples"
)
ALONE = "make what the model reads of each sample alone: normalise by constants, and mix no samples of the batch"
Made = Callable[[Tensor], Tensor]


def _itself(x: Tensor) -> Tensor:
    return x


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone()


class Looks:
    """When to look.

    Args:
        by: who hands out the batches, for messages.
    """

    def __init__(self, by: str) -> None:
        self._by = by
        self._first, self._random = FIRST, random.Random(0)
        self._graphs: set[tuple[str, ...]] = set()

    def due(self) -> Look | None:
        """For the next batch."""
        return Look(self._by) if self._random.random() < RATE or self._first > 0 else None

    def done(self) -> None:
        """One batch was looked at."""
        self._first -= self._first > 0

    def ran(self, nodes: tuple[str, ...]) -> None:
        """A backward pass of these nodes of autograd's, between loss and outputs: after a new kind one more is due.

        Args:
            nodes: their names, in order.
        """
        if nodes not in self._graphs and len(self._graphs) < KNOWN:
            self._graphs.add(nodes)
            self._first = max(self._first, 1)


class Look(Trace):
    """One batch: what is computed from it, and how the loss came about.

    Args:
        by: as of `Looks`.

    Attributes:
        done: it was looked at.
    """

    done = False

    def __init__(self, by: str) -> None:
        super().__init__()
        self._by = by
        self._inputs: list[Tensor] = []  # that the model has read
        self._handed: list[Tensor] = []  # what was made of the model's outputs, in the order of their cuts
        self._losses: list[tuple[int, Any]] = []  # identity of what backward() was called on, its gradient

    def batch(self, batch: Any) -> Any:
        """The loader's tensors, which note what is done with them.

        Args:
            batch: of the loader.
        """
        return map_tensors(lambda x: x if isinstance(x, Traced) else self._begun(x), batch)

    def read(self, *trees: Any) -> None:
        """The model is called with these."""
        self._inputs += [x for x in tensors_of(trees) if isinstance(x, Traced) and x.noted_by is self and x.dim()]

    def begun(self, handed: Tensor) -> Tensor:
        """The same of an output of the model.

        Args:
            handed: an output, with a graph of its own.
        """
        traced = self._begun(handed)
        self._handed.append(traced)
        return traced

    def noted(self, x: Tensor) -> Tensor:
        """One of the tensors that were noted, which has lost its class on the way out of the model.

        Args:
            x: what the model gave.
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

    def judge_inputs(self, batch_size: int) -> None:
        """Say whether what the model has read for a sample, of B, was made of that sample alone.

        Args:
            batch_size: B.

        Raises:
            UnsupportedModel: it was not.
        """
        if batch_size < 2 or not self._inputs:
            return
        self.done = True
        draws, read = Draws(), [id(x) for x in self._inputs]
        was = _run(draws, partial(self._values, read, _copy))
        for others in map(replaced, separating(batch_size)):
            now = _run(draws, partial(self._values, read, others.of))
            if was is None or now is None or any(a.shape != b.shape for a, b in zip(was, now, strict=True)):
                _unknown(self._by, "what is made of a batch before the model cannot be run again")
                return
            sample = differing(was, now, others, coarsest(was, TOLERANCE))
            if sample is not None:
                reason = f"samples mix: what the model reads for sample {sample} changes with the other samples"
                raise UnsupportedModel(self._by, [Problem("batch", reason, ALONE)])

    def judge_losses(self, losses: Tensor, batch_size: int) -> None:
        """Say whether each of the losses [B] is made of its own sample alone, and what the model has read, too.

        Args:
            losses: that the caller computed.
            batch_size: B.

        Raises:
            UnsupportedModel: they are not.
        """
        self.judge_inputs(batch_size)
        if batch_size < 2 or not isinstance(losses, Traced) or losses.noted_by is not self:
            return
        self.done = True
        draws, key = Draws(), id(losses)
        base = _run(draws, partial(self._values, [key], _copy))
        for others in map(replaced, separating(batch_size)):
            now = _run(draws, partial(self._values, [key], others.of))
            if base is None or now is None:
                _unknown(self._by, "it cannot be run with other labels")
                return
            sample = differing(base, now, others, coarsest(base, TOLERANCE))
            if sample is not None:
                reason = f"samples mix: the loss of sample {sample} changes with the other samples"
                remedy = "let each sample have a loss of its own, divided by nothing that the batch holds"
                raise UnsupportedModel(self._by, [Problem("losses", reason, remedy)])

    def judge(self, arrived: Sequence[Tensor | None], batch_size: int, *, mean: bool) -> None:
        """Say whether the gradients that `arrived` at the outputs, [B, ...] each, are the samples' own.

        Args:
            arrived: at each output that was handed to the caller; None where nothing came.
            batch_size: B.
            mean: whether the loss is a mean over the batch.

        Raises:
            UnsupportedModel: they are not.
        """
        self.judge_inputs(batch_size)
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
            with draws.again():  # are there random numbers in the loss? Then others give another one
                torch.rand(1)
                later = Draws()
            other = gradients(_copy, draws=later)
            base = base if other is not None and _differ(other, base, everybody, tolerance) else None
        if base is None:
            _unknown(self._by, "it cannot be run again")
            return
        for others in map(replaced, separating(batch_size)):
            now = gradients(others.of)
            if now is None:
                _unknown(self._by, "it cannot be run with other labels")
                break
            sample = differing(base, now, others, tolerance)
            if sample is not None:
                reason = f"samples mix: the gradient of the loss of sample {sample} changes with the other samples"
                raise UnsupportedModel("grad_sample_mode='hooks'", [Problem("criterion", reason, REMEDY)])
        twice = gradients(lambda x: _twice(x, batch_size), lambda x: _twice(x, batch_size)) or []
        first, second = [x[:batch_size] for x in twice], [x[batch_size:] for x in twice]
        if not twice or _differ(first, second, everybody, tolerance):
            if mean != self._averaged(batch_size):
                _unknown(self._by, "it cannot be run with each sample twice")
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

    def _values(self, keys: Sequence[int], change: Made) -> list[Tensor]:
        """Noted tensors by their identities, where all begin with what `change` makes of them."""
        values = self._again(lambda x: change(plain(x)))
        return [values[key] for key in keys]

    def _gradients(self, change: Made, fixed: Made) -> list[Tensor]:
        """Of the loss at the model's outputs, all tensors being what `change` makes of them, constants `fixed`."""
        leaves: dict[int, Tensor] = {}
        handed = {id(x) for x in self._handed}

        def begin(x: Tensor) -> Tensor:
            found = change(plain(x))
            if id(x) not in handed:
                return found
            leaves[id(x)] = found.requires_grad_()
            return found.clone()  # which may be changed in place

        values = self._again(begin, fixed)
        outputs = [leaves[id(x)] for x in self._handed]
        total: list[Tensor] = [torch.zeros_like(x) for x in outputs]
        for loss, gradient in self._losses:
            found = torch.autograd.grad(values[loss], outputs, gradient, retain_graph=True, allow_unused=True)
            total = [sum_ if x is None else sum_ + x for sum_, x in zip(total, found, strict=True)]
        return total

    def _averaged(self, batch_size: int) -> bool:
        """Was there a mean, by the names of the operations?"""
        for note in self._notes:
            name = getattr(note.operation, "__name__", "")
            reduction = note.kwargs.get("reduction", "mean" if name.endswith(("loss", "entropy")) else "")
            if name == "mean" or reduction == "mean":
                return True
        return self._divided(batch_size)

    def _divided(self, batch_size: int) -> bool:
        """Did the caller divide by a multiple of B, or multiply by 1/B? Then a sum is a mean all the same."""
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
    """The node of autograd's that a tensor is the result of, whatever classes it had since."""
    node: Any = x.grad_fn
    while node is not None and node.name().startswith("AliasBackward"):
        node = node.next_functions[0][0]
    return node


def _run(draws: Draws, again: Callable[[], list[Tensor]]) -> list[Tensor] | None:
    """What it gives with the random numbers from `draws` on; None where it cannot run."""
    try:
        with draws.again(), torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
            return again()
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError):
        return None


def _differ(one: Sequence[Tensor], other: Sequence[Tensor], everybody: Change, tolerance: float) -> bool:
    return any(a.shape != b.shape for a, b in zip(one, other, strict=True)) or (
        differing(one, other, everybody, tolerance) is not None
    )


def _twice(x: Tensor, batch_size: int) -> Tensor:
    """[2B·k, ...] of what has B·k rows; the same of anything else."""
    if isinstance(x, nn.Parameter) or not x.dim() or not len(x) or len(x) % batch_size:
        return x.detach().clone()
    return torch.cat([x.detach(), x.detach()])


def _unknown(by: str, why: str) -> None:
    warnings.warn(
        f"nobody has seen that the loss keeps samples apart: {why}; take the batches as {by} hands "
        "them out, and keep to torch's operations",
        PrivacyWarning,
        stacklevel=2,
    )
