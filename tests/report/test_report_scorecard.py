"""The scorecard page: each cell from records, with a link to their file, or "not measured" with the command."""

import re

import pytest
from report_records import CUDA, RunFile, memory

from dpbench.conformance import ConformanceTrial
from dpbench.conformance.coverage import CoverageTrial
from dpbench.records.reader import read
from dpbench.report import scorecard
from dpbench.trials.whole_step import TrainingStepTrial


def verdict(case, result):
    words = {"norm_error": None, "grad_error": None, "coverage": {}, "reason": ""}
    return {"case": case, "result": result, "raised": False} | words


@pytest.fixture
def results(tmp_path):
    return tmp_path / "results"


def cell(results, heading, backend):
    (column,) = [c for c in scorecard.columns(read(results)) if c.heading == heading]
    return column.of(backend)


def test_hard_cases_are_counted_and_what_is_refused_is_named(results):
    run = RunFile(results / "conformance" / "a.jsonl", experiment="conformance")
    rows = [verdict("a", "exact"), verdict("b", "refuses"), verdict("c", "wrong")]
    run.add(ConformanceTrial(backend="opacus_hooks"), {"rows": rows})
    exact = cell(results, "Exact in hard cases", "opacus_hooks")
    assert (exact.text, exact.more, exact.files) == ("1 of 3, 1 wrong", "Wrong: c", [run.path])
    refused = cell(results, "Refuses", "opacus_hooks")
    assert (refused.text, refused.more) == ("1 of 3 cases", "b")
    assert cell(results, "Refuses", "vmap").text == ""


@pytest.mark.parametrize("name", ["coverage", "sensitivity"])
def test_another_kind_of_trial_in_an_experiment_of_a_column(name, results):
    RunFile(results / name / "a.jsonl", experiment=name).epsilon("prv", 100, 1.2)
    assert all(not column.cells for column in scorecard.columns(read(results)))


def test_models_are_a_share_of_those_that_can_be_built(results):
    run = RunFile(results / "coverage" / "a.jsonl", experiment="coverage")
    for model, status in (("timm:a", "exact"), ("timm:b", "refused")):
        row = {"backend": "ghost", "status": status} | verdict("", "") | {"coverage": None}
        result = {"built": True, "rows": [row], "mixes": False, "random": False}
        run.add(CoverageTrial(model=model, task="t", backends=("ghost",)), result)
    run.add(CoverageTrial(model="timm:c", task="t", backends=("ghost",)), {"built": False, "reason": "none"})
    found = cell(results, "Exact on public models", "ghost")
    assert (found.text, found.more) == ("50.0% of 2", "1 refused, 0 wrong, 0 crashed")


def test_a_step_is_the_median_over_models_on_each_kind_of_device(results):
    run = RunFile(results / "overhead" / "a.jsonl", experiment="overhead")
    for model, ratio in (("cnn", 1.2), ("resnet18", 1.4), ("vgg11", 3.0)):
        run.overhead(model, {"nonprivate": [1.0], "ghost": [ratio]})
    gpu = RunFile(results / "overhead" / "b.jsonl", CUDA, experiment="overhead")
    gpu.overhead("cnn", {"nonprivate": [1.0], "ghost": [4.0]}, device="cuda")
    found = cell(results, "Forward, backward and clipping alone, CPU", "ghost")
    assert found.text.startswith("1.40×") and found.more.startswith("1.20× to 3.00× in time")
    assert found.more.endswith("on 3 models") and found.files == [run.path]
    assert cell(results, "Forward, backward and clipping alone, GPU", "ghost").files == [gpu.path]
    assert cell(results, "Whole step with noise and optimizer, CPU", "ghost").text == ""


def test_an_engine_of_another_framework_has_a_row_of_ratios_to_its_own_plain_step(results):
    run = RunFile(results / "training_step" / "a.jsonl", experiment="training_step")
    plain = {"turns": [{"round": 0, "step_seconds": [2.0]}], "memory": memory(2**20, "xla")}
    of = {"kind": TrainingStepTrial, "optimizer": "SGD", "image_size": None, "more": {"jax_privacy": {"plain": plain}}}
    run.overhead("transformers:gpt2@16", {"nonprivate": [1.0], "jax_privacy": [6.0]}, **of)
    found = scorecard.columns(read(results))
    assert scorecard.backends(found) == ["jax_privacy"]
    assert cell(results, "Whole step with noise and optimizer, CPU", "jax_privacy").text.startswith("3.00×")


def test_the_page_links_every_cell_and_claim_to_a_file_beside_it(results, dpbench):
    run = RunFile(results / "overhead" / "a.jsonl", experiment="overhead")
    run.overhead("resnet18", {"nonprivate": [1.0, 1.0], "mixed_ghost": [1.5, 1.5]})
    code, out, _ = dpbench("scorecard", results)
    page = results / "scorecard.html"
    assert (code, out.split()) == (0, [str(page)])
    text = page.read_text(encoding="utf-8")
    links = set(re.findall(r'<a href="([^"]+)"', text))
    assert links == {".", "overhead/a.jsonl"} and (results / "overhead/a.jsonl").exists()
    assert "The slow-down of mixed ghost clipping is below 2 on all models." in text and "held" in text
    assert "`python -m dpbench run training_step` measures it." in text and "not measured" in text
