"""``dpbench report``: paths on standard output, one line for what a person got wrong, nothing heavy imported."""

import pytest
from report_records import RunFile, save_no_pictures


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def report(dpbench):
    def run(*words):
        code, out, err = dpbench("report", *words)
        return code, out.splitlines(), err.splitlines()

    return run


def test_an_experiment_s_own_figures_lie_beside_its_records(here, report):
    RunFile(here / "results" / "memory_speed" / "a.jsonl", experiment="memory_speed").step("cnn", "ghost", [1.0])
    code, out, err = report("memory_speed")
    assert (code, err) == (0, [])
    stem = "results/memory_speed/cpu-test-cpu-2-cpus/memory_speed_table"
    assert out == [
        *(f"{stem}.{suffix}" for suffix in ("png", "svg", "pdf", "csv", "md", "tex")),
        "results/memory_speed/report.html",
    ]
    assert all((here / path).stat().st_size for path in out)


def test_records_of_a_run_with_its_own_output(here, report):
    RunFile(here / "mine" / "memory_speed" / "a.jsonl").step("cnn", "ghost", [1.0])
    code, out, _ = report("memory_speed", "--output", "mine")
    assert code == 0 and out[0].startswith("mine/memory_speed/cpu-test-cpu-2-cpus/")


def test_reports_in_one_folder_keep_to_themselves(here, report, monkeypatch):
    save_no_pictures(monkeypatch)
    for name, seconds in (("a", 1.0), ("b", 2.0), ("other/b", 3.0)):
        RunFile(here / name / "x.jsonl").step("cnn", "ghost", [seconds])
    pages = {}
    for source, folder in (("a", "out"), ("b", "out/b"), ("other/b", "out/b-2")):
        for _ in range(2):  # its own page may be made again
            code, out, err = report(source, "--output", "out")
            assert code == 0 and out[-1] == f"{folder}/report.html" and len(err) == (folder != "out")
        pages[out[-1]] = (here / out[-1]).read_bytes()
    assert len(set(pages.values())) == 3
    assert all((here / path).read_bytes() == text for path, text in pages.items())


def test_a_folder_gives_every_figure_that_its_records_make(here, report):
    RunFile(here / "some" / "a.jsonl").step("cnn", "ghost", [1.0]).epsilon("moments", 100, 1.0)
    code, out, _ = report("some")
    names = {path.rpartition("/")[2] for path in out if path.endswith(".svg")}
    assert code == 0 and names == {"max_batch_throughput.svg", "memory_speed_table.svg", "epsilon_epochs.svg"}


def test_an_experiment_of_one_s_own_is_planned_and_reported_by_reference(here, report, dpbench):
    (here / "own.py").write_text(
        "from dpbench.experiment import Experiment\nfrom dpbench.trials import StepTrial\n"
        "def cells(device): return [StepTrial(model='cnn', backend='ghost', batch_size=8, device=device)]\n"
        "TABLE = Experiment(name='own', doc='d', cells=cells, smoke=cells, figures=('memory_speed_table',))\n"
    )
    RunFile(here / "results" / "own" / "a.jsonl", experiment="own").step("cnn", "ghost", [1.0])
    code, out, _ = report("own.py:TABLE")
    assert code == 0 and out[0] == "results/own/cpu-test-cpu-2-cpus/memory_speed_table.png"
    code, out, _ = dpbench("plan", "own.py:TABLE", "--device", "cpu")
    assert code == 0 and "own on cpu" in out
    assert dpbench("compare", "own.py:TABLE", "results/own")[0] == 0


def test_readme_stands_alone_and_needs_the_pages(here, report):
    assert report("--readme")[::2] == (
        2,
        ["dpbench: expected README.md and results/README.md in the current folder, got 'no README.md'"],
    )
    assert report("overhead", "--readme")[0] == report()[0] == 2
    (here / "results").mkdir()
    for page in ("README.md", "results/README.md"):
        (here / page).write_text("no block\n")
    assert report("--readme") == (0, ["README.md", "results/README.md"], [])
