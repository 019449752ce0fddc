"""The numbers of the report, from records whose tables can be worked out by hand."""

import math

import pandas as pd
import pytest
from report_records import CPU, GIB, RunFile, save_no_pictures, step_result

from dpbench.conformance import ConformanceTrial
from dpbench.errors import UsageError
from dpbench.report import write_report
from dpbench.report.data import published
from dpbench.report.readable import rounded_epsilon
from dpbench.trials import PeakTrial, StepTrial

FOLDER = "cpu-test-cpu-2-cpus"


@pytest.fixture
def run(tmp_path):
    return RunFile(tmp_path / "records" / "a.jsonl")


@pytest.fixture(autouse=True)
def drawn_but_not_saved(monkeypatch):
    save_no_pictures(monkeypatch)


def report(run, figure, name=None, folder=FOLDER):
    """The table behind a figure and the text beside it."""
    output = run.path.parent.parent / "out"
    write_report(run.path.parent, output, [figure])
    stem = output / folder / (name or figure)
    return pd.read_csv(f"{stem}.csv"), stem.with_name(f"{stem.name}.md").read_text(encoding="utf-8")


def row(table, **where):
    for column, value in where.items():
        table = table[table[column] == value]
    assert len(table) == 1, f"{len(table)} rows for {where}"
    return table.iloc[0]


def test_ratios_are_taken_within_a_round_and_then_their_median(run):
    for index, (base, ghost) in enumerate([([1.0, 1.0, 7.0], [3.0, 3.0, 9.0]), ([2.0] * 3, [5.0] * 3)]):
        run.step("cnn", "nonprivate", base, 10 * 2**20, round=index)
        run.step("cnn", "ghost", ghost, 25 * 2**20, round=index, error=1e-6)
    run.step("cnn", "ghost", [100.0], 25 * 2**20, round=2)  # no ordinary training beside it
    table, text = report(run, "memory_speed_table")

    ghost = row(table, backend="ghost")
    assert ghost.time_ratio == pytest.approx((3.0 + 2.5) / 2)
    assert (ghost.time_ratio_low, ghost.time_ratio_high) == (2.5, 3.0)
    assert (ghost.step_seconds, ghost["rounds"], ghost.paired_rounds) == (5.0, 3, 2)
    assert ghost.memory_ratio == 2.5
    assert ghost.max_grad_error == 1e-6  # the worst of the rounds
    assert ghost.published_time_ratio == pytest.approx(11 / 5)
    assert ghost.published_memory_ratio == pytest.approx(2.47 / 0.66)
    assert "| 2.75×" in text and "2.50×–3.00×" in text and "median of 2 rounds" in text


def test_memory_ratio_needs_two_peaks_taken_in_the_same_way(run):
    run.step("cnn", "nonprivate", [1.0])
    result = step_result([2.0])
    result["memory"]["source"] = "simulated"
    run.add(StepTrial(model="cnn", backend="ghost", batch_size=8), result)
    table, text = report(run, "memory_speed_table")
    assert math.isnan(row(table, backend="ghost").memory_ratio)
    assert row(table, backend="ghost").time_ratio == 2.0
    assert "Memory: CPU allocator, simulated." in text


def test_throughput_is_the_batch_over_the_median_step(run):
    for index, seconds in enumerate([[0.5, 0.5, 90.0], [0.4, 0.4, 0.4], [0.8, 0.8, 0.8]]):
        run.step("cnn", "ghost", seconds, round=index)
    ghost = row(report(run, "max_batch_throughput")[0], backend="ghost")
    assert ghost.images_per_second == 8 / 0.5
    assert (ghost.images_per_second_low, ghost.images_per_second_high) == (8 / 0.8, 8 / 0.4)
    assert (ghost["rounds"], ghost.batch_size) == (3, 8)


def test_throughput_of_backends_in_turn_is_that_of_their_turns_with_ratios_of_one_round(run):
    run.overhead("cnn", {"nonprivate": [1.0, 2.0, 1.0], "ghost": [2.0, 8.0, 3.0]}, batch_size=16)
    run.search("cnn", "ghost", [8], [9])
    table, text = report(run, "max_batch_throughput")
    ghost = row(table, backend="ghost")
    assert (ghost.images_per_second, ghost.images_per_second_low, ghost["rounds"]) == (16 / 3, 2, 3)
    assert (ghost.time_ratio, ghost.time_ratio_low, ghost.time_ratio_high) == (3.0, 2.0, 4.0)
    assert "the backends in turn in one process" in text


@pytest.mark.parametrize("last", ["alone", "in turn"])
def test_throughput_is_as_it_was_timed_last_whatever_the_batch(run, last):
    def alone():
        run.step("cnn", "ghost", [1.0], batch_size=64)

    def in_turn():
        run.overhead("cnn", {"nonprivate": [1.0], "ghost": [2.0]}, batch_size=16)

    for time in (alone, in_turn) if last == "in turn" else (in_turn, alone):
        time()
    ghost = row(report(run, "max_batch_throughput")[0], backend="ghost")
    assert ghost.batch_size == {"alone": 64, "in turn": 16}[last]


def test_records_that_came_with_the_folder_are_told_of(run):
    run.search("cnn", "ghost", [8], [9])
    own = RunFile(run.path.with_name("b.jsonl"), CPU | {"results_folder": "f00d"}, start=5)
    own.overhead("cnn", {"nonprivate": [1.0], "ghost": [2.0]})
    text = report(run, "max_batch_throughput")[1]
    said = "Warning: 2 of 3 records came with this folder, perhaps of another machine; run all to make them one."
    assert " ".join(text.split()).count(said) == 1
    own.search("cnn", "ghost", [8], [9])
    assert "came with this folder" not in report(run, "max_batch_throughput")[1]


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
def test_max_batch_is_the_search_s_bracket(run, fits, fails, largest, note):
    run.search("resnet18", "ghost", fits, fails)
    ghost = row(report(run, "max_batch_throughput")[0], backend="ghost")
    if largest is None:
        assert math.isnan(ghost.max_batch_size)
    else:
        assert (ghost.max_batch_size, ghost.peak_bytes) == (largest, largest * 2**20)
    assert ghost.max_batch_note == note or (note is None and pd.isna(ghost.max_batch_note))
    assert ghost.published_max_batch_size == 798


@pytest.mark.parametrize(
    ("outcome", "words"),
    [("oom", "out of memory at B=1"), ("unsupported", "unsupported"), ("crash", "crashed at B=1")],
)
def test_a_cell_without_a_number_has_a_word_for_it(run, outcome, words):
    fields = {"model": "resnet18", "backend": "vmap", "batch_size": 1}
    evidence = "no vmap | here\nsecond line"
    run.add(PeakTrial(**fields, simulated=True, memory_budget=16 * GIB), outcome=outcome, evidence=evidence)
    run.add(StepTrial(**fields), outcome=outcome, evidence=evidence)
    table, text = report(run, "max_batch_throughput")
    assert row(table, backend="vmap").max_batch_note == words
    assert row(table, backend="vmap").throughput_note == words
    assert f"ResNet18 vmap B=1: {words.split(' at')[0]}. `no vmap | here`" in text


def test_a_failure_in_the_middle_of_a_search_is_no_limit_of_memory(run):
    run.search("resnet18", "ghost", [8, 64])
    run.add(
        PeakTrial(model="resnet18", backend="ghost", batch_size=128, simulated=True, memory_budget=16 * GIB),
        outcome="timeout",
    )
    ghost = row(report(run, "max_batch_throughput")[0], backend="ghost")
    assert (ghost.max_batch_size, ghost.max_batch_note) == (64, "search ended: timed out at B=128")


def test_a_mismatch_enters_no_number(run):
    run.search("resnet18", "ghost", [8, 100], [101])
    run.step("resnet18", "nonprivate", [1.0]).step("resnet18", "nonprivate", [1.0], round=1)
    run.step("resnet18", "ghost", [0.001])
    trial = StepTrial(model="resnet18", backend="ghost", batch_size=8)
    run.add(trial, step_result([0.001]), "mismatch", round=1, evidence="gradient off by 0.5")
    figure, text = report(run, "max_batch_throughput")
    speed, _ = report(run, "memory_speed_table")
    for name in ("max_batch_size", "images_per_second"):
        assert math.isnan(row(figure, backend="ghost")[name])
    for name in ("step_seconds", "time_ratio", "peak_bytes", "memory_ratio"):
        assert math.isnan(row(speed, backend="ghost")[name])
    assert "1 mismatch: wrong gradient" in text and "gradient off by 0.5" in text


def test_the_newest_record_of_a_trial_and_round_wins(run):
    run.step("cnn", "ghost", [1.0])
    later = RunFile(run.path.with_name("0-sorts-first.jsonl"), start=5)
    later.step("cnn", "ghost", [2.0])
    table, text = report(run, "memory_speed_table")
    ghost = row(table, backend="ghost")
    assert (ghost.step_seconds, ghost["rounds"]) == (2.0, 1)
    assert "1 superseded by a newer record" in text


def test_a_cell_is_of_one_version_of_the_code(run):
    run.step("cnn", "ghost", [1.0], round=0, fingerprint="old").step("cnn", "ghost", [3.0], round=1, fingerprint="new")
    run.search("cnn", "ghost", [8, 500], [501], fingerprint="old").search(
        "cnn", "ghost", [8, 40], [41], fingerprint="new"
    )
    table, text = report(run, "max_batch_throughput")
    assert row(table, backend="ghost").images_per_second == pytest.approx(8 / 3)
    assert row(table, backend="ghost").max_batch_size == 40
    assert "of an older version of the same cell" in text
    assert "Warning" not in text  # what is drawn is of one version


def test_several_versions_in_one_figure_are_warned_of(run):
    run.step("cnn", "ghost", [1.0], fingerprint="old").step("cnn", "vmap", [1.0], fingerprint="new")
    assert (
        "Warning: records of 2 versions (of sources, libraries or machine) are mixed, 1 of 2 not of the newest"
        in report(run, "memory_speed_table")[1]
    )


def test_simulated_and_measured_memory_have_a_row_each(run):
    run.search("cnn", "ghost", [8, 100], [101], simulated=True).search("cnn", "ghost", [8, 90], [91], simulated=False)
    table, text = report(run, "max_batch_throughput")
    assert row(table, memory="simulated").max_batch_size == 100
    assert row(table, memory="measured").max_batch_size == 90
    assert "simulated under fake tensors (hatched), not measured" in text


def test_each_budget_and_precision_has_a_figure_of_its_own(run):
    run.search("resnet18", "ghost", [8, 100], [101]).search("resnet18", "ghost", [4], [5], budget=GIB)
    small, text = report(run, "max_batch_throughput", "max_batch_throughput-memory-budget-1gib")
    assert row(small, backend="ghost").max_batch_size == 4
    assert math.isnan(row(small, backend="ghost").published_max_batch_size)  # those are for 16 GB
    assert "Budget: 1 GiB." in text
    large, _ = report(run, "max_batch_throughput", "max_batch_throughput-memory-budget-16gib")
    assert row(large, backend="ghost").max_batch_size == 100


def test_smoke_runs_are_drawn_only_when_asked_for(run, tmp_path):
    smoke = RunFile(tmp_path / "records" / "stress_test-smoke" / "a.jsonl")
    smoke.step("cnn", "vmap", [1.0])
    run.step("cnn", "ghost", [1.0])
    assert list(report(run, "memory_speed_table")[0].backend) == ["ghost"]
    assert list(report(smoke, "memory_speed_table")[0].backend) == ["vmap"]


def test_the_caption_says_what_was_measured_where(run):
    run.search("cnn", "ghost", [8, 100], [101])
    for index in range(3):
        run.step("cnn", "ghost", [1.0], round=index)
    text = report(run, "max_batch_throughput")[1]
    for words in ("Budget: 16 GiB", "cpu Test CPU, 2 CPUs", "torch 2.15.0", "float32", "32×32 inputs", "2 threads",
                  "batch size 8", "median of 3 rounds", "digits data", "No record is left out"):  # fmt: skip
        assert words in text


def test_epsilon_by_epochs(run):
    run.epsilon("moments", 10_000, 1.25861).epsilon("strong:published", 10_000, 9.34, kind="heuristic")
    run.epsilon("simple", 10_000, "inf").epsilon("moments", 100, None, outcome="timeout")
    table, text = report(run, "epsilon_epochs")
    assert row(table, accountant="moments", steps=10_000).epochs == 100
    assert row(table, accountant="strong:published").epsilon == 9.34
    assert row(table, accountant="simple").epsilon == math.inf
    assert row(table, accountant="moments", steps=100).note == "timed out"
    assert "1.259" in text  # an upper bound is rounded up
    assert rounded_epsilon(1.2596, "lower_bound") == "1.259" and rounded_epsilon(1.2596, "estimate") == "1.260"
    assert "heuristic (not a bound)" in text and "not drawn, at some point: simple" in text


def test_published_values():
    assert published.value("Figure 3", "max_batch_size_16GB", "resnet18", "mixed_ghost") == 1500
    assert published.ratio("time_per_epoch", "resnet18", "ghost") == pytest.approx(59 / 14)
    assert published.ratio("time_per_epoch", "resnet18", "opacus_hooks") == "OOM"
    assert published.ratio("time_per_epoch", "resnet18", "bk_mixed") is None
    assert published.ratio("time_per_epoch", "my/net.py:make", "ghost") is None


def test_an_unknown_figure_is_one_line(tmp_path):
    with pytest.raises(UsageError, match=r"expected a figure, got .*did you mean 'epsilon_epochs'\? \(one of"):
        write_report(tmp_path, tmp_path, ["epsilon_epoch"])


def test_no_records_no_files(tmp_path):
    assert write_report(tmp_path, tmp_path / "out", ["memory_speed_table"]) == []
    assert not (tmp_path / "out").exists()


def verdict(case, result, raised=False, reason=None):
    return {
        "case": case,
        "result": result,
        "raised": raised,
        "norm_error": None,
        "grad_error": None,
        "coverage": {},
        "reason": reason,
    }


def test_the_scorecard_counts_what_is_exact_refused_and_wrong(tmp_path):
    run = RunFile(tmp_path / "records" / "a.jsonl", experiment="conformance")
    run.add(ConformanceTrial(backend="opacus_hooks"), {"rows": [verdict("a", "wrong"), verdict("b", "refuses")]})
    run.add(ConformanceTrial(backend="vmap"), {"rows": [verdict("a", "exact"), verdict("b", "wrong", raised=True)]})
    run.add(ConformanceTrial(backend="fastdp"), None, outcome="unsupported", evidence="fastdp is not available here")
    table, text = report(run, "scorecard")
    assert list(table.columns) == ["case", "vmap", "opacus_hooks"]  # ours before the peers
    assert table.values.tolist() == [
        ["a", "exact", "wrong"],
        ["b", "wrong", "refuses"],
        ["in all", "1 exact, 0 refuses, 1 wrong", "0 exact, 1 refuses, 1 wrong"],
    ]
    assert "2 cases" in text and "fastDP: unsupported" in text and "fastdp is not available here" in text


def test_throughput_is_that_of_the_largest_batch_timed(run):
    run.step("cnn", "ghost", [1.0], batch_size=8).step("cnn", "ghost", [2.0], batch_size=64)
    run.step("cnn", "vmap", [1.0], batch_size=8)
    table, text = report(run, "max_batch_throughput")
    assert row(table, backend="ghost").images_per_second == 32
    assert "the batch size beside it" in text
