"""The one-run audit: its statistics, a sound engine that passes, and every seeded fault that does not."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from accounting.audit import epsilon_lower_bound, p_value
from dpbench.report import audit
from dpbench.training import FAULTS, AuditTrial


def test_with_every_guess_right_the_bound_has_a_closed_form():
    rate = 0.05 ** (1 / 40)  # P[all of 40 right] = rate^40 = 5 %
    assert epsilon_lower_bound(100, 40, 40, 0.0) == pytest.approx(math.log(rate / (1 - rate)), rel=1e-6)


def test_the_bound_rises_with_the_guesses_and_falls_with_delta():
    bounds = [epsilon_lower_bound(1000, 100, correct, 1e-6) for correct in (50, 70, 80, 99)]
    assert bounds[0] == 0 and sorted(bounds) == bounds and bounds[1] > 0
    assert epsilon_lower_bound(1000, 100, 80, 1e-3) < bounds[2] < epsilon_lower_bound(1000, 100, 80, 0.0)
    assert p_value(1000, 100, 0, 1.0, 0.5) == 1.0
    with pytest.raises(ValueError, match="expected 0 <= correct <= guesses <= canaries"):
        epsilon_lower_bound(10, 20, 5, 0.0)


def test_randomised_response_is_refuted_as_seldom_as_promised():
    """ε-private answers about each coin: the bound exceeds ε in a twentieth of the runs at the most."""
    rng, epsilon = np.random.default_rng(0), 1.5
    correct = rng.binomial(300, 1 / (1 + math.exp(-epsilon)), size=400)
    bounds = {c: epsilon_lower_bound(300, 300, int(c), 0.0) for c in set(correct.tolist())}
    exceeding = np.mean([bounds[c] > epsilon for c in correct.tolist()])
    assert 0.01 < exceeding < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)


def test_a_sound_engine_passes():
    from dpbench.training.audit import run

    result = run(AuditTrial())
    assert result["claimed_epsilon"] == pytest.approx(1.0, rel=1e-2) and result["epsilon_lower_bound"] < 0.5


@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_found(fault):
    from dpbench.training.audit import run

    result = run(AuditTrial(fault=fault))
    assert result["violated"] and result["epsilon_lower_bound"] > 1.2


class Record:
    def __init__(self, fault, seed, bound, backend="bk_mixed"):
        self.node = self.edition = None
        self.trial = AuditTrial(fault=fault, seed=seed, backend=backend).describe()
        self.kind, self.device, self.run, self.environment, self.fingerprint = "audit", "cpu", "", {}, "0"
        self.utc = ""
        self.outcome, self.load = "ok", None
        self.result = {"claimed_epsilon": 1.0, "epsilon_lower_bound": bound, "guesses": 500, "correct": 400}
        self.result |= {"delta": 1e-6}


def test_the_figure_says_what_was_found_and_what_was_not():
    records = [Record("no_noise", seed, bound) for seed, bound in enumerate((3.1, 3.3, 3.2))]
    records += [Record("divisor", 0, 0.4), Record("divisor", 1, 1.4), Record("", 0, 0.0), Record("", 1, 0.12)]
    records += [Record("", 0, 1.5, "ghost")]
    left_out = Counter()
    frame = audit.table(records, left_out)
    assert frame.fault.tolist() == ["", "", "", "no_noise", "no_noise", "no_noise", "divisor", "divisor"]
    words = audit.text(frame)
    assert words.verdict.tolist() == [
        "VIOLATED in 1 of 1: ε ≥ 1.50",
        "passes in 2 of 2: ε ≥ 0.00 to 0.12",
        "found in 3 of 3: ε ≥ 3.10 to 3.30",
        "MISSED in 1 of 2: ε ≥ 0.40 to 1.40",
    ]
    caption = audit.caption(records, frame, left_out)
    assert "Of 3 runs of the sound engine 1 refute it; of 5 runs with a seeded fault 4 find it." in caption
    axes = audit.plot(frame, caption).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        *("ghost", "bk_mixed"),
        *(FAULTS["no_noise"], FAULTS["divisor"]),
    ]
    assert set(words.verdict) <= {text.get_text() for text in axes.texts}
    drawn = sorted(x for line in axes.lines[1:] for x in line.get_xdata())
    assert drawn == sorted(frame.epsilon_lower_bound)
    assert audit.plot(audit.table([], left_out), audit.caption(records, frame[:0], left_out)).axes


def test_a_violation_is_a_mismatch(monkeypatch):
    from dpbench.engine.noise import Pseudo
    from dpbench.outcome import Mismatch
    from dpbench.training.audit import run

    monkeypatch.setattr(Pseudo, "added", lambda self, total, deviation, at: total)
    with pytest.raises(Mismatch, match="bk_mixed is less private than it says: a lower bound of 1"):
        run(AuditTrial())
