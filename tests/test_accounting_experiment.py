"""The `accountants` experiment, and the body of its trials."""

import json
import math

import pytest

from accounting import ACCOUNTANTS, ArgumentError
from dpbench.experiment import load_experiment
from dpbench.measure.epsilon import run
from dpbench.store import to_json
from dpbench.trials import EpsilonTrial

POINT = {"sample_rate": 0.01, "noise_multiplier": 4.0, "steps": 10_000, "delta": 1e-5}


def test_cells_hold_both_published_curves_and_every_accountant():
    experiment = load_experiment("accountants")
    cells = {(trial.accountant, trial.steps): run(trial) for trial in experiment.cells("cpu")}
    assert {name for name, _ in cells} == {*ACCOUNTANTS, "strong:exact", "strong:published"}
    assert max(steps for _, steps in cells) == 40_000
    assert cells["moments", 10_000]["epsilon"] == pytest.approx(1.26, abs=0.005)
    assert cells["strong:published", 10_000]["epsilon"] == pytest.approx(9.34, abs=0.005)
    assert {name for (name, _), result in cells.items() if result["kind"] != "upper_bound"} == {"strong:published"}
    smoke = {(trial.accountant, trial.steps) for trial in experiment.smoke("cuda")}
    assert smoke < set(cells)


def test_result_can_be_recorded_where_it_is_infinite():
    result = run(EpsilonTrial(accountant="moments", **POINT | {"delta": 0.0}))
    assert result["epsilon"] == math.inf
    assert json.loads(to_json(result))["epsilon"] == "inf"
    assert result["compute_seconds"] < 1 and "seconds" not in result["detail"]


def test_a_value_outside_its_domain_is_named():
    with pytest.raises(ArgumentError, match=r"^expected delta in \[0, 1\], got -1$"):
        run(EpsilonTrial(accountant="moments", **POINT | {"delta": -1}))
