"""A report over many records."""

from __future__ import annotations

import os

import pytest
from report_many import write_many

from dpbench.report import write_report


@pytest.mark.slow
def test_ten_thousand_records_in_ten_seconds(tmp_path):
    failed = write_many(tmp_path / "campaign")
    write_report(tmp_path / "campaign", tmp_path / "warm", ["memory_speed_table"])
    start = os.times()
    path = write_report(tmp_path / "campaign", tmp_path / "out")[-1]
    end = os.times()
    work = sum(getattr(end, name) - getattr(start, name) for name in ("user", "system"))
    apart = sum(getattr(end, name) - getattr(start, name) for name in ("children_user", "children_system"))
    text = path.read_text(encoding="utf-8")
    assert "10,000 trials of campaign" in text and f"{failed} results without a number" in text
    assert len(text) < 2_000_000
    assert max(work, (work + apart) / 2) <= 10.0  # on two CPUs that nobody else uses
