"""Overhead, resolution and sequence length: the tables, and the figures drawn of them."""

import json
import math

import pytest
from drawn import assert_apart, draw
from report_records import CPU, CUDA, RunFile, memory, row

from dpbench.records.reader import read
from dpbench.report import LeftOut, findings, style, write_report
from dpbench.report.figures import overhead
from dpbench.trials import OverheadTrial
from dpbench.trials.whole_step import TrainingStepTrial

GPT2 = "transformers:gpt2?n_layer=2&n_embd=256&n_head=4&vocab_size=1024"
UNSUPPORTED = ("unsupported", "fastdp is not available here: no package")


def test_a_ratio_is_of_two_turns_of_one_round(run, report):
    # the machine slows down to a third in the second round: each ratio is its own round's
    run.overhead(
        "resnet18",
        {"nonprivate": [1.0, 3.0, 1.0], "ghost": [2.0, 6.6, 2.4], "vmap": [None, 12.0, None]},
        {"nonprivate": 10 * 2**20, "ghost": 12 * 2**20},
        {"fastdp": UNSUPPORTED},
        batch_size=32,
    )
    table, text = report("overhead")
    ghost = row(table, backend="ghost")
    assert ghost.time_ratio == pytest.approx(2.2)
    assert (ghost.time_ratio_low, ghost.time_ratio_high) == (pytest.approx(2.0), pytest.approx(2.4))
    assert (ghost.paired_rounds, ghost.step_seconds, ghost.memory_ratio) == (3, 2.4, pytest.approx(1.2))
    assert (ghost.published_time_ratio, ghost.max_grad_error) == (pytest.approx(59 / 14), 1e-7)
    assert (ghost.ghost, ghost.instantiated) == (1.0, 0.0)
    assert (row(table, backend="vmap").time_ratio, row(table, backend="vmap").paired_rounds) == (4.0, 1)
    fastdp = row(table, backend="fastdp")
    assert math.isnan(fastdp.time_ratio) and fastdp.note == "unsupported"
    assert "median of 1 to 3 pairs (fewer of slow backends)" in text and "peak by the CPU allocator" in text
    assert "| 100% ghost " in text and "1 unsupported" in text
    assert "- ResNet18 fastDP B=32 32 px: unsupported. `fastdp is not available here: no package`" in text
    for words in ("cpu Test CPU, 2 CPUs", "torch 2.15.0", "float32", "32×32 inputs", "2 threads", "digits data"):
        assert words in text


def test_only_cells_with_the_same_libraries_ought_to_be_of_one_version(run, report):
    run.overhead("cnn", {"nonprivate": [1.0], "opacus_hooks": [2.0]}, fingerprint="with opacus")
    run.overhead("vgg11", {"nonprivate": [1.0], "ghost": [2.0]}, fingerprint="without")
    assert "Warning" not in report("overhead")[1]
    run.overhead("vgg19", {"nonprivate": [1.0], "ghost": [2.0]}, fingerprint="another version")
    assert "Warning: records of 2 versions" in report("overhead")[1]


def test_a_row_is_of_the_trial_that_measured_its_backend_last(run, report):
    """And beside the ordinary training of that trial; what a later trial has not measured stays."""
    run.overhead("cnn", {"nonprivate": [1.0, 1.0], "ghost": [3.0, 3.0], "opacus_hooks": [8.0, 6.0]})
    run.overhead("cnn", {"nonprivate": [2.0, 2.0], "ghost": [2.2, 2.6]})
    table, text = report("overhead")
    assert row(table, backend="ghost").time_ratio == pytest.approx(1.2)
    assert row(table, backend="opacus_hooks").time_ratio == pytest.approx(7.0)
    assert row(table, backend="nonprivate").step_seconds == 2.0
    assert "1 of an older declaration of the same cell" in text


def test_an_engine_of_another_framework_is_beside_its_own_plain_step(run, report):
    """Torch's plain step stands beside that one in the caption, and no finding compares its ratio with others'."""
    of = {"kind": TrainingStepTrial, "optimizer": "SGD"}
    jax = {
        "memory": memory(2**20, "xla"),
        "plain": {"turns": [{"round": n, "step_seconds": [2.0]} for n in (0, 1)], "memory": memory(2**19, "xla")},
        "compile_seconds": {"plain": 1.0, "private": 40.0},
        "versions": {"jax": "0.10.2", "jax_privacy": "2.0.0"},
    }
    run.overhead("cnn", {"nonprivate": [1.0, 1.0], "jax_privacy": [6.0, 9.0]}, more={"jax_privacy": jax}, **of)
    run.overhead("cnn", {"nonprivate": [1.0], "bk_mixed": [1.2]}, **of)
    table, text = report("training_step")
    jax = row(table, backend="jax_privacy")
    assert (jax.time_ratio, jax.plain_step_seconds, jax.memory_ratio) == (pytest.approx(3.75), 2.0, 2.0)
    assert math.isnan(row(table, backend="bk_mixed").plain_step_seconds)
    assert "That step takes CNN 2.00 s (torch 1.00 s). Compiling the private one took 40" in text
    assert "jax 0.10.2, jax_privacy 2.0.0" in text and "Memory: measured, peak by the CPU allocator." in text
    assert findings.paired(table).startswith("BK mixed is the only private backend on 1 model: 1.20×")


@pytest.mark.parametrize(("figure", "kind"), [("training_step", TrainingStepTrial), ("throughput", OverheadTrial)])
def test_steps_that_run_in_one_way_have_their_own_figure(figure, kind, run, report):
    """Records from before a trial had a way say at most that their steps were compiled."""
    of = {"kind": kind, "device": "cuda"} | ({"optimizer": "SGD"} if kind is TrainingStepTrial else {})
    ratios = {"eager": 2.0, "replayed": 1.3, "compiled": 1.6, "best": 1.2}
    for size in (8, 16):
        for way, ratio in ratios.items():
            run.overhead("cnn", {"nonprivate": [1.0], "bk_mixed": [ratio]}, way=way, batch_size=size, **of)
    lines = [json.loads(line) for line in run.path.read_text().splitlines()]
    for line in lines[1:]:
        if line["trial"]["way"] in ("eager", "best"):
            del line["trial"]["way"]
        if not line["trial"]["compiled"]:
            del line["trial"]["compiled"]
    run.path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    said = {"eager": "runs eagerly", "replayed": "as a CUDA graph", "compiled": "by TorchInductor", "best": "Best: "}
    for way, ratio in ratios.items():
        table, text = report(figure, f"{figure}-way-{way}")
        assert set(table[table.backend == "bk_mixed"].time_ratio) == {ratio}
        assert said[way] in text


def test_a_record_with_a_wrong_backend_shows_the_others(run, report):
    failed = {"vmap": ("mismatch", "vmap differs from the microbatch oracle")}
    run.overhead("cnn", {"nonprivate": [1.0], "ghost": [2.0]}, failed=failed, outcome="mismatch")
    table, text = report("overhead")
    assert row(table, backend="ghost").time_ratio == 2.0
    assert row(table, backend="vmap").note == "mismatch: wrong gradient" and "vmap differs from" in text


def test_a_trial_that_ended_as_a_whole_has_a_row_for_each_backend(run, report):
    run.add(
        OverheadTrial(model="cnn", backends=["nonprivate", "ghost"], batch_size=8), outcome="crash", evidence="killed"
    )
    table, _ = report("overhead")
    assert list(table.backend) == ["nonprivate", "ghost"] and set(table.note) == {"crashed"}


def test_without_ordinary_training_there_are_seconds_and_no_ratio(run, report):
    run.overhead("cnn", {"ghost": [2.0]}, failed={"nonprivate": ("oom", "no memory")})
    ghost = row(report("overhead")[0], backend="ghost")
    assert ghost.step_seconds == 2.0 and math.isnan(ghost.time_ratio) and ghost.paired_rounds == 0
    texts = [text for text, _ in draw(run, "overhead")[2]]
    assert {"non-private: out of memory", "no ordinary training beside it"} <= set(texts)


def everything(run):
    absent = ("private_cnn", "fastdp", "opake")
    names = [name for name in style.BACKENDS if name not in ("nonprivate", *absent)]
    for index, (model, batch_size) in enumerate(MODELS):
        ratios = {name: 0.9 + (number + index) % 9 / 2 for number, name in enumerate(names)}
        seconds = {"nonprivate": [0.5] * 3} | {n: [0.5 * r, 0.51 * r, 0.55 * r] for n, r in ratios.items()}
        peaks = {name: int(2**28 * ratio / 3) for name, ratio in ratios.items()} | {"nonprivate": 2**28}
        failed = dict.fromkeys(absent, UNSUPPORTED)
        if index == 1:
            del seconds["vmap"], seconds["opacus_ew"]
            failed |= {"vmap": ("mismatch", "relative error")}
        run.overhead(model, seconds, peaks, failed, batch_size=batch_size)
    return run


MODELS = [("resnet18", 32), ("cnn", 256), (f"{GPT2}@4096", 4), ("my/models/wide_network_with_a_long_name.py:make", 8)]


def test_a_panel_has_every_backend_and_nothing_lies_on_anything(run):
    _, drawn, boxes = draw(everything(run), "overhead")
    assert_apart(drawn, boxes)
    texts = [text for text, _ in boxes]
    assert len(drawn.axes) == 4
    names = [label.get_text() for label in drawn.axes[0].get_yticklabels()]
    assert names == [look.name for look in style.BACKENDS.values()][1:-3]  # three have no number anywhere
    assert "CNN, B=256" in texts and "GPT-2 2×256, T=4096, B=4" in texts
    assert texts.count("✕ mismatch: wrong gradient") == 1 and texts.count("not run") == 1
    assert texts.count("1× = 500 ms, 256 MiB") == 4
    said = "No number on any model: private_CNN (unsupported), fastDP (unsupported), Opake (unsupported)."
    assert any(said in " ".join(text.split()) for text in texts)


def test_a_model_with_one_private_backend_is_in_the_table_and_not_in_the_figure(run, report):
    run.overhead("cnn", {"nonprivate": [1.0], "ghost": [2.0], "vmap": [3.0]}, batch_size=32)
    run.overhead("resnet18", {"nonprivate": [1.0], "ghost": [2.5]}, batch_size=8)
    _, drawn, boxes = draw(run, "overhead")
    texts = [text for text, _ in boxes]
    assert len(drawn.axes) == 1 and "CNN, B=32" in texts and "not run" not in texts
    table, text = report("overhead")
    assert row(table, model="resnet18", backend="ghost").time_ratio == 2.5
    assert "In the table alone, for one private backend was run there: ResNet18, B=8." in text


def test_little_memory_is_an_arrow_at_the_edge(run):
    run.overhead("cnn", {"nonprivate": [1.0], "microbatch": [2.5]}, {"microbatch": 2**16})
    _, drawn, boxes = draw(run, "overhead")
    marks = {line.get_marker(): line for line in drawn.axes[0].lines if len(line.get_xdata()) == 1}
    assert marks["o"].get_xdata()[0] == 2.5 and marks["o"].get_markerfacecolor() != "white"  # time
    (arrow,) = [line for line in drawn.axes[0].lines if line.get_marker() == "<"]
    assert arrow.get_xdata()[0] == drawn.axes[0].get_xlim()[0]
    assert {"0.06×", "below 0.6×"} <= {text for text, _ in boxes}


def growing(run):
    """VGG11 at three sizes, B=8 at the two first and 2 at the last; ghost grows faster and fails at last."""
    for size, batch_size, factor in ((32, 8, 1), (64, 8, 4), (224, 2, 12)):
        seconds = {
            "nonprivate": [0.1 * factor] * 3,
            "bk_mixed": [0.12 * factor] * 3,
            "opacus_hooks": [0.3 * factor] * 3,
        }
        failed = {"fastdp": UNSUPPORTED}
        if size < 224:
            seconds["ghost"] = [0.2 * factor**2] * 3
        else:
            failed["ghost"] = ("oom", "can't allocate memory")
        run.overhead("vgg11", seconds, failed=failed, batch_size=batch_size, image_size=size)
    return run


def test_growth_is_the_exponent_of_the_seconds_of_one_sample(run, report):
    growing(run).overhead("cnn", {"nonprivate": [1.0], "ghost": [2.0]})
    table, text = report("resolution")
    assert set(table.model) == {"vgg11"}  # at one size nothing grows
    ordinary = row(table, backend="nonprivate", image_size=224)
    assert ordinary.seconds_per_sample == pytest.approx(0.6)
    assert ordinary.growth == pytest.approx(math.log(12) / math.log(3.5))
    assert row(table, backend="nonprivate", image_size=64).growth == pytest.approx(2)
    assert row(table, backend="ghost", image_size=64).growth == pytest.approx(4)
    assert math.isnan(row(table, backend="ghost", image_size=32).growth)
    assert row(table, backend="ghost", image_size=224).note == "out of memory"
    assert row(table, backend="bk_mixed", image_size=64).time_ratio == pytest.approx(1.2)
    assert row(table, backend="bk_mixed", image_size=224).published_time_ratio == pytest.approx(833 / 417)
    assert "1 of a model that was measured at one size only" in text
    assert "Batch size: 8 at 32, 8 at 64, 2 at 224." in text
    assert "No number at any size: VGG11, fastDP (unsupported)." in text


def test_a_failure_is_a_mark_at_its_size_and_nothing_lies_on_anything(run):
    _, drawn, boxes = draw(growing(run), "resolution")
    assert_apart(drawn, boxes)
    texts = [text for text, _ in boxes]
    assert texts.count("✕ Ghost") == 2 and not any("fastDP" in text for text in texts if text.startswith("✕"))
    assert {"VGG11", "Time per image", "∝ pixels²", "32", "64", "224"} <= set(texts)
    hollow = [line for line in drawn.axes[0].lines if line.get_markerfacecolor() == "white" and len(line.get_xdata())]
    assert {tuple(line.get_xdata()) for line in hollow} == {(224.0,)}


def test_sequences_of_one_model_are_one_line(run, report):
    for tokens, seconds in ((128, 0.1), (2048, 3.2)):
        options = f"&max_position_embeddings={tokens}" if tokens > 1024 else ""
        run.overhead(
            f"{GPT2}{options}@{tokens}",
            {"nonprivate": [seconds], "bk_mixed": [seconds * 1.1]},
            batch_size=2,
            image_size=None,
            data="synthetic",
        )
    table, text = report("sequence_length")
    assert set(table.model) == {GPT2} and list(table.tokens) == [128, 128, 2048, 2048]
    assert row(table, backend="nonprivate", tokens=2048).growth == pytest.approx(1.25)
    assert "Batch size 2." in text and "inputs" not in text  # a sequence has no pixels
    _, drawn, boxes = draw(run, "sequence_length")
    assert_apart(drawn, boxes)
    assert {"GPT-2 2×256", "128", "2k", "∝ T", "∝ T²"} <= {text for text, _ in boxes}


def test_figures_of_growth_are_drawn_only_of_what_grows(run, tmp_path):
    run.overhead("cnn", {"nonprivate": [1.0], "ghost": [2.0]})
    names = {path.stem for path in write_report(run.path.parent, tmp_path / "out")}
    assert names == {"overhead", "report"}


def test_models_have_short_names():
    for reference, name in [
        ("timm:vit_tiny_patch16_224?patch_size=4", "ViT-tiny/4"),
        (f"{GPT2}@128", "GPT-2 2×256, T=128"),
        (f"{GPT2}&max_position_embeddings=4096@4096", "GPT-2 2×256, T=4096"),
        ("transformers:gpt2?max_position_embeddings=4096&n_layer=3@4096", "gpt2?n_layer=3, T=4096"),
        ("transformers:gpt2?max_position_embeddings=4096@4096", "GPT-2, T=4096"),
        ("transformers:gpt2", "GPT-2"),
        ("timm:convnext_atto?depths=(1,1)", "convnext_atto?depths=(1,1)"),
        ("my/net.py:make", "net.py:make"),
        ("wide_resnet", "Wide ResNet"),
    ]:
        assert style.model(reference) == name


def test_engines_of_others_are_of_a_version_of_their_own(run, report):
    """Their libraries are part of their trial's."""
    of = {"kind": TrainingStepTrial, "optimizer": "SGD"}
    run.overhead("cnn", {"nonprivate": [1.0], "fastdp": [3.0]}, fingerprint="with fastDP", **of)
    run.overhead("cnn", {"nonprivate": [2.0], "bk_mixed": [2.2]}, fingerprint="without", **of)
    table, text = report("training_step")
    assert row(table, backend="fastdp").time_ratio == pytest.approx(3.0)
    assert row(table, backend="bk_mixed").time_ratio == pytest.approx(1.1)
    assert "give no number" not in text


def utilisations(tmp_path, environment, flops, **fields):
    """The utilisation of ordinary training and of a backend, and what the caption says of it."""
    run = RunFile(tmp_path / "run" / "a.jsonl", environment, experiment="overhead")
    seconds = {"nonprivate": [0.01] * 3, "ghost": [0.02] * 3}
    counted = dict.fromkeys(seconds, {"model_flops": flops} if flops else {})
    run.overhead("cnn", seconds, batch_size=64, more=counted, device=environment["device"], **fields)
    records = read(run.path)
    frame = overhead.table(records, LeftOut())
    return list(frame.model_flops_utilisation.dropna()), " ".join(overhead.FIGURES["overhead"].caption(records, frame))


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "float32", 66.9e12),
        ("NVIDIA H100 PCIe", "tf32", 378e12),
        ("NVIDIA H200", "bfloat16-autocast", 989.5e12),
        ("NVIDIA A100-SXM4-40GB", "bfloat16", 312e12),
    ],
)
def test_utilisation_is_of_the_peak_in_the_precision(tmp_path, name, precision, peak):
    environment = CUDA | {"device_name": name}
    found, said = utilisations(tmp_path, environment, int(0.4 * peak * 0.01), precision=precision)
    assert found == pytest.approx([0.4, 0.2])
    assert "MFU: operations of ordinary training's" in said and "NVIDIA" in said


@pytest.mark.parametrize(
    ("environment", "flops"),
    [(CPU, 10**9), (CUDA, 10**9), (CUDA | {"device_name": "NVIDIA H200"}, None)],
    ids=["a CPU", "a card whose peak is not known", "a record without a count"],
)
def test_utilisation_is_left_out_where_it_is_not_known(tmp_path, environment, flops):
    found, said = utilisations(tmp_path, environment, flops)
    assert found == [] and "MFU" not in said
