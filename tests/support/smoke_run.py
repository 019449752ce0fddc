"""Runs `stress_test --smoke` on an executor and reads its records; locally once for all tests."""

import functools
import subprocess
import sys
import tempfile
from pathlib import Path

from waiting import PATIENCE

from dpbench.records.store import read_records

Cell = tuple[str, int, str]


def smoke(folder: Path, *arguments: str) -> list[Cell]:
    """Run, check that figures were drawn, and return (trial id, round, outcome) of every record."""
    command = [sys.executable, "-m", "dpbench", "run", "stress_test", "--smoke", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--output", str(folder), *arguments], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert list(folder.rglob("*.svg"))
    return sorted((r["id"], r["round"], r["outcome"]) for r in read_records(folder / "stress_test-smoke"))


@functools.cache
def smoke_here() -> list[Cell]:
    with tempfile.TemporaryDirectory() as folder:
        return smoke(Path(folder))
