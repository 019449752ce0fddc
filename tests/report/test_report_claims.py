"""Claims of papers: every verdict from fabricated records, none without, and nothing that is not in the records."""

import pytest
from report_records import CUDA, RunFile

from dpbench.report import FIGURES, LeftOut, write_report
from dpbench.report.data import published
from dpbench.report.data.claims import CONFIRMED, NO_DATA, NOT_REACHED, REFUTED
from dpbench.report.data.select import newest, newest_version, read
from dpbench.report.figures import claims
from dpbench.report.figures.claims import CLAIMS
from dpbench.report.parts import VERDICTS

GPT2 = "transformers:gpt2?n_layer=2&n_embd=256&n_head=4&vocab_size=1024"
TEXT = {"image_size": None, "num_classes": None, "data": "synthetic"}


@pytest.fixture
def run(tmp_path):
    return RunFile(tmp_path / "a.jsonl", experiment="overhead")


def verdicts(path):
    """Statement's first words -> (verdict, finding)."""
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
    assert verdict == CONFIRMED
    assert finding == (
        "Mixed ghost is above 2.00× by more than 2 % on 0 of 2 models and sizes: 1.50× to 2.03× (VGG11, B=8), "
        "measured; the paper's own Table 4 has 1.40× to 3.00×. Device: cpu Test CPU, 2 CPUs."
    )
    timed(run, {"mixed_ghost": 2.4}, model="resnet50")
    verdict, finding = of(run, "below 2")
    assert verdict == REFUTED and "on 1 of 3 models and sizes: 1.50× to 2.40× (ResNet50, B=8)" in finding


def test_the_published_numbers_are_those_of_the_csv(run):
    timed(run, {"mixed_ghost": 1.5})
    ratios = [published.ratio("time_per_epoch", m, "mixed_ghost") for m in ("cnn", "resnet18", "vgg13")]
    assert min(ratios) == pytest.approx(1.4) and max(ratios) == pytest.approx(3.0)
    assert of(run, "0.1 to 10 %")[1].endswith("Table 4 has 1.00× to 1.20×. Device: cpu Test CPU, 2 CPUs.")


def test_book_keeping_is_judged_by_the_authors_code_and_by_ours(run):
    timed(run, {"fastdp": 2.1, "bk_mixed": 1.02})
    told = "its Figure 4 has 1.15× to 1.24× on GPT-2. Device: cpu Test CPU, 2 CPUs."
    assert of(run, "(an operation count)")[0] == REFUTED and of(run, "training: ours")[0] == CONFIRMED
    assert of(run, "(an operation count)")[1].endswith(told) and of(run, "training: ours")[1].endswith(told)


def test_memory_is_judged_to_the_byte_and_only_where_it_was_taken(run):
    mib = 2**20
    timed(run, {"mixed_ghost": 1.5}, peaks={"nonprivate": 100 * mib, "mixed_ghost": 109 * mib})
    assert of(run, "0.1 to 10 %")[0] == CONFIRMED
    timed(run, {"mixed_ghost": 1.5}, model="cnn", peaks={"nonprivate": 100 * mib, "mixed_ghost": 111 * mib})
    assert of(run, "0.1 to 10 %")[0] == REFUTED


@pytest.mark.parametrize(("opacus", "verdict"), [(4.6, CONFIRMED), (4.4, REFUTED)])
def test_speed_beside_opacus_is_that_of_one_cell(run, opacus, verdict):
    timed(run, {"mixed_ghost": 1.5, "opacus_hooks": opacus}, model="vgg19")
    timed(run, {"mixed_ghost": 1.5, "opacus_hooks": 99.0}, model="vgg11")
    assert of(run, "3 times as fast")[0] == verdict


def test_a_peer_that_ran_out_of_memory_leaves_a_claim_not_reached(run):
    seconds = {"nonprivate": [1.0, 1.0], "mixed_ghost": [1.5, 1.5]}
    run.overhead("vgg19", seconds, failed={"opacus_hooks": ("oom", "out of memory")})
    verdict, finding = of(run, "3 times as fast")
    assert verdict == NOT_REACHED and "Opacus hooks gave no time on VGG19" in finding


@pytest.mark.parametrize(("fits", "verdict"), [(180, CONFIRMED), (170, REFUTED)])
def test_the_batch_beside_opacus_says_that_memory_was_simulated(tmp_path, fits, verdict):
    run = RunFile(tmp_path / "a.jsonl")
    run.search("vgg19", "mixed_ghost", [fits], [fits + 1]).search("vgg19", "opacus_hooks", [10], [11])
    found = of(run, "18 times")
    assert found == (
        verdict,
        f"VGG19 in 16 GiB: {fits} images against 10 of Opacus hooks: {fits / 10:.1f}×, simulated memory. "
        "Device: cpu Test CPU, 2 CPUs.",
    )


def test_a_search_without_a_number_is_not_reached(tmp_path):
    run = RunFile(tmp_path / "a.jsonl")
    run.search("vgg19", "mixed_ghost", [180], [181]).search("vgg19", "opacus_hooks", [], [1])
    verdict, finding = of(run, "18 times")
    assert verdict == NOT_REACHED and "over budget at B=1" in finding


def test_the_largest_batch_of_all_allows_for_the_search(tmp_path):
    run = RunFile(tmp_path / "a.jsonl")
    for name, fits in {"mixed_ghost": 1000, "ghost": 1015, "fastgradclip": 400, "opacus_hooks": 100}.items():
        run.search("resnet18", name, [fits], [fits + 1])
    assert of(run, "largest batch of the private methods")[0] == CONFIRMED
    run.search("resnet34", "mixed_ghost", [1000], [1001]).search("resnet34", "ghost", [1050], [1051])
    verdict, finding = of(run, "largest batch of the private methods")
    assert verdict == REFUTED and "On 1 of 2 ResNets" in finding and "ResNet34: Ghost 1,050 > 1,000" in finding


def test_what_was_not_run_at_the_size_of_the_claim_is_not_reached(tmp_path):
    run = RunFile(tmp_path / "a.jsonl", experiment="sequence_length")
    timed(run, {"ghost": 2.6, "bk_ghost": 2.2}, model=f"{GPT2}@2048", **TEXT)
    verdict, finding = of(run, "8,192 tokens")
    assert verdict == NOT_REACHED and finding.startswith("At 2,048 tokens (GPT-2 2×256, T=2048, B=8): Ghost 2.60×")
    timed(run, {"ghost": 2.6, "bk_ghost": 2.55}, model=f"{GPT2}&max_position_embeddings=8192@8192", **TEXT)
    assert of(run, "8,192 tokens")[0] == CONFIRMED
    timed(run, {"ghost": 2.6, "bk_ghost": 2.2}, model=f"{GPT2}&max_position_embeddings=16384@16384", **TEXT)
    assert of(run, "8,192 tokens")[0] == REFUTED


def test_resolution(tmp_path):
    run = RunFile(tmp_path / "a.jsonl", experiment="resolution")
    timed(run, {"mixed_ghost": 1.6, "opacus_hooks": 1.5}, model="vgg11", image_size=128)
    verdict, finding = of(run, "high resolution")
    assert verdict == NOT_REACHED and "On VGG11 at 128 px, B=8, Opacus hooks take 1.50×" in finding
    timed(run, {"mixed_ghost": 1.6, "opacus_hooks": 1.5}, model="vgg11", image_size=512)
    assert of(run, "high resolution")[0] == CONFIRMED


def test_peak_memory_beside_the_largest_batch_needs_both(run):
    mib = 2**20
    timed(run, {"mixed_ghost": 1.5}, peaks={"nonprivate": 100 * mib, "mixed_ghost": 101 * mib})
    assert of(run, "different things")[0] == NO_DATA
    run.search("resnet18", "nonprivate", [1000], [1001]).search("resnet18", "mixed_ghost", [500], [501])
    verdict, finding = of(run, "different things")
    assert verdict == CONFIRMED and "+1.0% of peak memory at B=8 (measured), and 0.50× of" in finding
    assert "(simulated); published +0.3% and 0.47×." in finding


@pytest.mark.parametrize(("ratio", "verdict"), [(1.15, CONFIRMED), (1.6, REFUTED)])
def test_a_figure_is_judged_model_by_model(tmp_path, ratio, verdict):
    run = RunFile(tmp_path / "a.jsonl", experiment="vision_transformers")
    timed(run, {"mixed_ghost": ratio}, model="timm:deit_tiny_patch16_224", image_size=224)
    found = of(run, "Vision transformers")
    assert found[0] == verdict and f"{ratio:.2f}× measured, 1.18× published" in found[1]


def test_only_the_claim_s_own_experiments_speak_to_it(run, tmp_path):
    timed(run, {"mixed_ghost": 1.5})
    other = RunFile(tmp_path / "b.jsonl", experiment="throughput", start=5)
    timed(other, {"mixed_ghost": 2.9, "vmap": 4.0}, batch_size=8)  # the same cell, later
    timed(other, {"mixed_ghost": 4.9}, batch_size=1)
    verdict, finding = of(run, "below 2")
    assert verdict == CONFIRMED and "0 of 1 models and sizes: 1.50× to 1.50×" in finding


def test_a_mismatch_is_no_evidence(run):
    seconds = {"nonprivate": [1.0, 1.0]}
    run.overhead("resnet18", seconds, failed={"mixed_ghost": ("mismatch", "differs")}, outcome="mismatch")
    assert of(run, "below 2")[0] == NO_DATA


def test_without_a_record_there_is_no_verdict(tmp_path):
    one = RunFile(tmp_path / "a.jsonl", experiment="overhead").overhead("cnn", {"nonprivate": [1.0]})
    assert {verdict for verdict, _ in verdicts(one.path.parent).values()} == {NO_DATA}
    names = {"overhead"} & {name for stated in CLAIMS for name in stated.experiments}
    assert names and all("makes them" in finding for _, finding in verdicts(one.path.parent).values())
    other = RunFile(tmp_path / "b.jsonl", experiment="stress_test").search("cnn", "ghost", [8], [9])
    assert len(verdicts(other.path.parent)) == len(CLAIMS)  # of several experiments: all of them


def test_devices_are_judged_each_by_itself_and_written_with_their_words(tmp_path):
    timed(RunFile(tmp_path / "in" / "a.jsonl", experiment="overhead"), {"mixed_ghost": 1.5})
    timed(RunFile(tmp_path / "in" / "b.jsonl", CUDA, experiment="overhead"), {"mixed_ghost": 2.5}, device="cuda")
    write_report(tmp_path / "in", tmp_path / "out", ["claims"])
    said = {path.parent.name: path.read_text() for path in (tmp_path / "out").rglob("claims.md")}
    assert len(said) == 2
    on_cpu, on_cuda = (next(text for name, text in said.items() if name.startswith(d)) for d in ("cpu", "cuda"))
    assert f"{VERDICTS[CONFIRMED]} confirmed: The slow-down" in on_cpu and "Device: cpu Test CPU" in on_cpu
    assert f"{VERDICTS[REFUTED]} refuted: The slow-down" in on_cuda and "Device: cpu" not in on_cuda
    page = (tmp_path / "out" / "report.html").read_text()
    assert "The slow-down of mixed ghost clipping is below 2 on all models." in page


def test_every_claim_is_data_with_a_source_and_an_experiment_that_is_there():
    from dpbench.experiment import experiment_names, load_experiment

    for stated in CLAIMS:
        assert stated.source and stated.confirmed_if and stated.statement.endswith((".", ")."))
        for name in stated.experiments:
            assert name in experiment_names() and "claims" in load_experiment(name).figures
    assert {CONFIRMED, REFUTED, NOT_REACHED, NO_DATA} <= set(VERDICTS) and FIGURES["claims"].plot is None
