"""Runs `stress_test --smoke` on an executor and reads its records; locally once for all tests."""

import functools
import tempfile
from pathlib import Path

from waiting import python

from dpbench.records.store import read_records

Cell = tuple[str, int, str]


def smoke(folder: Path, *arguments: str) -> list[Cell]:
    """Run, check that figures were drawn, and return (trial id, round, outcome) of every record."""
    command = ["-m", "dpbench", "run", "stress_test", "--smoke", "--device", "cpu"]
    python(*command, "--output", folder, *arguments)
    assert list(folder.rglob("*.svg"))
    return sorted((r["id"], r["round"], r["outcome"]) for r in read_records(folder / "stress_test-smoke"))


@functools.cache
def smoke_here() -> list[Cell]:
    with tempfile.TemporaryDirectory() as folder:
        return smoke(Path(folder))
