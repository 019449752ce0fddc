"""Explain the route of each use's norm, its costs, and the plan of `bk_mixed`.

The decisions are those of the two-pass backends (`clipping.backends.tape`), without their work: a forward pass is
recorded, one backward pass gives every use the gradient of its output, and only shapes are read, so fake tensors will
do. The plan is made by `clipping.planning.planner` from that tape.

Costs are for one sample, by the rule's formulas, in the way that the formulas prefer (a convolution's Gram matrices may
come from pixels or from patches, its gradient from patches or a grouped convolution). With the T positions, d inputs, p
outputs and G groups of arXiv:2205.10683, section 4, in short:

==============  ===========================  ==============================================================
route           operations                   bytes, in entries: `Rule.work(...).workspace`
==============  ===========================  ==============================================================
`ghost`         2 T² (p + d) G               2 T² G; and by patches 2 T d G, by pixels N² G for N pixels
`instantiate`   2 T p d G                    p d G: the per-sample gradient; and by patches T d G
==============  ===========================  ==============================================================

A multiplication and an addition are two operations. `ghost` takes `2 · Rule.work(...).multiplications` operations:
pixels take 2 (T² p + N² C) G, and from `numerics.per_sample.HALVED` positions on the symmetry of a Gram matrix saves
some. Bytes are workspace beside the operation's own input and output gradient, before it is cut into blocks. Besides:

- An embedding's inputs are one-hot; both its norm and its gradient add up T rows of p.
- A parameter without a linear form (bias, norm, bare parameter) takes one or two operations for an entry of g.
- A fallback's operations are unknown.
- Several uses of one parameter by Gram matrices need the cross term of each pair: 2TS(p + d) operations, 2TS entries.
  It counts for the use that comes first in the forward pass, whose gradient arrives last.
- The gradient of a slice, a cast or another function of parameters is instantiated, then pulled back to each parameter.
  It counts for the first of them.

Seconds are for the whole batch: the norm, and the use's share of the clipped sum.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clipping.backends.tape import FastGradClip, Ghost, MixedGhost, TapeBackend
from clipping.core.batches import leading_dimension, map_tensors
from clipping.core.dtypes import norm_dtype
from clipping.core.types import LossFunction, UnsupportedModel
from clipping.planning.costs import Costs, ghost_by_paper, measured, predicted
from clipping.planning.planner import Plan, Planner, kinds_of
from clipping.provenance.derived_parameters import Source
from clipping.rules.base import Route, Rule
from clipping.rules.elementwise import Broadcast
from clipping.rules.embedding import EmbeddingWeight
from clipping.rules.linear import LinearWeight
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

    @property
    def is_planned(self) -> bool:
        """Whether the norm belongs to one parameter alone, by a rule of its own: each route has a cost."""
        return self.g is not None and self.source.alone and self.source.rearranged and not self.rule.is_fallback


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
    parameters = {name: p for name, p in backend.model.named_parameters() if p.requires_grad}
    tape = Tape(parameters, (inputs, targets), batch_size)
    gradients: dict[Use, Tensor] = {}
    with closing(tape), backend.explained():
        with tape:
            losses = backend.losses(inputs, targets, batch_size)
        if problems := tape.problems or unrecorded(losses, tape, parameters):
            raise UnsupportedModel(backend.name, dict.fromkeys(problems))
        readings = [  # before the backward pass, which frees the rules
            Reading(use, source, rule, None) for use in tape.uses for source, rule in use.rules
        ]
        made = [planner.plan(tape, losses) for _ in range(plans)]
        tape.backward(losses, gradients.__setitem__, retain_graph=False)
        for reading in readings:
            reading.g = gradients.get(reading.use)
            if reading.rule.is_fallback and reading.g is not None:  # run it, as only this shows that it fails
                reading.rule.instantiate(reading.g, slice(0, reading.rule.samples(reading.g)))
    return readings, made


def _decide(readings: Sequence[Reading], by_ghost: Callable[[Rule], bool]) -> list[str | None]:
    """The route of each reading, under a backend that prefers Gram matrices where `by_ghost` is true.

    All uses of a parameter share one route: Gram matrices if each use reads the parameter itself and each pair has a
    cross term; else all are instantiated and added.
    """
    found: list[str | None] = []
    together: defaultdict[str, list[int]] = defaultdict(list)
    for i, reading in enumerate(readings):
        rule, source, g = reading.rule, reading.source, reading.g
        if g is None:
            found.append(None)
            continue
        ghost = source.rearranged and rule.ghosts and by_ghost(rule) and (reading.source.alone or source.is_parameter)
        found.append("fallback" if rule.is_fallback else "ghost" if ghost else "instantiate")
        if not reading.source.alone:
            for name in source.parameters:
                together[name].append(i)
    for members in together.values():
        all_ghost = all(found[i] == "ghost" for i in members)
        if not all_ghost or not _have_cross_terms([readings[i] for i in members]):
            for i in members:
                found[i] = "instantiate" if found[i] == "ghost" else found[i]
    return found


def _have_cross_terms(readings: Sequence[Reading]) -> bool:
    """Whether each pair of these uses of one parameter has an inner product without instantiated gradients.

    Checked once for each two kinds of use, because a recurrent weight may have hundreds of equal uses.
    """
    kinds = {_likeness(reading): reading for reading in readings}
    several = Counter(_likeness(reading) for reading in readings)
    for this, a in kinds.items():
        for that, b in kinds.items():
            if this == that and several[this] == 1:
                continue
            assert a.g is not None and b.g is not None
            if a.rule.inner(a.g, b.rule, b.g) is None and b.rule.inner(b.g, a.rule, a.g) is None:
                return False
    return True


def _likeness(reading: Reading) -> tuple[type, str]:
    """Everything about a reading that its costs can depend on: all but the values of tensors."""
    shapes = {k: tuple(v.shape) if isinstance(v, Tensor) else v for k, v in vars(reading.rule).items()}
    return type(reading.rule), repr((shapes, None if reading.g is None else tuple(reading.g.shape)))


def _cross_terms(readings: Sequence[Reading]) -> dict[Reading, tuple[int, int]]:
    """(operations, bytes) of each reading's cross terms with later uses of the same parameter."""
    later: defaultdict[int, Counter[int]] = defaultdict(Counter)  # parameter -> features -> positions
    found = {}
    for reading in reversed(readings):
        rule, after = reading.rule, later[id(reading.rule.parameter)]
        if reading.source.alone or reading.g is None:
            continue
        mine = _features(rule)
        # one-hot inputs on either side turn the Gram matrix over them into a look-up
        operations = sum(2 * rule.positions * count * min(mine, theirs) for theirs, count in after.items())
        entries = 2 * rule.positions * after.total()
        found[reading] = operations, entries * norm_dtype(reading.g.dtype).itemsize
        after[mine] += rule.positions
    return found


def _features(rule: Rule) -> int:
    """Products that one entry of both Gram matrices takes."""
    return rule.outputs if isinstance(rule, EmbeddingWeight) else rule.inputs + rule.outputs


def _in_words(reading: Reading, route: Route, decided: str | None) -> str | None:
    """What `bk_mixed` does with a reading: "ghost by pixels, blocks of 16", "kept, grouped", "discarded, unfold"."""
    rule, g = reading.rule, reading.g
    if g is None:
        return None
    if not reading.source.alone:
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


STRATEGIES: dict[str, type[TapeBackend]] = {"ghost": Ghost, "instantiate": FastGradClip, "mixed": MixedGhost}

Seconds = Mapping[str, float | None]
"""Maps "ghost", "kept", "discarded" to seconds of norm and share of the sum, whole batch; None: no such route."""


@dataclass(frozen=True)
class Cost:
    """Bytes or operations of one sample's norm by each route.

    None: there is no such route, the loss does not depend on the use, or the operations of a fallback are unknown.
    """

    ghost: int | None
    instantiate: int | None

    def of(self, route: str | None) -> int | None:
        """The cost of a route; a fallback costs as much as "instantiate".

        Args:
            route: "ghost", "instantiate" or "fallback"; None has no cost.
        """
        return None if route is None else self.ghost if route == "ghost" else self.instantiate


@dataclass(frozen=True)
class Row:
    """One use of one parameter.

    Attributes:
        parameter: its name.
        operation: the function that read it, or read what was made of it.
        positions, inputs, outputs, groups: T, d, p of each group, and the number of groups; None without a linear form.
        bytes, operations: see the module's docstring.
        routes: strategy -> "ghost", "instantiate" or "fallback"; None if the loss does not depend on this use.
        reason: why "mixed" does not follow the paper's rule, if so.
        plan: what `bk_mixed` does ("ghost by pixels, blocks of 16"); None if the loss does not depend on this use.
        predicted, measured: seconds by each route of `bk_mixed`, by formula and on this device; None if there is only
            one route, or nothing was measured.
    """

    parameter: str
    operation: str
    positions: int | None
    inputs: int | None
    outputs: int | None
    groups: int | None
    bytes: Cost
    operations: Cost
    routes: dict[str, str | None]
    reason: str | None
    plan: str | None
    predicted: Seconds | None
    measured: Seconds | None

    @property
    def paper(self) -> str | None:
        """The rule of arXiv:2205.10683: "ghost" if 2T² ≤ pd, else "instantiate"; None without a linear form."""
        if self.positions is None or self.inputs is None or self.outputs is None:
            return None
        return "ghost" if ghost_by_paper(self.positions, self.inputs, self.outputs) else "instantiate"


def explain(
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: Any,
    targets: Any,
    *,
    planner: Planner | None = None,
    measure: bool = False,
) -> list[Row]:
    """The routes of the two-pass backends, and the plan of `bk_mixed`.

    Args:
        model, loss_fn, inputs, targets: as for a backend; real tensors or fake ones.
        planner: makes the plan; by default one like that of `bk_mixed` that uses no file.
        measure: time the routes on this device, and report the timed plan. Takes many times a step's time, and memory
            for the inputs and gradients of all uses. Needs real tensors.

    Returns:
        A row for each use of each trainable parameter, in the order of the forward pass.

    Raises:
        UnsupportedModel: the two-pass backends refuse the model; lists every problem.
        ValueError: the tensors disagree about the batch size, or the loss does not have shape [B].
    """
    planner = Planner(file=False) if planner is None else planner
    backends = {name: make(model, loss_fn, verify=False) for name, make in STRATEGIES.items()}
    mixed = backends["mixed"]
    with torch.enable_grad():
        inputs = map_tensors(lambda x: x.detach(), inputs)
        readings, plans = record(mixed, inputs, targets, planner, plans=2 if measure else 1)
    routes = {name: _decide(readings, backend.by_ghost) for name, backend in backends.items()}
    crossing = _cross_terms([r for r, route in zip(readings, routes["ghost"], strict=True) if route == "ghost"])
    costs = _on_this_device(readings, plans[-1]) if measure else {}
    planned = dict(zip((reading.rule for reading in readings), plans[-1].routes, strict=True))
    decided = _decide(readings, lambda rule: planned[rule].ghost)
    rows: list[Row] = []
    for i, reading in enumerate(readings):
        mine = {name: found[i] for name, found in routes.items()}
        wanted = reading.g is not None and mixed.by_ghost(reading.rule)
        rows += _rows_of(
            reading,
            mine,
            crossing.get(reading, (0, 0)),
            reason=_why(reading, mine["mixed"], mine["ghost"], wanted),
            plan=_in_words(reading, plans[-1].routes[i], decided[i]),
            predicted=_seconds(reading, predicted(reading.rule, reading.use.output)) if reading.is_planned else None,
            measured=_seconds(reading, costs[i]) if i in costs else None,
        )
    return rows


def _on_this_device(readings: Sequence[Reading], plan: Plan) -> dict[int, Costs]:
    """Position -> measured costs of each reading with several routes: the plan's, or measured here."""
    found = dict(plan.costs)
    others: dict[Hashable, Costs] = {}
    with torch.no_grad():
        for position, reading in enumerate(readings):
            if position not in found and reading.is_planned:
                count = reading.rule.samples(reading.use.output)
                (what,) = kinds_of([(reading.use, reading.source, reading.rule)], count)
                if what not in others:
                    others[what] = measured(reading.rule, reading.use.output)
                found[position] = others[what]
    return found


def _seconds(reading: Reading, costs: Costs) -> Seconds:
    """Seconds of the whole batch, by each route."""
    count = reading.rule.samples(reading.use.output)
    ghost, instantiated = costs.best(ghost=True), costs.best(ghost=False)
    return {
        "ghost": None if ghost is None else count * (ghost[1] + costs.weight_gradient),
        "kept": None if instantiated is None or costs.kept is None else count * (instantiated[1] + costs.kept),
        "discarded": None if instantiated is None else count * (instantiated[1] + costs.weight_gradient + costs.reach),
    }


def _rows_of(
    reading: Reading, routes: dict[str, str | None], crossing: tuple[int, int], **others: Any
) -> Iterator[Row]:
    """A row for each parameter of the reading's source.

    Args:
        routes: strategy -> route.
        crossing: operations and bytes of the cross terms with other uses.
        others: further fields of each row.
    """
    rule, source, g = reading.rule, reading.source, reading.g
    ghost = routes["ghost"] == "ghost"
    sizes: tuple[int | None, int | None, int | None, int | None] = (None, None, None, None)
    if rule.positions:
        d, p = rule.inputs, rule.outputs
        d, p = (p, d) if isinstance(rule, LinearWeight) and rule.transposed else (d, p)
        sizes = rule.positions, d, p, rule.groups
    for position, (name, parameter) in enumerate(source.parameters.items()):
        bytes_, operations = Cost(None, None), Cost(None, None)
        if g is not None:
            pulled_back = not source.is_parameter and not (reading.source.alone and source.rearranged)
            own = parameter.numel() * g.element_size() if pulled_back else 0
            first = position == 0
            by_ghost = _workspace(rule, g, ghost=True) + crossing[1] if ghost else None
            bytes_ = Cost(by_ghost, (_workspace(rule, g, ghost=False) if first else 0) + own)
            by_ghost = _multiplying(rule, g) + crossing[0] if ghost else None
            operations = Cost(by_ghost, _instantiating(rule, g) if first else 0)
        yield Row(name, reading.use.operation, *sizes, bytes_, operations, routes, **others)


def _workspace(rule: Rule, g: Tensor, *, ghost: bool) -> int:
    """Bytes of one sample's norm, in the way that the formulas prefer."""
    return int(rule.work(g, rule.best_way(g, ghost=ghost)).workspace)


def _multiplying(rule: Rule, g: Tensor) -> int:
    """Operations of one sample's norm by Gram matrices, in the way that the formulas prefer."""
    if isinstance(rule, EmbeddingWeight):
        return rule.positions * rule.outputs
    return int(2 * rule.work(g, rule.best_way(g, ghost=True)).multiplications)


def _instantiating(rule: Rule, g: Tensor) -> int | None:
    """Operations of one sample's instantiated gradient."""
    if rule.is_fallback:
        return None
    if isinstance(rule, EmbeddingWeight):
        return rule.positions * rule.outputs
    if rule.positions:
        return 2 * rule.positions * rule.inputs * rule.outputs * rule.groups
    inner = getattr(rule, "rule", rule)  # rows regrouped by sample
    entries = g.numel() // rule.samples(g)
    if isinstance(inner, Broadcast) and inner.dim:  # concatenated: its gradient is a segment of g
        entries = entries * inner.parameter.shape[inner.dim] // g.shape[inner.dim]
    # entries of g are added; for a product they are first multiplied by the other factor
    return entries * (1 if getattr(inner, "factor", None) is None else 2)


def _why(reading: Reading, route: str | None, best: str | None, wanted: bool) -> str | None:
    """Why "mixed" deviates from its rule for a single use; None if it does not.

    Args:
        route, best: the routes of "mixed" and of "ghost".
        wanted: the rule prefers Gram matrices.
    """
    if route is None:
        return "the loss does not depend on this use"
    if route == "fallback":
        return f"{reading.use.operation} has no formula: its own vector-Jacobian product, sample by sample"
    if not reading.rule.positions or route == "ghost" or not wanted:
        return None
    if not reading.rule.ghosts:
        return "rows are regrouped by sample, which has no Gram form here"
    if not reading.source.rearranged:
        return "reads a function of the parameter (a slice, a cast), not the parameter"
    if not reading.source.is_parameter:
        return "the parameter has several uses, and this one reads a view of it"
    if best != "ghost":
        return "the parameter has several uses, and no cross term with another of them"
    return "the parameter has several uses, and another of them is instantiated"
