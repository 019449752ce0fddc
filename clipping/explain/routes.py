"""Which route the norm of each use of each parameter takes, what each would cost, and what `bk_mixed` plans.

The decisions are those of the two-pass backends (`clipping.backends.tape`), found without their work: the forward pass
is recorded on a tape, one backward pass hands every use the gradient of its output, and of both only shapes are read.
Fake tensors will do. The plan is the one that `clipping.planning.planner` makes of that very tape.

Costs are those of one sample, by the formulas of the rule itself, in the way that they prefer (a convolution's Gram
matrices may be had from its pixels or from its patches, its gradient from patches or by a grouped convolution). With
the T positions, d inputs, p outputs and G groups of arXiv:2205.10683, section 4, in short:

==============  ===========================  ==============================================================
route           operations                   bytes, in entries: `Rule.work(...).workspace`
==============  ===========================  ==============================================================
`ghost`         2 T² (p + d) G               2 T² G; and by patches 2 T d G, by pixels N² G for N pixels
`instantiate`   2 T p d G                    p d G: the per-sample gradient; and by patches T d G
==============  ===========================  ==============================================================

A multiplication and an addition are two operations. Those of `ghost` are `2 · Rule.work(...).multiplications`: pixels
take 2 (T² p + N² C) G, and from `clipping.numerics.gram.HALVED` positions on the symmetry of a Gram matrix saves some.
Bytes are workspace beside the operation's own input and output gradient, before it is cut into blocks. Besides:

- An embedding's inputs are one-hot, and both its norm and its gradient add up T rows of p.
- A parameter without a linear form (bias, norm, bare parameter) is one or two operations for an entry of g.
- A fallback's operations are not known.
- Several uses of one parameter by Gram matrices need the cross term of each pair, 2TS(p + d) operations, 2TS entries.
  It is counted with whichever of the two comes first in the forward pass, whose gradient arrives last.
- A slice, a cast or another function of parameters is instantiated itself, and then pulled back to the gradient of each
  parameter that it is made of. Its own gradient is counted with the first of them.

Seconds are those of the whole batch: of the norm, and of the use's share of the clipped sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from clipping.backends.tape import FastGradClip, Ghost, MixedGhost, TapeBackend
from clipping.core.batches import map_tensors
from clipping.core.types import LossFunction
from clipping.explain.parameter_use import Reading, cross_terms, decide, in_words, record
from clipping.explain.plan_regret import fresh_costs, regrets
from clipping.planning.costs import Costs, ghost_by_paper, predicted
from clipping.planning.planner import Planner
from clipping.rules.base import Rule
from clipping.rules.elementwise import Broadcast
from clipping.rules.embedding import EmbeddingWeight

STRATEGIES: dict[str, type[TapeBackend]] = {"ghost": Ghost, "instantiate": FastGradClip, "mixed": MixedGhost}

Seconds = Mapping[str, float | None]
"""Of the whole batch, norm and share of the sum: "ghost", "kept" and "discarded"; None where there is no such route."""


@dataclass(frozen=True)
class Cost:
    """What one sample's norm takes by each route, in bytes or in operations.

    None: there is no such route, the loss does not depend on the use, or (operations of a fallback) it is not known.
    """

    ghost: int | None
    instantiate: int | None

    def of(self, route: str | None) -> int | None:
        """The cost of "ghost", "instantiate" or "fallback", which instantiates too.

        Args:
            route: one of these, or None, which has no cost.
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
        reason: why "mixed" does not follow the paper's rule here, where that is so.
        plan: what `bk_mixed` does (`clipping.explain.parameter_use.in_words`); None if the loss does not depend on
            this use.
        predicted, measured: seconds by each route of `bk_mixed`, by formula and on this device; None if it has but one,
            or nothing was measured.
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


@dataclass(frozen=True)
class Explanation:
    """What `explain` found.

    Attributes:
        rows: one for each use of each trainable parameter, in the order of the forward pass.
        regret: "formula" and "timed" -> seconds that a plan made so loses (`clipping.explain.plan_regret`), if that
            was measured.
    """

    rows: list[Row]
    regret: dict[str, float] | None


def explain(
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: Any,
    targets: Any,
    *,
    planner: Planner | None = None,
    measure: bool = False,
) -> Explanation:
    """The routes of the two-pass backends, and the plan of `bk_mixed`.

    Args:
        model, loss_fn, inputs, targets: as a backend takes them; real tensors or fake ones.
        planner: which makes the plan; by default one like that of `bk_mixed` that reads and writes no file.
        measure: time the routes on this device, twice over, and say what the timed plan is and loses. Takes many times
            a step's time and memory for the inputs and gradients of all uses; on real tensors only.

    Raises:
        UnsupportedModel: what the two-pass backends refuse, with every problem.
        ValueError: tensors that disagree about the batch size, or a loss that is not shaped [B].
    """
    planner = Planner(file=False) if planner is None else planner
    backends = {name: make(model, loss_fn, verify=False) for name, make in STRATEGIES.items()}
    mixed = backends["mixed"]
    with torch.enable_grad():
        inputs = map_tensors(lambda x: x.detach(), inputs)
        readings, plans = record(mixed, inputs, targets, planner, plans=2 if measure else 1)
    routes = {name: decide(readings, backend.by_ghost) for name, backend in backends.items()}
    crossing = cross_terms([r for r, route in zip(readings, routes["ghost"], strict=True) if route == "ghost"])
    costs, regret = {}, None
    if measure:
        costs = fresh_costs(readings, plans[-1])
        regret = dict(zip(("formula", "timed"), regrets(readings, plans, costs), strict=True))
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
    return Explanation(rows, regret)


def seconds(reading: Reading, costs: Costs) -> Seconds:
    """Of the whole batch, by each route.

    Args:
        reading: one use of a source.
        costs: what was measured of it.
    """
    count = reading.rule.samples(reading.use.output)
    ghost, instantiated = costs.best(ghost=True), costs.best(ghost=False)
    return {
        "ghost": None if ghost is None else count * (ghost[1] + costs.weight_gradient),
        "kept": None if instantiated is None or costs.kept is None else count * (instantiated[1] + costs.kept),
        "discarded": None if instantiated is None else count * (instantiated[1] + costs.weight_gradient),
    }


def rows_of(
    reading: Reading, routes: dict[str, str | None], crossing: tuple[int, int], reason: str | None
) -> list[Row]:
    """A row for each parameter that the source of a reading is made of.

    Args:
        reading: one use of a source.
        routes: strategy -> the route that it takes.
        crossing: operations and bytes of the cross terms with other uses.
        reason: why "mixed" does not follow the paper's rule here, where that is so.
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
    """Bytes of one sample's norm, in the way that the formulas prefer.

    Args:
        rule: of a use.
        g: the gradient of its output, [B, ...].
        ghost: by Gram matrices, or instantiated.
    """
    return int(rule.work(g, rule.best_way(g, ghost=ghost)).workspace)


def multiplying(rule: Rule, g: Tensor) -> int:
    """Operations of one sample's norm by Gram matrices, in the way that the formulas prefer.

    Args:
        rule: of a use, which has a Gram form.
        g: the gradient of its output, [B, ...].
    """
    if isinstance(rule, EmbeddingWeight):
        return rule.positions * rule.outputs
    return int(2 * rule.work(g, rule.best_way(g, ghost=True)).multiplications)


def instantiating(rule: Rule, g: Tensor) -> int | None:
    """Operations of one sample's instantiated gradient.

    Args:
        rule: of a use.
        g: the gradient of its output, [B, ...].
    """
    if rule.is_fallback:
        return None
    if isinstance(rule, EmbeddingWeight):
        return rule.positions * rule.outputs
    if rule.positions:
        return 2 * rule.positions * rule.inputs * rule.outputs * rule.groups
    inner = getattr(rule, "rule", rule)  # of rows that are regrouped by sample
    entries = g.numel() // rule.samples(g)
    if isinstance(inner, Broadcast) and inner.dim:  # concatenated: a segment of g is its gradient
        entries = entries * inner.parameter.shape[inner.dim] // g.shape[inner.dim]
    # the entries of g are added up; those of a product's gradient are multiplied by the other factor first
    multiplied = getattr(inner, "factor", None) is not None or hasattr(inner, "x")
    return entries * (2 if multiplied else 1)


def why(reading: Reading, route: str | None, best: str | None, wanted: bool) -> str | None:
    """Why "mixed" takes this route where its rule alone would not; None if it follows the rule or has none to follow.

    Args:
        reading: what is read.
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
