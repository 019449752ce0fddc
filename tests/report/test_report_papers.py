"""Papers' figures again, throughput against the batch size, and the decision map: tables and pictures of records."""

import pytest
from drawn import draw, words
from report_records import RunFile, memory

from dpbench.records.reader import read
from dpbench.report import LeftOut, style
from dpbench.report.data import published
from dpbench.report.figures import beside_papers as beside
from dpbench.report.figures import decision_map as decisions
from dpbench.report.figures import growth
from dpbench.trials import ExplainTrial, PeakTrial, StepTrial

GIB = 2**30
DEIT = "timm:deit_tiny_patch16_224"
TEXT = {"image_size": None, "num_classes": None, "data": "synthetic"}


def frame_of(run, module=beside):
    return module.table(read(run.path.parent), LeftOut())


def simulated(run, model, peaks, batch_size=16, **fields):
    for backend, peak in peaks.items():
        trial = PeakTrial(model=model, backend=backend, batch_size=batch_size, simulated=True, **fields)
        run.add(trial, {"memory": memory(peak, "simulated"), "budget_bytes": None, "parameters": 1})
    return run


def vision(run):
    run.overhead(DEIT, {"nonprivate": [1.0] * 3, "mixed_ghost": [1.4, 1.5, 1.6], "bk_mixed": [1.2] * 3}, image_size=224)
    return simulated(run, DEIT, {"nonprivate": 100, "mixed_ghost": 104, "bk_mixed": 103}, image_size=224)


def line(frame, backend, **where):
    for name, value in where.items():
        frame = frame[frame[name] == value]
    (row,) = frame[frame.backend == backend].itertuples()
    return row


def test_published_ratios_lie_beside_ours_and_only_for_the_method_that_they_are_of(run):
    frame = frame_of(vision(run))
    mixed, ours = line(frame, "mixed_ghost"), line(frame, "bk_mixed")
    assert mixed.time_ratio == pytest.approx(1.5) and mixed.published_time_ratio == pytest.approx(174 / 147)
    assert mixed.memory_ratio == pytest.approx(1.04) and mixed.published_memory_ratio == pytest.approx(1.0)
    assert mixed.published_in == "Figure 4 of arXiv:2205.10683" and (mixed.memory, mixed.peak_bytes) == (
        "simulated",
        104,
    )
    assert style.missing(ours.published_time_ratio) and style.missing(ours.published_in)
    assert style.missing(line(frame, "nonprivate").published_time_ratio)
    said = " ".join(words(draw(run, "beside_papers")[2]))
    assert "Peak memory, simulated" in said and "simulated under fake tensors at B=16" in " ".join(said.split())


def searched(run, budget=40 * GIB, tokens=100):
    model = f"transformers:gpt2@{tokens}"
    run.overhead(
        model, {"nonprivate": [1.0], "bk_mixed": [1.1]}, failed={"opacus_hooks": ("unsupported", "tied")}, **TEXT
    )
    for backend, size in {"nonprivate": 150, "bk_mixed": 140}.items():
        run.search(model, backend, [size], [size + 1], budget=budget, image_size=None)
    return run


def test_the_largest_batch_beside_the_published_one_in_the_same_budget(run, tmp_path):
    frame = frame_of(searched(run))
    ours = line(frame, "bk_mixed")
    assert (ours.max_batch_size, ours.published_max_batch_size, ours.max_batch_memory) == (140, 149, "simulated")
    assert ours.published_time_ratio == pytest.approx(341 / 274)
    _, drawn, boxes = draw(run, "beside_papers")
    assert [axes.get_title(loc="left") for axes in drawn.axes] == [
        "Time, measured",
        "Maximum batch in 40 GiB, simulated",
    ]
    assert "✕ unsupported" in words(boxes)
    other = searched(RunFile(tmp_path / "other" / "a.jsonl"), budget=16 * GIB)
    assert frame_of(other).published_max_batch_size.isna().all()


def test_other_models_and_other_lengths_are_left_out(run):
    searched(run, tokens=64).overhead("cnn", {"nonprivate": [1.0]})
    assert not beside.FIGURE.applies(read(run.path.parent))
    left_out = LeftOut()
    vision(run)
    assert set(beside.table(read(run.path.parent), left_out).model) == {DEIT}
    assert left_out["of a model that is not in those figures"] == 6


def test_throughput_at_the_largest_batch_is_a_ratio_where_nothing_else_was_timed(run):
    for backend, seconds in {"nonprivate": 1.0, "bk_mixed": 1.25}.items():
        run.search("vgg11", backend, [100], [101], simulated=False, budget=40 * GIB, image_size=224, device="cuda")
        trial = StepTrial(model="vgg11", backend=backend, batch_size=100, image_size=224, memory_budget=40 * GIB)
        run.add(trial, {"step_seconds": [seconds], "memory": memory(5, "cuda_allocator")})
    row = line(frame_of(run), "bk_mixed")
    assert row.time_ratio == pytest.approx(1.25) and row.published_time_ratio == pytest.approx(833 / 417)
    assert "that of a sample at the largest batch" in " ".join(" ".join(words(draw(run, "beside_papers")[2])).split())


def test_every_published_value_that_is_used_is_that_of_the_csv():
    assert published.value("Figure 3", "max_batch_size_16GB", "resnet18", "mixed_ghost") == 1500
    table_4 = [published.ratio("time_per_epoch", "resnet18", name) for name in ("ghost", "opacus_hooks", "bk_mixed")]
    assert table_4 == [pytest.approx(59 / 14), "OOM", None]
    gpt2 = published.beside("transformers:gpt2-large@100", None, "ghost")
    assert gpt2.time_ratio == pytest.approx(71 / 44) and gpt2.max_batch == 29
    beit = published.beside("timm:beit_large_patch16_224", 224, "bk_mixed")
    assert beit.time_ratio == pytest.approx(169 / 127) and beit.figure == "Figure 5 of arXiv:2210.00038"
    assert published.beside("timm:convit_base", 224, "mixed_ghost").memory_ratio == pytest.approx(6.76 / 6.3)
    assert published.beside("vgg11", 512, "ghost") is None  # a throughput of 0: no batch of one fitted
    assert published.beside("vgg11", 32, "bk_mixed") is None and published.beside("cnn", 32, "ghost") is None


def test_throughput_is_drawn_against_the_batch_size(tmp_path):
    run = RunFile(tmp_path / "records" / "a.jsonl", experiment="throughput")
    for size in (4, 16, 64):
        run.overhead("cnn", {"nonprivate": [0.1 * size] * 2, "bk_mixed": [0.2 * size] * 2}, batch_size=size)
    run.overhead("resnet18", {"nonprivate": [1.0]}, batch_size=4)
    frame = frame_of(run, growth.THROUGHPUT)
    assert list(frame[frame.backend == "bk_mixed"].batch_size) == [4, 16, 64] and set(frame.model) == {"cnn"}
    assert set(frame[frame.backend == "nonprivate"].samples_per_second.map(lambda rate: round(rate, 6))) == {10.0}
    _, drawn, boxes = draw(run, "throughput")
    assert drawn.axes[2].get_title(loc="left") == "Throughput (samples per second)"
    assert list(growth.THROUGHPUT.text(frame)["Samples/s"]) == ["10.0", "5.00"] * 3
    assert "samples per second, against batch size" in " ".join(" ".join(words(boxes)).split())


def explained(run):
    def use(parameter, op, T, d, p, paper, plan):
        row = {"parameter": parameter, "op": op, "T": T, "d": d, "p": p, "paper_choice": paper, "plan": plan}
        row |= {"two_T_squared": T and 2 * T * T, "p_times_d": d and p and p * d}
        return row | {unit: {"ghost": 100, "instantiate": 200} for unit in ("bytes", "flops")}

    rows = [
        use("conv.weight", "conv2d", 100, 9, 64, "instantiate", "kept, grouped"),
        use("conv.bias", "conv2d", None, None, None, None, "kept"),
        use("mid.weight", "linear", 20, 90, 64, "ghost", "discarded"),
        use("head.weight", "linear", 1, 512, 10, "ghost", "ghost, with cross terms"),
    ]
    summary = {"inputs": [[8, 3, 224, 224]], "batch_size": 8}
    return run.add(ExplainTrial(model="vgg11", batch_size=8, image_size=224), {"rows": rows, "summary": summary})


def test_the_decision_map_marks_what_differs_from_the_papers_rule(run):
    left_out = LeftOut()
    frame = decisions.table(read(explained(run).path.parent), left_out)
    assert list(frame.ours) == ["instantiate", "instantiate", "ghost"]
    assert list(frame.paper) == ["instantiate", "ghost", "ghost"] and list(frame.use) == [1, 2, 3]
    assert left_out["uses that have one route only (biases, normalisations, sums)"] == 1
    assert (
        "differ in 1: 1 are instantiated where the rule takes the ghost norm, 0 the other way"
        in decisions.FIGURE.finding(frame)
    )
    text = decisions.FIGURE.texts(frame)
    assert list(text.Ours) == ["instantiate", "instantiate ≠", "ghost"]
    _, drawn, boxes = draw(run, "decision_map")
    rings = [mark for mark in drawn.axes[0].lines if mark.get_markersize() == 9.5]
    assert len(rings) == 1 and list(rings[0].get_xdata()) == [2]
    assert {"VGG11, 224 px, B=8", "1 of 3 differ"} <= set(words(boxes))


def test_a_model_that_cannot_be_explained_is_counted(run):
    run.add(ExplainTrial(model="cnn", batch_size=8), {"problems": [{"module": "m", "reason": "r", "remedy": "x"}]})
    assert not decisions.FIGURE.applies(read(run.path.parent))
    left_out = LeftOut()
    decisions.table(read(explained(run).path.parent), left_out)
    assert left_out["model that cannot be explained"] == 1


def test_measured_peaks_are_drawn_where_none_was_simulated(run):
    peaks = {"nonprivate": 100, "mixed_ghost": 110}
    run.overhead(DEIT, {"nonprivate": [1.0], "mixed_ghost": [1.4]}, peaks, image_size=224)
    _, drawn, _ = draw(run, "beside_papers")
    assert drawn.axes[1].get_title(loc="left") == "Peak memory, measured"
    assert [patch.get_hatch() for patch in drawn.axes[1].patches] == [None]
