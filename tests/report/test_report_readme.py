"""`report --readme`: blocks of made-up records, whose numbers can be worked out by hand."""

from dataclasses import replace

import pytest
from report_records import CPU, RunFile

from dpbench.errors import UsageError
from dpbench.report import readme

FAST = dict(CPU) | {"device_name": "Fast CPU, 2 CPUs", "git_sha": "0123456789"}
FEW = dict(CPU) | {"device_name": "Newer CPU, 2 CPUs"}


@pytest.fixture
def root(tmp_path):
    """Two models on one machine, and a later machine with only one number."""
    folder = tmp_path / "results" / "overhead"
    RunFile(folder / "a.jsonl", FAST, "overhead").overhead(
        "cnn", {"nonprivate": [1.0, 2.0, 4.0], "ghost": [2.0, 6.0, 10.0], "bk_mixed": [1.1, 2.2, 4.4]}, {"ghost": 2**21}
    ).overhead("vgg11", {"nonprivate": [1.0], "bk_mixed": [0.5]}, failed={"ghost": ("unsupported", "no rule")})
    RunFile(folder / "b.jsonl", FEW, "overhead", start=9).overhead("cnn", {"nonprivate": [1.0], "bk_mixed": [1.5]})
    for device in ("fast", "newer"):
        there = folder / f"cpu-{device}-cpu-2-cpus"
        there.mkdir()
        for name in ("overhead.png", "claims.md"):
            (there / name).touch()
    return tmp_path


def page(root, block, name="README.md"):
    (root / name).write_text(f"before\n\n<!-- {block} -->\nstale 9.99×\n<!-- end -->\n\nafter 1\n")
    return readme.filled(root, name)


def cells(text):
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")
    ]


def test_a_table_has_medians_of_pairs_of_the_newest_machine_with_enough_numbers(root):
    text = page(root, "overhead: table cpu")
    assert cells(text) == [
        ["Model", "B", "Ghost", "BK mixed"],
        ["CNN", "8", "2.50×, 2.00×", "1.10×, 1.00×"],
        ["VGG11", "8", "unsupported", "0.50×, 1.00×"],
    ]
    assert "*cpu Fast CPU, 2 CPUs; torch 2.15.0; on 1 January 2026; commit 0123456.*" in text
    assert text.startswith("before\n\n<!--") and text.endswith("<!-- end -->\n\nafter 1\n") and "9.99" not in text
    (root / "README.md").write_text(text)
    assert readme.filled(root, "README.md") == text


def test_results_have_every_machine_the_newest_first_with_findings_and_links_to_figures(root):
    text = page(root, "overhead: results", "results/README.md")
    assert text.index("Newer CPU") < text.index("Fast CPU") and len(cells(text)) == 5
    assert "- [overhead](overhead/cpu-fast-cpu-2-cpus/overhead.png): BK mixed is the fastest private backend" in text
    assert "page" not in text and "commit unknown" in text


def test_a_step_that_takes_less_time_than_the_ordinary_one_says_why(root):
    assert "1.10× the time of ordinary training" in (text := page(root, "overhead: finding cpu"))
    assert "not less work" not in text  # only a model with a rival counts
    RunFile(root / "results" / "overhead" / "c.jsonl", FAST, "overhead", start=20).overhead(
        "cnn", {"nonprivate": [1.0], "bk_mixed": [0.9], "ghost": [2.0]}, fingerprint="v2"
    )
    assert "A time below 1× is not less work" in page(root, "overhead: finding cpu")


def test_a_figure_and_a_device_without_records(root):
    assert "![overhead](results/overhead/cpu-fast-cpu-2-cpus/overhead.png)" in page(root, "overhead: figure cpu")
    assert "Not measured on cuda yet." in page(root, "overhead: table cuda")


@pytest.mark.parametrize(
    ("block", "part"),
    [
        ("overheads: table", "did you mean 'overhead'"),
        ("overhead: tabel", "a table of overhead"),
        ("ablation: results", "python -m dpbench run ablation"),
    ],
)
def test_a_block_that_cannot_be_written_is_one_line(root, block, part):
    with pytest.raises(UsageError, match=part) as error:
        page(root, block)
    assert "\n" not in str(error.value)


def test_a_link_to_a_figure_that_is_not_drawn_says_how_to_draw_it(root):
    (root / "results" / "overhead" / "cpu-fast-cpu-2-cpus" / "overhead.png").unlink()
    with pytest.raises(UsageError, match="python -m dpbench report overhead"):
        page(root, "overhead: figure cpu")


def test_rows_of_several_settings_stand_in_one_table_and_some_are_left_out(root):
    from dpbench.experiment import load_experiment
    from dpbench.records.reader import read
    from dpbench.report import FIGURES, parts_of

    file = root / "results" / "overhead" / "d.jsonl"
    RunFile(file, FAST, "overhead").overhead("cnn", {"nonprivate": [1.0], "bk_mixed": [3.0]}, precision="tf32")
    fast = [r for r in read(root / "results" / "overhead") if r.device == "cpu Fast CPU, 2 CPUs"]
    parts = list(parts_of(fast, {"overhead": replace(FIGURES["overhead"], plot=None)}))
    excerpt = load_experiment("overhead").excerpts["table"]
    chosen = replace(excerpt, rows=("Model", "Precision"), where=lambda row: row["Backend"] == "BK mixed")
    wide = readme.table(parts, chosen)
    with pytest.raises(UsageError, match="tell its records apart, got 'CNN'"):
        readme.table(parts, replace(excerpt, rows=("Model",)))
    assert readme.table([*parts, *parts], chosen).equals(wide)  # the same number twice is one
    assert wide.to_numpy().tolist() == [
        ["CNN", "float32", "1.10×, 1.00×"],
        ["VGG11", "float32", "0.50×, 1.00×"],
        ["CNN", "tf32", "3.00×, 1.00×"],
    ]
    whole = replace(excerpt, rows=("Model",), cells=("Time ratio", "Memory ratio"), across="", turned="What")
    turned = readme.table(parts[:1], replace(whole, where=lambda row: row["Backend"] == "BK mixed"))
    assert turned.to_numpy().tolist() == [["Time ratio", "1.10×", "0.50×"], ["Memory ratio", "1.00×", "1.00×"]]
