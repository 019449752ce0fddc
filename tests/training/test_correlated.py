"""Training with banded noise at one ε, by the settings of the experiment, and the figure that is made of it."""

from collections import Counter

import pytest
from made_records import made

from dpbench.experiment import load_experiment
from dpbench.report.figures import held_out_loss
from dpbench.training import CorrelatedTrial
from dpbench.trials.line_shapes import flaw_of_result


@pytest.mark.slow
def test_banded_noise_has_the_same_epsilon_and_less_loss_in_small_batches():
    from dpbench.training.utility import run

    trial = next(t for t in load_experiment("correlated_noise").cells("cpu") if t.lr == 0.05 and t.batch_size == 64)
    found = {}
    for noise in ("gaussian", "banded:16"):
        result = run(trial.replace(noise=noise, target_epsilon=8.0))
        assert flaw_of_result("correlated", result) is None and 7.98 < result["epsilon"] <= 8.0
        found[noise] = result
    assert found["banded:16"]["test_losses"][-1] < found["gaussian"]["test_losses"][-1]
    result = run(trial.replace(noise="blt:3@one_pass", target_epsilon=8.0, epochs=10))
    assert result["sampling"] == "one_pass" and 7.98 < result["epsilon"] <= 8.0 and result["noise"].startswith("blt")
    assert found["banded:16"]["sampling"] == "cyclic_poisson" and found["banded:16"]["noise"].startswith("banded")


def record(noise, lr, seed, loss, accuracy=0.9, batch_size=64):
    result = {"accuracy": accuracy, "test_losses": [9.0, loss], "epsilon": 7.99, "noise_multiplier": 1.0}
    trial = CorrelatedTrial(network="linear", target_epsilon=8.0, batch_size=batch_size, noise=noise, lr=lr, seed=seed)
    return made(trial, result)


def test_the_figure_has_each_noise_at_its_best_learning_rate():
    records = [record("gaussian", 0.1, seed, 0.3 + 0.01 * seed) for seed in range(3)]
    records += [record("gaussian", 0.2, seed, 0.2 + 0.01 * seed) for seed in range(3)]
    records += [record("banded:4", 0.1, seed, 0.1 + 0.01 * seed, 0.95) for seed in range(3)]
    records += [record("gaussian", 0.4, 0, 0.05, 0.96, batch_size=512)]
    records += [record("blt:3@one_pass", 0.1, 0, 0.3), record("gaussian@one_pass", 0.1, 0, 0.4)]
    frame = held_out_loss.noise_table(records, Counter())
    assert frame[["batch_size", "noise", "lr", "seeds"]].values.tolist() == [
        [64, "DP-SGD", 0.2, 3],
        [64, "4 bands", 0.1, 3],
        [64, "DP-SGD, one pass", 0.1, 1],
        [64, "BLT of at most 3 buffers", 0.1, 1],
        [512, "DP-SGD", 0.4, 1],
    ]
    assert frame.loss.tolist() == pytest.approx([0.21, 0.11, 0.4, 0.3, 0.05])
    assert "4 bands take the test loss of batches of 64 from 0.2100 to 0.1100" in held_out_loss.FIGURES[
        "correlated"
    ].finding(frame)
    assert "batches of 512, has 0.0500 (96.0%)" in held_out_loss.FIGURES["correlated"].finding(frame)
    said = "In one pass an epoch a BLT has 0.3000 (batches of 64), and independent noise 0.4000 (batches of 64)."
    assert held_out_loss.FIGURES["correlated"].finding(frame).endswith(said)
    (axes,) = held_out_loss.noise_plot(frame, "").axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1", "4", "one\npass", "BLT"]
    assert list(held_out_loss.FIGURES["correlated"].texts(frame).accuracy) == [
        "90.0 %",
        "95.0 %",
        "90.0 %",
        "90.0 %",
        "96.0 %",
    ]
    assert held_out_loss.FIGURES["correlated"].finding(held_out_loss.noise_table([], Counter())) == ""
