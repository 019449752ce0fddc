"""Training to a budget on the digits, by the settings of the experiment, and the figure that is made of it."""

from __future__ import annotations

from collections import Counter

import pandas as pd
import pytest

from dpbench.experiment import load_experiment
from dpbench.report import utility
from dpbench.training import UtilityTrial


def settings(network):
    return next(t for t in load_experiment("utility").cells("cpu") if t.network == network)


def accuracies(network, *epsilons):
    from dpbench.training.utility import run

    return [run(settings(network).replace(target_epsilon=epsilon))["accuracy"] for epsilon in epsilons]


def test_the_linear_model_learns_the_digits_privately():
    ordinary, eight, two = accuracies("linear", None, 8.0, 2.0)
    assert ordinary > 0.95
    assert eight > ordinary - 0.03
    assert two > 0.90


@pytest.mark.slow
def test_the_cnn_learns_the_digits_privately():
    ordinary, eight, two = accuracies("cnn", None, 8.0, 2.0)
    assert ordinary > 0.96
    assert eight > ordinary - 0.03
    assert two > 0.90


def test_exact_backends_train_alike_and_within_the_target():
    from dpbench.training.utility import run

    trial = settings("linear").replace(target_epsilon=2.0, epochs=5)
    found = [run(trial.replace(backend=backend)) for backend in ("microbatch", "ghost", "bk_mixed")]
    for result in found:
        assert result["test_losses"] == pytest.approx(found[0]["test_losses"], rel=1e-4)
        assert result["epsilon"] <= 2.0 and result["steps"] == 15 == result["curve"][-1]["steps"]
        assert result["noise"] == "seeded by the caller: can be repeated, not private"
    other = run(trial.replace(seed=1))
    assert other["test_losses"] != pytest.approx(found[0]["test_losses"], rel=1e-3)


def test_figure_and_table():
    class Record:
        def __init__(self, epsilon, seed, accuracy, clip="flat"):
            trial = UtilityTrial(network="linear", target_epsilon=epsilon, seed=seed, clip=clip)
            self.trial, self.outcome, self.fingerprint = trial.describe(), "ok", "0"
            curve = [{"steps": 3, "seconds": 1.0, "accuracy": 0.5}, {"steps": 6, "seconds": 2.0, "accuracy": accuracy}]
            self.result = {"accuracy": accuracy, "curve": curve, "test_losses": [1.0, 0.5], "epsilon": epsilon}

    records = [Record(8.0, 0, 0.9), Record(8.0, 1, 0.94), Record(8.0, 2, 0.95), Record(2.0, 0, 0.8)]
    records += [Record(None, 0, 0.97), Record(8.0, 0, 0.91, "automatic")]
    frame = utility.table(records, Counter())
    row = frame[(frame["clip"] == "flat") & (frame.target_epsilon == 8)].iloc[0]
    assert (row.seeds, row.accuracy, row.least, row.greatest) == (3, 0.94, 0.9, 0.95)
    assert frame[frame.backend == "ordinary"].accuracy.tolist() == [0.97]
    assert "94.0 %" in set(utility.text(frame).accuracy)
    axes = utility.plot(frame, "words").axes[0]
    lines = {text.get_text() for text in axes.get_legend().get_texts()}
    assert lines == {"ordinary training", "flat clipping", "automatic clipping"}
    flat = next(c for c in axes.containers if c.get_label() == "flat clipping")
    assert flat.lines[0].get_xydata().tolist() == [[2, 0.8], [8, 0.94]]
    assert isinstance(utility.table([], Counter()), pd.DataFrame)
