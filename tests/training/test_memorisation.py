"""What a model gives away of secrets: the records of a trial, and the figure that is made of them."""

import math

import pandas as pd
import pytest
from made_records import made

from dpbench.experiment import load_experiment
from dpbench.report.figures import memorisation
from dpbench.training import MemorisationTrial
from dpbench.trials.line_shapes import flaw_of_result


def record(target, seed, bits):
    result = {"exposures": [{"times": times, "bits": b} for times, b in bits], "bits_of_all": math.log2(10_000)}
    result |= {"bits_per_byte": 3.0 if target is None else 3.3, "bits_per_byte_before": 4.0, "seconds": 1.0}
    result |= {"epsilon": target, "delta": None if target is None else 1e-4}
    return made(MemorisationTrial(target_epsilon=target, seed=seed), result)


def test_a_row_for_each_epsilon_and_number_of_repetitions():
    lines = [record(8.0, 0, [(1, 1.0), (1, 3.0), (16, 2.0)]), record(None, 0, [(1, 1.0), (16, 13.0)])]
    lines += [record(None, 1, [(1, 2.0), (16, 11.0)])]
    assert all(flaw_of_result("memorisation", line.result) is None for line in lines)
    frame = memorisation.table(lines, {})
    assert [(None if pd.isna(e) else e, t) for e, t in zip(frame.target_epsilon, frame.times, strict=True)] == [
        *((None, 1), (None, 16), (8.0, 1), (8.0, 16))
    ]
    assert frame.exposure.tolist() == [1.5, 12.0, 2.0, 2.0]
    assert frame.least.tolist() == [1.0, 11.0, 1.0, 2.0]
    assert frame.seeds.tolist() == [2, 2, 1, 1]
    said = memorisation.FIGURE.finding(frame)
    assert "there 16 times" in said
    assert "12.0 of 13.3 bits, at ε = 8 2.0" in said
    drawn = memorisation.plot(frame, "")
    assert [text.get_text() for text in drawn.axes[0].get_legend().get_texts()] == ["ordinary", "ε = 8"]
    assert [tick.get_text() for tick in drawn.axes[1].get_xticklabels()] == ["before", "ordinary", "ε = 8"]
    assert [round(bar.get_height(), 1) for bar in drawn.axes[1].patches if bar.get_width()] == [4.0, 3.0, 3.3]


@pytest.mark.slow
def test_a_trial_gives_what_its_records_are_to_have():
    pytest.importorskip("peft", reason="peft is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from dpbench.integrations.tutorials.memorisation_trial import run

    ordinary, private = load_experiment("memorisation").smoke("cpu")
    for trial in (ordinary, private):
        result = run(trial)
        assert flaw_of_result("memorisation", result) is None
        assert len(result["exposures"]) == 16
        assert (result["epsilon"] is None) == (trial.target_epsilon is None)
        assert result["epsilon"] is None or 7.9 < result["epsilon"] <= 8.0
