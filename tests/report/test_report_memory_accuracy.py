"""The table and figure of simulated beside measured peaks."""

import pandas as pd
import pytest
from report_records import RunFile

from dpbench.records.reader import LeftOut, read
from dpbench.report import write_report
from dpbench.report.figures import memory_accuracy
from dpbench.trials import PeakTrial


def peaks(run, model, backend, simulated, measured=None, outcome="ok", evidence=None):
    for is_simulated, peak in ((True, simulated), (False, measured)):
        trial = PeakTrial(model=model, backend=backend, batch_size=8, simulated=is_simulated)
        if peak is None:
            run.add(trial, None, outcome, evidence=evidence)
            continue
        phases = {"model": 2**20, "forward": peak // 2, "backward": peak, "step": peak}
        source = "simulated" if is_simulated else "cpu_allocator"
        memory = {"source": source, "peak_bytes": peak, "baseline_bytes": 2**20, "phases": phases}
        run.add(trial, {"memory": memory, "budget_bytes": None, "parameters": 1})


@pytest.fixture
def source(tmp_path):
    run = RunFile(tmp_path / "run.jsonl", experiment="memory_accuracy")
    peaks(run, "cnn", "nonprivate", 102 * 2**20, 100 * 2**20)
    peaks(run, "cnn", "vmap", 90 * 2**20, 100 * 2**20)
    peaks(run, "cnn", "opacus_ew", None, None, "unsupported", "does not run on fake tensors")
    return tmp_path


def test_errors_by_cell_and_the_worst_by_name(source):
    records, left_out = read(source), LeftOut()
    frame = memory_accuracy.table(records, left_out)
    assert list(frame.backend) == ["nonprivate", "vmap", "opacus_ew"]
    assert frame.error[0] == pytest.approx(0.02) and frame.error[1] == pytest.approx(-0.1)
    assert pd.isna(frame.error[2]) and frame.note[2] == "unsupported"
    caption = " ".join(memory_accuracy.FIGURE.caption(records, frame))
    assert "1 of 2 cells are within 5%" in caption and "the largest -10.0% (" in caption
    words = memory_accuracy.text(frame)
    assert words.Step[0].endswith(" +2.0%") and words.Step[2] == "–"
    assert words.Model[0] == "CNN" and words["Parameters and buffers"][0] == "1 MiB +0.0%"


def test_the_figure_is_drawn_of_such_records_and_of_no_search(source, tmp_path):
    paths = write_report(source, tmp_path / "out", ("memory_accuracy",))
    assert {path.suffix for path in paths} >= {".png", ".svg", ".pdf", ".csv", ".md"}
    other = tmp_path / "search"
    RunFile(other / "run.jsonl").search("cnn", "vmap", fits=(8,), fails=(16,))
    assert "memory_accuracy" not in str([p.name for p in write_report(other, tmp_path / "none", ("memory_accuracy",))])
