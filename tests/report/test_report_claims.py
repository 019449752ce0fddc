"""Claims of papers: every verdict from fabricated records, none without, and nothing that is not in the records."""

import pytest
from report_records import CUDA, RunFile

from dpbench.report import FIGURES, LeftOut, write_report
from dpbench.report.data import published
from dpbench.report.data.claims import HELD, NOT_COMPARABLE, NOT_HELD, NOT_MEASURED
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
    assert verdict == HELD
    assert finding == (
        "Mixed ghost is above 2.00× by more than 2 % on 0 of 2 models and sizes: 1.50× on ResNet18, B=8 to "
        "2.03× on VGG11, B=8, measured; the paper's own Table 4 has 1.40× to 3.00×. Device: cpu Test CPU, 2 CPUs."
    )
    timed(run, {"mixed_ghost": 2.4}, model="resnet50")
    verdict, finding = of(run, "below 2")
    assert (
        verdict == NOT_HELD
        and "on 1 of 3 models and sizes: 1.50× on ResNet18, B=8 to 2.40× on ResNet50, B=8" in finding
    )


def test_the_published_numbers_are_those_of_the_csv(run):
    timed(run, {"mixed_ghost": 1.5})
    ratios = [published.ratio("time_per_epoch", m, "mixed_ghost") for m in ("cnn", "resnet18", "vgg13")]
    assert min(ratios) == pytest.approx(1.4) and max(ratios) == pytest.approx(3.0)
    assert of(run, "0.1 to 10 %")[1].endswith("Table 4 has 1.00× to 1.20×. Device: cpu Test CPU, 2 CPUs.")


def test_book_keeping_is_judged_by_the_authors_code_and_by_ours(run):
    timed(run, {"fastdp": 2.1, "bk_mixed": 1.02})
    told = "its Figure 4 has 1.15× to 1.24× on GPT-2. Device: cpu Test CPU, 2 CPUs."
    assert of(run, "(an operation count)")[0] == NOT_HELD and of(run, "training: ours")[0] == HELD
    assert of(run, "(an operation count)")[1].endswith(told) and of(run, "training: ours")[1].endswith(told)


def test_memory_is_judged_to_the_byte_and_only_where_it_was_taken(run):
    mib = 2**20
    timed(run, {"mixed_ghost": 1.5}, peaks={"nonprivate": 100 * mib, "mixed_ghost": 109 * mib})
    assert of(run, "0.1 to 10 %")[0] == HELD
    timed(run, {"mixed_ghost": 1.5}, model="cnn", peaks={"nonprivate": 100 * mib, "mixed_ghost": 111 * mib})
    assert of(run, "0.1 to 10 %")[0] == NOT_HELD


@pytest.fixture
def steps(tmp_path):
    """Whole steps as of `training_step`: those of `overhead` under another kind."""

    def write(ratios, model="resnet18", **more):
        run = RunFile(tmp_path / "steps.jsonl", experiment="training_step")
        timed(run, ratios, model, **more)
        text = run.path.read_text().replace('"kind": "overhead"', '"kind": "training_step", "optimizer": "SGD"')
        run.path.write_text(text)
        return verdicts(tmp_path)

    return write


def judged(found, words):
    (one,) = [value for key, value in found.items() if words in key]
    return one


@pytest.mark.parametrize(("fastdp", "verdict"), [(1.27, HELD), (1.28, NOT_HELD)])
def test_fastdp_s_readme_is_judged_by_whole_steps(steps, run, fastdp, verdict):
    timed(run, {"fastdp": 9.9})
    found = steps({"fastdp": fastdp})
    assert judged(found, "less than 25 %")[0] == verdict
    assert judged(found, "20 % more memory")[0] == HELD
    assert judged(found, "BERT with Opacus' ghost clipping takes 1.19")[0] == NOT_MEASURED


@pytest.mark.parametrize(
    ("hooks", "ghost", "expected"),
    [(4.0, 2.4, (HELD, HELD)), (2.5, 2.4, (NOT_HELD, NOT_HELD)), (8.2, 4, (NOT_HELD, HELD))],
)
def test_opacus_is_judged_by_its_range_and_its_ghost_clipping_beside_its_hooks(steps, hooks, ghost, expected):
    found = steps({"opacus_hooks": hooks, "opacus_ghost": ghost})
    assert (judged(found, "2.6 to 8 times")[0], judged(found, "roughly halves")[0]) == expected


def test_a_bert_that_a_library_refuses_is_not_comparable(steps):
    bert = "transformers:bert?num_hidden_layers=2@16"
    assert judged(steps({"opacus_ghost": 1.2}), "takes 1.19 times the time")[0] == NOT_MEASURED
    assert judged(steps({"opacus_ghost": 1.2}, model=bert, **TEXT), "takes 1.19 times the time")[0] == HELD


def test_table_4_is_judged_cell_by_cell(run):
    timed(run, {"mixed_ghost": 1.42}, model="cnn", image_size=32)
    verdict, finding = of(run, "as much time as the table says")
    assert verdict == HELD and "1 of 1 cells" in finding and "1.40× published" in finding
    timed(run, {"mixed_ghost": 3.2}, image_size=32)
    verdict, finding = of(run, "as much time as the table says")
    assert verdict == NOT_HELD and "1 of 2 cells" in finding and "3.20× measured" in finding


def test_a_claim_links_to_the_files_of_its_records(run):
    timed(run, {"mixed_ghost": 1.5})
    left_out = LeftOut()
    records = read(run.path.parent)
    frame = claims.table(records, left_out)
    by_verdict = {each.verdict: list(each.files) for each in claims.claims(records, frame)}
    assert by_verdict[HELD] == [str(run.path)] and by_verdict[NOT_MEASURED] == []


@pytest.mark.parametrize(("opacus", "verdict"), [(4.6, HELD), (4.4, NOT_HELD)])
def test_speed_beside_opacus_is_that_of_one_cell(run, opacus, verdict):
    timed(run, {"mixed_ghost": 1.5, "opacus_hooks": opacus}, model="vgg19")
    timed(run, {"mixed_ghost": 1.5, "opacus_hooks": 99.0}, model="vgg11")
    assert of(run, "3 times as fast")[0] == verdict


def test_a_peer_that_ran_out_of_memory_leaves_a_claim_not_reached(run):
    seconds = {"nonprivate": [1.0, 1.0], "mixed_ghost": [1.5, 1.5]}
    run.overhead("vgg19", seconds, failed={"opacus_hooks": ("oom", "out of memory")})
    verdict, finding = of(run, "3 times as fast")
    assert verdict == NOT_COMPARABLE and "Opacus hooks gave no time on VGG19" in finding


@pytest.mark.parametrize(("fits", "verdict"), [(180, HELD), (170, NOT_HELD)])
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
    assert verdict == NOT_COMPARABLE and "over budget at B=1" in finding


def test_the_largest_batch_of_all_allows_for_the_search(tmp_path):
    run = RunFile(tmp_path / "a.jsonl")
    for name, fits in {"mixed_ghost": 1000, "ghost": 1015, "fastgradclip": 400, "opacus_hooks": 100}.items():
        run.search("resnet18", name, [fits], [fits + 1])
    assert of(run, "largest batch of the private methods")[0] == HELD
    run.search("resnet34", "mixed_ghost", [1000], [1001]).search("resnet34", "ghost", [1050], [1051])
    verdict, finding = of(run, "largest batch of the private methods")
    assert verdict == NOT_HELD and "On 1 of 2 ResNets" in finding and "ResNet34: Ghost 1,050 > 1,000" in finding


def test_what_was_not_run_at_the_size_of_the_claim_is_not_reached(tmp_path):
    run = RunFile(tmp_path / "a.jsonl", experiment="sequence_length")
    timed(run, {"ghost": 2.6, "bk_ghost": 2.2}, model=f"{GPT2}@2048", **TEXT)
    verdict, finding = of(run, "8,192 tokens")
    assert verdict == NOT_COMPARABLE and finding.startswith("At 2,048 tokens (GPT-2 2×256, T=2048, B=8): Ghost 2.60×")
    timed(run, {"ghost": 2.6, "bk_ghost": 2.55}, model=f"{GPT2}&max_position_embeddings=8192@8192", **TEXT)
    assert of(run, "8,192 tokens")[0] == HELD
    timed(run, {"ghost": 2.6, "bk_ghost": 2.2}, model=f"{GPT2}&max_position_embeddings=16384@16384", **TEXT)
    assert of(run, "8,192 tokens")[0] == NOT_HELD


def test_resolution(tmp_path):
    run = RunFile(tmp_path / "a.jsonl", experiment="resolution")
    timed(run, {"mixed_ghost": 1.6, "opacus_hooks": 1.5}, model="vgg11", image_size=128)
    verdict, finding = of(run, "high resolution")
    assert verdict == NOT_COMPARABLE and "On VGG11 at 128 px, B=8, Opacus hooks take 1.50×" in finding
    timed(run, {"mixed_ghost": 1.6, "opacus_hooks": 1.5}, model="vgg11", image_size=512)
    assert of(run, "high resolution")[0] == HELD


def test_peak_memory_beside_the_largest_batch_needs_both(run):
    mib = 2**20
    timed(run, {"mixed_ghost": 1.5}, peaks={"nonprivate": 100 * mib, "mixed_ghost": 101 * mib})
    assert of(run, "different things")[0] == NOT_MEASURED
    run.search("resnet18", "nonprivate", [1000], [1001]).search("resnet18", "mixed_ghost", [500], [501])
    verdict, finding = of(run, "different things")
    assert verdict == HELD and "+1.0% of peak memory at B=8 (measured), and 0.50× of" in finding
    assert "(simulated); published +0.3% and 0.47×." in finding


@pytest.mark.parametrize(("ratio", "verdict"), [(1.15, HELD), (1.6, NOT_HELD)])
def test_a_figure_is_judged_model_by_model(tmp_path, ratio, verdict):
    run = RunFile(tmp_path / "a.jsonl", experiment="vision_transformers")
    timed(run, {"mixed_ghost": ratio}, model="timm:deit_tiny_patch16_224", image_size=224)
    found = of(run, "pay as much time")
    assert found[0] == verdict and f"{ratio:.2f}× measured, 1.18× published" in found[1]


def test_only_the_claim_s_own_experiments_speak_to_it(run, tmp_path):
    timed(run, {"mixed_ghost": 1.5})
    other = RunFile(tmp_path / "b.jsonl", experiment="throughput", start=5)
    timed(other, {"mixed_ghost": 2.9, "vmap": 4.0}, batch_size=8)  # the same cell, later
    timed(other, {"mixed_ghost": 4.9}, batch_size=1)
    verdict, finding = of(run, "below 2")
    assert verdict == HELD and "0 of 1 models and sizes: 1.50× on ResNet18, B=8, measured" in finding


def test_a_mismatch_is_no_evidence(run):
    seconds = {"nonprivate": [1.0, 1.0]}
    run.overhead("resnet18", seconds, failed={"mixed_ghost": ("mismatch", "differs")}, outcome="mismatch")
    assert of(run, "below 2") == (
        NOT_COMPARABLE,
        "Mixed ghost gave no number: ResNet18, B=8: mismatch: wrong gradient. Device: cpu Test CPU, 2 CPUs.",
    )


def test_without_a_record_there_is_no_verdict(tmp_path):
    one = RunFile(tmp_path / "a.jsonl", experiment="overhead").overhead("cnn", {"nonprivate": [1.0]})
    assert {verdict for verdict, _ in verdicts(one.path.parent).values()} == {NOT_MEASURED}
    names = {"overhead"} & {name for stated in CLAIMS for name in stated.experiments}
    assert names and all("` measures it" in finding for _, finding in verdicts(one.path.parent).values())
    other = RunFile(tmp_path / "b.jsonl", experiment="stress_test").search("cnn", "ghost", [8], [9])
    assert len(verdicts(other.path.parent)) == len(CLAIMS)  # of several experiments: all of them


def test_devices_are_judged_each_by_itself_and_written_with_their_words(tmp_path):
    timed(RunFile(tmp_path / "in" / "a.jsonl", experiment="overhead"), {"mixed_ghost": 1.5})
    timed(RunFile(tmp_path / "in" / "b.jsonl", CUDA, experiment="overhead"), {"mixed_ghost": 2.5}, device="cuda")
    write_report(tmp_path / "in", tmp_path / "out", ["claims"])
    said = {path.parent.name: path.read_text() for path in (tmp_path / "out").rglob("claims.md")}
    assert len(said) == 2
    on_cpu, on_cuda = (next(text for name, text in said.items() if name.startswith(d)) for d in ("cpu", "cuda"))
    assert f"{VERDICTS[HELD]} held: The slow-down" in on_cpu and "Device: cpu Test CPU" in on_cpu
    assert f"{VERDICTS[NOT_HELD]} not held: The slow-down" in on_cuda and "Device: cpu" not in on_cuda
    page = (tmp_path / "out" / "report.html").read_text()
    assert "The slow-down of mixed ghost clipping is below 2 on all models." in page


def test_every_claim_is_data_with_a_source_and_an_experiment_that_is_there():
    from dpbench.experiment import experiment_names, load_experiment

    for stated in CLAIMS:
        assert stated.source and stated.held_if and stated.statement.endswith((".", ")."))
        for name in stated.experiments:
            assert name in experiment_names() and "claims" in load_experiment(name).figures
    assert {HELD, NOT_HELD, NOT_COMPARABLE, NOT_MEASURED} <= set(VERDICTS) and FIGURES["claims"].plot is None
