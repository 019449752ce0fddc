"""Check that the samples of a batch do not mix, without an oracle: on the whole batch, in training mode.

rows    For a subset S of the samples, run a backward pass of Σ_{i∈S} ℓ_i. The gradient of each use's output must be
        exactly zero in the rows of all other samples; else samples mix, or rows are not in the order of the samples.
        It must also be zero in rows that belong to no sample, because norms by rows leave them out.
again   The first of these passes runs twice, and must give the same gradients, as norms and sums may come from two.
others  Run the step again with other records, or more or fewer of them, beside those of S. Losses and norms of S must
        not change (`clipping.checks.rerun`). This finds what no gradient shows (a detached mean of the batch).

"rows" runs when the graph of the losses is new, and "others" when shapes are new. Both also run in steps 2, 4, 8, ...,
as a schedule may begin to mix samples, in about one step of 400, and after a refusal. A graph stays new, for at most 8
steps, until all uses have nonzero gradients in one step, as zeros show nothing (a gate that begins at 0). The first
check of rows uses enough sets S to separate any two samples.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations, islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clipping.checks.rerun import REMEDY, Change, fewer, more, of_one, replaced, tolerance_of
from clipping.checks.verification import WrongGradient
from clipping.core.batches import tensors_of
from clipping.core.types import Problem, UnsupportedModel
from clipping.numerics.rng_replay import Draws

if TYPE_CHECKING:
    from clipping.tape.record import Tape
    from clipping.tape.uses import Use

NOBODYS = (
    "the losses depend on what it gives for rows that belong to no sample, such as a constant joined to the batch",
    "join as many rows for each sample, or give the constant to the layer in a call of its own",
)
"""Reason and remedy."""
AGAIN = (
    "the backward pass gives other gradients when it runs again, as with a hook that removes itself, a custom function "
    "that writes to its ctx, or a checkpoint that draws other random numbers"
)
SAME = (
    "let each backward pass do the same: call Tensor.register_hook in forward, write to ctx in a function's forward "
    "only, and checkpoint with preserve_rng_state=True"
)
"""Reason and remedy."""
RATE = 1 / 400
PATIENCE = 8
"""Most steps in which a graph counts as new."""
KNOWN = 32
"""Most graphs and shapes to distinguish. Further graphs count as known; further sizes are rounded to powers of two."""


class Occasions:
    """Decides when to check, and with which samples. Seeded, so that training can be repeated.

    Methods take:
        graph: the number of the losses' graph (`clipping.tape.graph`), equal for graphs of the same nodes.
    """

    def __init__(self) -> None:
        self._graphs: set[int] = set()
        self._tries: Counter[int] = Counter()
        self._shapes: set[str] = set()
        self._shape = ""
        self.is_new = False
        """Whether the graph that `rows` was last asked about was new."""
        self._random = random.Random(0)
        self._insisted, self._asked = [False] * 3, [0] * 3
        self._scaled = 0, set[int]()
        self.refused = False
        """Whether the last step was refused: each step is checked until one passes, as a caller may catch the error."""

    def insist(self) -> None:
        """Check rows and others in the next step, because its code is new, or its batch is followed."""
        self._insisted[:2] = [True, True]

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Context of a step, which notes whether it is refused."""
        try:
            yield
        except (UnsupportedModel, WrongGradient):
            self.refused = True
            raise

    def follows(self) -> bool:
        """Whether to follow what is computed of the loader's next batch."""
        return self._is_due(2)

    def _is_due(self, what: int) -> bool:
        insisted, self._insisted[what] = self._insisted[what], False
        self._asked[what] += 1
        return self._random.random() < RATE or insisted or self.refused or self._is_early(what)

    def _is_early(self, what: int) -> bool:
        """Whether this is step 1, 2, 4, 8, ...: mixing that begins in step t is looked for by step 2t."""
        return self._asked[what].bit_count() == 1

    def rows(self, batch_size: int, graph: int) -> Sequence[Tensor]:
        """The sets S, [B] bool, for the rows of this step; empty for most steps."""
        due = self._is_due(0)
        self.is_new = batch_size > 1 and graph not in self._graphs and len(self._graphs) < KNOWN
        if batch_size < 2:
            return ()
        if self.is_new:
            half = self._half(batch_size)
            return (half, ~half) if self._graphs else separating(batch_size)
        return (self._half(batch_size),) if due else ()

    def rows_passed(self, graph: int, whole: bool = True) -> None:
        """Record that this graph passed. A graph that fails is checked again if training goes on.

        Args:
            whole: every use had a gradient that is not zero.
        """
        self._tries[graph] += self.is_new
        if self.is_new and (whole or self._tries[graph] >= PATIENCE):
            self._graphs.add(graph)

    def changes(self, batch_size: int, *trees: Any) -> Sequence[Change]:
        """The changed batches to repeat this step with; empty for most steps.

        Args:
            trees: the batch's tensors [B, ...], and numbers about it. A batch of one is changed as a whole.
        """
        due = self._is_due(1)
        shapes: list[Any] = [batch_size > 1, *(tree for tree in trees if isinstance(tree, (bool, int)))]
        shapes += [(x.dtype, *x.shape[1:]) for x in tensors_of(trees)]
        self._shape = repr(shapes if len(self._shapes) < KNOWN else [_rough(shape) for shape in shapes])
        if self._shape in self._shapes and not (due and batch_size > 1):
            return ()
        if batch_size == 1:
            return (of_one(1, 0).spoiled,)
        half = self._half(batch_size)
        every = [*(replaced(each, poison=True) for each in (half, ~half)), fewer(batch_size), more(batch_size)]
        if self._shape not in self._shapes or self.refused:
            return every
        # a schedule changes a weight, not what is divided by the size
        return (self._random.choice(every[:2] if self._is_early(1) else every),)

    def scales(self, batch_size: int, places: set[int]) -> bool:
        """Whether an operation scaled by the batch size in the last check, too, and that was of another size.

        Args:
            batch_size: of this check.
            places: of the operations that scaled by it, or by its inverse.
        """
        last, self._scaled = self._scaled, (batch_size, places)
        return last[0] != batch_size and not places.isdisjoint(last[1])

    def others_passed(self) -> None:
        """Record that the last shapes passed."""
        self._shapes.add(self._shape)
        self.refused = False

    def _half(self, batch_size: int) -> Tensor:
        chosen = torch.zeros(batch_size, dtype=torch.bool, device="cpu")
        chosen[self._random.sample(range(batch_size), batch_size // 2)] = True
        return chosen


def separating(batch_size: int) -> list[Tensor]:
    """Sets [B] bool of about half the samples: for any i ≠ j, one holds i but not j.

    Sample i is in the sets of the i-th choice of ⌊n/2⌋ out of n; no such choice contains another (Sperner 1928).
    """
    n = next(n for n in range(1, 64) if math.comb(n, n // 2) >= batch_size)
    sets = torch.zeros(n, batch_size, dtype=torch.bool, device="cpu")
    for i, chosen in enumerate(islice(combinations(range(n), n // 2), batch_size)):
        sets[list(chosen), i] = True
    return [each for each in sets if each.any() and not each.all()]


def mixed_rows(tape: Tape, losses: Tensor, occasions: Occasions | None, *, owned: bool = True) -> Problem | None:
    """Find a row of a use's output that another sample's loss depends on; None if there is none.

    Args:
        tape: as the forward pass left it; not changed.
        losses: [B]; their graph is kept.
        occasions: when to check; None for never.
        owned: also find a row of no sample that a loss depends on: norms by rows leave it out.
    """
    batch_size = len(losses)
    awake: set[Use] = set()
    if occasions is None:
        return None
    sets = occasions.rows(batch_size, tape.arrivals.graph)
    draws = Draws() if sets and tape.hooked else None
    first: dict[Use, Tensor] = {}
    again: dict[Use, Tensor] = {}
    for number, half in enumerate((*sets[:1], *sets)):
        inside = half.to(losses.device)
        allowed = torch.cat([inside, inside.new_tensor([not owned])])
        sketches = (first, again)[number] if number < 2 else None
        largest = _pass(tape, torch.where(inside, losses, torch.zeros_like(losses)), sketches)
        if number == 1 and (odd := _differing(first, again, losses.dtype)) is not None:
            return Problem(", ".join(odd.names), f"{odd.operation}: {AGAIN}", SAME)
        if draws is not None and draws.used():
            return Problem("model", AGAIN, SAME)
        if not largest:
            continue
        uses = list(largest)
        reached = torch.stack([largest[use].to(losses) for use in uses]) > 0
        awake.update(use for use, is_reached in zip(uses, reached.any(1).tolist(), strict=True) if is_reached)
        wrong = reached & ~allowed
        if bool(wrong.any()):
            at, row = wrong.nonzero()[0].tolist()
            reason, remedy = "samples mix, the losses of other samples depend on what it gives for sample {}", REMEDY
            if row == batch_size:
                reason, remedy = NOBODYS
            names = ", ".join(dict.fromkeys(uses[at].names))
            return Problem(names, f"{uses[at].operation}: {reason.format(row)}", remedy)
    occasions.rows_passed(tape.arrivals.graph, awake.issuperset(tape.arrivals.expected))
    return None


def _pass(tape: Tape, losses: Tensor, sketches: dict[Use, Tensor] | None) -> dict[Use, Tensor]:
    """Largest magnitudes [B + 1] of the gradients of Σ_i ℓ_i that arrive at uses.

    Args:
        sketches: gets a sketch of each use's gradient, unless None.
    """
    largest: dict[Use, Tensor] = {}

    def arrived(use: Use, g: Tensor) -> None:
        found = use.largest(g, len(losses))
        largest[use] = torch.maximum(largest[use], found) if use in largest else found
        if sketches is not None:
            few = _sketch(g)
            sketches[use] = sketches[use] + few if use in sketches else few

    tape.arrivals.run(losses, arrived)
    return largest


def _sketch(g: Tensor) -> Tensor:
    """[B·k + 1]: the products of a gradient [B·k, ...] with a vector along each other dimension, and last its norm."""
    found, wide = g if g.dim() else g[None], torch.promote_types(g.dtype, torch.float32)
    norm = torch.linalg.vector_norm(g, dtype=wide).to(wide)
    while found.dim() > 1:
        found = found @ torch.arange(found.shape[-1], device=g.device).cos().to(found.dtype)
    return torch.cat([found.to(wide), norm[None]])


def _differing(first: Mapping[Use, Tensor], again: Mapping[Use, Tensor], dtype: torch.dtype) -> Use | None:
    """A use whose sketches differ in two passes by more than rounding (a GPU adds in any order); None if there is none.

    NaN and infinity are left to other checks.
    """
    for use in first.keys() ^ again.keys():
        return use
    tolerance = tolerance_of({dtype, *(use.output.dtype for use in first)})
    differ = [((again[use] - x).abs() > tolerance * x[-1].abs()).any() for use, x in first.items()]
    wrong = torch.stack([x.to(differ[0].device) for x in differ]).tolist() if differ else []
    return next((use for use, is_wrong in zip(first, wrong, strict=True) if is_wrong), None)


def _rough(shape: Any) -> Any:
    if not isinstance(shape, tuple):
        return shape
    return [size.bit_length() if isinstance(size, int) else size for size in shape]
