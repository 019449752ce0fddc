"""A report over many records."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure
from processor import work
from report_many import write_many

from dpbench.report import write_report
from dpbench.report.drawing import pictures

#: Of the yardstick's time on one CPU, a report's on two: ten seconds where that is 3.7 s. It takes 2.5 times as long.
LIMIT = 2.7


def yardstick(folder: Path) -> None:
    """A plain figure of 30 panels and 600 texts, as PNG, SVG and PDF."""
    folder.mkdir(exist_ok=True)
    figure = Figure(figsize=(10, 12))
    for axes in figure.subplots(10, 3).flat:
        for line in range(20):
            axes.plot([0, 1], [line, line])
            axes.text(0.5, line, f"line {line}")
    pictures.save(figure, {suffix: folder / f"plain.{suffix}" for suffix in ("png", "svg", "pdf")})


@pytest.mark.slow
def test_ten_thousand_records_in_ten_seconds(tmp_path):
    failed = write_many(tmp_path / "campaign")
    write_report(tmp_path / "campaign", tmp_path / "warm", ["memory_speed_table"])
    yardstick(tmp_path / "plain")
    assert any(_is_quick(tmp_path, f"out {attempt}") for attempt in range(3))  # other work slows one side alone
    text = (tmp_path / "out 0" / "report.html").read_text(encoding="utf-8")
    assert "10,000 trials on " in text and f"{failed} results without a number" in text
    assert len(text) < 2_000_000


def _is_quick(folder: Path, name: str) -> bool:
    """True if a new report takes at most `LIMIT` times as long as the yardstick before and after it."""
    before = sum(work(lambda: yardstick(folder / "plain")))
    own, apart = work(lambda: write_report(folder / "campaign", folder / name))
    after = sum(work(lambda: yardstick(folder / "plain")))
    return max(own, (own + apart) / 2) <= LIMIT * (before + after) / 2  # the time on two idle CPUs
