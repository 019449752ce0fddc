"""The audit: its statistics, an engine that passes, seeded faults that do not, and the figure of both."""

import math
from collections import Counter

import numpy as np
import pytest
from made_records import made
from marks import slow_unless
from scipy.stats import norm

from accounting import refutation
from accounting.audit import epsilon_lower_bound, epsilon_of_mu, mu_lower_bound, p_value, rate_upper_bound
from accounting.blt import Blt
from dpbench.engine.noise import Secure
from dpbench.engine.sampling import Sampler
from dpbench.report.figures import audit
from dpbench.training import FAULTS, FORMS, TESTS, AuditTrial, faults
from dpbench.training.audit import run
from dpbench.trials.outcome import Mismatch


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


def test_no_error_in_n_trials_has_a_closed_form():
    assert rate_upper_bound(0, 100, 0.95) == pytest.approx(1 - 0.05 ** (1 / 100), rel=1e-12)
    assert rate_upper_bound(100, 100) == rate_upper_bound(0, 0) == 1.0
    with pytest.raises(ValueError, match="expected 0 <= wrong <= trials, got 3, 2"):
        rate_upper_bound(3, 2)


def test_a_perfect_test_of_each_release_has_a_closed_form():
    each = 1 - 0.025 ** (1 / 50)
    assert mu_lower_bound(0, 50, 0, 50) == pytest.approx(2 * norm.isf(each), rel=1e-9)
    assert mu_lower_bound(25, 50, 25, 50) == mu_lower_bound(0, 0, 0, 0) == 0.0
    assert mu_lower_bound(0, 50, 0, 50, confidence=0.999) < mu_lower_bound(0, 50, 0, 50)


def test_a_gaussian_mechanism_is_refuted_as_seldom_as_promised():
    """Thresholds at the middle of N(0, 1) and N(μ, 1): the bound exceeds μ in a tenth of the runs at most."""
    rng, mu, trials = np.random.default_rng(1), 1.2, 400
    errors = rng.binomial(trials, norm.sf(mu / 2), size=(1000, 2)).tolist()
    bounds = np.array([mu_lower_bound(a, trials, b, trials, confidence=0.9) for a, b in errors])
    assert 0 < np.mean(bounds > mu) <= 0.1 and bounds.mean() > 0.8 * mu


def test_epsilon_of_mu_is_that_of_the_gaussian_mechanism():
    mu, epsilon = 0.8, epsilon_of_mu(0.8, 1e-6)
    assert norm.sf(epsilon / mu - mu / 2) - math.exp(epsilon) * norm.sf(epsilon / mu + mu / 2) == pytest.approx(1e-6)
    assert epsilon_of_mu(0.0, 1e-6) == 0.0


def test_the_tests_of_noise_are_wrong_as_seldom_as_they_say():
    rng = np.random.default_rng(2)
    x, y = rng.standard_normal((2, 2000, 50))
    p_values = {
        "too_small": refutation.too_small((x**2).sum(1), 50),
        "correlated": refutation.correlated((x * y).sum(1), (x**2).sum(1), (9 * y**2).sum(1) / 9, 50),
    }
    for p in p_values.values():  # uniform: of 2000, 100 are below 5 %
        assert 60 < (p < 0.05).sum() < 140 and 900 < (p < 0.5).sum() < 1100
    assert np.mean([refutation.not_gaussian(row) < 0.05 for row in x[:400]]) < 0.05
    assert np.mean([refutation.not_gaussian(3 * row) for row in x[:100]]) > 0.3


def test_the_test_of_batches_is_wrong_as_seldom_as_it_says_and_has_power():
    rng, q = np.random.default_rng(4), 0.05
    drawn = rng.random((300, 20, 400)) < q
    assert np.mean([refutation.not_poisson(each, q) < 0.1 for each in drawn]) < 0.1 + 3 * math.sqrt(0.09 / 300)
    in_order = np.arange(400) // 20 == np.arange(20)[:, None]
    again = np.tile(drawn[0][:5], (4, 1))
    twice = drawn[0] | drawn[1]
    assert max(refutation.not_poisson(each, q) for each in (in_order, again, twice)) < 1e-8


def attack(fault="", **settings):
    return run(AuditTrial(fault=fault, **{"canaries": 2000} | settings))


@pytest.mark.parametrize("form", slow_unless(lambda form: form in ("padded", "blt"), FORMS))
def test_the_engine_passes(form):
    result = attack(form=form)
    assert result["refuted_by"] == [] and result["claimed_epsilon"] == pytest.approx(1.0, rel=1e-2)
    assert result["epsilon_lower_bound"] < 0.5 and 0 < result["mu_lower_bound"] < result["claimed_mu"]
    assert 0.99 < result["sigma_hat"] < 1.01 and result["sensitivity"] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(
    ("fault", "test"),
    {
        "no_noise": "one_run",
        "averaged_noise": "mu",
        "less_noise": "scale",
        "uniform_noise": "shape",
        "resumed_noise": "steps",
        "noise_of_parameters": "parameters",
        "shared_noise": "shards",
        "padded_copies": "sensitivity",
        "fixed_batches": "sampling",
    }.items(),
)
def test_each_test_finds_what_it_is_for(fault, test):
    canaries = 2000 if test in ("one_run", "mu") else 1000  # what guesses about canaries needs more of them
    result = attack(fault, form="padded", canaries=canaries)
    assert test in result["refuted_by"] and result["violated"]


@pytest.mark.parametrize(
    ("form", "rate"), [pytest.param("banded", 0.125, marks=pytest.mark.slow), ("banded", 0.25), ("blt", 0.125)]
)
def test_what_is_certified_of_correlated_noise_is_never_more_than_its_epsilon(form, rate):
    """At a rate of a half and of 1 in a group, where little or nothing is amplified and the bounds come near.

    Of a BLT, fifteen passes: a bound without the products of columns would be refuted.
    """
    result = attack(form=form, canaries=1000, sample_rate=rate, steps=120, target_epsilon=30.0)
    assert result["refuted_by"] == [] and 1 < result["epsilon_lower_bound"] < result["claimed_epsilon"]
    assert 0.85 * result["claimed_mu"] < result["mu_lower_bound"] < result["claimed_mu"]


@pytest.mark.parametrize(
    ("form", "fault", "test"),
    [
        ("banded", "less_noise", "scale"),
        ("banded", "record_twice", "sensitivity"),
        ("banded", "twice_the_rate", "sampling"),
        ("blt", "less_noise", "scale"),
        ("blt", "record_twice", "sensitivity"),
    ],
)
def test_faults_of_correlated_noise_are_found(form, fault, test):
    assert test in attack(fault, form=form, canaries=1000)["refuted_by"]


@pytest.mark.slow
def test_a_blt_whose_passes_are_counted_apart_is_refuted(monkeypatch):
    """‖Σ C[:, ib]‖² is more than Σ ‖C[:, ib]‖²: all passes see the same noise cancelled."""

    def apart(self, steps):
        return math.sqrt(sum(np.square(self.coefficients(steps - i)).sum() for i in range(0, steps, self.separation)))

    settings = {"canaries": 2000, "sample_rate": 0.25, "steps": 120, "target_epsilon": 13.0}
    attack(form="blt", **settings)
    monkeypatch.setattr(Blt, "sensitivity", apart)
    with pytest.raises(Mismatch, match="less private than it says, by mu"):
        attack(form="blt", **settings)


@pytest.mark.parametrize("form", ["banded", "blt"])
def test_steps_of_two_turns_are_found(form, monkeypatch):
    """A record in neighbouring steps moves shared rows, which b-min-separation excludes."""
    batch = Sampler.batch
    monkeypatch.setattr(Sampler, "batch", lambda self, step: batch(self, step + step // 9))
    with pytest.raises(Mismatch, match=r"less private than it says, by .*sampling"):
        attack(form=form)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_found_each_time(fault):
    """In two runs; the experiment `audit` measures five."""
    assert all(attack(fault, form="padded", seed=seed)["refuted_by"] for seed in (100, 101))


@pytest.mark.slow
def test_the_engine_is_refuted_in_none_of_twenty():
    forms = list(FORMS)
    assert all(not attack(form=forms[seed % len(forms)], seed=100 + seed)["refuted_by"] for seed in range(20))


def record(fault, seed, by=None, backend="bk_mixed", form="whole"):
    result = {"claimed_epsilon": 1.0, "epsilon_lower_bound": 0.5, "guesses": 500, "correct": 400, "delta": 1e-6}
    if by is not None:
        result |= {"refuted_by": by, "level": 1e-4, "p_values": {"scale": 0.3}, "sigma_hat": 0.9512}
        result |= {"claimed_mu": 0.75, "mu_lower_bound": 0.7, "sensitivity": 1.0}
    return made(AuditTrial(fault=fault, seed=seed, backend=backend, form=form), result)


def test_the_figure_says_what_was_found_and_what_was_not():
    records = [record("no_noise", seed, ["mu", "scale"][seed > 0 :]) for seed in range(3)]
    records += [record("divisor", 0, []), record("divisor", 1, ["scale"]), record("", 0, []), record("", 1, [])]
    records += [record("", 0, ["one_run"], "ghost"), record("", 0, [], form="padded")]
    left_out = Counter()
    frame = audit.table(records, left_out)
    assert frame.fault.tolist() == ["", "", "", "", "no_noise", "no_noise", "no_noise", "divisor", "divisor"]
    words = audit.text(frame)
    assert words.verdict.tolist() == [
        "REFUTED in 1 of 1",
        "passes in 2 of 2",
        "passes in 1 of 1",
        "found in 3 of 3",
        "MISSED in 1 of 2",
    ]
    assert words["refuted by"].tolist() == ["ε of one run 1", "", "", "μ of a step 1, noise: size 3", "noise: size 1"]
    caption = " ".join(audit.FIGURE.caption(records, frame))
    assert "Of 4 runs of the engine as it is 1 are refuted; of 5 runs with one of 2 seeded faults 4 are." in caption
    axes = audit.plot(frame, caption).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        *("Ghost", "BK mixed", "BK mixed, batches in padded pieces"),
        *(FAULTS["no_noise"], FAULTS["divisor"]),
    ]
    assert len(axes.get_xticks()) == len(TESTS)
    drawn = [text.get_text() for text in axes.texts]
    assert set(words.verdict) <= set(drawn) and sorted(t for t in drawn if t.isdigit()) == ["1", "1", "1", "3"]
    assert len(axes.lines) == 5 * len(TESTS) - 4  # a dot where a test refutes no run
    assert audit.plot(audit.table([], left_out), audit.FIGURE.caption(records, frame[:0])[0]).axes


def test_records_of_the_first_audits_are_read():
    """They had the bound of one run alone, no form of batches, and faults that may have gone since."""
    records = [record("no_noise", 0), record("", 0), record("", 1), record("since_gone", 0)]
    for each in records:
        del each.trial["form"]
    records[0].result["epsilon_lower_bound"] = records[2].result["epsilon_lower_bound"] = 1.5
    frame = audit.table(records, Counter())
    assert frame.verdict.tolist() == ["passes", "REFUTED", "found", "MISSED"]
    assert set(frame.form) == {"whole"} and frame.refuted_by.tolist() == ["", "one_run", "one_run", ""]
    assert audit.text(frame)["μ certified"].tolist() == ["", "", ""]
    assert audit.plot(frame, "words").axes


def test_a_refuted_engine_is_a_mismatch(monkeypatch):
    add = Secure.add_to_flat
    monkeypatch.setattr(
        Secure, "add_to_flat", lambda self, flat, of, sd, *at, **to: add(self, flat, of, 0.9 * sd, *at, **to)
    )
    with pytest.raises(Mismatch, match=r"^bk_mixed, whole: less private than it says, by scale: .* noise is 0\.(9|89)"):
        attack()


def test_a_fault_that_is_not_found_is_a_mismatch(monkeypatch):
    monkeypatch.setitem(faults.SEEDS, "no_noise", lambda engine: None)
    with pytest.raises(Mismatch, match=r"does not find the fault 'no_noise' \(no noise is added\): certified"):
        attack("no_noise")
