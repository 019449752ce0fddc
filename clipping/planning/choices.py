"""What can be done with one use of a parameter: its routes, their seconds, and what each holds in memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

from clipping.norms.collection import is_small_pulled_back
from clipping.planning.costs import Costs, predicted
from clipping.planning.timeline import Held, storage_of
from clipping.provenance.derived_parameters import Source
from clipping.rules.base import Route, Rule, Spec
from clipping.tape.uses import Use

CALL = 3e-5
"""Seconds of another block of samples, roughly: what smaller blocks are charged where they were not timed."""

KEEPING = 1.1
"""What kept gradients are charged, times what was timed: they move through all of the step's memory, and what is as
fast without them is faster with the rest of the step."""


class Choice(NamedTuple):
    """One thing to do with a use: its route, seconds of one sample, and what it holds (batch in all)."""

    route: Route
    seconds: float
    held: Held


def has_choice(source: Source, rule: Rule, counts: Counter[str]) -> bool:
    """Its norm can be found in more than one way, and is that of its parameter alone.

    Args:
        source: what a use reads.
        rule: of the use.
        counts: parameter name -> how many uses it has.
    """
    alone = all(counts[name] == 1 for name in source.parameters)
    several = len(rule.ghosts) + len(rule.instantiations) > 1
    return alone and source.rearranged and several and not rule.is_fallback


def formula_route(source: Source, rule: Rule, output: Spec, count: int) -> Route:
    """For a use without a choice, or one of several uses of a parameter: what the formulas prefer.

    Args:
        source: what a use reads.
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


def held_without_choice(
    use: Use, source: Source, rule: Rule, route: Route, shared: set[str] | None, planned_for: int
) -> Held:
    """What a use holds whose route is settled.

    Args:
        use, source, rule, route: one reading.
        shared: parameters of several uses that were met before, added to here; None if its own are used once.
        planned_for: number of samples to plan for.
    """
    output, count = use.output, rule.samples(use.output)
    size, gradients = output.numel() * output.element_size(), count * rule.instantiated_bytes(output)
    if shared is not None and not (route.ghost and source.is_parameter):
        new = [name for name in source.parameters if name not in shared]
        shared.update(new)  # all uses of a parameter add up to one gradient a sample
        return Held(use.node, gradients if new else 0, None, 0 if new else gradients)
    if route.kept:
        return Held(use.node, gradients, None, 0)
    if not source.rearranged and is_small_pulled_back(source, rule, output, planned_for):
        entries = sum(p.numel() for p in source.parameters.values())
        return Held(use.node, count * entries * output.element_size(), None, gradients)
    held_input = rule.held_input()
    stored = None if held_input is None else storage_of(held_input)
    return Held(use.node, 0, stored, 0, size, rule.summing_bytes(output))


def choices_of(rule: Rule, use: Use, costs: Costs) -> list[Choice]:
    """What can be done with a use (see the module's text), the fastest of a kind before those that take less memory.

    Args:
        rule: of the use.
        use: one that the tape recorded.
        costs: measured or predicted.
    """
    output = use.output
    count, size = rule.samples(output), output.numel() * output.element_size()
    held_input = rule.held_input()
    stored = None if held_input is None else storage_of(held_input)
    summing = rule.summing_bytes(output)
    found = []
    for ghost in (True, False):
        for route, seconds, block in _routes(rule, output, costs, ghost=ghost):
            workspace = rule.norm_bytes(output, route.way or rule.best_way(output, ghost=ghost), block)
            held = Held(use.node, 0, stored, workspace, size, summing)
            found.append(Choice(route, seconds + costs.weight_gradient, held))
            if not ghost and costs.kept is not None:
                each = rule.instantiated_bytes(output)
                held = Held(use.node, count * each, None, max(0, workspace - block * each))
                found.append(Choice(replace(route, kept=True), KEEPING * (seconds + costs.kept), held))
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
