"""Measure how much slower the planned routes are than the best ones, with fresh timings.

A plan always looks good by the timings that it was made from: of two equal routes it chose the one that noise favoured.
So each use is run again on the step's own input and gradient, as book-keeping runs it (the norm, and the use's share of
the clipped sum), by each route that may be fastest. Routes take turns, and each counts with its median over the rounds.
Then

    regret = Σ over uses of (seconds of the planned route − least seconds of any route)

It is never negative, and includes what a plan paid to save memory. Noise makes it too large, because the least of
several medians underestimates the least time. Uses that share a parameter, or read a function of it, have one route
only and are left out.

Functions take:
    reading, readings: one use, with a real gradient; or all, on the device to measure.
    costs: of a first measurement, which selects the routes to time; see `fresh_costs`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median

import torch
from torch import Tensor

from clipping.explain.parameter_use import Reading
from clipping.numerics.per_sample import sum_of_squares, weighted_sum
from clipping.planning.costs import CACHES, Costs, measured, predicted
from clipping.planning.planner import Plan, kind
from clipping.rules.base import Route

ROUNDS = 5


def fresh_costs(readings: Sequence[Reading], plan: Plan) -> dict[int, Costs]:
    """Position -> measured costs of each reading with several routes: the plan's, or measured here.

    Args:
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


def regrets(readings: Sequence[Reading], plans: Sequence[Plan], costs: dict[int, Costs]) -> list[float]:
    """Seconds that each plan loses on the whole batch.

    Args:
        plans: of these readings.
    """
    lost = [0.0] * len(plans)
    seconds: dict[tuple[Hashable, Route], float] = {}
    for position, reading in enumerate(readings):
        if not reading.is_planned:
            continue
        what = kind(reading.rule, reading.use.output, reading.rule.samples(reading.use.output))
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
    """The best of each kind of route, by measured costs and by formula."""
    found = []
    for known in (costs, predicted(reading.rule, reading.use.output)):
        for ghost in (True, False):
            best = known.best(ghost=ghost)
            if best is not None:
                found += [best[0]] if ghost else [best[0], replace(best[0], kept=True)]
    return [settled(reading, route) for route in found]


def settled(reading: Reading, route: Route) -> Route:
    """The same route with its way and block size filled in, so that equal routes compare equal.

    Args:
        route: one of the reading's routes.
    """
    rule, output = reading.rule, reading.use.output
    way = route.way or rule.best_way(output, ghost=route.ghost)
    block = max(part.stop - part.start for part in rule.blocks(output, way, route.block))
    return replace(route, way=way, block=block)


def remeasured(reading: Reading, routes: Sequence[Route]) -> dict[Route, float]:
    """Seconds of the whole batch by each route, norm and share of the sum: medians of interleaved rounds.

    Args:
        routes: of the reading.
    """
    device = reading.rule.parameter.device
    filler = torch.empty(CACHES, dtype=torch.uint8, device=device)
    seconds: dict[Route, list[float]] = {route: [] for route in routes}
    made: list[object] = []
    for turn in range(ROUNDS + 1):  # the first is a warm-up
        for route in routes:
            filler.fill_(0)  # as in a step, other layers' tensors are in the caches,
            spent, results = _seconds(partial(followed, reading, route), device)
            if turn:
                seconds[route].append(spent)
            if device.type == "cpu":
                made.append(results)  # and results lie in untouched pages
    return {route: median(each) for route, each in seconds.items()}


def followed(reading: Reading, route: Route) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Squared norms [B], the sum with factors of 1, and what was kept for it, as in `norms.collection.Book`.

    Args:
        route: one of the reading's routes.
    """
    rule, g = reading.rule, reading.g
    assert g is not None
    factors = torch.ones(rule.samples(g), device=g.device, dtype=g.dtype)
    with torch.no_grad():
        if not route.kept:
            return rule.squared_norms(g, route), rule.weighted(g, factors), []
        parts, squares = [], []
        blocks = rule.blocks(g, route.way, route.block)
        for samples in blocks:
            parts.append(rule.instantiate(g, samples, route.way))
            squares.append(sum_of_squares(parts[-1]))
        total = weighted_sum(factors[blocks[0]], parts[0])
        for samples, part in zip(blocks[1:], parts[1:], strict=True):
            total += weighted_sum(factors[samples], part)
        return torch.cat(squares), total, parts


def _seconds(run: Callable[[], object], device: torch.device) -> tuple[float, object]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    results = run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start, results
