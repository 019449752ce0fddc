"""Explain the route of each use's norm, its costs, and the plan of `bk_mixed`.

The decisions are those of the two-pass backends (`clipping.backends.tape`), without their work: a forward pass is
recorded, one backward pass gives every use the gradient of its output, and only shapes are read, so fake tensors will
do. The plan is made by `clipping.planning.planner` from that tape.

Costs are those of one sample, by the formulas of the rule, in the way that they prefer (a convolution's Gram matrices
may come from pixels or from patches, its gradient from patches or a grouped convolution). With the T positions, d
inputs, p outputs and G groups of arXiv:2205.10683, section 4, in short:

==============  ===========================  ==============================================================
route           operations                   bytes, in entries: `Rule.work(...).workspace`
==============  ===========================  ==============================================================
`ghost`         2 T² (p + d) G               2 T² G; and by patches 2 T d G, by pixels N² G for N pixels
`instantiate`   2 T p d G                    p d G: the per-sample gradient; and by patches T d G
==============  ===========================  ==============================================================

A multiplication and an addition are two operations. Those of `ghost` are `2 · Rule.work(...).multiplications`: pixels
take 2 (T² p + N² C) G, and from `numerics.per_sample.HALVED` positions on the symmetry of a Gram matrix saves some.
Bytes are workspace beside the operation's own input and output gradient, before it is cut into blocks. Besides:

- An embedding's inputs are one-hot; both its norm and its gradient add up T rows of p.
- A parameter without a linear form (bias, norm, bare parameter) takes one or two operations for an entry of g.
- A fallback's operations are unknown.
- Several uses of one parameter by Gram matrices need the cross term of each pair: 2TS(p + d) operations, 2TS entries.
  It counts for the use that comes first in the forward pass, whose gradient arrives last.
- The gradient of a slice, a cast or another function of parameters is instantiated, then pulled back to each parameter.
  It counts for the first of them.

Seconds are those of the whole batch: of the norm, and of the use's share of the clipped sum.

Functions take:
    reading, rule: one use of a source, and its rule.
    g: the gradient of the use's output, [B, ...].
    ghost: by Gram matrices, or instantiated.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from clipping.backends.tape import FastGradClip, Ghost, MixedGhost, TapeBackend
from clipping.core.batches import map_tensors
from clipping.core.types import LossFunction
from clipping.explain.parameter_use import Reading, cross_terms, decide, in_words, record
from clipping.planning.costs import Costs, ghost_by_paper, measured, predicted
from clipping.planning.planner import Plan, Planner, kind
from clipping.rules.base import Rule
from clipping.rules.elementwise import Broadcast
from clipping.rules.embedding import EmbeddingWeight

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
        plan: what `bk_mixed` does (`clipping.explain.parameter_use.in_words`); None if the loss does not depend on this
            use.
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
    plan: str | None = None
    predicted: Seconds | None = None
    measured: Seconds | None = None

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
    routes = {name: decide(readings, backend.by_ghost) for name, backend in backends.items()}
    crossing = cross_terms([r for r, route in zip(readings, routes["ghost"], strict=True) if route == "ghost"])
    costs = on_this_device(readings, plans[-1]) if measure else {}
    planned = dict(zip((reading.rule for reading in readings), plans[-1].routes, strict=True))
    decided = decide(readings, lambda rule: planned[rule].ghost)
    rows = []
    for i, reading in enumerate(readings):
        mine = {name: found[i] for name, found in routes.items()}
        wanted = reading.g is not None and mixed.by_ghost(reading.rule)
        reason = why(reading, mine["mixed"], mine["ghost"], wanted)
        words = in_words(reading, plans[-1].routes[i], decided[i])
        by_formula = seconds(reading, predicted(reading.rule, reading.use.output)) if reading.is_planned else None
        on_device = seconds(reading, costs[i]) if i in costs else None
        for row in rows_of(reading, mine, crossing.get(reading, (0, 0)), reason):
            rows.append(replace(row, plan=words, predicted=by_formula, measured=on_device))
    return rows


def on_this_device(readings: Sequence[Reading], plan: Plan) -> dict[int, Costs]:
    """Position -> measured costs of each reading with several routes: the plan's, or measured here.

    Args:
        readings: all uses, with real gradients.
        plan: of the step with these readings.
    """
    found = dict(plan.costs)
    others: dict[Hashable, Costs] = {}
    with torch.no_grad():
        for position, reading in enumerate(readings):
            if position not in found and reading.is_planned:
                what = kind(reading.rule, reading.use.output, reading.rule.samples(reading.use.output))
                if what not in others:
                    others[what] = measured(reading.rule, reading.use.output)
                found[position] = others[what]
    return found


def seconds(reading: Reading, costs: Costs) -> Seconds:
    """Seconds of the whole batch, by each route.

    Args:
        costs: measured or predicted.
    """
    count = reading.rule.samples(reading.use.output)
    ghost, instantiated = costs.best(ghost=True), costs.best(ghost=False)
    return {
        "ghost": None if ghost is None else count * (ghost[1] + costs.weight_gradient),
        "kept": None if instantiated is None or costs.kept is None else count * (instantiated[1] + costs.kept),
        "discarded": None if instantiated is None else count * (instantiated[1] + costs.weight_gradient + costs.reach),
    }


def rows_of(
    reading: Reading, routes: dict[str, str | None], crossing: tuple[int, int], reason: str | None
) -> list[Row]:
    """A row for each parameter of the reading's source.

    Args:
        routes: strategy -> route.
        crossing: operations and bytes of the cross terms with other uses.
        reason: why "mixed" does not follow the paper's rule, if so.
    """
    rule, source, g = reading.rule, reading.source, reading.g
    ghost = routes["ghost"] == "ghost"
    rows = []
    for position, (name, parameter) in enumerate(source.parameters.items()):
        bytes_, operations = Cost(None, None), Cost(None, None)
        if g is not None:
            pulled_back = not source.is_parameter and not (reading.alone and source.rearranged)
            own = parameter.numel() * g.element_size() if pulled_back else 0
            first = position == 0
            bytes_ = Cost(
                workspace(rule, g, ghost=True) + crossing[1] if ghost else None,
                (workspace(rule, g, ghost=False) if first else 0) + own,
            )
            operations = Cost(
                multiplying(rule, g) + crossing[0] if ghost else None,
                instantiating(rule, g) if first else 0,
            )
        linear = bool(rule.positions)
        rows.append(
            Row(
                parameter=name,
                operation=reading.use.operation,
                positions=rule.positions if linear else None,
                inputs=rule.inputs if linear else None,
                outputs=rule.outputs if linear else None,
                groups=rule.groups if linear else None,
                bytes=bytes_,
                operations=operations,
                routes=routes,
                reason=reason,
            )
        )
    return rows


def workspace(rule: Rule, g: Tensor, *, ghost: bool) -> int:
    """Bytes of one sample's norm, in the way that the formulas prefer."""
    return int(rule.work(g, rule.best_way(g, ghost=ghost)).workspace)


def multiplying(rule: Rule, g: Tensor) -> int:
    """Operations of one sample's norm by Gram matrices, in the way that the formulas prefer."""
    if isinstance(rule, EmbeddingWeight):
        return rule.positions * rule.outputs
    return int(2 * rule.work(g, rule.best_way(g, ghost=True)).multiplications)


def instantiating(rule: Rule, g: Tensor) -> int | None:
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
    multiplied = getattr(inner, "factor", None) is not None or hasattr(inner, "x")
    return entries * (2 if multiplied else 1)


def why(reading: Reading, route: str | None, best: str | None, wanted: bool) -> str | None:
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
