"""Do the samples of a batch stay apart? Two looks that need no oracle, at the whole batch, in the mode that trains.

rows    Let S be some of the samples. In a backward pass of Σ_{i∈S} ℓ_i the gradient of each use's output must be zero,
        exactly, in the rows of all other samples: else samples mix, or rows are in another order than the samples.
others  The same step again, with other records, or more or fewer of them, beside those of S: losses and norms of S must
        be what they were (`clipping.checks.second_look`). This shows what no gradient does (a detached mean of the
        batch).

Rows are looked at when the graph of the losses is new, the others when shapes are, and both in about one step of 400;
rows at first by so many S that any two samples are told apart by one of them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import combinations, islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clipping.checks.second_look import REMEDY, Change, fewer, more, replaced
from clipping.core.batches import map_tensors
from clipping.core.types import Problem

if TYPE_CHECKING:
    from clipping.tape.record import Tape
    from clipping.tape.uses import Use

RATE = 1 / 400
KNOWN = 32
"""So many graphs and shapes are told apart; after that no graphs, and sizes by their powers of two."""


class Occasions:
    """When to look, and by which samples. The same in every run, so that training can be repeated."""

    def __init__(self) -> None:
        self._graphs: set[int] = set()
        self._shapes: set[str] = set()
        self._shape = ""
        self._random = random.Random(0)
        self._insisted = [False, False]

    def insist(self) -> None:
        """Rows and others are looked at in the next step that is asked about: its code is new."""
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

    def changes(self, batch_size: int, *trees: Any) -> Sequence[Change]:
        """Of the batch, to repeat the step with; none for most steps.

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
        if self._shape in self._shapes and not due:
            return ()
        half = self._half(batch_size)
        every = [*(replaced(each, poison=True) for each in (half, ~half)), fewer(batch_size), more(batch_size)]
        return every if self._shape not in self._shapes else (self._random.choice(every),)

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


def _rough(shape: Any) -> Any:
    if not isinstance(shape, tuple):
        return shape
    return [size.bit_length() if isinstance(size, int) else size for size in shape]
