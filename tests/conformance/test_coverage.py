"""The sweep over the models that people load: its list, the rule that makes them small, how it judges and reports."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from hooked import changed
from report_records import RunFile, save_no_pictures
from waiting import python

from clipping import ClippedGradient, Problem
from clipping.backends.microbatch import Microbatch
from dpbench.conformance import coverage
from dpbench.conformance.coverage import CoverageTrial, models, size_of
from dpbench.errors import UsageError
from dpbench.measure.coverage import run
from dpbench.models.loading import load_workload
from dpbench.models.tiny_config import FIRST_TOKEN, shrunk
from dpbench.records.reader import LeftOut, newest_version, read
from dpbench.report import write_report
from dpbench.report.figures import coverage as figure

# The list


def test_every_family_and_every_type_is_listed_once_with_its_task():
    listed = models()
    tasks = dict(listed)
    assert len(tasks) == len(listed) > 500
    assert tasks["timm:test_vit"] == tasks["torchvision:alexnet"] == tasks["tiny:image/vit"] == coverage.IMAGES
    assert tasks["tiny:masked/bert"] == "masked language model"
    assert tasks["tiny:causal/mixtral"] == coverage.KERNEL
    assert tasks["tiny:causal/mixtral?experts_implementation=eager"] == coverage.LOOP
    assert "tiny:causal/llama?experts_implementation=eager" not in tasks
    assert listed == models()


def test_the_list_has_a_model_of_every_module_of_timm():
    import timm

    names = [name.removeprefix("timm:").partition("?")[0] for name, _ in models() if name.startswith("timm:")]
    modules = {module: set(timm.list_models(module=module)) for module in timm.list_modules()}
    of = [next(module for module, known in modules.items() if name in known) for name in names]
    assert sorted(of) == sorted(module for module, known in modules.items() if known)


def test_the_list_is_read_without_importing_the_libraries():
    code = (
        "import sys, dpbench.conformance.coverage as c; c.models(); "
        "print({'torch', 'timm', 'transformers'} & set(sys.modules))"
    )
    assert python("-c", code).strip() == "set()"


def test_a_library_that_is_not_installed_has_no_models(monkeypatch):
    monkeypatch.setattr(coverage.importlib.util, "find_spec", lambda name: None)
    assert models() == []


@pytest.mark.parametrize(
    ("names", "smallest"),
    [
        (["resnet50", "resnet18", "resnet101"], "resnet18"),
        (["vit_base_patch16_224", "vit_tiny_patch16_224", "vit_huge_patch14"], "vit_tiny_patch16_224"),
        (["vit_h_14", "vit_b_16"], "vit_b_16"),
        (["convnext_atto", "test_convnext"], "test_convnext"),
    ],
)
def test_the_smallest_of_a_family_is_found_by_its_name(names, smallest):
    assert min(names, key=size_of) == smallest


# The rule that makes a configuration small


def config_of(kind: str) -> Any:
    from transformers import AutoConfig

    return shrunk(AutoConfig.for_model(kind))


def test_a_configuration_has_small_fields_and_marks_below_the_tokens():
    small = config_of("mixtral")
    assert (small.hidden_size, small.num_hidden_layers, small.num_local_experts) == (32, 2, 4)
    assert (small.num_attention_heads, small.num_key_value_heads) == (4, 2)  # grouped, as by default
    assert {small.pad_token_id, small.bos_token_id, small.eos_token_id} < set(range(FIRST_TOKEN))
    assert config_of("phi").num_key_value_heads == 4  # not grouped, as by default


@pytest.mark.parametrize("ref", ["tiny:causal/gpt2", "tiny:image/resnet", "tiny:ctc/wav2vec2", "tiny:seq2seq/t5"])
def test_a_tiny_model_has_a_loss_for_each_sample_and_is_the_same_every_time(ref):
    first, again = (load_workload(ref) for _ in range(2))
    assert sum(p.numel() for p in first.model.parameters()) < 1e6 and first.model.training
    inputs, targets = first.batch(2)
    losses = first.loss_fn(first.model(**inputs), targets)
    assert losses.shape == (2,) and torch.equal(losses, again.loss_fn(again.model(**inputs), targets))


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        ("tiny:causal/gtp2", "gpt2"),
        ("tiny:casual/gpt2", "causal"),
        ("tiny:causal/gpt2?n_leyer=3", "n_layer"),
        ("tiny:image/gpt2", "a model type that transformers has for the head image"),
    ],
)
def test_what_is_no_tiny_model_is_one_line(ref, message):
    with pytest.raises(UsageError, match=message) as error:
        load_workload(ref)
    assert "\n" not in str(error.value)


# How a backend is judged

HERE = Path(__file__)


Doubles = changed(lambda g, _: 2 * g)


class KeepsTheFirst(Microbatch):
    """Right on the first batch, whose norms it gives ever after."""

    name = "keeps_the_first"
    kept: Any = None

    def _clipped(self, *args: Any, **kwargs: Any) -> ClippedGradient:
        out = super()._clipped(*args, **kwargs)
        self.kept = out.norms if self.kept is None else self.kept
        return ClippedGradient(out.grads, self.kept[: len(out.losses)], out.losses)


class Refuses(Microbatch):
    """No model is good enough."""

    name = "refuses"

    def problems(self) -> list[Problem]:
        return [Problem("model", "it is a model", "none")]


class Fails(Microbatch):
    """An error of its own."""

    name = "fails"

    def _clipped(self, *args: Any, **kwargs: Any) -> ClippedGradient:
        raise KeyError("no such\nthing")


class Small(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))


class Mixes(Small):
    """Subtracts the mean over the batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y - y.mean(0) / 2


class MixesLater(Small):
    """Mixes once a parameter is not zero, as some initial values are."""

    def __init__(self) -> None:
        super().__init__()
        self.share = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y - self.share.detach() * y.mean(0)


class Draws(Small):
    """Adds noise in train mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + 0.1 * torch.randn_like(x) if self.training else x)


def breaks() -> torch.nn.Module:
    raise RuntimeError("no such library")


def judged(factory: str, *backends: str) -> dict[str, Any]:
    names = [f"{HERE}:{name}" if name[0].isupper() else name for name in backends]
    return run(CoverageTrial(model=f"{HERE}:{factory}", task="test", backends=names, image_size=8))


def test_each_backend_is_exact_refuses_is_wrong_or_crashes():
    result = judged("Small", "microbatch", "bk_mixed", "Doubles", "KeepsTheFirst", "Refuses", "Fails")
    statuses = [row["status"] for row in result["rows"]]
    assert statuses == ["exact", "exact", "wrong", "wrong", "refused", "crash"]
    exact, _, doubles, keeps, refuses, fails = result["rows"]
    assert exact["grad_error"] < 1e-12 and exact["reason"] is None
    assert doubles["grad_error"] == pytest.approx(1) and doubles["norm_error"] < 1e-12
    assert keeps["norm_error"] > 1e-3
    assert "it is a model" in refuses["reason"] and fails["reason"] == "KeyError: 'no such\\nthing'"
    assert (result["built"], result["dtype"]) == (True, "float64")


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        *(("Mixes", "it mixes samples"), ("MixesLater", "it mixes samples")),
        *(("Draws", "it draws random numbers"), ("breaks", "RuntimeError: no such library")),
    ],
)
def test_a_model_without_gradients_to_compare_with_says_why(factory, reason):
    result = judged(factory, "microbatch")
    assert not result["built"] and reason in result["reason"]


def test_a_dropout_of_a_nested_configuration_is_off():
    assert run(CoverageTrial(model="tiny:ctc/parakeet_ctc", task="test", backends=["ghost"]))["built"]


def test_a_mixture_of_experts_that_has_no_float64_is_judged_in_float32():
    result = run(CoverageTrial(model="tiny:causal/mixtral", task="test", backends=["microbatch"]))
    assert (result["dtype"], result["rows"][0]["status"]) == ("float32", "exact")


def test_a_mixture_of_experts_without_experts_shows_nothing():
    result = run(CoverageTrial(model="tiny:causal/gpt2", task=coverage.KERNEL, backends=["microbatch"]))
    assert (result["built"], result["reason"]) == (False, "made small, none of its layers has experts")


def test_a_backend_that_is_not_installed_is_unavailable(monkeypatch):
    monkeypatch.setattr(Microbatch, "unavailable", classmethod(lambda cls: "no package"))
    assert judged("Small", "microbatch")["rows"][0]["status"] == "unavailable"


# The report


def verdict(backend: str, status: str, reason: str | None = None) -> dict[str, Any]:
    errors = {"norm_error": None, "grad_error": None, "coverage": {}}
    return {"backend": backend, "status": status, "reason": reason} | errors


def built(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"built": True, "dtype": "float64", "rows": list(rows)}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The folder of a report of both figures."""
    folder, backends = tmp_path_factory.mktemp("coverage"), ("bk_mixed", "opacus_hooks")
    refusal = "opacus_hooks does not support this model: wpe.weight: left no gradient [3, 16] (remedy: none); x: y"
    results = {
        "timm:test_vit": built(verdict("bk_mixed", "exact"), verdict("opacus_hooks", "exact")),
        "tiny:causal/a": built(verdict("bk_mixed", "exact"), verdict("opacus_hooks", "refused", refusal)),
        "tiny:causal/b": built(verdict("bk_mixed", "wrong", "of 'w'"), verdict("opacus_hooks", "refused", refusal)),
        "tiny:causal/c": {"built": False, "reason": "no such library"},
    }
    file = RunFile(folder / "records" / "a.jsonl", experiment="coverage")
    for model, result in results.items():
        file.add(CoverageTrial(model=model, task=model[:4], backends=backends), result)
    last = CoverageTrial(model="tiny:causal/d", task="tiny", backends=backends)
    file.add(last, None, outcome="timeout", evidence="still running after its limit of 300 s; killed\nmore")
    with pytest.MonkeyPatch.context() as patch:
        save_no_pictures(patch)
        write_report(folder / "records", folder / "report", ["coverage", "coverage_reasons"])
    return folder / "report"


def test_the_report_has_the_share_of_what_is_built_by_library_and_task(report):
    table = pd.read_csv(next(report.rglob("coverage.csv")))
    rows = table.set_index(["library", "backend"])[["listed", "built", "exact", "refused", "wrong", "crash"]]
    assert rows.loc[("all libraries", "bk_mixed")].tolist() == [5, 4, 2, 0, 1, 1]
    assert rows.loc[("transformers", "opacus_hooks")].tolist() == [4, 3, 0, 2, 0, 1]
    assert rows.loc[("timm", "bk_mixed")].tolist() == [1, 1, 1, 0, 0, 0]
    shares = table.set_index(["library", "backend"]).exact_share
    assert shares[("all libraries", "bk_mixed")] == 0.5 and shares[("transformers", "opacus_hooks")] == 0
    text = next(report.rglob("coverage.md")).read_text()
    assert "50.0 %" in text and "1 that cannot be built" in text
    assert "BK mixed 2 (wrong on 1, crashed on 1)" in (report / "report.html").read_text()


def test_a_mixture_of_experts_counts_once_by_its_graver_result_and_only_the_newest_version_counts(tmp_path):
    file = RunFile(tmp_path / "a.jsonl", experiment="coverage")
    models = ("a", "exact"), (f"a{coverage.EAGER}", "refused"), ("b", "exact"), (f"b{coverage.EAGER}", "exact")
    for model, status in models:
        trial = CoverageTrial(model=f"tiny:causal/{model}", task="t", backends=("ghost",))
        file.add(trial, built(verdict("ghost", status)))
    frame = figure.table(read(file.path), LeftOut())
    counts = frame.set_index("library")[["listed", "exact", "refused"]]
    assert counts.loc[figure.ALL].tolist() == [2, 1, 1] and counts.loc["transformers"].tolist() == [4, 3, 1]
    newer = CoverageTrial(model="tiny:causal/c", task="t", backends=("ghost",))
    file.add(newer, built(verdict("ghost", "exact")), fingerprint="newer")
    left_out: LeftOut = LeftOut()
    kept = newest_version(read(file.path), figure.FIGURES["coverage"].cell, left_out)
    assert [r.trial["model"] for r in kept] == ["tiny:causal/c"] and left_out.total() == 4


def test_the_reasons_name_every_model_that_is_not_exact_or_not_built(report):
    table = pd.read_csv(next(report.rglob("coverage_reasons.csv")), keep_default_na=False)
    assert table[["backend", "status", "models", "which"]].values.tolist() == [
        ["bk_mixed", "wrong", 1, "tiny:causal/b"],
        ["bk_mixed", "crash", 1, "tiny:causal/d"],
        ["opacus_hooks", "crash", 1, "tiny:causal/d"],
        ["opacus_hooks", "refused", 2, "tiny:causal/a, tiny:causal/b"],
        ["", "not built", 1, "tiny:causal/c"],
    ]
    assert table.reason[3] == "left no gradient [3, 16] (remedy: none)"
    assert table.reason[1] == "timed out: still running after its limit of 300 s; killed"


def test_a_backend_that_is_not_there_is_in_no_share(tmp_path):
    file = RunFile(tmp_path / "a.jsonl", experiment="coverage")
    trial = CoverageTrial(model="timm:a", task="t", backends=("ghost", "opacus_hooks"))
    file.add(trial, built(verdict("ghost", "exact"), verdict("opacus_hooks", "unavailable", "not installed")))
    left_out: LeftOut = LeftOut()
    assert set(figure.table(read(file.path), left_out).backend) == {"ghost"}
    assert left_out == {"Opacus hooks is not available here": 1}
