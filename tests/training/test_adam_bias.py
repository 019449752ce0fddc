"""Training by SGD, Adam and AdamBC at one ε, by the settings of the experiment, and the figure that is made of it."""

from collections import Counter

import pytest
from made_records import made

from dpbench.errors import UsageError
from dpbench.experiment import load_experiment
from dpbench.report.figures import held_out_loss
from dpbench.training import AdamTrial
from dpbench.trials.line_shapes import flaw_of_result


@pytest.mark.slow
def test_adam_is_sgd_under_noise_and_adam_again_without_it():
    """Where pixels have scales of their own; the numbers that entries are divided by say so."""
    from dpbench.training.utility import run

    cells = load_experiment("adam_bias").cells("cpu")
    trial = next(t for t in cells if t.network == "uneven" and t.optimizer == "Adam" and t.lr == 0.016)
    found = {}
    for optimizer, epsilon in (("SGD", 8.0), ("Adam", 8.0), ("AdamBC", 8.0), ("AdamBC:1", 8.0), ("Adam", None)):
        found[optimizer, epsilon] = run(trial.replace(optimizer=optimizer, target_epsilon=epsilon, epochs=15))
        assert flaw_of_result("adam_bias", found[optimizer, epsilon]) is None
    assert "spread" not in found.pop(("SGD", 8.0))
    spread = {key: result["spread"] for key, result in found.items()}
    assert 1 < spread["AdamBC:1", 8.0] < spread["AdamBC", 8.0] < spread["Adam", None]
    assert 1 < spread["Adam", 8.0] < 2.5 < spread["AdamBC", 8.0]
    assert found["Adam", 8.0]["epsilon"] == found["AdamBC", 8.0]["epsilon"] <= 8.0


def test_an_optimizer_that_is_none_is_refused():
    from dpbench.training.utility import run

    with pytest.raises(UsageError, match=r"expected an optimizer, got .Adamm.; did you mean .Adam."):
        run(AdamTrial(network="linear", target_epsilon=8.0, seed=0, optimizer="Adamm"))


def record(optimizer, lr, seed, loss, epsilon=8.0):
    result = {"accuracy": 0.9, "test_losses": [9.0, loss], "epsilon": epsilon and 7.99, "noise_multiplier": 1.0}
    result |= {} if optimizer == "SGD" else {"spread": 2.0}
    return made(AdamTrial(network="linear", target_epsilon=epsilon, optimizer=optimizer, lr=lr, seed=seed), result)


def test_the_figure_has_every_learning_rate_and_says_the_best():
    records = [record("SGD", 0.1, seed, 0.3 + 0.01 * seed) for seed in range(3)]
    records += [
        record("Adam", lr, seed, loss + 0.01 * seed) for seed in range(3) for lr, loss in ((0.1, 0.5), (0.2, 0.2))
    ]
    records += [record("AdamBC", 0.1, 0, 0.1), record("AdamBC:0.01", 0.1, 0, 0.7), record("Adam", 0.1, 0, 0.05, None)]
    frame = held_out_loss.adam_table(records, Counter())
    private = frame[frame.target_epsilon.notna()]
    assert sorted(zip(private.optimizer, private.lr, private.seeds, strict=True)) == [
        ("Adam", 0.1, 3),
        ("Adam", 0.2, 3),
        ("AdamBC", 0.1, 1),
        ("AdamBC:0.01", 0.1, 1),
        ("SGD", 0.1, 3),
    ]
    said = "Least test loss, linear at ε = 8: SGD 0.310, Adam 0.210, AdamBC 0.100."
    assert held_out_loss.FIGURES["adam_bias"].finding(frame) == said
    figure = held_out_loss.adam_plot(frame, "a caption")
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert titles == ["linear, ordinary training", "linear, ε = 8"]
    entries = [text.get_text() for text in figure.legends[0].get_texts()]
    assert entries == ["SGD", "Adam", "AdamBC", "AdamBC, floor 0.01"]
    assert held_out_loss.FIGURES["adam_bias"].texts(frame).accuracy.tolist() == ["90.0 %"] * 6
    assert (
        held_out_loss.FIGURES["adam_bias"].finding(frame.iloc[:0]) == ""
        and held_out_loss.adam_plot(frame.iloc[:0], "none") is not None
    )


@pytest.mark.parametrize("loss", ["nan", "inf"])
def test_a_panel_of_trainings_that_all_diverge(loss):
    frame = held_out_loss.adam_table([record("SGD", 0.1, 0, 0.3), record("Adam", 0.1, 0, loss, None)], Counter())
    assert held_out_loss.adam_plot(frame, "a caption") is not None
