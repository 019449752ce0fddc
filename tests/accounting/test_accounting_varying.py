"""ε of steps whose noise changes: beside Opacus' accountant, and beside the bounds from both sides."""

import math
from dataclasses import replace
from functools import cache

import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from opacus.accountants import RDPAccountant

from accounting import NoAnswer, SubsampledGaussian, compose, load_accountant, risk, varying
from accounting.audit import epsilon_of_mu
from accounting.prv import bracket
from accounting.varying import guarantee_of_parts

ONE, TWO = SubsampledGaussian(1.0, 0.02), SubsampledGaussian(1.6, 0.01)


@pytest.mark.parametrize("name", ["prv", "rdp", "gdp", "moments"])
def test_steps_of_one_kind_are_the_accountant_s_own(name):
    accountant = load_accountant(name)
    whole = accountant.epsilon(ONE, steps=300, delta=1e-5)
    found = guarantee_of_parts(accountant, [(ONE, 100), (TWO, 0), (ONE, 200)], delta=1e-5)
    assert found.epsilon == whole and found.kind == accountant.kind
    assert guarantee_of_parts(accountant, [(ONE, 0)], delta=1e-5).epsilon == 0


def test_divergences_add_up_as_in_opacus_accountant():
    theirs = RDPAccountant()
    theirs.history = [(1.0, 0.02, 300), (1.6, 0.01, 900), (0.8, 0.02, 50)]
    parts = [(SubsampledGaussian(sigma, q), steps) for sigma, q, steps in theirs.history]
    found = guarantee_of_parts(load_accountant("rdp"), parts, delta=1e-5)
    assert found.kind == "upper_bound"
    assert 0.98 * theirs.get_epsilon(1e-5) < found.epsilon <= theirs.get_epsilon(1e-5) * (1 + 1e-9)
    again = guarantee_of_parts(load_accountant("rdp"), parts[::-1], delta=1e-5)
    assert again.epsilon == pytest.approx(found.epsilon, rel=1e-9)


def test_where_batches_are_not_sampled_an_epoch_is_a_gaussian_step():
    """Of an accountant that does not compose, all steps count at the least noise."""
    shuffled = [SubsampledGaussian(sigma, 0.02, sampling="shuffled") for sigma in (2.0, 3.0)]
    parts = [(shuffled[1], 50), (shuffled[0], 50)]
    found = guarantee_of_parts(load_accountant("prv"), parts, delta=1e-5)
    assert found.epsilon == pytest.approx(epsilon_of_mu(math.hypot(1 / 2, 1 / 3), 1e-5), rel=1e-9)
    simple = guarantee_of_parts(load_accountant("simple"), parts, delta=1e-5)
    assert simple.epsilon == load_accountant("simple").epsilon(shuffled[0], steps=100, delta=1e-5)


@pytest.mark.parametrize("name", ["prv", "pld", "rdp"])
@pytest.mark.parametrize("sampling", ["one_pass", "shuffled", "balls_and_bins"])
def test_every_pass_counts_by_its_least_noise(name, sampling):
    """A record of the least batch of every pass, of ten steps each."""
    least, more = (SubsampledGaussian(sigma, 0.1, sampling, "replace_one") for sigma in (2.0, 20.0))
    passes = load_accountant(name).epsilon(least, steps=100, delta=1e-5)
    turns = [(least, 1), (more, 9)]
    for parts in (turns * 10, turns[::-1] * 10, [(more, 7), *turns * 9, (least, 1)]):
        assert compose(name, parts).epsilon(delta=1e-5) == pytest.approx(passes, rel=1e-9)
    two = load_accountant(name).epsilon(least, steps=20, delta=1e-5)
    assert compose(name, [(more, 5), (least, 10)]).epsilon(delta=1e-5) == pytest.approx(two, rel=1e-9)
    half = risk(name, least, steps=100, delta=1e-5)["advantage"]
    assert compose(name, [(least, 1), (more, 9)] * 10).risk(delta=1e-5)["advantage"] == pytest.approx(half, rel=1e-9)


def test_noise_that_changes_within_an_epoch_is_counted_as_the_least_of_it():
    """Of 50 steps an epoch, with a noise of its own each: 50 epochs if each phase had begun one."""
    steps = [(SubsampledGaussian(2.0 + turn / 1000, 0.02, sampling="shuffled"), 1) for turn in range(50)]
    found = guarantee_of_parts(load_accountant("prv"), steps, delta=1e-5)
    assert found.epsilon == pytest.approx(epsilon_of_mu(1 / 2, 1e-5), rel=1e-9)


@cache
def of_dp_accounting(*parts):
    theirs = None
    for sigma, q, steps in parts:
        one = pld.from_gaussian_mechanism(sigma, sampling_prob=q, value_discretization_interval=2e-4)
        theirs = one.self_compose(steps) if theirs is None else theirs.compose(one.self_compose(steps))
    return theirs.get_epsilon_for_delta(1e-6)


@pytest.mark.parametrize("name", ["pld", "prv", "best"])
@pytest.mark.parametrize(
    "parts",
    [
        [(1.0, 0.02, 300), (1.6, 0.01, 900)],
        [(0.7, 0.001, 500), (4.0, 0.2, 60), (2.0, 0.05, 10)],
        [(1.2, 0.01, 2000), (6.0, 1.0, 1)],  # and a release of all records
    ],
)
def test_unlike_phases_are_composed_as_dp_accounting_does(name, parts):
    phases = [(SubsampledGaussian(sigma, q), steps) for sigma, q, steps in parts]
    found = compose(name, phases).guarantee(delta=1e-6)
    assert found.kind == "upper_bound"
    assert found.epsilon == pytest.approx(of_dp_accounting(*parts), rel=1e-3)
    assert found.epsilon < 0.97 * compose("rdp", phases).epsilon(delta=1e-6)
    again = compose(name, phases[::-1]).epsilon(delta=1e-6)
    assert again == pytest.approx(found.epsilon, rel=1e-6)


def test_phases_that_hardly_differ_are_within_the_certified_bounds_of_one_kind():
    for sigma, q, steps, delta in ((1.0, 0.02, 1200, 1e-5), (0.9, 1e-3, 500, 1e-12), (3.0, 3e-5, 4000, 1e-9)):
        parts = [(SubsampledGaussian(sigma * (1 + turn * 1e-9), q), steps // 4) for turn in range(4)]
        found = compose("pld", parts).epsilon(delta=delta)
        truth = bracket(sigma, q, float(steps), delta)
        assert truth.lower * (1 - 1e-6) <= found <= truth.upper * 1.002


def test_a_schedule_of_many_kinds_is_a_little_above_all_of_them_apart(monkeypatch):
    parts = [(SubsampledGaussian(1.0 + turn / 60, 0.02), 10) for turn in range(60)]
    merged = compose("prv", parts).guarantee(delta=1e-5)
    assert merged.detail["kinds"] <= varying.MOST_KINDS < 60
    monkeypatch.setattr(varying, "MOST_KINDS", 100)
    apart = compose("prv", parts).guarantee(delta=1e-5)
    assert apart.detail["kinds"] == 60 and apart.epsilon < merged.epsilon < 1.03 * apart.epsilon


def test_phases_under_other_schemes_and_of_several_samplings():
    parts = [
        (SubsampledGaussian(1.0, 0.02, adjacency="replace_one"), 200),
        (SubsampledGaussian(1.4, 0.02, sampling="without_replacement", adjacency="replace_one"), 100),
    ]
    found = compose("pld", parts).guarantee(delta=1e-5)
    alone = [load_accountant("prv").epsilon(mechanism, steps=steps, delta=1e-5) for mechanism, steps in parts]
    assert max(alone) < found.epsilon < sum(alone)
    assert (found.detail["sampling"], found.detail["adjacency"]) == ("poisson, without_replacement", "replace_one")


def test_no_noise_in_some_steps_is_no_privacy_and_endless_noise_costs_nothing():
    accountant = load_accountant("prv")
    none, endless = SubsampledGaussian(0.0, 0.02), SubsampledGaussian(math.inf, 0.02)
    assert guarantee_of_parts(accountant, [(ONE, 10), (none, 1)], delta=1e-5).epsilon == math.inf
    alone = load_accountant("rdp").epsilon(ONE, steps=300, delta=1e-5)
    both = guarantee_of_parts(load_accountant("rdp"), [(ONE, 300), (endless, 900)], delta=1e-5).epsilon
    assert both == pytest.approx(alone, rel=1e-6)


def test_what_has_no_bound_says_so():
    with pytest.raises(NoAnswer, match="no estimate of steps with different noise"):
        guarantee_of_parts(load_accountant("gdp"), [(ONE, 3), (TWO, 3)], delta=1e-5)
    with pytest.raises(NoAnswer, match="drawn in different ways"):
        shuffled = SubsampledGaussian(1.0, 0.02, sampling="shuffled")
        guarantee_of_parts(load_accountant("prv"), [(ONE, 3), (shuffled, 3)], delta=1e-5)
    for name in ("prv", "best", "rdp"):
        with pytest.raises(NoAnswer, match=r"drawn in different ways|different adjacency or group size"):
            compose(name, [(ONE, 3), (replace(ONE, group_size=2), 3)]).epsilon(delta=1e-5)
