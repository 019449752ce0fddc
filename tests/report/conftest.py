"""A run's records, and the report that is made of them."""

import pandas as pd
import pytest
from report_records import RunFile, save_no_pictures

from dpbench.report import write_report


@pytest.fixture
def run(tmp_path):
    return RunFile(tmp_path / "records" / "a.jsonl")


@pytest.fixture
def report(run, tmp_path, monkeypatch):
    """Make a report and return the table behind a figure and the text beside it; pictures are not saved."""
    save_no_pictures(monkeypatch)

    def make(figure, name=None, source=run):
        write_report(source.path.parent, tmp_path / "out", [figure])
        stem = tmp_path / "out" / "cpu-test-cpu-2-cpus" / (name or figure)
        return pd.read_csv(f"{stem}.csv"), stem.with_suffix(".md").read_text(encoding="utf-8")

    return make
