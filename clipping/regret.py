"""How much slower the planned routes are than the best ones, by a second measurement that no plan has seen.

By the timings that it was made from, a plan always looks good: of two routes alike it took the one that noise favoured.
So every use is run again on the step's own input and gradient, as book-keeping runs it (`clipping.norms.Book`: the
norm, and the use's share of the clipped sum), by each route that may be best. Routes take turns, and each counts with
its median over the rounds. Then

    regret = Σ over uses of (seconds of the planned route − least seconds of any route)

which is never negative, and includes what a plan paid to save memory. What is left of the noise makes it too large: the
least of several medians is below the least of what they estimate. Uses that share a parameter, or a function of it,
have one route only, and are not in it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median

import torch

from clipping.costs import CACHES, Costs, measured, predicted
from clipping.functions import Flat
from clipping.norms import Book
from clipping.planner import Plan, kind
from clipping.readings import Reading
from clipping.rules import Route, Spec
from clipping.tape import Use

ROUNDS = 5


def fresh_costs(readings: Sequence[Reading], plan: Plan) -> dict[int, Costs]:
    """Position -> measured costs of each reading that has routes: those that the plan was made from, and others'."""
    found = {item.position: item.costs for item in plan.items}
    others: dict[str, Costs] = {}
    with torch.no_grad():
        for position, reading in enumerate(readings):
            if position not in found and reading.is_planned:
                what = kind(reading.rule, reading.use.output)
                if what not in others:
                    others[what] = measured(reading.rule, reading.use.output)
                found[position] = others[what]
    return found


def regrets(readings: Sequence[Reading], plans: Sequence[Plan], costs: dict[int, Costs]) -> list[float]:
    """Seconds that each plan loses on the whole batch.

    Args:
        readings: with real gradients, on the device that is asked about.
        plans: of these readings.
        costs: of a first measurement, which says what may be best; see `fresh_costs`.
    """
    lost = [0.0] * len(plans)
    seconds: dict[tuple[str, Route], float] = {}
    for position, reading in enumerate(readings):
        if not reading.is_planned:
            continue
        what = kind(reading.rule, reading.use.output)
        taken = [settled(reading, plan.routes[position]) for plan in plans]
        routes = dict.fromkeys([*taken, *candidates(reading, costs[position])])
        if any((what, route) not in seconds for route in routes):
            timed = remeasured(reading, list(routes))
            seconds |= {(what, route): spent for route, spent in timed.items()}
        least = min(seconds[what, route] for route in routes)
        for i, route in enumerate(taken):
            lost[i] += seconds[what, route] - least
    return lost


def candidates(reading: Reading, costs: Costs) -> list[Route]:
    """The best of each kind of route, by measured costs and by the formulas."""
    found = []
    for known in (costs, predicted(reading.rule, reading.use.output)):
        for ghost in (True, False):
            best = known.best(ghost=ghost)
            if best is not None:
                found += [best[0]] if ghost else [best[0], replace(best[0], kept=True)]
    return [settled(reading, route) for route in found]


def settled(reading: Reading, route: Route) -> Route:
    """The same route with its way and its block spelled out: two that do the same thing are equal."""
    rule, output = reading.rule, reading.use.output
    way = route.way or rule.best_way(output, ghost=route.ghost)
    block = max(part.stop - part.start for part in rule.blocks(output, way, route.block))
    return replace(route, way=way, block=block)


def remeasured(reading: Reading, routes: Sequence[Route]) -> dict[Route, float]:
    """Seconds of the whole batch by each route, norm and share of the sum: medians of interleaved rounds."""
    device = reading.rule.parameter.device
    filler = torch.empty(CACHES, dtype=torch.uint8, device=device)
    seconds: dict[Route, list[float]] = {route: [] for route in routes}
    for turn in range(ROUNDS + 1):  # the first does not count
        for route in routes:
            filler.fill_(0)  # in a step, other layers' tensors are in the caches
            spent = _seconds(partial(_book, reading, route), device)
            if turn:
                seconds[route].append(spent)
    return {route: median(each) for route, each in seconds.items()}


def _book(reading: Reading, route: Route) -> None:
    source, rule, g = reading.source, reading.rule, reading.g
    assert g is not None
    rule.route = route
    losses = torch.zeros(rule.samples(g), device=g.device, dtype=g.dtype)
    with torch.no_grad():
        book = Book(Counter(source.parameters.keys()), losses, source.parameters, Flat(1.0))
        book.arrived(Use(reading.use.operation, [(source, rule)], Spec(g.shape, g.dtype)), g)
        book.finish()


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
