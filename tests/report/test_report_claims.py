"""Claims of papers: every verdict from fabricated records, none without, and nothing that is not in the records."""

import pytest
from report_records import CUDA, RunFile

from dpbench.records.reader import newest, newest_version, read
from dpbench.report import FIGURES, LeftOut, write_report
from dpbench.report.data.claims import HELD, NOT_COMPARABLE, NOT_HELD, NOT_MEASURED, VERDICTS
from dpbench.report.figures import claims
from dpbench.report.figures.claims import CLAIMS
from dpbench.trials.whole_step import TrainingStepTrial

GPT2 = "transformers:gpt2?n_layer=2&n_embd=256&n_head=4&vocab_size=1024"
TEXT = {"image_size": None, "num_classes": None, "data": "synthetic"}
MIB = 2**20


@pytest.fixture
def run(tmp_path):
    return RunFile(tmp_path / "a.jsonl", experiment="overhead")


def verdicts(path):
    """Statement -> (verdict, finding)."""
    left_out = LeftOut()
    kept = newest_version(newest(read(path), left_out), claims.cell, left_out)
    frame = claims.table(kept, left_out)
    return {row.claim: (row.verdict, row.finding) for row in frame.itertuples()}


def of(run, words):
    """The one claim that has these words."""
    (found,) = [value for key, value in verdicts(run.path.parent).items() if words in key]
    return found


def timed(run, ratios, model="resnet18", **fields):
    """Backends that take so many times as long as ordinary training."""
    seconds = {"nonprivate": [1.0, 1.0]} | {name: [ratio, ratio] for name, ratio in ratios.items()}
    return run.overhead(model, seconds, **fields)


def test_a_ratio_that_is_at_most_the_bound_everywhere_confirms_and_one_above_refutes(run):
    timed(timed(run, {"mixed_ghost": 1.5}), {"mixed_ghost": 2.03}, model="vgg11")
    verdict, finding = of(run, "below 2")
    assert verdict == HELD
    assert finding == (
        "Mixed ghost is above 2.00× by more than 2 % on 0 of 2 models and sizes: 1.50× on ResNet18, B=8 to "
        "2.03× on VGG11, B=8, measured; the paper's own Table 4 has 1.40× to 3.00×. Device: cpu Test CPU, 2 CPUs."
    )
    timed(run, {"mixed_ghost": 2.4}, model="resnet50")
    verdict, finding = of(run, "below 2")
    assert verdict == NOT_HELD
    assert "on 1 of 3 models and sizes: 1.50× on ResNet18, B=8 to 2.40× on ResNet50, B=8" in finding


def searched(run, *searches):
    for model, backend, fits in searches:
        run.search(model, backend, [fits] if fits else [], [fits + 1])
    return run


def peaks(run, mixed, model="resnet18"):
    return timed(run, {"mixed_ghost": 1.5}, model, peaks={"nonprivate": 100 * MIB, "mixed_ghost": mixed * MIB})


def tokens(run, ghost, length):
    options = f"&max_position_embeddings={length}" if length > 2048 else ""
    return timed(run, {"ghost": 2.6, "bk_ghost": ghost}, f"{GPT2}{options}@{length}", **TEXT)


def vision(run, ratio):
    return timed(run, {"mixed_ghost": ratio}, "timm:deit_tiny_patch16_224", image_size=224)


def high(run, size):
    return timed(run, {"mixed_ghost": 1.6, "opacus_hooks": 1.5}, "vgg11", image_size=size)


def vgg19(run, hooks):
    return timed(run, {"mixed_ghost": 1.5, "opacus_hooks": hooks}, "vgg19")


def on_vgg19(run, ours, hooks):
    return searched(run, ("vgg19", "mixed_ghost", ours), ("vgg19", "opacus_hooks", hooks))


def steps(run, ratios, model="resnet18", **fields):
    """Whole steps; an overhead, without optimizer and noise, says nothing of them."""
    timed(RunFile(run.path.with_name("b.jsonl"), experiment="overhead"), {"fastdp": 9.9})
    return timed(run, ratios, model, kind=TrainingStepTrial, optimizer="SGD", **fields)


def oom(run):
    seconds = {"nonprivate": [1.0, 1.0], "mixed_ghost": [1.5, 1.5]}
    return run.overhead("vgg19", seconds, failed={"opacus_hooks": ("oom", "out of memory")})


def wrong(run):
    failed = {"mixed_ghost": ("mismatch", "differs")}
    return run.overhead("resnet18", {"nonprivate": [1.0, 1.0]}, failed=failed, outcome="mismatch")


def four(run, first):
    found = {"mixed_ghost": first, "ghost": 1015, "fastgradclip": 400, "opacus_hooks": 100}
    return searched(run, *(("resnet18", name, fits) for name, fits in found.items()))


TIME = "as much time as the table says"
CASES = {
    "overhead": [
        (lambda r: timed(r, {"fastdp": 2.1}), "(an operation count)", NOT_HELD, "has 1.15× to 1.24× on GPT-2."),
        (lambda r: timed(r, {"bk_mixed": 1.02}), "training: ours", HELD, "has 1.15× to 1.24× on GPT-2."),
        (lambda r: peaks(r, 109), "0.1 to 10 %", HELD, "Table 4 has 1.00× to 1.20×."),
        (lambda r: peaks(peaks(r, 109), 111, "cnn"), "0.1 to 10 %", NOT_HELD, "on 1 of 2 models"),
        (lambda r: timed(r, {"mixed_ghost": 1.42}, "cnn", image_size=32), TIME, HELD, "CNN, B=8, 1.42× measured"),
        (lambda r: timed(r, {"mixed_ghost": 3.2}, image_size=32), TIME, NOT_HELD, "0 of 1 cells"),
        (lambda r: vgg19(timed(r, {"opacus_hooks": 99.0}, "vgg11"), 4.6), "3 times as fast", HELD, "3.07× as fast"),
        (lambda r: vgg19(r, 4.4), "3 times as fast", NOT_HELD, "2.93×"),
        (oom, "3 times as fast", NOT_COMPARABLE, "Opacus hooks gave no time on VGG19"),
        (wrong, "below 2", NOT_COMPARABLE, "gave no number: ResNet18, B=8: mismatch: wrong gradient."),
    ],
    "stress_test": [
        (lambda r: on_vgg19(r, 180, 10), "18 times", HELD, "180 images against 10 of Opacus hooks: 18.0×, simulated"),
        (lambda r: on_vgg19(r, 170, 10), "18 times", NOT_HELD, "17.0×"),
        (lambda r: on_vgg19(r, 180, 0), "18 times", NOT_COMPARABLE, "over budget at B=1"),
        (lambda r: four(r, 1000), "largest batch of the private methods", HELD, "On 1 of 1 ResNets"),
        (lambda r: four(r, 990), "largest batch of the private", NOT_HELD, "ResNet18: Ghost 1,015 > 990"),
    ],
    "sequence_length": [
        (lambda r: tokens(r, 2.2, 2048), "8,192", NOT_COMPARABLE, "At 2,048 tokens (GPT-2 2×256, T=2048"),
        (lambda r: tokens(r, 2.55, 8192), "8,192 tokens", HELD, "Ghost 2.60×"),
        (lambda r: tokens(r, 2.2, 16384), "8,192 tokens", NOT_HELD, "At 16,384 tokens"),
    ],
    "resolution": [
        (lambda r: high(r, 128), "high resolution", NOT_COMPARABLE, "On VGG11 at 128 px, B=8, Opacus hooks"),
        (lambda r: high(r, 512), "high resolution", HELD, "take 1.50×"),
    ],
    "vision_transformers": [
        (lambda r: vision(r, 1.15), "pay as much time", HELD, "1.15× measured, 1.18× published"),
        (lambda r: vision(r, 1.6), "pay as much time", NOT_HELD, "1.60× measured, 1.18× published"),
    ],
    "training_step": [
        (lambda r: steps(r, {"fastdp": 1.27}), "less than 25 %", HELD, ""),
        (lambda r: steps(r, {"fastdp": 1.28}), "less than 25 %", NOT_HELD, ""),
        (lambda r: steps(r, {"opacus_hooks": 4.0, "opacus_ghost": 2.4}), "2.6 to 8 times", HELD, ""),
        (lambda r: steps(r, {"opacus_hooks": 2.5}), "2.6 to 8 times", NOT_HELD, ""),
        (lambda r: steps(r, {"opacus_hooks": 8.2}), "2.6 to 8 times", NOT_HELD, ""),
        (lambda r: steps(r, {"opacus_hooks": 4.0, "opacus_ghost": 2.4}), "roughly halves", HELD, ""),
        (lambda r: steps(r, {"opacus_hooks": 2.5, "opacus_ghost": 2.4}), "roughly halves", NOT_HELD, ""),
        (lambda r: steps(r, {"opacus_ghost": 1.2}), "takes 1.19 times the time", NOT_MEASURED, ""),
        (
            lambda r: steps(r, {"opacus_ghost": 1.2}, "transformers:bert?num_hidden_layers=2@16", **TEXT),
            *("takes 1.19 times the time", HELD, ""),
        ),
    ],
}


@pytest.mark.parametrize(
    ("experiment", "records", "words", "verdict", "part"),
    [(experiment, *case) for experiment, cases in CASES.items() for case in cases],
)
def test_a_claim_is_judged_by_the_records(tmp_path, experiment, records, words, verdict, part):
    run = RunFile(tmp_path / "a.jsonl", experiment=experiment)
    found = of(records(run), words)
    assert found[0] == verdict and part in found[1]


def test_only_the_claim_s_own_experiments_speak_to_it(run, tmp_path):
    timed(run, {"mixed_ghost": 1.5})
    other = RunFile(tmp_path / "b.jsonl", experiment="throughput", start=5)
    timed(other, {"mixed_ghost": 2.9, "vmap": 4.0}, batch_size=8)  # the same cell, later
    timed(other, {"mixed_ghost": 4.9}, batch_size=1)
    verdict, finding = of(run, "below 2")
    assert verdict == HELD and "0 of 1 models and sizes: 1.50× on ResNet18, B=8, measured" in finding


def test_without_a_record_there_is_no_verdict(tmp_path):
    one = RunFile(tmp_path / "a.jsonl", experiment="overhead").overhead("cnn", {"nonprivate": [1.0]})
    assert {verdict for verdict, _ in verdicts(one.path.parent).values()} == {NOT_MEASURED}
    assert all("` measures it" in finding for _, finding in verdicts(one.path.parent).values())
    other = RunFile(tmp_path / "b.jsonl", experiment="stress_test").search("cnn", "ghost", [8], [9])
    assert len(verdicts(other.path.parent)) == len(CLAIMS)  # of several experiments: all of them


def test_devices_are_judged_each_by_itself_and_written_with_their_words(tmp_path):
    timed(RunFile(tmp_path / "in" / "a.jsonl", experiment="overhead"), {"mixed_ghost": 1.5})
    timed(RunFile(tmp_path / "in" / "b.jsonl", CUDA, experiment="overhead"), {"mixed_ghost": 2.5}, device="cuda")
    write_report(tmp_path / "in", tmp_path / "out", ["claims"])
    said = {path.parent.name: path.read_text() for path in (tmp_path / "out").rglob("claims.md")}
    assert len(said) == 2
    on_cpu, on_cuda = (next(text for name, text in said.items() if name.startswith(d)) for d in ("cpu", "cuda"))
    assert "✓ held" in on_cpu and "Device: cpu Test CPU" in on_cpu and "a.jsonl" in on_cpu
    assert "✗ not held" in on_cuda and "Device: cpu" not in on_cuda and "b.jsonl" in on_cuda
    page = (tmp_path / "out" / "report.html").read_text()
    assert "The slow-down of mixed ghost clipping is below 2 on all models." in page


def test_every_claim_is_data_with_a_source_and_an_experiment_that_is_there():
    from dpbench.experiment import experiment_names, load_experiment

    for stated in CLAIMS:
        assert stated.source and stated.held_if and stated.statement.endswith((".", ")."))
        for name in stated.experiments:
            assert name in experiment_names() and "claims" in load_experiment(name).figures
    assert {HELD, NOT_HELD, NOT_COMPARABLE, NOT_MEASURED} <= set(VERDICTS) and FIGURES["claims"].plot is None
