"""``dpbench explain``: the paper's example, the rows and the table, and one line for what cannot be explained."""

import json
import re
from pathlib import Path

import pytest

from dpbench.cli.explain import table
from dpbench.measure.explain import run, sizes
from dpbench.trials import ExplainTrial

KEYS = [
    *("parameter", "op", "T", "d", "p", "groups", "two_T_squared", "p_times_d", "paper_choice", "choice"),
    *("bytes", "flops", "reason", "plan", "predicted_seconds", "measured_seconds"),
]
MODELS = """
import itertools

import torch
from torch import nn

from dpbench.conformance.modules import Net


def net(forward, **parts):
    return Net(lambda net, x: forward(net, x.mean((2, 3))), head=nn.Linear(3, 10), **parts)


def in_place():
    return net(lambda net, x: net.head(x).fmod_(net.a).remainder_(net.b), a=torch.ones(10), b=torch.ones(10))


def asks_for_a_value():
    return net(lambda net, x: net.head(x if x.sum() > 0 else -x))


def broken():
    calls = itertools.count()

    def forward(net, x):
        if next(calls):
            raise RuntimeError("the second batch is too much")
        return net.head(x)

    return net(forward)


def small():
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=4), nn.GroupNorm(2, 8), nn.Flatten(), nn.LazyLinear(10))


def lazy_no_more():
    model = small()
    model(torch.zeros(1, 3, 32, 32))
    return model
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "mine.py"
    path.write_text(MODELS)
    return path


@pytest.fixture(scope="module")
def vgg() -> dict:
    """The paper's example, without a process of its own."""
    return run(ExplainTrial(model="torchvision:vgg11", batch_size=1))


def test_vgg_11_at_224_as_the_paper_has_it(vgg):
    """arXiv:2205.10683: conv1 to conv5 are instantiated, and the ghost norm is taken from conv6 on."""
    assert vgg["summary"]["inputs"] == [[1, 3, 224, 224]]
    weights = [row for row in vgg["rows"] if row["T"]]
    assert [row["op"] for row in weights] == ["conv2d"] * 8 + ["linear"] * 3
    assert [row["paper_choice"] for row in weights] == ["instantiate"] * 5 + ["ghost"] * 6
    assert [row["choice"] for row in weights] == [row["paper_choice"] for row in weights]
    positions = [224**2, 112**2, 56**2, 56**2, 28**2, 28**2, 14**2, 14**2, 1, 1, 1]
    products = [64 * 3 * 9, 128 * 64 * 9, 256 * 128 * 9, 256 * 256 * 9, 512 * 256 * 9, *[512 * 512 * 9] * 3]
    products += [4096 * 512 * 7 * 7, 4096 * 4096, 1000 * 4096]
    assert [row["T"] for row in weights] == positions
    assert [row["two_T_squared"] for row in weights] == [2 * T**2 for T in positions]
    assert [row["p_times_d"] for row in weights] == products == [row["p"] * row["d"] for row in weights]


def test_the_totals_are_those_of_the_rows(vgg):
    rows, summary = vgg["rows"], vgg["summary"]
    for key in ("bytes", "flops"):
        instantiated = sum(row[key]["instantiate"] for row in rows)
        ghost = sum(row[key]["instantiate" if row[key]["ghost"] is None else "ghost"] for row in rows)
        mixed = sum(row[key][row["choice"]] for row in rows)
        found = [summary["totals"][name][key] for name in ("ghost", "instantiate", "mixed")]
        assert found == [ghost, instantiated, mixed]
        assert mixed < ghost
    ghost_weights = [row for row in rows if row["choice"] == "ghost"]
    assert summary["parameters"] == 132_863_336
    assert summary["share"]["ghost"] == pytest.approx(sum(row["p_times_d"] for row in ghost_weights) / 132_863_336)
    assert sum(summary["share"].values()) == pytest.approx(1)


def test_json_is_a_list_of_rows(dpbench, models, trials_here):
    code, out, err = dpbench("explain", f"{models}:lazy_no_more", "--batch-size", "1", "--format", "json")
    assert (code, err) == (0, "")
    rows = json.loads(out)
    assert [list(row) for row in rows] == [KEYS] * 6
    assert [row["parameter"] for row in rows] == ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]
    conv, bias = rows[:2]
    assert list(conv["predicted_seconds"]) == ["ghost", "kept", "discarded"] and conv["measured_seconds"] is None
    assert [conv[key] for key in KEYS[:8]] == ["0.weight", "conv2d", 64, 27, 8, 1, 2 * 64**2, 27 * 8]
    assert (conv["paper_choice"], conv["choice"], conv["plan"]) == ("instantiate", "instantiate", "kept, grouped")
    assert [bias[key] for key in ("T", "d", "p", "two_T_squared", "p_times_d", "paper_choice")] == [None] * 6
    assert bias["bytes"] == {"ghost": None, "instantiate": 32}


def columns(line: str) -> list[str]:
    return re.split(r"  +", line.strip())


def test_the_table_is_aligned_and_sums_up(vgg):
    lines = table("torchvision:vgg11", vgg["rows"], vgg["summary"] | {"batch_size": 4})
    assert lines[0] == "torchvision:vgg11: 132,863,336 trainable parameters, inputs 1×3×224×224"
    header, first, second = lines[2:5]
    assert len(lines[2 : lines.index("", 2)]) == 1 + len(vgg["rows"])
    assert columns(first)[:7] == ["features.0.weight", "conv2d", "50,176", "27", "64", "5.04 G", "1.73 k"]
    assert columns(first)[7:13] == ["instantiate", "instantiate", "18.8 GiB", "6.75 KiB", "344 G", "173 M"]
    assert columns(second)[2:13] == ["-"] * 6 + ["instantiate", "-", "256 B", "-", "3.21 M"]
    assert [columns(line)[13:] for line in (first, second)] == [["kept, grouped", "1.30 ms"], ["kept", "0.04 µs"]]
    for name in ("2T²", "pd"):  # numbers end where their header ends
        end = header.index(name) + len(name)
        assert all(line[end - 1] != " " and line[end] == " " for line in (header, first, second))
    text = "\n".join(lines)
    assert "parameters by the route of mixed_ghost: 98.4% ghost, 1.6% instantiated\n" in text
    totals = {columns(line)[0]: columns(line)[1:] for line in lines}
    assert ["all ghost", "all instantiated", "mixed"] in [columns(line) for line in lines]
    assert totals["bytes, one sample"] == ["20.8 GiB", "603 MiB", "91.9 MiB"]
    assert totals["operations, one sample"] == ["424 G", "15.2 G", "10.8 G"]
    assert totals["bytes, 4 samples"] == ["83.0 GiB", "2.36 GiB", "368 MiB"]
    assert "Figures of a row are for one sample" in text and "2T² ≤ pd" in text and "2205.10683" in text
    assert "What is made of several parameters" not in text
    batch_of_one = table("vgg11", vgg["rows"], vgg["summary"])
    assert [line.split(", ")[1][:10] for line in batch_of_one if line.startswith("bytes, ")] == ["one sample"]


def test_what_shows_only_in_the_trial_is_one_line_too(dpbench, trials_here):
    code, out, err = dpbench("explain", "torchvision:vgg12")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("dpbench: expected") and "got 'vgg12'" in err and "did you mean" in err


def test_a_refused_model_is_a_line_for_each_problem(dpbench, models, trials_here):
    code, out, err = dpbench("explain", f"{models}:in_place")
    assert (code, out) == (1, "")
    assert [line.split(":")[0] for line in err.splitlines()] == ["dpbench"] * 2
    for line, parameter in zip(err.splitlines(), ("a: fmod_", "b: remainder_"), strict=True):
        assert f"{models}:in_place is refused; {parameter}: no exact rule" in line and "(remedy: use its out" in line


def test_a_model_that_fails_is_one_line(dpbench, models, trials_here):
    code, out, err = dpbench("explain", f"{models}:broken")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.endswith("cannot be explained: error: RuntimeError: the second batch is too much\n")


def test_a_model_that_asks_for_a_value_is_run_on_real_tensors(models):
    found = run(ExplainTrial(model=f"{models}:asks_for_a_value", batch_size=2))
    assert [row["choice"] for row in found["rows"]] == ["ghost", "instantiate"]
    assert "DataDependent" in found["summary"]["real_tensors"]


def test_every_reference_has_its_own_size():
    """A timm model is explained at the resolution that it was made for."""
    found = {
        ref: sizes(ExplainTrial(model=ref, batch_size=1))
        for ref in ("cnn", "torchvision:vgg11", "timm:resnet18", "timm:vit_small_patch16_384", "timm:resnet_18")
    }
    assert list(found.values()) == [(32, 10), (224, 1000), (224, 1000), (384, 1000), (224, 1000)]
    asked = ExplainTrial(model="torchvision:vgg11", batch_size=1, image_size=64, num_classes=7)
    assert sizes(asked) == (64, 7)


@pytest.fixture(scope="module")
def measured(models) -> dict:
    return run(ExplainTrial(model=f"{models}:lazy_no_more", batch_size=4, measure=True))


def test_measured_seconds_and_peaks(measured):
    rows, summary = measured["rows"], measured["summary"]
    assert all(row["measured_seconds"]["kept"] > 0 for row in rows)
    assert rows[0]["measured_seconds"]["ghost"] is None or rows[0]["measured_seconds"]["ghost"] > 0
    steps = summary["measured"]
    for name in ("plan", "ordinary"):
        assert steps[name]["source"] == "cpu_allocator" and 0 < steps[name]["step_seconds"] < 1
        assert steps[name]["verification"]["max_grad_error"] < 1e-6
        assert steps[name]["peak_bytes"] > 0
    assert sum(steps["plan"]["coverage"].values()) == pytest.approx(1.0)


def test_the_table_says_what_was_measured(measured):
    lines = table("mine.py:f", measured["rows"], measured["summary"])
    assert columns(lines[2])[-5:] == ["plan of bk_mixed", "predicted", "measured: ghost", "kept", "discarded"]
    assert all(re.fullmatch(r"[\d.]+ (s|ms|µs)", columns(line)[-2]) for line in lines[3:9])
    assert {"Measured peak of the plan", "Measured step"} <= {line.partition(":")[0] for line in lines}
