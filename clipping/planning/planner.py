"""Plan the route of each use: the fastest that keeps the step's memory near that of ordinary training.

A use has three kinds of routes for its norm and its share of the clipped sum:

    ghost      norm by Gram matrices, (a, g) kept, sum by the ordinary weight gradient
    kept       gradients instantiated and kept, sum from them
    discarded  gradients instantiated for their norm only, (a, g) kept, sum by the ordinary weight gradient

Strategies:

    auto       least time, with little more kept for the sum than g, and little workspace
    time       least time, whatever the memory
    memory     least memory
    paper      ghost where 2T² <= pd, else instantiated (the rule of the paper, on space alone)

"auto" decides for each use alone at first. This nearly suffices: Gram matrices take less time than instantiated
gradients, T²(p + d) <= Tpd, about where the gradients, pd, take more memory than (a, g), T(p + d). Then it keeps more
where a byte saves most time, such as the gradients of a depthwise convolution of few positions, up to `SPARE`.

Times come from formulas at first. The second step with a batch of about the same size times its uses on the device,
once (`clipping.planning.costs`), and plans again. All routes are exact, so a plan changes a result by rounding only. To
repeat training bit for bit, `settle` ends the timing and returns the plans as plain values for `resume`.

Functions take:
    readings: each use, with each source that it reads and the rule of its gradient.
    output: shape and dtype of a use's output.
    count: number of samples to plan for.
    costs: measured or predicted.
"""

import logging
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from clipping.numerics.rng_replay import Draws
from clipping.numerics.traced_operations import is_traced
from clipping.planning.costs import MOST_SAMPLES, CostCache, Costs, ghost_by_paper, measured, predicted
from clipping.provenance.derived_parameters import Source
from clipping.rules.base import UNTIMED, Route, Rule, Spec
from clipping.tape.checkpointing import with_numbers
from clipping.tape.record import Tape
from clipping.tape.uses import Use

_LOG = logging.getLogger(__name__)
WORKSPACE = 1 / 4
"""The share of a rule's room that "auto" allows as a workspace on a CPU, if any route needs so little. On a GPU it is
the whole room: smaller blocks are more launches."""

SPARE = 1 / 10
"""Additional memory that "auto" may keep, relative to the parameters, their gradients and all g."""

CALL = 3e-5
"""Rough seconds of another block of samples, added to smaller blocks that were not timed."""

KEEPING = 1.1
"""Factor on the time of kept gradients: they pass through all of the step's memory, and an equally fast route without
them makes the rest of the step faster."""

Kind = tuple[Hashable, ...]
Reading = tuple[Use, Source, Rule]
Strategy = Literal["auto", "time", "memory", "paper"]


class Choice(NamedTuple):
    """One route of a use.

    Attributes:
        route: the route.
        seconds: time of one sample, its share of the sum included.
        held: bytes of the batch that are kept for the sum.
        workspace: bytes that computing the norm takes besides.
    """

    route: Route
    seconds: float
    held: int
    workspace: int


@dataclass(frozen=True)
class Plan:
    """Routes of all uses, in the order of the tape.

    Attributes:
        routes: one for each rule of each use.
        costs: position of a rule that had a choice -> costs of its routes.
        timed: costs were measured, not predicted.
    """

    routes: list[Route]
    costs: dict[int, Costs]
    timed: bool


class Planner:
    """Plans by kind of step: the shapes of all uses, and the batch size that they are chosen for, to a power of two.

    Args:
        strategy: see the module's text.
        timing: time routes on the device; else all is by formula, and the plan the same wherever it is made.
        file: costs are read from the device's file and added to it; False measures them anew.
    """

    def __init__(self, strategy: Strategy = "auto", *, timing: bool = True, file: bool = True) -> None:
        self.strategy, self.timing, self.file = strategy, timing, file
        self._plans: dict[Hashable, Plan] = {}
        self._calls: Counter[Hashable] = Counter()
        self._caches: dict[torch.device, CostCache] = {}
        self._resumed: dict[str, list[Route]] = {}

    def settle(self) -> dict[str, list[list[object]]]:
        """Return the plans so far: kind of step -> a route for each rule. Later plans are not timed."""
        self.timing = False
        made = {repr(step): plan.routes for step, plan in self._plans.items()}
        return {
            step: [[route.ghost, route.way, route.block, route.kept] for route in routes]
            for step, routes in {**self._resumed, **made}.items()
        }

    def resume(self, settled: Mapping[str, Sequence[Sequence[Any]]]) -> None:
        """Adopt the plans of another planner, so that the same steps give the same bits.

        Args:
            settled: result of that planner's `settle`.
        """
        self.timing = False
        self._plans.clear()
        self._resumed = {step: [Route(*route) for route in routes] for step, routes in settled.items()}

    def plan(self, tape: Tape, losses: Tensor, count: int = 0) -> Plan:
        """Return the plan of a recorded step. Only a new kind of step is planned.

        Args:
            count: number of samples to plan for; 0 for the size of the batch.
        """
        readings = [(use, source, rule) for use in tape.uses for source, rule in use.rules]
        count = count or losses.shape[0]
        kinds = kinds_of(readings, count)
        step = (count.bit_length(), losses.device, *kinds, *(["let go"] if tape.let_go.count else []))
        self._calls[step] += 1
        known = self._plans.get(step)
        routes = self._resumed.get(repr(step)) if known is None and self._resumed else None
        if routes is not None and len(routes) == len(readings):
            known = self._plans[step] = Plan(routes, {}, False)
        may_time = not (known and known.timed) and self._calls[step] > 1 and self._times(losses)
        if known is None or may_time:
            self._plans[step] = self._made(tape, losses, readings, kinds, may_time, count)
            how = "by their times on this device" if may_time else "by formula"
            _LOG.info("%d norms of a step of %d samples are planned %s", len(readings), losses.shape[0], how)
        return self._plans[step]

    def _made(
        self,
        tape: Tape,
        losses: Tensor,
        readings: list[Reading],
        kinds: list[Kind],
        may_time: bool,
        count: int,
    ) -> Plan:
        known = self._costs(readings, kinds, losses, may_time)
        routes = [formula_route(source, rule, use.output, count) for use, source, rule in readings]
        costs: dict[int, Costs] = {}
        offers: dict[int, tuple[Choice, Choice]] = {}
        for position, ((use, source, rule), what) in enumerate(zip(readings, kinds, strict=True)):
            if has_choice(source, rule):
                costs[position] = known[what]
                choices = choices_of(rule, use.output, known[what])
                if tape.let_go.count:  # a second backward pass forms the sum
                    choices = [choice for choice in choices if not choice.route.kept]
                chosen = self._chosen(rule, choices)
                routes[position] = chosen.route
                fitting = [choice for choice in choices if choice.workspace <= self._workspace(rule)]
                offers[position] = chosen, min(fitting, key=lambda choice: choice.seconds, default=chosen)
        if self.strategy == "auto":
            parameters = {id(rule.parameter): rule.parameter.nbytes for _, _, rule in readings}
            room = SPARE * (2 * sum(parameters.values()) + sum(chosen.held for chosen, _ in offers.values()))
            for position in accepted(offers, room):
                routes[position] = offers[position][1].route
        for position in costs:
            (use, _, rule), route = readings[position], routes[position]
            if route.way and not route.block:
                routes[position] = replace(route, block=rule.fitting(use.output, route.way))
        return Plan(routes, costs, may_time)

    def _chosen(self, rule: Rule, choices: list[Choice]) -> Choice:
        if self.strategy == "paper":
            ghost = ghost_by_paper(rule.positions, rule.inputs, rule.outputs)
            return next((choice for choice in choices if choice.route.ghost == ghost), choices[0])
        if self.strategy == "memory":
            kinds = {(c.route.ghost, c.route.kept): c for c in reversed(choices)}  # the fastest blocks of each
            return min(kinds.values(), key=lambda choice: (choice.held + choice.workspace, choice.seconds))
        if self.strategy == "auto":
            least = min(choice.held for choice in choices if not choice.route.kept)
            choices = [choice for choice in choices if choice.held <= least]
            most = max(self._workspace(rule), min(choice.workspace for choice in choices))
            choices = [choice for choice in choices if choice.workspace <= most]
        return min(choices, key=lambda choice: choice.seconds)

    def _workspace(self, rule: Rule) -> float:
        """Bytes that a norm's workspace may take under "auto"."""
        return rule.room() * (WORKSPACE if rule.parameter.is_cpu else 1)

    def _costs(
        self,
        readings: list[Reading],
        kinds: list[Kind],
        losses: Tensor,
        may_time: bool,
    ) -> dict[Kind, Costs]:
        """Costs by kind of use: recorded ones, else measured if `may_time`, else predicted."""
        if not self._times(losses):
            cpu, pairs = losses.device.type == "cpu", zip(readings, kinds, strict=True)
            return {
                what: predicted(rule, use.output, kernels=None if cpu else UNTIMED) for (use, _, rule), what in pairs
            }
        cache = self._cache(losses.device)
        costs: dict[Kind, Costs] = {}
        new: dict[str, Costs] = {}
        with torch.no_grad(), Draws().again():  # timing leaves the caller's random numbers alone
            for (use, source, rule), what in zip(readings, kinds, strict=True):
                if what in costs or not has_choice(source, rule):
                    continue
                on_record = cache.get(repr(what))
                if on_record is not None and not on_record.fit(rule):
                    on_record = None
                if on_record is None and may_time:
                    try:
                        on_record = new[repr(what)] = measured(with_numbers(rule), use.output)
                    except torch.OutOfMemoryError:  # the step itself may fit
                        may_time = False
                costs[what] = on_record or predicted(rule, use.output)
        if new:
            cache.add(new)
        return costs

    def _times(self, losses: Tensor) -> bool:
        real = not isinstance(losses, FakeTensor) and losses.device.type != "meta" and not is_traced()
        return self.timing and real and self.strategy in ("auto", "time")

    def _cache(self, device: torch.device) -> CostCache:
        if device not in self._caches:
            self._caches[device] = CostCache(device, file=self.file)
        return self._caches[device]


def accepted(offers: Mapping[int, tuple[Choice, Choice]], room: float) -> list[int]:
    """Choose the uses to move to their faster choice, by the time saved for each additional byte.

    Args:
        offers: use -> (choice so far, faster choice).
        room: additional bytes that all moves together may take.
    """
    more = {position: other.held - chosen.held for position, (chosen, other) in offers.items()}
    worth = {
        position: (chosen.seconds - other.seconds) / more[position]
        for position, (chosen, other) in offers.items()
        if more[position] > 0 and other.seconds < chosen.seconds
    }
    found = []
    for position in sorted(worth, key=worth.__getitem__, reverse=True):
        if more[position] <= room:
            room -= more[position]
            found.append(position)
    return found


def kinds_of(readings: list[Reading], count: int) -> list[Kind]:
    """Return everything that the costs of each reading depend on, with the number of samples to a power of two."""
    kinds, samples = list[Kind](), min(count, MOST_SAMPLES).bit_length()
    for use, _, rule in readings:
        shapes = tuple(rule.parameter.shape), rule.positions, rule.inputs, rule.outputs, rule.groups, *rule.settings
        kinds.append((type(rule).__name__, shapes, samples, use.output.shape[1:], use.output.dtype, rule.fold))
    return kinds


def has_choice(source: Source, rule: Rule) -> bool:
    """True if the norm can be computed in several ways, and no other use has a share in it."""
    return source.alone and source.rearranged and len(rule.ways) > 1 and not rule.is_fallback


def formula_route(source: Source, rule: Rule, output: Spec, count: int) -> Route:
    """Return the route that the formulas prefer, for a use without a choice or one of several uses of a parameter."""
    if not source.rearranged:
        return Route()
    costs = predicted(rule, output)
    ghost, instantiated = costs.best(ghost=True), costs.best(ghost=False)
    if ghost is not None and (instantiated is None or ghost[1] < instantiated[1]):
        return ghost[0]
    return Route(kept=rule.is_kept(output, count))


def choices_of(rule: Rule, output: Spec, costs: Costs) -> list[Choice]:
    """Return the choices of a use. Within each kind the fastest comes first, then routes that take less memory."""
    count, each = rule.samples(output), rule.instantiated_bytes(output)
    gradient = output.numel() * output.element_size()  # autograd holds the input anyway when memory is fullest
    found = []
    for ghost in (True, False):
        for route, seconds, block in _routes(rule, output, costs, ghost=ghost):
            workspace = rule.norm_bytes(output, route.way, block)
            summed = costs.weight_gradient + (0 if ghost else costs.reach)
            found.append(Choice(route, seconds + summed, gradient, workspace))
            if not ghost and costs.kept is not None:
                seconds = KEEPING * (seconds + costs.kept)
                found.append(Choice(replace(route, kept=True), seconds, count * each, max(0, workspace - block * each)))
    return found


def _routes(rule: Rule, output: Spec, costs: Costs, *, ghost: bool) -> list[tuple[Route, float, int]]:
    """(route, seconds of one sample, samples to a block): the fastest, then smaller blocks, timed ones if there are."""
    routes = [(Route(*key), seconds) for key, seconds in costs.norms.items() if key[0] == ghost]
    if not routes:
        return []
    count = rule.samples(output)
    found: list[tuple[Route, float, int]] = []
    for route, seconds in sorted(routes, key=lambda each: each[1]):
        block = -(-count // len(rule.blocks(output, route.way, route.block)))
        if not found or block < found[-1][2]:
            found.append((route, seconds, block))
    route, seconds, block = found[-1]
    for smaller in (-(-block // 4), -(-block // 16)):
        if smaller < found[-1][2]:
            more = CALL * (count / smaller - count / block) / max(1, count)
            found.append((replace(route, block=smaller), seconds + more, smaller))
    return found
