"""Privacy of people with several records: which are kept, and the noise and ε of groups."""

from collections import Counter

import pytest
from attached import attached

from accounting import ArgumentError, SubsampledGaussian, load_accountant
from dpbench.engine.users import at_most


def test_at_most_so_many_of_each_user_are_kept():
    users = ["a"] * 7 + ["b"] * 2 + ["c"] * 4 + ["a"]
    kept = at_most(users, 3, seed=0)
    assert kept == sorted(set(kept)) and Counter(users[place] for place in kept) == {"a": 3, "b": 2, "c": 3}
    assert at_most(users, 3, seed=0) == kept and at_most(users, 100) == list(range(14))
    chosen = Counter(place for seed in range(400) for place in at_most(users, 3, seed=seed) if users[place] == "a")
    assert set(chosen) == {0, 1, 2, 3, 4, 5, 6, 13} and min(chosen.values()) > 100  # 150 of each are expected
    with pytest.raises(ArgumentError, match=r"^expected records to be a whole number >= 1, got 0$"):
        at_most(users, 0)


def test_an_engine_of_groups_adds_more_noise_and_says_so():
    given = {"batch_size": 20, "sample_size": 200, "steps": 30, "noise_multiplier": None, "target_epsilon": 4.0}
    one, group = (attached(attach=False, group_size=size, **given)[2] for size in (1, 3))
    assert group.noise_multiplier > 1.5 * one.noise_multiplier
    group.steps = 10
    spent, step = group.privacy_spent(), SubsampledGaussian(group.noise_multiplier, 0.1, group_size=3)
    assert spent.epsilon == load_accountant("prv").epsilon(step, steps=10, delta=spent.delta)
    assert spent.group_size == 3 and "3 records at once" in str(spent)
    with pytest.raises(ValueError, match="group_size"):
        attached(attach=False, group_size=0, **given)
