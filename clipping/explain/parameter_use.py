"""Record how a step uses its parameters: a planned forward pass on a tape, and one backward pass.

A backend chooses a route for each `Reading`: one source of one use, with its rule and the gradient of the use's output.
`record` makes readings as the backends do, and makes plans while the tape has its graph.

Functions take:
    reading, readings: one use of a source; all uses of all parameters, in the order of the forward pass.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from clipping.backends.tape import TapeBackend
from clipping.core.batches import leading_dimension
from clipping.core.dtypes import norm_dtype
from clipping.core.types import Problem, UnsupportedModel
from clipping.planning.planner import Plan, Planner
from clipping.provenance.derived_parameters import Source
from clipping.rules.base import Refused, Route, Rule
from clipping.rules.embedding import EmbeddingWeight
from clipping.tape.graph import unrecorded
from clipping.tape.record import Tape
from clipping.tape.uses import Use


@dataclass(eq=False)
class Reading:
    """One source that a use reads. `g` is None if the loss does not depend on the use."""

    use: Use
    source: Source
    rule: Rule
    g: Tensor | None
    alone: bool
    """The parameters of the source have no other use."""

    @property
    def is_planned(self) -> bool:
        """Whether the norm belongs to one parameter alone, by a rule of its own: each route has a cost."""
        return self.g is not None and self.alone and self.source.rearranged and not self.rule.is_fallback


def record(
    backend: TapeBackend, inputs: Any, targets: Any, planner: Planner, plans: int = 1
) -> tuple[list[Reading], list[Plan]]:
    """Record one forward pass, and one backward pass of activation gradients, as `backend` would.

    Args:
        backend: with its model and loss.
        inputs, targets: real tensors or fake ones.
        planner, plans: makes this many plans: the first by formula, later ones may be timed.

    Returns:
        The readings, and the plans, with routes in the same order.

    Raises:
        UnsupportedModel: a parameter without an exact rule.
    """
    batch_size = leading_dimension(inputs, targets)
    model = backend.model
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    tape = Tape(parameters, (inputs, targets), batch_size)
    gradients: dict[Use, Tensor] = {}
    try:
        with tape:
            losses = backend.losses(inputs, targets, batch_size)
        problems = tape.problems or unrecorded(losses, tape, parameters)
        if problems:
            raise UnsupportedModel(backend.name, dict.fromkeys(problems))
        readings = [  # before the backward pass, which frees the rules
            Reading(use, source, rule, None, all(tape.counts[name] == 1 for name in source.parameters))
            for use in tape.uses
            for source, rule in use.rules
        ]
        made = [planner.plan(tape, losses) for _ in range(plans)]
        tape.backward(losses, gradients.__setitem__, retain_graph=False)
        for reading in readings:
            reading.g = gradients.get(reading.use)
            if reading.rule.is_fallback and reading.g is not None:  # a fallback fails only when it runs
                reading.rule.instantiate(reading.g, slice(0, reading.rule.samples(reading.g)))
    except Refused as refused:
        raise UnsupportedModel(backend.name, [Problem("model", refused.reason, refused.remedy)]) from refused
    finally:
        tape.close()
    return readings, made


def decide(readings: Sequence[Reading], by_ghost: Callable[[Rule], bool]) -> list[str | None]:
    """The route of each reading, under a backend that prefers Gram matrices where `by_ghost` is true.

    All uses of a parameter share one route: Gram matrices if each use reads the parameter itself and each pair has a
    cross term; else all are instantiated and added.

    Args:
        by_ghost: rule with a Gram form -> whether to use it.
    """
    found: list[str | None] = []
    together: defaultdict[str, list[int]] = defaultdict(list)
    for i, reading in enumerate(readings):
        rule, source, g = reading.rule, reading.source, reading.g
        if g is None:
            found.append(None)
            continue
        ghost = source.rearranged and rule.ghosts and by_ghost(rule) and (reading.alone or source.is_parameter)
        found.append("fallback" if rule.is_fallback else "ghost" if ghost else "instantiate")
        if not reading.alone:
            for name in source.parameters:
                together[name].append(i)
    for members in together.values():
        all_ghost = all(found[i] == "ghost" for i in members)
        if not all_ghost or not have_cross_terms([readings[i] for i in members]):
            for i in members:
                found[i] = "instantiate" if found[i] == "ghost" else found[i]
    return found


def have_cross_terms(readings: Sequence[Reading]) -> bool:
    """Whether each pair of these uses of one parameter has an inner product without instantiated gradients.

    Checked once for each two kinds of use, because a recurrent weight may have hundreds of equal uses.
    """
    kinds = {likeness(reading): reading for reading in readings}
    several = Counter(likeness(reading) for reading in readings)
    for this, a in kinds.items():
        for that, b in kinds.items():
            if this == that and several[this] == 1:
                continue
            assert a.g is not None and b.g is not None
            if a.rule.inner(a.g, b.rule, b.g) is None and b.rule.inner(b.g, a.rule, a.g) is None:
                return False
    return True


def likeness(reading: Reading) -> tuple[type, str]:
    """Everything about a reading that its costs can depend on: all but the values of tensors."""
    shapes = {k: tuple(v.shape) if isinstance(v, Tensor) else v for k, v in vars(reading.rule).items()}
    return type(reading.rule), repr((shapes, None if reading.g is None else tuple(reading.g.shape)))


def cross_terms(readings: Sequence[Reading]) -> dict[Reading, tuple[int, int]]:
    """(operations, bytes) of each reading's cross terms with later uses of the same parameter."""
    later: defaultdict[int, Counter[int]] = defaultdict(Counter)  # parameter -> features -> positions
    found = {}
    for reading in reversed(readings):
        rule, after = reading.rule, later[id(reading.rule.parameter)]
        if reading.alone or reading.g is None:
            continue
        mine = features(rule)
        # one-hot inputs on either side turn the Gram matrix over them into a look-up
        operations = sum(2 * rule.positions * count * min(mine, theirs) for theirs, count in after.items())
        entries = 2 * rule.positions * after.total()
        found[reading] = operations, entries * norm_dtype(reading.g.dtype).itemsize
        after[mine] += rule.positions
    return found


def features(rule: Rule) -> int:
    """Products that one entry of both Gram matrices takes."""
    return rule.outputs if isinstance(rule, EmbeddingWeight) else rule.inputs + rule.outputs


def in_words(reading: Reading, route: Route, decided: str | None) -> str | None:
    """What `bk_mixed` does with a reading: "ghost by pixels, blocks of 16", "kept, grouped", "discarded, unfold".

    Args:
        route: the plan's.
        decided: this reading's result of `decide` for the plan.
    """
    rule, g = reading.rule, reading.g
    if g is None:
        return None
    if not reading.alone:
        return "ghost, with cross terms" if decided == "ghost" else "kept, added up"
    if not reading.source.rearranged:
        return "pulled back"
    way = route.way or rule.best_way(g, ghost=route.ghost)
    several = len(rule.ghosts if route.ghost else rule.instantiations) > 1
    words = "ghost" if route.ghost else "kept" if route.kept else "discarded"
    if several:
        words += f" by {way}" if route.ghost else f", {way}"
    blocks = rule.blocks(g, way, route.block)
    return words if len(blocks) == 1 else f"{words}, blocks of {max(part.stop - part.start for part in blocks)}"
