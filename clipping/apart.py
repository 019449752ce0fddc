"""Do the samples of a batch stay apart? Two looks that need no oracle, at the whole batch, in the mode that trains.

rows    Let S be some of the samples. In a backward pass of Σ_{i∈S} ℓ_i the gradient of each use's output must be zero,
        exactly, in the rows of all other samples: else samples mix, or rows are in another order than the samples.
others  The same step again, with each sample that is not in S replaced by one that is, and the same random numbers:
        losses and norms of S must be what they were. This shows what no gradient does (a detached mean of the batch).

Rows are looked at when the graph of the losses is new, the others when shapes are, and both in about one step of 400;
rows at first by so many S that any two samples are told apart by one of them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import combinations, islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from clipping.batches import map_tensors
from clipping.draws import Draws
from clipping.formats import without_autocast
from clipping.types import Problem
from clipping.verification import CAST_TOLERANCE, reading_float64

if TYPE_CHECKING:
    from clipping.tape.record import Tape
    from clipping.tape.uses import Use

RATE = 1 / 400
KNOWN = 32
"""So many graphs and shapes are told apart; after that no graphs, and sizes by their powers of two."""
REMEDY = (
    "let no sample's loss depend on another one: statistics, sorting and attention within a sample (GroupNorm for "
    "BatchNorm); if only the order of rows differs from that of the samples, use microbatch or vmap"
)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Of the second step beside the first, by the dtype that was computed in. Kernels and shapes are those of the first,
and so are the rows of S, unless what is computed of them depends on the others."""


class Occasions:
    """When to look, and by which samples. The same in every run, so that training can be repeated."""

    def __init__(self) -> None:
        self._graphs: set[int] = set()
        self._shapes: set[str] = set()
        self._shape = ""
        self._random = random.Random(0)
        self._insisted = [False, False]

    def insist(self) -> None:
        """Rows and others are looked at in the next step that is asked about: those before ran as graphs, unseen."""
        self._insisted = [True, True]

    def _is_due(self, what: int) -> bool:
        insisted, self._insisted[what] = self._insisted[what], False
        return self._random.random() < RATE or insisted

    def rows(self, batch_size: int, graph: int) -> Sequence[Tensor]:
        """Sets S, [B] bool, to look at the rows of this step by; none for most steps.

        Args:
            batch_size: B.
            graph: the same number for graphs of the same nodes.
        """
        due = self._is_due(0)
        if batch_size < 2:
            return ()
        if graph not in self._graphs and len(self._graphs) < KNOWN:
            half = self._half(batch_size)
            return (half, ~half) if self._graphs else separating(batch_size)
        return (self._half(batch_size),) if due else ()

    def rows_passed(self, graph: int) -> None:
        """What mixes is looked at again, if somebody goes on with it.

        Args:
            graph: the number of the losses' graph, as `clipping.tape.graph` gives it.
        """
        if len(self._graphs) < KNOWN:
            self._graphs.add(graph)

    def others(self, batch_size: int, *trees: Any) -> Sequence[Tensor]:
        """Sets S, [B] bool, all samples outside of which are to be replaced in a repetition; none for most steps.

        Args:
            batch_size: B.
            trees: the batch's tensors [B, ...], and numbers about it.
        """
        due = self._is_due(1)
        if batch_size < 2:
            return ()
        shapes: list[Any] = [tree for tree in trees if isinstance(tree, (bool, int))]
        map_tensors(lambda x: shapes.append((x.dtype, *x.shape[1:])) or x, trees)  # type: ignore[func-returns-value]
        self._shape = repr(shapes if len(self._shapes) < KNOWN else [_rough(shape) for shape in shapes])
        half = self._half(batch_size)
        return (half, ~half) if self._shape not in self._shapes else (half,) if due else ()

    def others_passed(self) -> None:
        """In the last step that was asked about."""
        self._shapes.add(self._shape)

    def _half(self, batch_size: int) -> Tensor:
        chosen = torch.zeros(batch_size, dtype=torch.bool, device="cpu")
        chosen[self._random.sample(range(batch_size), batch_size // 2)] = True
        return chosen


def separating(batch_size: int) -> list[Tensor]:
    """Sets [B] bool of about half the samples, such that for any i ≠ j one holds i and not j.

    Sample i is in the sets of the i-th choice of ⌊n/2⌋ out of n, none of which contains another (Sperner 1928).

    Args:
        batch_size: B, at least 1.
    """
    n = next(n for n in range(1, 64) if math.comb(n, n // 2) >= batch_size)
    sets = torch.zeros(n, batch_size, dtype=torch.bool, device="cpu")
    for i, chosen in enumerate(islice(combinations(range(n), n // 2), batch_size)):
        sets[list(chosen), i] = True
    return [each for each in sets if each.any() and not each.all()]


def mixed_rows(tape: Tape, losses: Tensor, occasions: Occasions | None) -> Problem | None:
    """Where a row of some use's output has a gradient of another sample's loss; None if there is none to be found.

    Args:
        tape: as the forward pass left it; it stays so.
        losses: [B], whose graph is kept.
        occasions: None for never.
    """
    batch_size = len(losses)
    if occasions is None:
        return None
    for half in occasions.rows(batch_size, tape.arrivals.graph):
        inside = half.to(losses.device)
        largest: dict[Use, Tensor] = {}

        def arrived(use: Use, g: Tensor, largest: dict[Use, Tensor] = largest) -> None:
            found = use.largest(g, batch_size)
            largest[use] = torch.maximum(largest[use], found) if use in largest else found

        tape.arrivals.run(torch.where(inside, losses, torch.zeros_like(losses)), arrived)
        if not largest:
            continue
        uses = list(largest)
        wrong = (torch.stack([largest[use].to(losses) for use in uses]) > 0) & ~inside
        if bool(wrong.any()):
            at, row = wrong.nonzero()[0].tolist()
            names = dict.fromkeys(name for source, _ in uses[at].rules for name in source.parameters)
            return Problem(
                ", ".join(names),
                f"{uses[at].operation}: samples mix, the losses of other samples depend on what it gives for sample "
                f"{row}",
                REMEDY,
            )
    if batch_size > 1:
        occasions.rows_passed(tape.arrivals.graph)
    return None


def changed(
    model: nn.Module,
    run: Callable[[Any], Sequence[Tensor]],
    batch: Any,
    halves: Sequence[Tensor],
    draws: Draws,
    before: Sequence[Tensor],
    tolerance: float,
) -> int | None:
    """A sample for which `run` gives something else where those outside of its half are replaced; None if none is.

    What differs must differ in float64, too, if the model can be cast: experts are chosen by numbers that may be within
    a rounding of one another.

    Args:
        model: what is run, with its buffers as they were.
        run: of a batch, tensors [B·k, ...].
        batch: every tensor [B, ...].
        halves: [B] bool each.
        draws: before the run that gave `before`.
        before: what it gave.
        tolerance: relative to the largest number in each tensor.
    """

    def differs(batch: Any, before: Sequence[Tensor], tolerance: float) -> int | None:
        for half in halves:
            with repeated(model, draws):
                sample = differing(before, run(with_others_replaced(batch, half)), half, tolerance)
            if sample is not None:
                return sample
        return None

    sample = differs(batch, before, tolerance)
    if sample is None or tolerance <= CAST_TOLERANCE:
        return sample
    wide = map_tensors(lambda x: x.double() if x.is_floating_point() else x, batch)
    autocast = without_autocast(before[0].device)
    with suppress(RuntimeError, TypeError, NotImplementedError), reading_float64(model), autocast:
        with repeated(model, draws):
            in_wide = run(wide)
        sample = differs(wide, in_wide, CAST_TOLERANCE)
    return sample


def with_others_replaced(tree: Any, half: Tensor) -> Any:
    """Tensors [B·k, ...] with each sample outside of `half` replaced by the first one in it; others as they are.

    Args:
        tree: tensors in nested tuples, lists and dicts.
        half: [B] bool, true of the samples that stay.
    """
    first = int(half.nonzero()[0])

    def replaced(x: Tensor) -> Tensor:
        x = x.detach().clone()
        if x.dim() and len(x) and len(x) % len(half) == 0:
            samples = x.unflatten(0, (len(half), -1))
            samples[~half.to(x.device)] = samples[first].clone()
        return x

    return map_tensors(replaced, tree)


def differing(before: Sequence[Tensor], after: Sequence[Tensor], half: Tensor, tolerance: float) -> int | None:
    """A sample of `half` whose numbers are not what they were, relative to the largest in each tensor [B·k, ...].

    Args:
        before, after: the same tensors of both steps.
        half: [B] bool, true of the samples that had to stay as they were.
        tolerance: the largest difference that rounding explains, relative.
    """
    for one, other in zip(before, after, strict=True):
        if one.shape != other.shape or not one.dim() or one.shape[0] % len(half) or not one.is_floating_point():
            continue
        rows = torch.stack([one.detach(), other.detach()]).double().reshape(2, len(half), -1)[:, half.to(one.device)]
        scale = torch.where(rows.isfinite(), rows.abs(), 0).amax() if rows.numel() else rows.new_zeros(())
        wrong = ((rows[0] - rows[1]).abs() > tolerance * scale).any(1)
        if bool(wrong.any()):
            return int(half.nonzero()[int(wrong.nonzero()[0])])
    return None


def mixing(sample: int, what: str) -> Problem:
    """The problem of samples that a second look found to depend on others.

    Args:
        sample: its position in the batch.
        what: what changed, such as "gradient".
    """
    return Problem("model", f"samples mix: the {what} of sample {sample} changes with the other samples", REMEDY)


@contextmanager
def repeated(model: nn.Module, draws: Draws) -> Iterator[None]:
    """What runs inside has the random numbers that came after `draws`, and leaves the model's buffers as they are.

    Args:
        model: whose buffers are put back.
        draws: the state of the generators to begin from.
    """
    buffers = [(module, name, x) for module in model.modules() for name, x in module._buffers.items() if x is not None]
    kept = [x.detach().clone() for _, _, x in buffers]
    versions = [x._version for _, _, x in buffers]
    try:
        with draws.again():
            yield
    finally:
        for (module, name, x), copy, version in zip(buffers, kept, versions, strict=True):
            module._buffers[name] = x
            if x._version != version:
                with torch.no_grad():
                    x.copy_(copy)


def _rough(shape: Any) -> Any:
    if not isinstance(shape, tuple):
        return shape
    return [size.bit_length() if isinstance(size, int) else size for size in shape]
