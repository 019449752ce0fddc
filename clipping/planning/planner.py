"""Which route each use takes: the fastest that keeps the step's memory near that of ordinary training.

For a use there are three things to do with its norm and its share of the clipped sum:

    ghost      norm by Gram matrices, (a, g) kept, sum by the ordinary weight gradient
    kept       gradients instantiated and kept, sum from them
    discarded  gradients instantiated for their norm only, (a, g) kept, sum by the ordinary weight gradient

The strategies of arXiv:2205.10683 and what is better known since:

    auto       least time, subject to: predicted peak memory <= (1 + memory_overhead) · that of ordinary training
    time       least time, whatever the memory
    memory     least kept
    paper      ghost where 2T² <= pd, else instantiated (the rule of the paper, on space alone)

Times come from formulas at first. A model that is called a second time with a batch of about the same size is being
trained: its uses are then timed on the device, once (`clipping.planning.costs`), and planned again. All routes are
exact, so a plan changes a result by rounding only. What is to be repeated bit for bit takes its plans along: `settle`
ends the timing, and gives them as plain values for `resume`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from clipping.numerics.rng_replay import Draws
from clipping.planning.choices import Choice, choices_of, formula_route, has_choice, held_without_choice
from clipping.planning.costs import MOST_SAMPLES, CostCache, Costs, ghost_by_paper, measured, predicted
from clipping.planning.timeline import Balance, Held, Timeline
from clipping.provenance.derived_parameters import Source
from clipping.rules.base import Route, Rule, Spec
from clipping.tape.checkpointing import with_numbers
from clipping.tape.record import Tape
from clipping.tape.uses import Use

_LOG = logging.getLogger(__name__)
UNTIMED = 4.0
"""What a Triton kernel is charged, times its formula, in a plan that nothing is timed for: it reaches about a quarter
of what libraries multiply by, and wins where Gram matrices or gradients would be written, and read, for little work."""

AIMED_AT = 0.9
"""Of the memory that may be taken beyond ordinary training's: predictions are right to half a percent of the whole."""

Kind = tuple[Hashable, ...]
Strategy = Literal["auto", "time", "memory", "paper"]


@dataclass(eq=False)
class Item:
    """A use that has a choice.

    Attributes:
        position: of its rule among all rules of the tape.
        paper: the rule of arXiv:2205.10683 prefers Gram matrices here.
        costs: of its routes.
        choices: by what becomes of it; see the module's text.
        taken: the chosen one.
    """

    position: int
    paper: bool
    costs: Costs
    choices: list[Choice]
    taken: Choice


@dataclass
class Plan:
    """Routes of all uses, in the order of the tape, and what was predicted of them.

    Attributes:
        routes: one for each rule of each use.
        items: the uses that had a choice.
        peak, ordinary: predicted bytes, of this plan and of ordinary training, parameters and buffers among them.
        timed: costs were measured, not predicted.
    """

    routes: list[Route]
    items: list[Item]
    peak: int
    ordinary: int
    timed: bool


class Planner:
    """Plans by kind of step: the shapes of all uses, and the batch size that they are chosen for, to a power of two.

    Args:
        strategy: see the module's text.
        memory_overhead: predicted bytes beyond those of ordinary training, as a share of these, for "auto".
        timing: time routes on the device; else all is by formula, and the plan the same wherever it is made.
        file: costs are read from the device's file and added to it; False measures them anew.
    """

    def __init__(
        self,
        strategy: Strategy = "auto",
        memory_overhead: float = 0.05,
        *,
        timing: bool = True,
        file: bool = True,
    ) -> None:
        self.strategy, self.memory_overhead = strategy, memory_overhead
        self.timing, self.file = timing, file
        self._plans: dict[Hashable, Plan] = {}
        self._calls: Counter[Hashable] = Counter()
        self._caches: dict[torch.device, CostCache] = {}
        self._resumed: dict[str, list[Route]] = {}

    def settle(self) -> dict[str, list[list[object]]]:
        """The plans so far, kind of step -> a route for each rule. From now on none is timed."""
        self.timing = False
        made = {repr(step): plan.routes for step, plan in self._plans.items()}
        return {
            step: [[route.ghost, route.way, route.block, route.kept] for route in routes]
            for step, routes in {**self._resumed, **made}.items()
        }

    def resume(self, settled: Mapping[str, Sequence[Sequence[Any]]]) -> None:
        """Plan as the planner that was settled, whatever this one has found: the same steps give the same bits.

        Args:
            settled: what `settled` of that planner gave.
        """
        self.timing = False
        self._plans.clear()
        self._resumed = {step: [Route(*route) for route in routes] for step, routes in settled.items()}

    def plan(self, tape: Tape, losses: Tensor, outside: Callable[[], list[Tensor]], count: int = 0) -> Plan:
        """The plan for what was recorded, made anew only for a kind of step that was not seen before.

        Args:
            tape: after the forward pass.
            losses: [B], with their graph.
            outside: tells the tensors that are held whatever happens; asked only for a plan that is made anew.
            count: number of samples to plan for; 0 for those of the batch.
        """
        readings = [(use, source, rule) for use in tape.uses for source, rule in use.rules]
        count = count or losses.shape[0]
        kinds = [kind(rule, use.output, count) for use, _, rule in readings]
        step = (count.bit_length(), losses.device, *kinds, *(["let go"] if tape.let_go else []))
        self._calls[step] += 1
        known = self._plans.get(step)
        routes = self._resumed.get(repr(step)) if known is None and self._resumed else None
        if routes is not None and len(routes) == len(readings):
            known = self._plans[step] = Plan(routes, [], 0, 0, False)
        may_time = self._calls[step] > 1 and self._times(losses)
        if known is None or (may_time and not known.timed):
            self._plans[step] = self._made(tape, losses, outside(), readings, kinds, may_time, count)
            how = "by their times on this device" if may_time else "by formula"
            _LOG.info("%d norms of a step of %d samples are planned %s", len(readings), losses.shape[0], how)
        return self._plans[step]

    def _made(
        self,
        tape: Tape,
        losses: Tensor,
        outside: list[Tensor],
        readings: list[tuple[Use, Source, Rule]],
        kinds: list[Kind],
        may_time: bool,
        count: int,
    ) -> Plan:
        sizes = Counter[int]()
        for use, source, _ in readings:
            sizes[use.node] += sum(p.numel() * p.element_size() for p in source.parameters.values())
        timeline = Timeline(losses, list(sizes.items()), outside)
        routes = [formula_route(source, rule, use.output, count) for use, source, rule in readings]
        costs = self._costs(readings, kinds, tape.counts, losses, may_time)
        items: list[Item] = []
        fixed: list[Held] = []
        shared: set[str] = set()
        for position, ((use, source, rule), what) in enumerate(zip(readings, kinds, strict=True)):
            if has_choice(source, rule, tape.counts):
                choices = choices_of(rule, use, costs[what])
                paper = ghost_by_paper(rule.positions, rule.inputs, rule.outputs)
                items.append(Item(position, paper, costs[what], choices, choices[0]))
            else:
                alone = all(tape.counts[name] == 1 for name in source.parameters)
                several = None if alone else shared
                fixed.append(held_without_choice(use, source, rule, routes[position], several, count))
        if tape.let_go:
            self._choose_norms(items, timeline)
        else:
            self._choose(items, timeline, fixed)
        for item in items:
            routes[item.position] = item.taken.route
        peak = timeline.peak([item.taken.held for item in items] + fixed)
        constant = timeline.outside
        return Plan(routes, items, peak + constant, timeline.ordinary + constant, may_time)

    def _costs(
        self,
        readings: list[tuple[Use, Source, Rule]],
        kinds: list[Kind],
        counts: Counter[str],
        losses: Tensor,
        may_time: bool,
    ) -> dict[Kind, Costs]:
        """By kind of use: those on record, else timed if they may be, else predicted."""
        if not self._times(losses):
            kernels = None if losses.device.type == "cpu" else UNTIMED
            pairs = zip(readings, kinds, strict=True)
            return {what: predicted(rule, use.output, kernels=kernels) for (use, _, rule), what in pairs}
        cache = self._cache(losses.device)
        costs: dict[Kind, Costs] = {}
        new: dict[str, Costs] = {}
        with torch.no_grad(), Draws().again():  # what is timed draws no number that the caller would have
            for (use, source, rule), what in zip(readings, kinds, strict=True):
                if what in costs or not has_choice(source, rule, counts):
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
        real = not isinstance(losses, FakeTensor) and losses.device.type != "meta"
        return self.timing and real and self.strategy in ("auto", "time")

    def _cache(self, device: torch.device) -> CostCache:
        if device not in self._caches:
            self._caches[device] = CostCache(device, file=self.file)
        return self._caches[device]

    def _choose(self, items: list[Item], timeline: Timeline, fixed: list[Held]) -> None:
        """Set what each item takes; `fixed` is held by uses without a choice."""
        if self.strategy == "paper":
            for item in items:
                item.taken = next((c for c in item.choices if c.route.ghost == item.paper), item.choices[0])
            return
        if self.strategy == "memory":
            for item in items:
                kinds = {(c.route.ghost, c.route.kept): c for c in reversed(item.choices)}  # the fastest blocks of each
                item.taken = min(kinds.values(), key=lambda c: (c.held.bytes, c.seconds))
            return
        balance = self._fastest(items, timeline, fixed)
        if self.strategy == "time":
            return
        limit = (1 + AIMED_AT * self.memory_overhead) * (timeline.ordinary + timeline.outside) - timeline.outside
        while balance.peak > limit:
            if not _relieve(items, balance, dearest=float("inf")):  # out of reach: what can be had at a fair price
                balance = self._fastest(items, timeline, fixed)
                step = 3 * sum(item.costs.weight_gradient for item in items)
                while _relieve(items, balance, dearest=step / (timeline.ordinary + timeline.outside)):
                    pass
                return
        _hasten(items, balance, limit)

    def _choose_norms(self, items: list[Item], timeline: Timeline) -> None:
        """Where the sum is another backward pass's, nothing is held: the fastest norms of little workspace each."""
        ordinary = timeline.ordinary + timeline.outside
        limit = self.memory_overhead * ordinary if self.strategy == "auto" else 0
        for item in items:
            choices = [choice for choice in item.choices if not choice.route.kept]
            least = min(choice.held.workspace for choice in choices)
            fitting = [choice for choice in choices if choice.held.workspace <= max(limit, least)]
            item.taken = min(fitting, key=lambda choice: choice.seconds)

    def _fastest(self, items: list[Item], timeline: Timeline, fixed: list[Held]) -> Balance:
        for item in items:
            item.taken = min(item.choices, key=lambda c: c.seconds)
        return Balance(timeline, [*(item.taken.held for item in items), *fixed])


def _relieve(items: list[Item], balance: Balance, dearest: float) -> bool:
    """Exchange the one choice that lowers the fullest moment most for its time; False if there is none.

    Args:
        items: whose choices may be exchanged.
        balance: what they add up to.
        dearest: seconds (of a sample) that a byte may cost.
    """
    best: tuple[float, Item, Choice] | None = None
    for item in items:
        for choice in item.choices:
            if choice is item.taken:
                continue
            saved = balance.saved(item.taken.held, choice.held)
            if saved <= 0:
                continue
            price = (choice.seconds - item.taken.seconds) / saved
            if price <= dearest and (best is None or price < best[0]):
                best = price, item, choice
    if best is None:
        return False
    _, item, choice = best
    balance.exchange(item.taken.held, choice.held)
    item.taken = choice
    return True


def _hasten(items: list[Item], balance: Balance, limit: float) -> None:
    """Take back what turned out to be given up for nothing: faster choices within the limit, what gains most first."""
    gains = [
        (choice.seconds - item.taken.seconds, i, j)
        for i, item in enumerate(items)
        for j, choice in enumerate(item.choices)
    ]
    for gain, i, j in sorted(gains):
        item, choice = items[i], items[i].choices[j]
        if gain >= 0 or choice.seconds >= item.taken.seconds:
            continue
        if balance.peak_after(item.taken.held, choice.held) <= limit:
            balance.exchange(item.taken.held, choice.held)
            item.taken = choice


def kind(rule: Rule, output: Spec, count: int) -> Kind:
    """All that the costs of a use depend on; of the number of samples what they are timed on, to a power of two.

    Args:
        rule: of a use.
        output: shape and dtype of the use's output.
        count: number of samples to plan for.
    """
    samples = min(count, MOST_SAMPLES).bit_length()
    return type(rule).__name__, rule.shapes(), samples, output.shape[1:], output.dtype, rule.fold
