"""What can be done with one use of a parameter: its routes, their time and their memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

from clipping.planning.costs import Costs, predicted
from clipping.provenance.derived_parameters import Source
from clipping.rules.base import Route, Rule, Spec

CALL = 3e-5
"""Rough seconds of another block of samples, added to smaller blocks that were not timed."""

KEEPING = 1.1
"""Factor on the time of kept gradients: they pass through all of the step's memory, and an equally fast route without
them makes the rest of the step faster."""


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


def has_choice(source: Source, rule: Rule, counts: Counter[str]) -> bool:
    """True if the norm can be computed in several ways, and is that of its parameter alone.

    Args:
        source: what the use reads.
        rule: of the use.
        counts: parameter name -> number of uses.
    """
    alone = all(counts[name] == 1 for name in source.parameters)
    return alone and source.rearranged and len(rule.ways) > 1 and not rule.is_fallback


def formula_route(source: Source, rule: Rule, output: Spec, count: int) -> Route:
    """Return the route that the formulas prefer, for a use without a choice or one of several uses of a parameter.

    Args:
        source: what the use reads.
        rule: of the use.
        output: shape and dtype of its output.
        count: number of samples to plan for.
    """
    if not source.rearranged:
        return Route()
    costs = predicted(rule, output)
    ghost, instantiated = costs.best(ghost=True), costs.best(ghost=False)
    if ghost is not None and (instantiated is None or ghost[1] < instantiated[1]):
        return ghost[0]
    return Route(kept=rule.is_kept(output, count))


def choices_of(rule: Rule, output: Spec, costs: Costs) -> list[Choice]:
    """Return the choices of a use. Within each kind the fastest comes first, then routes that take less memory.

    Args:
        rule: of the use.
        output: shape and dtype of its output.
        costs: measured or predicted.
    """
    count, each = rule.samples(output), rule.instantiated_bytes(output)
    gradient = output.numel() * output.element_size()  # autograd holds the input anyway when memory is fullest
    found = []
    for ghost in (True, False):
        for route, seconds, block in _routes(rule, output, costs, ghost=ghost):
            workspace = rule.norm_bytes(output, route.way or rule.best_way(output, ghost=ghost), block)
            found.append(Choice(route, seconds + costs.weight_gradient, gradient, workspace))
            if not ghost and costs.kept is not None:
                seconds = KEEPING * (seconds + costs.kept)
                found.append(Choice(replace(route, kept=True), seconds, count * each, max(0, workspace - block * each)))
    return found


def _routes(rule: Rule, output: Spec, costs: Costs, *, ghost: bool) -> list[tuple[Route, float, int]]:
    """(route, seconds of one sample, samples to a block): the fastest, then smaller blocks, timed ones if there are."""
    best = costs.best(ghost=ghost)
    if best is None:
        return []
    count = rule.samples(output)
    found: list[tuple[Route, float, int]] = []
    others = [(Route(*key), seconds) for key, seconds in costs.norms.items() if key[0] == ghost]
    for route, seconds in [best, *sorted(others, key=lambda other: other[1])]:
        block = _block(rule, output, route, count)
        if all(block < known for _, _, known in found):
            found.append((route, seconds, block))
    route, seconds, block = found[-1]
    for smaller in (-(-block // 4), -(-block // 16)):
        if smaller < found[-1][2]:
            more = CALL * (count / smaller - count / block) / max(1, count)
            found.append((replace(route, block=smaller), seconds + more, smaller))
    return found


def _block(rule: Rule, output: Spec, route: Route, count: int) -> int:
    way = route.way or rule.best_way(output, ghost=route.ghost)
    return -(-count // len(rule.blocks(output, way, route.block)))
