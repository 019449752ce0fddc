"""``dpbench epsilon``: rows, errors in one line, and nothing heavy imported."""

import json
import math

import pytest

import accounting
from accounting import Accountant, SubsampledGaussian, compose

POINT = ["--sample-rate", "0.01", "--noise-multiplier", "4", "--steps", "10000", "--delta", "1e-5"]


def point(**changes):
    options = dict(zip(POINT[::2], POINT[1::2], strict=True))
    options |= {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    return [word for item in options.items() for word in item]


def test_json_rows(rows):
    found = rows("epsilon", *POINT)
    assert list(found) == list(accounting.ACCOUNTANTS)
    assert all(list(row) == ["accountant", "epsilon", "kind", "detail"] for row in found.values())
    assert {name: row["kind"] for name, row in found.items() if row["kind"] != "upper_bound"} == {"gdp": "estimate"}
    assert found["moments"]["epsilon"] == pytest.approx(1.2586, abs=5e-5)
    assert {"order": 19, "sampling": "poisson", "adjacency": "add_remove"}.items() <= found["moments"]["detail"].items()


def test_chosen_accountants_in_the_order_asked(rows):
    chosen = ["--accountant", "strong:published", "--accountant", "moments", "--accountant", "moments"]
    kinds = {name: row["kind"] for name, row in rows("epsilon", *POINT, *chosen).items()}
    assert list(kinds.items()) == [("strong:published", "heuristic"), ("moments", "upper_bound")]


def test_an_infinite_epsilon_is_a_string(rows):
    found = rows("epsilon", *point(delta="0"))
    assert [row["epsilon"] for row in found.values()] == ["inf"] * len(accounting.ACCOUNTANTS)
    rows("epsilon", *point(noise_multiplier="1e-3"))


def test_table_states_setting_scheme_adjacency_and_kind(dpbench):
    code, out, _ = dpbench("epsilon", *POINT, "--accountant", "moments", "--accountant", "strong:published")
    assert code == 0
    assert "Poisson sampling" in out and "adding or removing one record" in out
    assert "10,000 steps" in out and "1e-05" in out
    header, moments, published = out.splitlines()[-3:]
    for line, kind in ((moments, "upper bound"), (published, "heuristic")):
        assert line.index(kind) == header.index("kind")
    assert "1.25858" in moments  # 1.2585747...: an upper bound is rounded up
    assert "order=19" in moments and "no upper bound" in published


def test_an_accountant_without_an_answer_leaves_the_others_theirs(dpbench, rows, monkeypatch):
    class Broken(Accountant):
        def _inside(self, mechanism, steps, delta):
            return float("nan"), {}

    monkeypatch.setattr(accounting, "Broken", Broken, raising=False)
    monkeypatch.setitem(
        accounting.ACCOUNTANTS, "simple", accounting.AccountantInfo("accounting:Broken", "never answers")
    )
    simple, strong, moments, *_ = rows("epsilon", *POINT).values()
    assert simple["epsilon"] is None and "nan" in simple["detail"]["reason"]
    assert strong["epsilon"] > moments["epsilon"] > 0
    code, out, _ = dpbench("epsilon", *POINT)
    assert code == 0 and "1.25858" in out


def test_a_scheme_has_its_own_accountants_and_says_where_there_is_no_bound(dpbench, rows):
    scheme = ["--sampling", "shuffled", "--adjacency", "replace_one"]
    found = rows("epsilon", *point(steps="400"), *scheme)
    assert (found["shuffled"]["kind"], found["prv"]["kind"]) == ("lower_bound", "upper_bound")
    assert 0 < found["shuffled"]["epsilon"] < found["prv"]["epsilon"]
    assert found["gdp"]["epsilon"] is None and "no valid bound" in found["gdp"]["detail"]["reason"]
    _, out, _ = dpbench("epsilon", *point(steps="400"), *scheme, "--accountant", "gdp")
    assert "shuffled batches, replacing one record" in out
    _, out, _ = dpbench("epsilon", *point(steps="400"), *scheme[:2], "--accountant", "prv")
    assert "shuffled batches, making one record's gradient zero" in out
    _, out, _ = dpbench("epsilon", *point(steps="400"), *scheme[:2], "--accountant", "gdp")
    assert out.splitlines()[-1].split()[:3] == ["gdp", "-", "estimate"]


def test_truncated_batches_need_their_sizes(dpbench):
    sizes = ["--sampling", "truncated_poisson", "--dataset-size", "60000", "--max-batch-size", "700"]
    code, out, _ = dpbench("epsilon", *POINT, *sizes, "--accountant", "prv")
    assert code == 0 and "60,000 records, 700 kept in a batch at most" in out


LENGTHS = [
    ["--sample-rate", "256/60000", "--steps", "2344"],
    ["--batch-size", "256", "--dataset-size", "60000", "--steps", "2.344e3"],
    ["--batch-size", "256", "--dataset-size", "60000", "--epochs", "10"],
    ["--sample-rate", "0.004266666666666667", "--epochs", "10"],
]


@pytest.mark.parametrize("command", ["epsilon", "calibrate"])
def test_rate_and_steps_as_people_know_them(command, rows):
    other = {"epsilon": ["--noise-multiplier", "1.1"], "calibrate": ["--target-epsilon", "1"]}[command]
    given = [*other, "--delta", "1e-5", "--accountant", "moments"]
    assert len({rows(command, *length, *given)["moments"]["epsilon"] for length in LENGTHS}) == 1


def test_the_best_bound_is_first_and_what_bounds_nothing_is_last(dpbench):
    _, out, _ = dpbench("epsilon", *point(noise_multiplier="0.001", delta="1e-15"))
    names = [line.split()[0] for line in out.splitlines()[4:]]
    answers = [line.split()[1] for line in out.splitlines()[4:]]
    assert answers.index("-") > max(i for i, answer in enumerate(answers) if answer != "-")
    assert names.index("gdp") > names.index("simple")


def test_no_answer_of_the_only_one_is_exit_1(dpbench):
    asked = [*point(noise_multiplier="0.001", delta="1e-15"), "--accountant", "pld"]
    assert dpbench("epsilon", *asked)[0] == 1
    assert dpbench("epsilon", *asked, "--accountant", "rdp")[0] == 0


def test_an_accountant_of_ones_own(tmp_path, dpbench, rows):
    file = tmp_path / "mine.py"
    file.write_text(
        "from accounting import Accountant, load_accountant\n"
        "class Twice(type(load_accountant('rdp'))):\n"
        "    def guarantee(self, mechanism, *, steps, delta):\n"
        "        return super().guarantee(mechanism, steps=2 * steps, delta=delta)\n"
        "class Other:\n    pass\n"
    )
    (row,) = rows("epsilon", *POINT, "--accountant", f"{file}:Twice").values()
    assert row["epsilon"] == rows("epsilon", *point(steps="20000"), "--accountant", "rdp")["rdp"]["epsilon"]
    for name, words in ((f"{file}:Other", "expected an accounting.Accountant"), (f"{file}:Nobody", "to be made")):
        code, out, err = dpbench("epsilon", *POINT, "--accountant", name)
        assert (code, out, err.count("\n")) == (2, "", 1) and words in err


OWN = "import sys\nfrom accounting import Accountant\nprint('loaded')\nclass A(Accountant):\n"
OWN += "    def _inside(self, m, steps, delta):\n        print('asked')\n        "


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise ValueError('a\\nb')", "expected an answer of mine.py:A, got 'ValueError: a b'"),
        ("return 1 / 0, {}", "got 'ZeroDivisionError: division by zero'"),
        ("sys.exit(0)", "got 'SystemExit: 0'"),
        ("return 'x', {}", "expected ε to be a number, got 'x'"),
        ("return None", "TypeError"),
        ("return 1.0, {'kind': 'proof'}", "expected a kind of ε, one of upper_bound, lower_bound, estimate, heuristic"),
        ("return 1.0, {'x': {1}}", "expected a detail of values that JSON has"),
    ],
)
@pytest.mark.parametrize("command", ["epsilon", "calibrate"])
def test_what_an_accountant_of_ones_own_gets_wrong_is_one_line(command, body, said, tmp_path, monkeypatch, dpbench):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(OWN + body)
    asked = POINT if command == "epsilon" else [*POINT[:2], *POINT[4:], "--target-epsilon", "1"]
    code, out, err = dpbench(command, *asked, "--accountant", "mine.py:A", "--format", "json")
    printed, line = err.rsplit("asked\n", 1)
    assert (code, out) == (2, "") and printed.startswith("loaded\n") and said in line and line.count("\n") == 1


def test_an_accountant_s_file_that_exits_is_one_line(tmp_path, dpbench):
    (tmp_path / "mine.py").write_text("import sys\nsys.exit(0)\n")
    code, out, err = dpbench("epsilon", *POINT, "--accountant", f"{tmp_path}/mine.py:A")
    assert (code, out, err.count("\n")) == (2, "", 1) and "to be made, got 'SystemExit: 0'" in err


def test_numbers_of_numpy_and_a_reason_that_is_no_text_are_shown(tmp_path, dpbench):
    (tmp_path / "mine.py").write_text(f"import numpy as np\n{OWN}return np.float32(1.5), {{'reason': 5}}\n")
    asked = [*POINT, "--accountant", f"{tmp_path}/mine.py:A"]
    code, out, _ = dpbench("epsilon", *asked, "--format", "json")
    assert (code, json.loads(out)[0]["epsilon"]) == (0, 1.5)
    assert dpbench("epsilon", *asked)[0] == 0


PHASES = """delta = 1e-5
dataset_size = 60_000

[[phase]]
batch_size = 256
noise_multiplier = 1.1
epochs = 2

[[phase]]
sample_rate = 0.01
noise_multiplier = 2
steps = 50
"""


def test_risk_of_every_valid_row_is_in_the_json(rows):
    for row in rows("epsilon", *point(sample_rate="1", steps="4"), "--risk").values():
        assert row["kind"] == "upper_bound"  # all of them are at rate 1
        mu = 2 / 4
        assert row["risk"]["advantage"] == pytest.approx(math.erf(mu / 2 / math.sqrt(2)), rel=0.01)
        assert set(row["risk"]["tpr_at_fpr"]) == {"0.01", "0.001"}
    for row in rows("epsilon", *point(steps="10"), "--risk").values():
        assert ("risk" in row) == (row["kind"] == "upper_bound")


def test_risk_is_told_below_the_table_and_drawn(tmp_path, dpbench):
    picture = tmp_path / "risk.png"
    asked = [*point(steps="100"), "--accountant", "prv", "--risk", "--output", str(picture)]
    code, out, _ = dpbench("epsilon", *asked)
    assert code == 0 and "\nadvantage " in out and "true positives at 0.1 % false ones" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_no_printed_bound_is_rounded_to_the_unsafe_side(dpbench, rows):
    asked = ["epsilon", *point(steps="100"), "--accountant", "prv"]
    found = rows(*asked)["prv"]["detail"]
    _, out, _ = dpbench(*asked)
    shown = dict(word.split("=") for word in out.splitlines()[-1].replace(",", "").split() if "=" in word)
    assert float(shown["lower"]) <= found["lower"] <= found["upper"] <= float(shown["upper"])


@pytest.mark.parametrize("command", [["epsilon", "--noise-multiplier", "1"], ["calibrate", "--target-epsilon", "1"]])
def test_a_delta_that_protects_nobody_is_told(command, dpbench):
    of_100 = ["--batch-size", "10", "--dataset-size", "100", "--steps", "10", "--accountant", "rdp"]
    for delta, warns in (("0.01", True), ("1/101", False)):
        code, _, err = dpbench(*command, *of_100, "--delta", delta)
        assert code == 0 and ("delta=0.01 is not below 1/dataset_size=0.01" in err) == warns


def test_an_estimate_has_no_risk(dpbench):
    code, out, _ = dpbench("epsilon", *point(steps="100"), "--accountant", "gdp", "--risk")
    assert code == 0 and out.endswith("they need an accountant with an upper bound\n")


def test_a_risk_that_no_grid_holds_is_drawn_by_epsilon_alone(tmp_path, dpbench):
    picture = tmp_path / "risk.png"
    asked = [*point(noise_multiplier="1e-200"), "--accountant", "rdp", "--risk", "--output", str(picture)]
    assert dpbench("epsilon", *asked)[0] == 0 and picture.read_bytes().startswith(b"\x89PNG")


def test_phases_of_a_file(tmp_path, dpbench, rows):
    file = tmp_path / "phases.toml"
    file.write_text(PHASES)
    row = rows("epsilon", file, "--accountant", "pld", "--risk")["pld"]
    parts = [(SubsampledGaussian(1.1, 256 / 60_000), 469), (SubsampledGaussian(2.0, 0.01), 50)]
    assert row["epsilon"] == compose("pld", parts).epsilon(delta=1e-5) and row["risk"]["advantage"] > 0
    assert rows("epsilon", file, "--accountant", "pld", "--delta", "1e-7")["pld"]["epsilon"] > row["epsilon"]
    _, out, _ = dpbench("epsilon", str(file), "--accountant", "rdp")
    assert "519 steps in 2 phases" in out and "50 steps, sample rate 0.01, noise multiplier 2" in out


@pytest.mark.parametrize(
    ("text", "more", "words"),
    [
        (PHASES, ["--steps", "3"], "expected either --steps or phases"),
        ("delta = 1e-5", [], "expected one [[phase]] at least"),
        (PHASES.replace("steps", "step"), [], "did you mean 'steps'"),
        (PHASES.replace("delta = 1e-5", ""), [], "expected --delta"),
        (PHASES.replace("noise_multiplier = 2", ""), [], "expected --noise-multiplier"),
        (PHASES.replace("multiplier = 2", "multiplier = -2"), [], "toml, phase 2: expected --noise-multiplier to be a"),
        (PHASES + "delta = 1e-3", [], "phase 2: expected a field of a phase (delta stands above the first), one of"),
        ("[phase", [], "expected TOML"),
        (PHASES + 'adjacency = "replace_one"', [], "expected one adjacency in all phases"),
        (PHASES + "group_size = 2", [], "expected one group_size in all phases, got '1, 2'"),
        (None, [], "No such file"),
    ],
)
def test_phases_that_are_none(text, more, words, tmp_path, dpbench):
    file = tmp_path / "phases.toml"
    if text is not None:
        file.write_text(text)
    code, out, err = dpbench("epsilon", str(file), *more)
    assert (code, out, err.count("\n")) == (2, "", 1) and words in err


def test_tuned_runs_and_groups(dpbench, rows):
    asked = ["epsilon", *point(steps="100"), "--accountant", "rdp", "--accountant", "prv"]
    one, tuned, group = rows(*asked), rows(*asked, "--tuned", "8"), rows(*asked, "--group-size", "3")
    assert tuned["rdp"]["epsilon"] > one["rdp"]["epsilon"] and tuned["rdp"]["detail"]["distribution"] == "geometric"
    assert tuned["prv"]["epsilon"] is None and tuned["prv"]["detail"]["reason"].endswith("rdp has one")
    assert group["prv"]["epsilon"] > one["prv"]["epsilon"] and group["rdp"]["epsilon"] is None
    _, out, _ = dpbench(*asked, "--tuned", "8", "--tuned-by", "poisson")
    assert "of the best of 8 runs on average" in out and "poisson" in out
