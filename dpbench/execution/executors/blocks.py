"""Group trials into blocks that stay on one node, because their times are compared.

A ratio to ordinary training is taken within one node and one round. So all timed trials of one model, precision and
device form one block, in all rounds. A node gets a whole block; the block moves only if the node is lost. Trials that
are not timed (an accountant, a simulated peak, a search of such) can run anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dpbench.execution.schedule import History, Run, Schedule, family
from dpbench.experiment import Cell, MaxBatch
from dpbench.trials import Trial, canonical_json


@dataclass
class Block:
    """A part of a plan. `together`: on one node. `running`: submitted runs that have not ended."""

    key: str
    schedule: Schedule
    together: bool
    running: list[Run] = field(default_factory=list)


def key_of(cell: Cell) -> tuple[str, bool]:
    """(the name of the cell's block, whether that must stay on one node).

    Args:
        cell: a trial, or a search.
    """
    trial: Trial = cell.probe if isinstance(cell, MaxBatch) else cell
    timed = cell.then is not None or trial.alone if isinstance(cell, MaxBatch) else trial.alone
    described = trial.describe()
    if timed and "model" in described:
        return canonical_json({name: described.get(name) for name in ("model", "device", "precision")}), True
    return (family(described) if isinstance(cell, MaxBatch) else trial.id), False


def blocks_of(
    name: str, cells: Sequence[Cell], rounds: int, history: History, *, in_order: bool = False
) -> list[Block]:
    """The blocks of an experiment, in the order of their first cells; together they are its schedule.

    Args:
        name: of the experiment.
        cells: of it.
        rounds: of each cell.
        history: the records.
        in_order: trials run as declared, in each block.
    """
    found: dict[tuple[str, bool], list[Cell]] = {}
    for cell in cells:
        found.setdefault(key_of(cell), []).append(cell)
    return [
        Block(key, Schedule(name, members, rounds, history, in_order=in_order), together)
        for (key, together), members in found.items()
    ]
