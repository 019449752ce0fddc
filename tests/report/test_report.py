"""The numbers of the report, from records whose tables can be worked out by hand."""

import math

import pandas as pd
import pytest
from report_records import CPU, GIB, RunFile, row, step_result

from dpbench.conformance import ConformanceTrial
from dpbench.report import write_report
from dpbench.trials import PeakTrial, StepTrial


def test_ratios_are_taken_within_a_round_and_then_their_median(run, report):
    for index, (base, ghost) in enumerate([([1.0, 1.0, 7.0], [3.0, 3.0, 9.0]), ([2.0] * 3, [5.0] * 3)]):
        run.step("cnn", "nonprivate", base, 10 * 2**20, round=index)
        run.step("cnn", "ghost", ghost, 25 * 2**20, round=index, error=1e-6)
    run.step("cnn", "ghost", [100.0], 25 * 2**20, round=2)  # no ordinary training beside it
    table, text = report("memory_speed_table")

    ghost = row(table, backend="ghost")
    assert ghost.time_ratio == pytest.approx((3.0 + 2.5) / 2)
    assert (ghost.time_ratio_low, ghost.time_ratio_high) == (2.5, 3.0)
    assert (ghost.step_seconds, ghost["rounds"], ghost.paired_rounds) == (5.0, 3, 2)
    assert ghost.memory_ratio == 2.5
    assert ghost.max_grad_error == 1e-6  # the worst of the rounds
    assert ghost.published_time_ratio == pytest.approx(11 / 5)
    assert ghost.published_memory_ratio == pytest.approx(2.47 / 0.66)
    assert "| 2.75×" in text and "2.50×–3.00×" in text and "median of 2 rounds" in text


def test_memory_ratio_needs_two_peaks_taken_in_the_same_way(run, report):
    run.step("cnn", "nonprivate", [1.0])
    result = step_result([2.0])
    result["memory"]["source"] = "simulated"
    run.add(StepTrial(model="cnn", backend="ghost", batch_size=8), result)
    table, text = report("memory_speed_table")
    assert math.isnan(row(table, backend="ghost").memory_ratio)
    assert row(table, backend="ghost").time_ratio == 2.0
    assert "Memory: CPU allocator, simulated." in text


def test_throughput_is_the_batch_over_the_median_step_of_the_largest_batch(run, report):
    run.step("cnn", "ghost", [0.1], batch_size=4)
    for index, seconds in enumerate([[0.5, 0.5, 90.0], [0.4, 0.4, 0.4], [0.8, 0.8, 0.8]]):
        run.step("cnn", "ghost", seconds, round=index)
    ghost = row(report("max_batch_throughput")[0], backend="ghost")
    assert ghost.images_per_second == 8 / 0.5
    assert (ghost.images_per_second_low, ghost.images_per_second_high) == (8 / 0.8, 8 / 0.4)
    assert (ghost["rounds"], ghost.batch_size) == (3, 8)


def test_throughput_of_backends_in_turn_is_that_of_their_turns_with_ratios_of_one_round(run, report):
    run.step("cnn", "ghost", [1.0], batch_size=64)  # whatever the batch: they were timed last
    run.overhead("cnn", {"nonprivate": [1.0, 2.0, 1.0], "ghost": [2.0, 8.0, 3.0]}, batch_size=16)
    run.search("cnn", "ghost", [8], [9])
    table, text = report("max_batch_throughput")
    ghost = row(table, backend="ghost")
    assert (ghost.images_per_second, ghost.images_per_second_low, ghost["rounds"]) == (16 / 3, 2, 3)
    assert (ghost.time_ratio, ghost.time_ratio_low, ghost.time_ratio_high) == (3.0, 2.0, 4.0)
    assert "the backends in turn in one process" in text


def test_records_that_came_with_the_folder_are_told_of(run, report):
    run.search("cnn", "ghost", [8], [9])
    own = RunFile(run.path.with_name("b.jsonl"), CPU | {"results_folder": "f00d"}, start=5)
    own.overhead("cnn", {"nonprivate": [1.0], "ghost": [2.0]})
    text = report("max_batch_throughput")[1]
    said = "Warning: 2 of 3 records came with this folder, perhaps of another machine; run all to make them one."
    assert " ".join(text.split()).count(said) == 1
    own.search("cnn", "ghost", [8], [9])
    assert "came with this folder" not in report("max_batch_throughput")[1]


@pytest.mark.parametrize(
    ("fits", "fails", "largest", "note"),
    [
        ([8, 100], [102, 200], 100, None),
        ([8, 100], [150], 100, "search unfinished: 150 does not fit"),
        ([8, 100, 160], [150], 100, "search unfinished: 150 does not fit"),  # what fits, fits always
        ([8, 256], [], 256, "not limited by memory up to there"),
        ([], [1, 8], None, "over budget at B=1"),
    ],
)
def test_max_batch_is_the_search_s_bracket(run, fits, fails, largest, note, report):
    run.search("resnet18", "ghost", fits, fails)
    ghost = row(report("max_batch_throughput")[0], backend="ghost")
    if largest is None:
        assert math.isnan(ghost.max_batch_size)
    else:
        assert (ghost.max_batch_size, ghost.peak_bytes) == (largest, largest * 2**20)
    assert ghost.max_batch_note == note or (note is None and pd.isna(ghost.max_batch_note))
    assert ghost.published_max_batch_size == 798


@pytest.mark.parametrize(
    ("outcome", "words"), [("oom", "out of memory at B=1"), ("unsupported", "unsupported"), ("crash", "crashed at B=1")]
)
def test_a_cell_without_a_number_has_a_word_for_it(run, outcome, words, report):
    fields = {"model": "resnet18", "backend": "vmap", "batch_size": 1}
    evidence = "no vmap | here\nsecond line"
    run.add(PeakTrial(**fields, simulated=True, memory_budget=16 * GIB), outcome=outcome, evidence=evidence)
    run.add(StepTrial(**fields), outcome=outcome, evidence=evidence)
    table, text = report("max_batch_throughput")
    assert row(table, backend="vmap").max_batch_note == words
    assert row(table, backend="vmap").throughput_note == words
    assert f"ResNet18 vmap B=1: {words.split(' at')[0]}. `no vmap | here`" in text.replace(" (2×)", "")  # of two kinds


def test_a_failure_in_the_middle_of_a_search_is_no_limit_of_memory(run, report):
    run.search("resnet18", "ghost", [8, 64])
    run.add(
        PeakTrial(model="resnet18", backend="ghost", batch_size=128, simulated=True, memory_budget=16 * GIB),
        outcome="timeout",
    )
    ghost = row(report("max_batch_throughput")[0], backend="ghost")
    assert (ghost.max_batch_size, ghost.max_batch_note) == (64, "search ended: timed out at B=128")


def test_a_mismatch_enters_no_number(run, report):
    run.search("resnet18", "ghost", [8, 100], [101])
    run.step("resnet18", "nonprivate", [1.0]).step("resnet18", "nonprivate", [1.0], round=1)
    run.step("resnet18", "ghost", [0.001])
    trial = StepTrial(model="resnet18", backend="ghost", batch_size=8)
    run.add(trial, step_result([0.001]), "mismatch", round=1, evidence="gradient off by 0.5")
    figure, text = report("max_batch_throughput")
    speed, _ = report("memory_speed_table")
    for name in ("max_batch_size", "images_per_second"):
        assert math.isnan(row(figure, backend="ghost")[name])
    for name in ("step_seconds", "time_ratio", "peak_bytes", "memory_ratio"):
        assert math.isnan(row(speed, backend="ghost")[name])
    assert "1 mismatch: wrong gradient" in text and "gradient off by 0.5" in text


def test_the_newest_record_of_a_trial_and_round_wins(run, report):
    run.step("cnn", "ghost", [1.0])
    later = RunFile(run.path.with_name("0-sorts-first.jsonl"), start=5)
    later.step("cnn", "ghost", [2.0])
    table, text = report("memory_speed_table")
    ghost = row(table, backend="ghost")
    assert (ghost.step_seconds, ghost["rounds"]) == (2.0, 1)
    assert "1 superseded by a newer record" in text


def test_a_cell_is_of_one_version_of_the_code(run, report):
    run.step("cnn", "ghost", [1.0], round=0, fingerprint="old").step("cnn", "ghost", [3.0], round=1, fingerprint="new")
    for version, fits in (("old", 500), ("new", 40)):
        run.search("cnn", "ghost", [8, fits], [fits + 1], fingerprint=version)
    table, text = report("max_batch_throughput")
    assert row(table, backend="ghost").images_per_second == pytest.approx(8 / 3)
    assert row(table, backend="ghost").max_batch_size == 40
    assert "of an older version of the same cell" in text
    assert "Warning" not in text  # what is drawn is of one version


def test_simulated_and_measured_memory_have_a_row_each(run, report):
    run.search("cnn", "ghost", [8, 100], [101]).search("cnn", "ghost", [8, 90], [91], simulated=False)
    table, text = report("max_batch_throughput")
    assert {row.memory: row.max_batch_size for row in table.itertuples()} == {"simulated": 100, "measured": 90}
    assert "simulated under fake tensors (hatched), not measured" in text


def test_each_budget_and_precision_has_a_figure_of_its_own(run, report):
    run.search("resnet18", "ghost", [8, 100], [101]).search("resnet18", "ghost", [4], [5], budget=GIB)
    small, text = report("max_batch_throughput", "max_batch_throughput-memory-budget-1gib")
    assert row(small, backend="ghost").max_batch_size == 4
    assert math.isnan(row(small, backend="ghost").published_max_batch_size)  # those are for 16 GB
    assert "Budget: 1 GiB." in text
    large, _ = report("max_batch_throughput", "max_batch_throughput-memory-budget-16gib")
    assert row(large, backend="ghost").max_batch_size == 100


def test_smoke_runs_are_drawn_only_when_asked_for(run, tmp_path, report):
    smoke = RunFile(tmp_path / "records" / "stress_test-smoke" / "a.jsonl")
    smoke.step("cnn", "vmap", [1.0])
    run.step("cnn", "ghost", [1.0])
    assert list(report("memory_speed_table")[0].backend) == ["ghost"]
    assert list(report("memory_speed_table", source=smoke)[0].backend) == ["vmap"]


def test_epsilon_by_epochs(run, report):
    run.epsilon("moments", 10_000, 1.25861).epsilon("strong:published", 10_000, 9.34, kind="heuristic")
    run.epsilon("simple", 10_000, "inf").epsilon("moments", 100, None, outcome="timeout")
    table, text = report("epsilon_epochs")
    assert row(table, accountant="moments", steps=10_000).epochs == 100
    assert row(table, accountant="strong:published").epsilon == 9.34
    assert row(table, accountant="simple").epsilon == math.inf
    assert row(table, accountant="moments", steps=100).note == "timed out"
    assert "1.259" in text  # an upper bound is rounded up
    assert "heuristic (not a bound)" in text and "not drawn, at some point: simple" in text


def test_no_records_no_files(tmp_path):
    assert write_report(tmp_path, tmp_path / "out", ["memory_speed_table"]) == []
    assert not (tmp_path / "out").exists()


def test_the_scorecard_counts_what_is_exact_refused_and_wrong(run, report):
    words = {"raised": False, "norm_error": None, "grad_error": None, "coverage": {}, "reason": None}
    for backend, results in {
        "opacus_hooks": {"a": "wrong", "b": "refuses"},
        "vmap": {"a": "exact", "b": "wrong", "c": "exact"},
    }.items():
        rows = [{"case": case, "result": result} | words for case, result in results.items()]
        run.add(ConformanceTrial(backend=backend), {"rows": rows})
    run.add(ConformanceTrial(backend="fastdp"), None, outcome="unsupported", evidence="fastdp is not available here")
    table, text = report("scorecard")
    assert list(table.columns) == ["case", "vmap", "opacus_hooks"]  # ours before the peers
    assert table.values.tolist() == [
        ["a", "exact", "wrong"],
        ["b", "wrong", "refuses"],
        ["c", "exact", "'-"],  # a spreadsheet's text
        ["in all", "2 exact, 0 refuses, 1 wrong", "0 exact, 1 refuses, 1 wrong"],
    ]
    assert "3 cases" in text and "fastDP: unsupported" in text and "fastdp is not available here" in text
