"""A report over many records."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure
from processor import work
from report_many import write_many

from dpbench.report import write_report
from dpbench.report.drawing import pictures

#: Of the yardstick's time on one CPU, a report's on two: ten seconds where that is 3.7 s. It takes twice as long.
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
    # The machine's pace is measured around the report: it is another one beside other work.
    before = sum(work(lambda: yardstick(tmp_path / "plain")))
    own, apart = work(lambda: write_report(tmp_path / "campaign", tmp_path / "out"))
    after = sum(work(lambda: yardstick(tmp_path / "plain")))
    text = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "10,000 trials on " in text and f"{failed} results without a number" in text
    assert len(text) < 2_000_000
    assert max(own, (own + apart) / 2) <= LIMIT * (before + after) / 2  # on two CPUs that nobody else uses
