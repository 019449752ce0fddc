"""ε of steps whose noise changes: beside Opacus' accountant, and beside the bounds from both sides."""

from __future__ import annotations

import math

import pytest
from opacus.accountants import RDPAccountant

from accounting import ArgumentError, NoAnswer, SubsampledGaussian, load_accountant
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


@pytest.mark.parametrize("name", ["prv", "rdp"])
def test_it_is_above_each_part_and_below_all_steps_at_the_least_noise(name):
    accountant = load_accountant(name)
    found = guarantee_of_parts(accountant, [(ONE, 300), (TWO, 900)], delta=1e-5).epsilon
    assert found > accountant.epsilon(ONE, steps=300, delta=1e-5)
    assert found <= accountant.epsilon(ONE, steps=1200, delta=1e-5)
    nearly = SubsampledGaussian(1.0000001, 0.02)
    alike = guarantee_of_parts(accountant, [(ONE, 300), (nearly, 900)], delta=1e-5).epsilon
    assert alike == pytest.approx(accountant.epsilon(ONE, steps=1200, delta=1e-5), rel=1e-4)


def test_where_batches_are_not_sampled_all_steps_count_at_the_least_noise():
    shuffled = [SubsampledGaussian(sigma, 0.02, sampling="shuffled") for sigma in (2.0, 3.0)]
    accountant = load_accountant("prv")
    found = guarantee_of_parts(accountant, [(shuffled[1], 50), (shuffled[0], 50)], delta=1e-5)
    assert found.epsilon == accountant.epsilon(shuffled[0], steps=100, delta=1e-5)


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
        guarantee_of_parts(
            load_accountant("prv"), [(ONE, 3), (SubsampledGaussian(1.0, 0.02, sampling="shuffled"), 3)], delta=1e-5
        )
    with pytest.raises(ArgumentError, match="parts"):
        guarantee_of_parts(load_accountant("prv"), [], delta=1e-5)
