"""Run a `LargestTrial`: find the largest batch that fits in a budget, by a simulated search in one process.

The search is `dpbench.trials.max_batch.MaxBatch`; its probes are simulated steps (`dpbench.measure.simulate`). On CUDA
a `ConfirmTrial` checks the result by real steps.
"""

from __future__ import annotations

import time
from typing import Any

from dpbench.measure import memory
from dpbench.measure.explain import sizes
from dpbench.trials import LargestTrial, PeakTrial
from dpbench.trials.max_batch import MaxBatch, Probe
from dpbench.trials.outcome import OverBudget


def run(trial: LargestTrial) -> dict[str, Any]:
    """{"batch_size", "ended", "probes"}: the largest batch size seen to fit, or 0.

    "ended" is "bracketed" (a batch a tolerance larger does not fit), "full" (the budget is used except for `unused`),
    "limit" (`max_batch_size` fits), "nothing" (a batch of one does not fit) or "time". A probe is {"batch_size",
    "fits", "peak_bytes", "seconds"}, in the order of the search.

    Raises:
        UnsupportedModel: the backend refuses the model, or is not available.
        UsageError: the model cannot be built.
    """
    image_size, num_classes = sizes(trial)
    probe = PeakTrial(
        model=trial.model,
        backend=trial.backend,
        batch_size=trial.batch_size,
        device=trial.device,
        precision=trial.precision,
        image_size=image_size,
        num_classes=num_classes,
        seed=trial.seed,
        memory_budget=trial.memory_budget,
        simulated=True,
    )
    search = MaxBatch(
        probe=probe,
        start=trial.batch_size,
        max_batch_size=trial.max_batch_size,
        tolerance=trial.tolerance,
    )
    begin = time.monotonic()
    seen: dict[int, Probe] = {}
    probes: list[dict[str, Any]] = []
    while (ended := _end(trial, search, seen, time.monotonic() - begin)) is None:
        size = search.next_batch_size(seen)
        assert size is not None
        before = time.monotonic()
        seen[size] = found = _probe(probe.replace(batch_size=size))
        probes.append(
            {
                "batch_size": size,
                "fits": found.fits,
                "peak_bytes": found.peak_bytes,
                "seconds": time.monotonic() - before,
            }
        )
    return {"batch_size": search.answer(seen), "ended": ended, "probes": probes}


def _probe(trial: PeakTrial) -> Probe:
    try:
        result, fits = memory.run(trial), True
    except OverBudget as over:
        result, fits = over.result, False
    return Probe(fits, result["memory"]["peak_bytes"], result["memory"]["baseline_bytes"])


def _end(trial: LargestTrial, search: MaxBatch, seen: dict[int, Probe], seconds: float) -> str | None:
    """Why the search is over; None if it continues."""
    low = search.answer(seen)
    if search.next_batch_size(seen) is None:
        return "nothing" if not low else "limit" if low >= search.max_batch_size else "bracketed"
    if low and trial.memory_budget is not None:
        peak = seen[low].peak_bytes
        assert peak is not None
        if peak >= (1 - trial.unused) * trial.memory_budget:
            return "full"
    return "time" if seen and seconds >= trial.max_seconds else None
