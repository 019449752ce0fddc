"""Which route the norm of each use of each parameter takes, and what either route would cost.

The decisions are those of the two-pass backends (`clipping.ghost`), found without their work: the forward pass is
recorded on a tape, one backward pass hands every use the gradient of its output, and of both only shapes are read.
Fake tensors will do.

Costs are those of one sample. With the T positions, d inputs, p outputs and G groups of arXiv:2205.10683, section 4:

==============  ===========================  ==============================================================
route           operations                   bytes, in entries
==============  ===========================  ==============================================================
`ghost`         2 T² (p + d) G               2 T² G, and T (p + d) G for the patches of a convolution
`instantiate`   2 T p d G                    p d G: the per-sample gradient
==============  ===========================  ==============================================================

A multiplication and an addition are two operations. Bytes are workspace beside the operation's own input and output
gradient, as its rule declares it, before it is cut into blocks (`clipping.rules.base.workspace`). Besides:

- An embedding's inputs are one-hot: no operation is spent on them, 2T²p by Gram matrices and Tp to add up its rows.
- A parameter without a linear form (bias, norm, bare parameter) is one or two operations for an entry of g.
- A fallback's operations are not known.
- Several uses of one parameter by Gram matrices need the cross term of each pair, 2TS(p + d) operations, 2TS entries.
  It is counted with whichever of the two comes first in the forward pass, whose gradient arrives last.
- A slice, a cast or another function of parameters is instantiated itself, and then pulled back to the gradient of each
  parameter that it is made of. Its own gradient is counted with the first of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clipping.ghost import FastGradClip, Ghost, MixedGhost, TapeBackend
from clipping.interface import LossFunction, Problem, UnsupportedModel, leading_dimension, map_tensors, norm_dtype
from clipping.rules import Broadcast, EmbeddingWeight, Refused, Rule
from clipping.sources import Source
from clipping.tape import Tape, Use, unrecorded

STRATEGIES: dict[str, type[TapeBackend]] = {"ghost": Ghost, "instantiate": FastGradClip, "mixed": MixedGhost}


@dataclass(frozen=True)
class Cost:
    """What one sample's norm takes by each route, in bytes or in operations.

    None: there is no such route, the loss does not depend on the use, or (operations of a fallback) it is not known.
    """

    ghost: int | None
    instantiate: int | None

    def of(self, route: str | None) -> int | None:
        """The cost of "ghost", "instantiate" or "fallback", which instantiates too."""
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

    @property
    def paper(self) -> str | None:
        """The rule of arXiv:2205.10683: "ghost" if 2T² ≤ pd, else "instantiate"; None without a linear form."""
        if self.positions is None or self.inputs is None or self.outputs is None:
            return None
        return "ghost" if 2 * self.positions**2 <= self.inputs * self.outputs else "instantiate"


@dataclass(eq=False)
class Reading:
    """One source that a use reads: what a backend decides upon. `g` is None if the loss does not depend on the use."""

    use: Use
    source: Source
    rule: Rule
    g: Tensor | None
    alone: bool
    """No parameter of the source is used anywhere else."""


def explain(model: nn.Module, loss_fn: LossFunction, inputs: Any, targets: Any) -> list[Row]:
    """One row for each use of each trainable parameter, in the order of the forward pass.

    Args:
        model, loss_fn, inputs, targets: as a backend takes them; real tensors or fake ones.

    Raises:
        UnsupportedModel: what the two-pass backends refuse, with every problem.
        ValueError: tensors that disagree about the batch size, or a loss that is not shaped [B].
    """
    backends = {name: make(model, loss_fn, verify=False) for name, make in STRATEGIES.items()}
    mixed = backends["mixed"]
    with torch.enable_grad():
        readings = record(mixed, map_tensors(lambda x: x.detach(), inputs), targets)
    routes = {name: decide(readings, backend.by_ghost) for name, backend in backends.items()}
    crossing = cross_terms([r for r, route in zip(readings, routes["ghost"], strict=True) if route == "ghost"])
    rows = []
    for i, reading in enumerate(readings):
        mine = {name: decided[i] for name, decided in routes.items()}
        wanted = reading.g is not None and mixed.by_ghost(reading.rule)
        reason = why(reading, mine["mixed"], mine["ghost"], wanted)
        rows += rows_of(reading, mine, crossing.get(reading, (0, 0)), reason)
    return rows


def record(backend: TapeBackend, inputs: Any, targets: Any) -> list[Reading]:
    """The readings of one forward pass and one backward pass for activation gradients, as `backend` would make them.

    Raises:
        UnsupportedModel: a parameter without an exact rule.
    """
    batch_size = leading_dimension(inputs, targets)
    parameters = {name: p for name, p in backend.model.named_parameters() if p.requires_grad}
    tape = Tape(parameters, (inputs, targets), batch_size)
    gradients: dict[Use, Tensor] = {}
    try:
        with tape:
            losses = backend.losses(inputs, targets, batch_size)
        problems = tape.problems or unrecorded(losses, tape, parameters)
        if problems:
            raise UnsupportedModel(backend.name, dict.fromkeys(problems))
        readings = [  # before the backward pass, in which uses let go of their rules
            Reading(use, source, rule, None, all(tape.counts[name] == 1 for name in source.parameters))
            for use in tape.uses
            for source, rule in use.rules
        ]
        tape.backward(losses, gradients.__setitem__, retain_graph=False)
        for reading in readings:
            reading.g = gradients.get(reading.use)
            if reading.rule.is_fallback and reading.g is not None:  # what it cannot do shows when it is done
                reading.rule.instantiate(reading.g, slice(0, reading.rule.samples(reading.g)))
    except Refused as refused:
        raise UnsupportedModel(backend.name, [Problem("model", refused.reason, refused.remedy)]) from refused
    finally:
        tape.close()
    return readings


def decide(readings: Sequence[Reading], by_ghost: Callable[[Rule], bool]) -> list[str | None]:
    """The route of each reading, under a backend that prefers Gram matrices where `by_ghost` says so.

    Uses of one parameter share a route: all by Gram matrices, if each of them reads the parameter itself and each pair
    has a cross term, or else all instantiated and added up.
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
    """Has each pair of these uses of one parameter an inner product that needs no instantiated gradient?

    Asked once for each two kinds of use: a recurrent weight may have hundreds of uses, all alike.
    """
    kinds = {kind(reading): reading for reading in readings}
    several = Counter(kind(reading) for reading in readings)
    for this, a in kinds.items():
        for that, b in kinds.items():
            if this == that and several[this] == 1:
                continue
            assert a.g is not None and b.g is not None
            if a.rule.inner(a.g, b.rule, b.g) is None and b.rule.inner(b.g, a.rule, a.g) is None:
                return False
    return True


def kind(reading: Reading) -> tuple[type, str]:
    """All about a reading but the values of its tensors: what its costs can depend on."""
    shapes = {k: tuple(v.shape) if isinstance(v, Tensor) else v for k, v in vars(reading.rule).items()}
    return type(reading.rule), repr((shapes, None if reading.g is None else tuple(reading.g.shape)))


def cross_terms(readings: Sequence[Reading]) -> dict[Reading, tuple[int, int]]:
    """(operations, bytes) of the cross terms of each reading with those of the same parameter that come after it."""
    later: defaultdict[int, Counter[int]] = defaultdict(Counter)  # parameter -> features of a Gram entry -> positions
    found = {}
    for reading in reversed(readings):
        rule, after = reading.rule, later[id(reading.rule.parameter)]
        if reading.alone or reading.g is None:
            continue
        mine = features(rule)
        # one-hot inputs of either side make the Gram matrix over them a look-up
        operations = sum(2 * rule.positions * count * min(mine, theirs) for theirs, count in after.items())
        entries = 2 * rule.positions * after.total()
        found[reading] = operations, entries * norm_dtype(reading.g.dtype).itemsize
        after[mine] += rule.positions
    return found


def features(rule: Rule) -> int:
    """Products that one entry of both Gram matrices takes."""
    return rule.outputs if isinstance(rule, EmbeddingWeight) else rule.inputs + rule.outputs


def rows_of(
    reading: Reading, routes: dict[str, str | None], crossing: tuple[int, int], reason: str | None
) -> list[Row]:
    """A row for each parameter that the source of a reading is made of."""
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
                rule.ghost_bytes(g) + crossing[1] if ghost else None,
                (rule.instantiated_bytes(g) if first else 0) + own,
            )
            operations = Cost(
                2 * rule.positions**2 * features(rule) * rule.groups + crossing[0] if ghost else None,
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


def instantiating(rule: Rule, g: Tensor) -> int | None:
    """Operations of one sample's instantiated gradient."""
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
