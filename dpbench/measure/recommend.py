"""Body of a `RecommendTrial`: some of the backends beside ordinary training, interleaved, and done within a time.

As an `OverheadTrial` (see `dpbench.measure.overhead`), but whoever waits for it wants an answer: a backend whose turn
to be opened comes too late is left out, with an entry that says so, and rounds end when the time is spent, the first
excepted. Ordinary training, which clips nothing, is not verified. What a backend comes to is its entry's outcome, never
the trial's.
"""

from __future__ import annotations

import time
from typing import Any

from dpbench.errors import UsageError
from dpbench.execution.recommend.findings import LEFT_OUT, ORDINARY
from dpbench.measure.bench import device_of, open_workload, parameter_count, tensors_in
from dpbench.measure.explain import sizes
from dpbench.measure.overhead import Entry, allocations_that_fail, order
from dpbench.measure.precision import arithmetic, facts
from dpbench.trials import RecommendTrial
from dpbench.trials.outcome import Outcome

#: The share of the time after which no further backend is opened: the rest is for the rounds.
OPENING = 0.5
#: Ordinary training and the backend that comes first are opened in any case.
FIRST = 2


def run(trial: RecommendTrial) -> dict[str, Any]:
    """{"parameters", "precision", "inputs", "backends"}: as an overhead trial, and the shape of each input.

    Of a model that cannot be built: {"usage": line}.

    Args:
        trial: which model, under which backends.
    """
    begin = time.monotonic()
    device = device_of(trial.device)
    with arithmetic(trial.precision, device), allocations_that_fail(device):
        try:
            image_size, num_classes = sizes(trial)
            workload = open_workload(trial.replace(image_size=image_size, num_classes=num_classes))
        except UsageError as error:
            return {"usage": str(error)}
        batch = workload.batch(trial.batch_size)
        entries = [
            Entry(name, trial, device, fewest=trial.fewest, verified=name != ORDINARY) for name in trial.backends
        ]
        for place, entry in enumerate(entries):
            if place >= FIRST and time.monotonic() - begin > OPENING * trial.within:
                entry.record |= {"outcome": Outcome.TIMEOUT, "evidence": LEFT_OUT}
            else:
                entry.open(workload, *batch)
        longest = 0.0
        for number in range(trial.rounds):
            before = time.monotonic()
            for position, entry in enumerate(e for e in order(entries, trial.seed, number) if number in e.rounds):
                entry.turn(number, position)
            after = time.monotonic()
            longest = max(longest, after - before)
            if after + longest - begin > trial.within:  # another such round would end too late
                break
        for entry in entries:
            entry.take_memory()
        told = facts(trial.precision, workload, *batch)
    return {
        "parameters": parameter_count(workload.model),
        "precision": told,
        "inputs": [list(tensor.shape) for tensor in tensors_in(batch[0])],
        "backends": {entry.name: entry.record for entry in entries},
    }
