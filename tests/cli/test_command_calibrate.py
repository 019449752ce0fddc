"""``dpbench calibrate``: rows, the contract's keys, what is safe when rounded, errors in one line."""

import pytest

import accounting
from accounting import ACCOUNTANTS, SubsampledGaussian, load_accountant

GIVEN = {"target_epsilon": "1", "sample_rate": "0.01", "steps": "10000", "delta": "1e-5"}


def words(*more, **changes):
    options = {name: value for name, value in (GIVEN | changes).items() if value is not None}
    given = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    return ["calibrate", *given, *more]


def test_json_has_every_accountant_within_the_target(rows):
    found = rows(*words())
    assert list(found) == list(ACCOUNTANTS)
    for name, row in found.items():
        assert {"accountant", "noise_multiplier", "epsilon", "kind", "steps", "sample_rate", "detail"} <= set(row)
        assert 0.999 <= row["epsilon"] <= 1.0
        again = SubsampledGaussian(row["noise_multiplier"], 0.01)
        assert load_accountant(name).epsilon(again, steps=10_000, delta=1e-5) == row["epsilon"]
    assert found["gdp"]["kind"] == "estimate"
    assert found["prv"]["noise_multiplier"] < found["rdp"]["noise_multiplier"] < found["moments"]["noise_multiplier"]


@pytest.mark.parametrize(
    ("unknown", "given", "key", "low", "high"),
    [
        ("steps", {"noise_multiplier": "4", "steps": None}, "steps", 6000, 12_000),
        ("epochs", {"noise_multiplier": "4", "steps": None}, "epochs", 60.0, 120.0),
        ("sample-rate", {"noise_multiplier": "4", "sample_rate": None}, "sample_rate", 0.007, 0.012),
        ("noise-multiplier", {"epochs": "100", "steps": None}, "noise_multiplier", 3.8, 5.0),
    ],
)
def test_each_unknown(unknown, given, key, low, high, rows):
    found = rows(*words("--solve", unknown, "--accountant", "moments", "--accountant", "rdp", **given))
    for row in found.values():
        assert low < row[key] < high and row["epsilon"] <= 1.0
        assert row["epochs"] == pytest.approx(row["steps"] * row["sample_rate"])


def test_the_table_rounds_to_the_safe_side(dpbench, rows):
    code, out, _ = dpbench(*words("--accountant", "rdp"))
    assert code == 0
    assert "smallest noise multiplier with ε ≤ 1 at δ = 1e-05, sample rate 0.01, steps 10,000" in out
    name, sigma, epsilon, *kind = out.splitlines()[-1].split()
    exact = rows(*words("--accountant", "rdp"))["rdp"]
    assert (name, kind[:2]) == ("rdp", ["upper", "bound"])
    assert exact["noise_multiplier"] <= float(sigma) <= exact["noise_multiplier"] * (1 + 1e-5)
    assert exact["epsilon"] <= float(epsilon)


def test_a_target_out_of_reach_is_a_row_and_the_others_answer(dpbench, rows):
    found = rows(*words(target_epsilon="0.3"))
    assert found["moments"]["noise_multiplier"] is None and found["moments"]["epsilon"] is None
    assert "still 0.3598" in found["moments"]["detail"]["reason"]
    assert found["rdp"]["epsilon"] <= 0.3
    _, out, _ = dpbench(*words("--accountant", "moments", target_epsilon="0.3"))
    assert out.splitlines()[-1].split()[:3] == ["moments", "-", "-"]


def test_under_another_scheme(dpbench, rows):
    scheme = {"sampling": "shuffled", "steps": "400"}
    found = rows(*words(**scheme))
    assert list(found) == ["shuffled", *ACCOUNTANTS]
    assert found["shuffled"]["kind"] == "lower_bound"
    assert found["shuffled"]["noise_multiplier"] < found["prv"]["noise_multiplier"]
    assert "no valid bound" in found["gdp"]["detail"]["reason"]
    assert {row["detail"].get("adjacency", "zero_out") for row in found.values()} == {"zero_out"}
    _, out, _ = dpbench(*words("--accountant", "rdp", **scheme))
    assert "shuffled batches, making one record's gradient zero" in out


def test_a_risk_may_be_the_target(rows):
    given = words("--accountant", "rdp", target_epsilon=None, sample_rate="0.02", steps="50")
    row = rows(*given, "--target-advantage", "0.15")["rdp"]
    step = SubsampledGaussian(row["noise_multiplier"], 0.02)
    assert 0.149 < accounting.risk("rdp", step, steps=50, delta=1e-5)["advantage"] <= 0.15
    assert row["epsilon"] == load_accountant("rdp").epsilon(step, steps=50, delta=1e-5)
    assert rows(*given, "--target-tpr", "0.01", "--fpr", "0.001")["rdp"]["detail"]["tpr"] <= 0.01
