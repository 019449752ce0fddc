"""Writes made-up records for the report's tests, in the format of a run."""

import json

from dpbench.report.output import files
from dpbench.report.output.page import svg
from dpbench.trials import EpsilonTrial, OverheadTrial, PeakTrial, StepTrial

GIB = 2**30
CPU = {"device": "cpu", "device_name": "Test CPU, 2 CPUs", "torch": "2.15.0", "threads": 2}
CUDA = {"device": "cuda", "device_name": "Test GPU", "torch": "2.15.0", "threads": 2}


def save_no_pictures(monkeypatch):
    """Draw figures, but save neither files nor pictures in the page: saving takes most of the time."""
    monkeypatch.setattr(files, "save_all", lambda drawn: None)
    monkeypatch.setattr(svg, "inline", lambda figure, prefix, title, description: "")


class RunFile:
    """The record file of one run; trials are one second apart, from the minute `start` on.

    `more` has further fields of the lines to come, such as those of a later schema.
    """

    def __init__(self, path, environment=CPU, experiment="stress_test", start=0, more=()):
        self.path, self.experiment, self.seconds, self.more = path, experiment, 60 * start, dict(more)
        path.parent.mkdir(parents=True, exist_ok=True)
        head = {"type": "environment", "schema": 1, "run": path.stem, "utc": self.now(), "environment": environment}
        path.write_text(json.dumps(head) + "\n")

    def now(self):
        self.seconds += 1
        return f"2026-01-01T{self.seconds // 3600:02d}:{self.seconds // 60 % 60:02d}:{self.seconds % 60:02d}.000000Z"

    def add(self, trial, result=None, outcome="ok", round=0, fingerprint="v1", evidence=None):
        line = {"type": "trial", "schema": 1, "experiment": self.experiment, "id": trial.id, "round": round}
        line |= {"fingerprint": fingerprint, "trial": trial.describe(), "outcome": outcome, "evidence": evidence}
        line |= {"seconds": 1.0, "utc": self.now(), "result": result} | self.more
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return self

    def step(self, model, backend, seconds, peak=2**20, batch_size=8, round=0, fingerprint="v1", error=1e-7, **fields):
        trial = StepTrial(model=model, backend=backend, batch_size=batch_size, **fields)
        return self.add(trial, step_result(seconds, peak, error), round=round, fingerprint=fingerprint)

    def search(self, model, backend, fits=(), fails=(), simulated=True, budget=16 * GIB, fingerprint="v1", **fields):
        """Add probes of a search: batch sizes that fit, and batch sizes that fail."""
        for size in (*fits, *fails):
            trial = PeakTrial(
                model=model, backend=backend, batch_size=size, simulated=simulated, memory_budget=budget, **fields
            )
            source = "simulated" if simulated else "cuda_allocator"
            result = {"memory": memory(size * 2**20, source), "budget_bytes": budget, "parameters": 1}
            self.add(trial, result, "ok" if size in fits else "over_budget", fingerprint=fingerprint)
        return self

    def overhead(
        self,
        model,
        seconds,
        peaks=None,
        failed=None,
        batch_size=8,
        round=0,
        outcome="ok",
        fingerprint="v1",
        kind=OverheadTrial,
        more=None,
        **fields,
    ):
        """Add one trial of many backends.

        `seconds`: name -> seconds of its step in each round, None for no turn; `peaks`: name -> bytes, default 1 MiB;
        `failed`: name -> (outcome, evidence); `more`: name -> further values of its entry.
        """
        failed = failed or {}
        trial = kind(model=model, backends=[*seconds, *failed], batch_size=batch_size, **fields)
        backends = {}
        for name, series in seconds.items():
            entry = step_result([], (peaks or {}).get(name, 2**20)) | {"outcome": "ok", "evidence": None}
            del entry["step_seconds"], entry["parameters"]
            known = [(number, value) for number, value in enumerate(series) if value is not None]
            entry["turns"] = [{"round": n, "position": 0, "step_seconds": [value] * 3} for n, value in known]
            backends[name] = entry | (more or {}).get(name, {})
        backends |= {name: {"outcome": word, "evidence": said} for name, (word, said) in failed.items()}
        return self.add(trial, {"parameters": 1, "backends": backends}, outcome, round=round, fingerprint=fingerprint)

    def epsilon(self, accountant, steps, value, kind="upper_bound", outcome="ok", **fields):
        setting = {"sample_rate": 0.01, "noise_multiplier": 4.0, "delta": 1e-5} | fields
        result = {"epsilon": value, "kind": kind, "detail": {}, "compute_seconds": 0.01}
        return self.add(EpsilonTrial(accountant=accountant, steps=steps, **setting), result, outcome)


def memory(peak, source="cpu_allocator"):
    return {"source": source, "peak_bytes": peak, "baseline_bytes": peak // 2}


def step_result(seconds, peak=2**20, error=1e-7):
    checked = {"samples": 2, "max_norm_error": error / 2, "max_grad_error": error, "tolerance": 1e-3}
    return {
        "parameters": 1,
        "step_seconds": list(seconds),
        "warmup_seconds": [],
        "memory": memory(peak),
        "verification": checked,
        "coverage": {"ghost": 1.0, "instantiated": 0.0, "fallback": 0.0},
        "loss": 2.3,
    }


def row(table, **where):
    """The one row of a table with these values."""
    for column, value in where.items():
        table = table[table[column] == value]
    assert len(table) == 1, f"{len(table)} rows for {where}"
    return table.iloc[0]
