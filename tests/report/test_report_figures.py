"""The pictures: what is drawn for what, nothing on top of anything else, and the same bytes every time."""

import colorsys
import itertools
import json
import xml.etree.ElementTree as ElementTree

import matplotlib
import pytest
from drawn import assert_apart, draw, words
from matplotlib.colors import to_rgb
from report_every import everything
from report_records import CUDA, GIB, RunFile

from clipping import VARIANTS
from dpbench.report import FIGURES, style, write_report
from dpbench.trials import PeakTrial, StepTrial

BACKENDS = ["nonprivate", "microbatch", "vmap", "fastgradclip", "ghost", "mixed_ghost", "bk_ghost", "bk_mixed"]
BACKENDS += ["opacus_hooks", "opacus_functorch", "opacus_ew", "opacus_ghost", "private_cnn", "fastdp", "opake"]


def full(run):
    """Every backend on a model with a long name and on one with published values; every sign occurs."""
    for model, (index, backend) in itertools.product(
        ["resnet18", "my/models/wide_network_with_a_long_name.py:make_network"], enumerate(BACKENDS)
    ):
        if backend == "fastdp":
            trial = PeakTrial(model=model, backend=backend, batch_size=8, simulated=True, memory_budget=16 * GIB)
            run.add(trial, outcome="unsupported", evidence="fastDP is not importable")
        elif backend == "opacus_ew":
            run.search(model, backend, [], [1])
        else:
            run.search(model, backend, [8, 100 + 37 * index], [] if backend == "microbatch" else [103 + 37 * index])
        for number in range(3):
            if backend == "ghost":
                run.add(StepTrial(model=model, backend=backend, batch_size=8), outcome="mismatch", round=number)
            elif index < 10:
                run.step(model, backend, [0.1 * (index + 1) * (1 + number / 20)], 2**20 * (index + 1), round=number)
    return run


@pytest.mark.parametrize("figure", ["max_batch_throughput", "memory_speed_table"])
def test_no_text_lies_on_another_or_beyond_the_edge(run, figure):
    _, drawn, boxes = draw(full(run), figure)
    assert len(boxes) > 60
    assert_apart(drawn, boxes)


def test_models_whose_memory_alone_is_known_stand_below_on_the_same_scale(run):
    for model in ("resnet18", "resnet101", "vgg11", "vgg19"):
        for backend in ("nonprivate", "ghost"):
            run.search(model, backend, [8, 100], [103])
    run.overhead("resnet18", {"nonprivate": [1.0, 1.0], "ghost": [2.0, 2.4]}, batch_size=16)
    _, drawn, boxes = draw(run, "max_batch_throughput")
    assert [len(axes.patches) for axes in drawn.axes] == [2, 2, 4, 2]
    assert len({axes.get_xlim() for axes in drawn.axes if axes is not drawn.axes[1]}) == 1
    assert "not measured" not in words(boxes) and {"7.33", "2.20×", "1.00×"} <= set(words(boxes))


def test_every_failure_is_a_mark_with_its_word(run):
    texts = words(draw(full(run), "max_batch_throughput")[2])
    assert texts.count("✕ unsupported") == 2
    assert texts.count("✕ over budget at B=1") == 2
    assert texts.count("✕ mismatch: wrong gradient") == 4  # both panels, both models
    assert "≥ 137" in texts


def test_simulated_memory_is_hatched_and_named_and_nothing_else_is(run):
    _, drawn, boxes = draw(full(run), "max_batch_throughput")
    sizes, speeds = drawn.axes
    assert {patch.get_hatch() is not None for patch in sizes.patches} == {True}
    assert {patch.get_hatch() is not None for patch in speeds.patches} == {False}
    assert {"simulated memory", "measured", "published", "not limited by memory"} <= set(words(boxes))


def test_a_variant_has_the_marker_of_its_base_and_a_shade_of_its_colour():
    for variant in VARIANTS:
        base, look = style.backend("bk_mixed"), style.backend(variant)
        assert look.marker == base.marker and look.name == variant.replace("bk_mixed:", "BK mixed, ").replace("_", " ")
        others = {style.backend(name).color for name in (*BACKENDS, *VARIANTS) if name != variant}
        assert look.color not in others and look.color != "#000000"
        hues = [colorsys.rgb_to_hsv(*to_rgb(color))[0] for color in (base.color, look.color)]
        assert hues[0] == pytest.approx(hues[1], abs=0.02)


def test_another_mechanism_stands_last_under_a_sign_that_the_caption_explains(run):
    for backend in ("tf_microbatch:16", "nonprivate", "my.module:Mine", "bk_mixed:time", "tf_microbatch:4", "bk_mixed"):
        run.step("cnn", backend, [1.0])
    _, drawn, boxes = draw(run, "memory_speed_table")
    names = [label.get_text() for label in drawn.axes[0].get_yticklabels()]
    last = ["TF µbatch of 4 ‡", "TF µbatch of 16 ‡"]
    assert names == ["Non-private", "BK mixed", "BK mixed, time", "my.module:Mine", *last]
    assert any(
        "‡ another mechanism: the mean of so many samples is clipped" in " ".join(text.split()) for text in words(boxes)
    )
    assert not style.is_other_mechanism("microbatch")


def test_without_ordinary_training_the_absolute_numbers_are_drawn(run):
    run.step("cnn", "ghost", [0.25], 3 * 2**20)
    _, drawn, boxes = draw(run, "memory_speed_table")
    assert [axes.get_xlabel() for axes in drawn.axes] == ["seconds", "MiB"]
    assert {"250 ms", "3 MiB"} <= set(words(boxes))


@pytest.mark.parametrize("figure", [name for name, kind in FIGURES.items() if kind.plot is not None])
def test_nothing_but_failures_can_be_drawn(run, figure):
    everything(run)
    head, *trials = map(json.loads, run.path.read_text().splitlines())
    failed = {"outcome": "error", "evidence": "ValueError: no", "result": None}
    run.path.write_text("".join(f"{json.dumps(line)}\n" for line in (head, *(trial | failed for trial in trials))))
    _, drawn, _ = draw(run, figure)
    if figure != "coverage":  # whose bars show crashes
        assert all(not patch.get_width() for axes in drawn.axes for patch in axes.patches)


def test_printed_values_stand_only_beside_their_own_setting(run, tmp_path):
    run.epsilon("moments", 10_000, 1.26)
    assert "1.26" in words(draw(run, "epsilon_epochs")[2])
    assert "2.55" not in words(draw(run, "epsilon_epochs")[2])  # beyond the epochs that were computed
    other = RunFile(tmp_path / "other" / "a.jsonl").epsilon("moments", 10_000, 1.26, noise_multiplier=3.0)
    assert "printed in Abadi et al. 2016" not in words(draw(other, "epsilon_epochs")[2])


@pytest.mark.slow
def test_the_same_records_give_the_same_bytes(run, tmp_path):
    full(run).epsilon("moments", 10_000, 1.26)
    settings = dict(matplotlib.rcParams)
    first = write_report(run.path.parent, tmp_path / "first")
    matplotlib.rcParams["font.size"] = 30  # somebody's own style is not the report's
    try:
        second = write_report(run.path.parent, tmp_path / "second")
    finally:
        matplotlib.rcParams["font.size"] = settings["font.size"]
    assert [path.suffix for path in first] == [
        *[".png", ".svg", ".pdf", ".csv", ".md", ".tex"] * 3,
        *[".csv", ".md", ".tex"],  # claims: a table alone
        ".html",
    ]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes(), f"{one.name} differs"
    for path in first:
        if path.suffix == ".svg":
            ElementTree.parse(path)
            assert "dc:date" not in path.read_text(encoding="utf-8")
    assert dict(matplotlib.rcParams) == settings


def test_published_throughput_is_for_gpus(run, tmp_path):
    run.step("resnet18", "ghost", [1.0])
    assert "published" not in words(draw(run, "max_batch_throughput")[2])
    gpu = RunFile(tmp_path / "gpu" / "a.jsonl", CUDA).step("resnet18", "ghost", [1.0], device="cuda")
    assert "published" in words(draw(gpu, "max_batch_throughput")[2])
