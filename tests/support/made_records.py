"""Records as figures read them, made from a trial and a result without a run."""

from dpbench.records.reader import Record


def made(trial, result, outcome="ok", **more):
    """A record of `trial`; `more` are further fields of `Record`."""
    fields = {"device": "cpu", "experiment": trial.kind, "id": trial.id, "round": 0, "fingerprint": "0", "evidence": ""}
    fields |= {"utc": "2026-01-01T00:00:00Z", "environment": {"cpus_available": 2}, "trial": trial.describe()}
    return Record(**fields | {"result": result, "outcome": outcome} | more)
