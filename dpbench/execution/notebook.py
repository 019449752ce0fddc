"""For notebooks and scripts: `load` records as a tidy frame, or `run` an experiment and load its records.

    import dpbench
    frame = dpbench.run("memory_speed", only={"model": "cnn"}, rounds=7)
    frame[frame.outcome == "ok"].pivot_table("step_seconds", "model", "backend")

pandas is imported when one of the two is called, and torch not at all: trials run in processes of their own.
"""

from __future__ import annotations

import dataclasses
import io
import os
import signal
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from dpbench.errors import UsageError, one_of
from dpbench.experiment import Cell, Experiment, MaxBatch, load_experiment
from dpbench.records.environment import DEVICES
from dpbench.records.reader import LeftOut, Record, entries, locate, newest, read
from dpbench.trials import Trial
from dpbench.trials.shapes import COUNT, NUMBER, SECONDS, TEXT, WHOLE, check, flaw, optional

if TYPE_CHECKING:
    import pandas as pd

Source = str | os.PathLike[str] | Experiment
#: The columns of every frame, in order; then the trial's other fields, and the environment as ``env_...``.
COLUMNS = (
    *("experiment", "kind", "device_label", "id", "round", "turn", "fingerprint", "utc", "run", "model", "backend"),
    *("accountant", "batch_size", "outcome", "evidence", "step_seconds", "samples", "warmup_seconds", "peak_bytes"),
    *("baseline_bytes", "memory", "max_norm_error", "max_grad_error", "ghost", "instantiated", "fallback", "epsilon"),
    *("epsilon_kind", "seconds", "load", "stolen", "result"),
)


def load(source: Source, *, results: str | os.PathLike[str] = "results", superseded: bool = False) -> pd.DataFrame:
    """Records as a tidy frame: one row for each trial, backend and round.

    Args:
        source: the name of an experiment or an `Experiment`, with records in `results`; or a folder or file.
        superseded: include records that a newer one of the same trial and round has replaced.

    Returns:
        `COLUMNS` (seconds, bytes; `step_seconds` is the median of a round's raw `samples`), the other fields of the
        trial, and the run's environment as ``env_...``. A trial of several backends has a row for each backend and
        `turn`, a round within the trial. Missing values are empty. Failed trials have rows too, with the reason in
        `outcome` and `evidence`.

    Raises:
        UsageError: there are no records there.
    """
    if isinstance(source, Experiment):
        path = Path(results) / source.name
        if not any(path.glob("*.jsonl")):
            raise UsageError(f"records in {path}", "none")
    else:
        path = locate(os.fspath(source), Path(results))
    return _frame(read(path), superseded)


def run(
    experiment: str | Experiment | Cell | Sequence[Cell],
    *,
    output: str | os.PathLike[str] = "results",
    device: str = "auto",
    only: Mapping[str, object] | None = None,
    rounds: int | None = None,
    retry: Collection[str] = (),
    minutes: float | None = None,
    smoke: bool = False,
    quiet: bool = False,
    name: str = "notebook",
) -> pd.DataFrame:
    """Measure what remains of an experiment, and return its records as `load` does. Recorded trials do not run again.

    Args:
        experiment: its name, ``my/file.py:NAME``, an `Experiment`, or trials (one, or a list).
        output: the folder of all results; records are appended below it.
        device: "auto", "cpu" or "cuda". Listed trials carry their own device, which must be the same for all.
        only: field -> value or values, as ``--only``.
        rounds: how often each trial runs; by default the experiment's number (5 for a list of trials).
        retry: outcomes to run again, as ``--retry``.
        minutes: do not start trials that would end later, as ``--minutes``; the same call resumes.
        smoke: run in miniature.
        quiet: do not print a line for each trial on standard error.
        name: the folder in `output` for a list of trials.

    Returns:
        The present rows of the requested trials.

    Raises:
        UsageError: an argument is invalid.
        KeyboardInterrupt: it was interrupted; finished trials are recorded, and the same call resumes.
    """
    from dpbench.execution.progress import Progress  # imports numpy, which `load` does not need
    from dpbench.execution.runner import Request, make_plan  # the same
    from dpbench.execution.runner import run as run_request  # the same

    retry = [retry] if isinstance(retry, str) else list(retry)
    chosen, device = _experiment(experiment, one_of("a device", device, DEVICES), name)
    request = Request(
        experiment=chosen,
        results=Path(output),
        device=device,
        only=_only(only),
        rounds=rounds,
        retry=retry,
        smoke=smoke,
        minutes=minutes,
    )
    progress = Progress(io.StringIO() if quiet else None)
    done = run_request(request, progress)
    for line in done.left:
        progress.say(f"dpbench: {line}")
    if done.signum is not None:
        raise KeyboardInterrupt(signal.Signals(done.signum).name)
    history = make_plan(dataclasses.replace(request, retry=()), done.device).schedule.recorded()
    asked = {(line["id"], line["round"], line["fingerprint"]) for line in history}
    return _frame([r for r in read(request.folder) if (r.id, r.round, r.fingerprint) in asked], superseded=False)


def _experiment(given: Any, device: str, name: str) -> tuple[Experiment, str]:
    """(the experiment, its device)."""
    if isinstance(given, str):
        return load_experiment(given), device
    if isinstance(given, Experiment):
        return given, device
    cells = [given] if isinstance(given, Trial | MaxBatch) else list(given)
    if not cells or not all(isinstance(cell, Trial | MaxBatch) for cell in cells):
        raise UsageError("the name of an experiment, an Experiment, or trials", given)
    for cell in cells:
        if type(cell).__module__ == "__main__":
            raise UsageError("trials of a class in a file, which their processes can import", type(cell).__name__)
    own = {getattr(cell.probe if isinstance(cell, MaxBatch) else cell, "device", device) for cell in cells}
    if len(own) > 1 or (device != "auto" and own != {device}):
        raise UsageError(f"trials of one device ({device})", ", ".join(sorted(own)))
    declared = Experiment(name=name, doc="Trials.", cells=lambda _: cells, smoke=lambda _: cells, rounds=5)
    return declared, own.pop()


def _only(given: Mapping[str, object] | None) -> dict[str, list[str]]:
    several = (list, tuple, set, frozenset)
    return {
        field: [str(item) for item in value] if isinstance(value, several) else [str(value)]
        for field, value in (given or {}).items()
    }


#: The parts of a result that have columns of their own, in the form of our records.
_READ = check(
    {
        "memory?": optional({"source": TEXT, "peak_bytes": WHOLE}),
        "epsilon?": optional(NUMBER),
        "turns?": optional([{"round": COUNT, "step_seconds": [SECONDS]}]),
        "step_seconds?": optional([SECONDS]),
    }
)
#: Fields of a result, and of those parts, that are columns as they are.
_TAKEN = (
    *("warmup_seconds", "compute_seconds", "loss", "parameters", "peak_bytes", "baseline_bytes", "reserved_bytes"),
    *("max_norm_error", "max_grad_error", "ghost", "instantiated", "fallback"),
)


def _frame(records: Sequence[Record], superseded: bool) -> pd.DataFrame:
    import pandas as pd

    kept = records if superseded else newest(records, LeftOut())
    rows = [row for record in entries(kept) for row in _rows(record)]
    extra = dict.fromkeys(key for row in rows for key in row if key not in COLUMNS)
    ordered = [*COLUMNS, *(k for k in extra if not k.startswith("env_")), *(k for k in extra if k.startswith("env_"))]
    frame = pd.DataFrame(rows, columns=ordered)
    whole = ("round", "turn", "batch_size", "peak_bytes", "baseline_bytes")
    return frame.astype({name: "Int64" for name in whole})


def _rows(record: Record) -> list[dict[str, Any]]:
    """One row; for a trial of several backends, one for each turn of a backend."""
    row: dict[str, Any] = {name: value for name, value in record.trial.items() if name not in ("backends", "rounds")}
    row |= {"device_label": record.device, "evidence": record.evidence or None}
    own = ("experiment", "kind", "id", "round", "fingerprint", "utc", "run", "outcome", "seconds", "load", "stolen")
    row |= {name: getattr(record, name) for name in own}
    row["result"] = dict(record.result)
    result = record.result if flaw(record.result, _READ) is None else {}  # a custom kind may return anything
    for part in (result, *map(result.get, ("memory", "verification", "coverage"))):
        if isinstance(part, Mapping):
            row |= {name: part[name] for name in _TAKEN if name in part}
    if isinstance(memory := result.get("memory"), Mapping):
        row["memory"] = memory["source"]
    if result.get("epsilon") is not None:  # none without noise
        row |= {"epsilon": float(result["epsilon"]), "epsilon_kind": result.get("kind")}
    row |= {f"env_{name}": value for name, value in record.environment.items() if not isinstance(value, Mapping)}
    for versions in (record.environment.get("packages"), record.environment.get("variables")):
        row |= {f"env_{name}": value for name, value in (versions or {}).items()}
    if result.get("turns"):
        return [row | {"turn": turn["round"]} | _times(turn["step_seconds"]) for turn in result["turns"]]
    return [row | _times(result.get("step_seconds") or [])]


def _times(samples: Sequence[float]) -> dict[str, Any]:
    return {"samples": list(samples), "step_seconds": median(samples)} if samples else {}
