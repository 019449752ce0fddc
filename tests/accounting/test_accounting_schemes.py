"""Sampling schemes and adjacencies: known values, whole instances worked out, lower bounds, the contract at edges."""

import itertools
import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr

from accounting import ACCOUNTANTS, SAMPLINGS, NoAnswer, SubsampledGaussian, load_accountant
from accounting.convolution import Losses, epsilon_of
from accounting.reductions import epochs_begun, log_truncation
from accounting.sampling import PROVED, SCHEMES
from accounting.schemes import epsilon

MNIST = {"noise_multiplier": 1.1, "sample_rate": 256 / 60_000}
SIZES = {"dataset_size": 60_000, "max_batch_size": 352}


def mechanism(sampling, adjacency, sigma=1.1, q=256 / 60_000, sizes=None):
    sizes = (sizes or SIZES) if sampling == "truncated_poisson" else {}
    return SubsampledGaussian(sigma, q, sampling=sampling, adjacency=adjacency, **sizes)


def spent(name, *scheme, steps=14_040, delta=1e-5, **settings):
    return load_accountant(name).epsilon(mechanism(*scheme, **settings), steps=steps, delta=delta)


def test_known_values():
    """Of dp-accounting 0.6 and the literature, at n = 60000, b = 256, σ = 1.1, 60 epochs, δ = 1e-5."""
    assert spent("prv", "poisson", "add_remove") == pytest.approx(2.38, abs=0.005)
    assert spent("prv", "poisson", "replace_one") == pytest.approx(4.22, abs=0.005)
    assert spent("prv", "one_pass", "zero_out") == pytest.approx(54.0, abs=0.05)
    assert spent("prv", "truncated_poisson", "add_remove") == pytest.approx(2.38, abs=0.005)
    found = spent("without_replacement", "without_replacement", "replace_one", steps=14_063)
    assert found == pytest.approx(24.1, abs=0.05)


def test_dp_accounting_is_no_lower_and_where_it_is_exact_the_same():
    from dp_accounting.pld import privacy_loss_distribution as pld
    from dp_accounting.privacy_accountant import NeighboringRelation

    for adjacency, relation in (
        ("add_remove", NeighboringRelation.ADD_OR_REMOVE_ONE),
        ("replace_one", NeighboringRelation.REPLACE_ONE),
    ):
        q, sigma, sizes = 0.02, 0.9, {"dataset_size": 1000, "max_batch_size": 25}
        asked = {"sigma": sigma, "q": q, "steps": 200, "delta": 1e-6}
        grid = {"value_discretization_interval": 1e-3, "neighboring_relation": relation}
        poisson = pld.from_gaussian_mechanism(sigma, sampling_prob=q, **grid).self_compose(200)
        theirs = poisson.get_epsilon_for_delta(1e-6)
        assert spent("prv", "poisson", adjacency, **asked) == pytest.approx(theirs, rel=2e-3)
        cut = pld.from_truncated_subsampled_gaussian_mechanism(1000, q, 25, sigma, **grid).self_compose(200)
        ours = spent("prv", "truncated_poisson", adjacency, **asked, sizes=sizes)
        assert theirs < ours < cut.get_epsilon_for_delta(1e-6) * 1.002


# Whole instances: n records with gradients -1, 0 or 1, the distribution of the noisy sum of one batch.


def sums(gradients, sampling, q, cap):
    """P[sum = s] of a batch of these, as a dict: exact, over all subsets."""
    found = {}
    n = len(gradients)
    for chosen in itertools.product((0, 1), repeat=n):
        k = sum(chosen)
        chance = q**k * (1 - q) ** (n - k)
        if sampling == "without_replacement":
            size = round(q * n) if cap is None else cap
            if k != size:
                continue
            chance = 1 / math.comb(n, size)
        picked = [g for g, c in zip(gradients, chosen, strict=True) if c]
        batches = [picked] if k <= (cap or n) else list(itertools.combinations(picked, cap))
        for batch in batches:
            total = sum(batch)
            found[total] = found.get(total, 0.0) + chance / len(batches)
    return found


GRID = np.linspace(-14.0, 14.0, 40_001)
STEPS = (1, 6)


def masses(distribution, sigma):
    edges = np.concatenate([[-np.inf], GRID, [np.inf]])
    return sum(chance * np.diff(ndtr((edges - total) / sigma)) for total, chance in distribution.items())


def needed(one, other, sigma, delta):
    """ε that certainly is needed between two datasets' sums in `STEPS` steps: outcomes merged, losses rounded down."""
    worst = dict.fromkeys(STEPS, 0.0)
    p, q = masses(one, sigma), masses(other, sigma)
    for a, b in ((p, q), (q, p)):
        kept = (a > 1e-280) & (b > 1e-280)
        losses = np.log(a[kept] / b[kept])
        h = 2e-3
        index = np.floor(losses / h).astype(int)
        weights = np.bincount(index - index.min(), a[kept]).astype(float)
        for steps, found in worst.items():
            worst[steps] = max(found, epsilon_of(Losses(weights, int(index.min()), h), steps, delta, upper=False)[0])
    return worst


OTHERS = [(-1,) * 5, (0,) * 5, (1,) * 5, (-1, -1, 1, 1, 1), (-1, 0, 0, 0, 1)]


@pytest.mark.parametrize(
    ("sampling", "cap", "adjacency"),
    [
        (sampling, cap, adjacency)
        for sampling, cap in [("poisson", None), ("truncated_poisson", 2), ("without_replacement", 2)]
        for adjacency in PROVED[sampling]
    ],
)
def test_no_instance_needs_more(sampling, cap, adjacency):
    """n = 6, several gradients of the others: all are below the bound, and one is not far from it."""
    sigma, delta, n, b = 0.8, 1e-4, 6, 2
    q = b / n
    sizes = {"dataset_size": n, "max_batch_size": cap} if sampling == "truncated_poisson" else {}
    step = SubsampledGaussian(sigma, q, sampling=sampling, adjacency=adjacency, **sizes)
    worst = dict.fromkeys(STEPS, 0.0)
    for others in OTHERS:
        for x in (1, -1):
            twin = {"replace_one": (-x,), "zero_out": (0,), "add_remove": ()}[adjacency]
            one, other = (sums((*others, *more), sampling, q, cap) for more in ((x,), twin))
            for steps, found in needed(one, other, sigma, delta).items():
                worst[steps] = max(worst[steps], found)
    share = {"poisson": 0.95, "truncated_poisson": 0.3, "without_replacement": 0.3 if adjacency == "zero_out" else 0.75}
    for steps, found in worst.items():
        bound, _ = epsilon(step, steps, delta)
        assert share[sampling] * bound <= found <= bound, steps


def test_every_upper_bound_is_above_the_tightest():
    """`best` is the smallest of all accountants' upper bounds, and says who has no answer."""
    for scheme in SCHEMES:
        m = mechanism(*scheme, sigma=2.0)
        best = load_accountant("best").guarantee(m, steps=2000, delta=1e-5)
        assert best.epsilon >= epsilon(m, 2000, 1e-5)[0] * (1 - 2e-3), (scheme, best)
        assert set(best.detail.get("no_answer", "pld").split(", ")) <= {"pld", "gdp"}, (scheme, best)


def test_reductions_say_what_they_are():
    answer = load_accountant("moments").guarantee(mechanism("without_replacement", "replace_one"), steps=10, delta=1e-5)
    assert answer.detail["bound"] == "group privacy: a record removed and one added, Poisson sampling at half the noise"
    half = spent("moments", "poisson", "add_remove", sigma=0.55, steps=10, delta=answer.detail["delta"])
    assert answer.epsilon == 2 * half
    assert answer.detail["delta"] * (1 + math.exp(half)) <= 1e-5
    assert "order" not in answer.detail  # that of another problem


def test_a_cap_far_above_the_mean_costs_next_to_nothing_and_needs_no_half_noise():
    cut = mechanism("truncated_poisson", "add_remove", sizes={"dataset_size": 60_000, "max_batch_size": 450})
    answer = load_accountant("rdp").guarantee(cut, steps=14_040, delta=1e-5)
    assert answer.epsilon == pytest.approx(spent("rdp", "poisson", "add_remove"), rel=1e-3)
    assert answer.detail["bound"].startswith("as if no batch were cut")
    assert answer.detail["delta"] < 1e-5


@pytest.mark.parametrize(("n", "q", "cap"), [(60_000, 256 / 60_000, 300), (50, 0.2, 20), (10, 0.5, 9), (7, 0.3, 7)])
def test_chance_of_a_cut_is_bounded(n, q, cap):
    with mpmath.workdps(30):
        true = mpmath.fsum(
            mpmath.binomial(n, k) * mpmath.mpf(q) ** k * (1 - mpmath.mpf(q)) ** (n - k)
            for k in range(cap + 1, min(n, cap + 300) + 1)
        )
    bound = math.exp(log_truncation(n, q, cap))
    assert true <= bound * (1 + 1e-9) and (bound <= 30 * true or true == bound == 0)


@pytest.mark.parametrize("name", ["prv", "rdp"])
def test_a_zero_costs_no_more_than_another_record_and_less_where_few_batches_are_cut(name):
    asked = {"steps": 500, "sizes": {"dataset_size": 60_000, "max_batch_size": 450}}
    zero, replaced, uncut = (
        spent(name, *scheme, **asked)
        for scheme in (("truncated_poisson", "zero_out"), ("truncated_poisson", "replace_one"), ("poisson", "zero_out"))
    )
    assert zero < 0.7 * replaced and zero == pytest.approx(uncut, rel=1e-3)
    fixed = [spent(name, "without_replacement", adjacency, **asked) for adjacency in ("zero_out", "replace_one")]
    assert fixed[0] == fixed[1]


def test_epochs_of_one_pass():
    assert epochs_begun(256 / 60_000, 14_040) == 60  # 234 batches each
    assert epochs_begun(256 / 60_000, 14_041) == 61
    assert [epochs_begun(q, steps) for q, steps in ((0.01, 100), (0.01, 101), (1.0, 7), (1e-9, 3))] == [1, 2, 7, 1]
    one = spent("prv", "one_pass", "replace_one", q=0.01, sigma=2.0, steps=100)
    assert one == pytest.approx(spent("gdp", "poisson", "add_remove", q=1.0, sigma=1.0, steps=1), rel=1e-6)


NO_BOUNDS = ("gdp", "strong:published", "prv:lower", "prv:estimate")
ELSEWHERE = SCHEMES - {("poisson", "add_remove"), ("poisson", "zero_out")}


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        *itertools.product(NO_BOUNDS, sorted(ELSEWHERE)),
        *itertools.product(("shuffled", "without_replacement"), [("poisson", "add_remove")]),
    ],
)
def test_a_scheme_that_an_accountant_has_no_bound_for(name, scheme):
    with pytest.raises(NoAnswer, match=r"^no valid bound by this accountant under .*$"):
        spent(name, *scheme)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_every_sampling_has_its_own_adjacency(sampling):
    own = "zero_out" if sampling in ("one_pass", "shuffled") else "add_remove"
    sizes = SIZES if sampling == "truncated_poisson" else {}
    unnamed = SubsampledGaussian(**MNIST, sampling=sampling, **sizes)
    assert unnamed == mechanism(sampling, own) and PROVED[sampling][0] == own
    assert load_accountant("rdp").guarantee(unnamed, steps=10, delta=1e-5).detail["adjacency"] == own


@pytest.mark.parametrize("name", ["simple", "gdp", "strong:published", "prv:lower", "best"])
def test_a_zero_is_a_removed_record_in_poisson_samples(name):
    answers = [
        load_accountant(name).guarantee(mechanism("poisson", adjacency), steps=500, delta=1e-5)
        for adjacency in ("add_remove", "zero_out")
    ]
    assert len({(answer.epsilon, answer.kind) for answer in answers}) == 1
    assert [answer.detail["adjacency"] for answer in answers] == ["add_remove", "zero_out"]


@pytest.mark.parametrize("name", [*ACCOUNTANTS, "shuffled", "without_replacement", "prv:lower"])
@pytest.mark.parametrize("sampling", ["one_pass", "shuffled"])
def test_an_adjacency_without_a_proof_has_no_answer_and_another_is_named(name, sampling):
    with pytest.raises(NoAnswer, match=f"^no valid bound: expected adjacency zero_out or .* {sampling} .*$"):
        spent(name, sampling, "add_remove")


def test_a_removed_record_of_fixed_batches_would_cost_more_than_a_zero():
    """11 records +1, -1, ..., one a batch: without the first, all ten sums that are left move by 2C."""
    records = np.array([(-1.0) ** i for i in range(11)])
    moved = float(np.linalg.norm(records[:10] - records[1:]))
    assert moved == pytest.approx(2 * math.sqrt(10))
    really = spent("prv", "poisson", "add_remove", q=1.0, sigma=1 / moved, steps=1, delta=1e-6)
    zero = spent("prv", "one_pass", "zero_out", q=1 / 11, sigma=1.0, steps=11, delta=1e-6)
    assert really > 49 and zero < 5


# Shuffled batches.


@pytest.mark.parametrize(("sigma", "batches"), [(0.5, 20), (1.0, 100), (3.0, 500)])
@pytest.mark.parametrize("adjacency", PROVED["shuffled"])
def test_one_epoch_of_shuffled_batches_is_the_best_threshold(sigma, batches, adjacency):
    """Chua et al. 2024: δ(ε) ≥ P[max > c] − e^ε Q[max > c]; ours uses all thresholds at once."""
    delta, other = 1e-5, 0 if adjacency == "replace_one" else 1
    ours = spent("shuffled", "shuffled", adjacency, sigma=sigma, q=1 / batches, steps=batches, delta=delta)

    def above(mean, c):
        return 1 - mpmath.ncdf((c - mean) / sigma) * mpmath.ncdf(c / mpmath.mpf(sigma)) ** (batches - 1)

    with mpmath.workdps(40):
        thresholds = [mpmath.mpf(k) * sigma / 20 for k in range(20, 300)]
        best = max(mpmath.log((above(2, c) - delta) / above(other, c)) for c in thresholds if above(2, c) > delta)
    assert float(best) - 1e-3 <= ours <= float(best) + max(0.05, 0.02 * ours)


def test_shuffling_spends_more_than_poisson_sampling_and_less_than_one_pass():
    lower = spent("shuffled", "shuffled", "zero_out")
    assert spent("prv", "poisson", "zero_out") * 4 < lower < spent("prv", "shuffled", "zero_out") / 4
    replaced = spent("shuffled", "shuffled", "replace_one")
    assert lower < replaced < spent("prv", "shuffled", "replace_one")
    assert spent("shuffled", "shuffled", "zero_out", steps=20) < spent("shuffled", "shuffled", "zero_out", steps=235)


# The contract at the edges.

schemes = st.sampled_from(sorted(SCHEMES))


@settings(max_examples=8)
@given(
    sigma=st.floats(0.4, 20),
    q=st.floats(1e-5, 1),
    steps=st.integers(1, 10**5),
    delta=st.floats(1e-9, 1e-3),
    scheme=schemes,
    more=st.floats(1.05, 10),
    change=st.sampled_from(["steps", "noise", "delta"]),
)
def test_more_for_more(sigma, q, steps, delta, scheme, more, change):
    sizes = {"dataset_size": 1000, "max_batch_size": max(1, int(1100 * q))}
    base = spent("prv", *scheme, sigma=sigma, q=q, steps=steps, delta=delta, sizes=sizes)
    worse = {
        "steps": {"sigma": sigma, "steps": int(steps * more) + 1, "delta": delta},
        "noise": {"sigma": sigma / more, "steps": steps, "delta": delta},
        "delta": {"sigma": sigma, "steps": steps, "delta": delta / more},
    }[change]
    assert spent("prv", *scheme, q=q, sizes=sizes, **worse) >= base * (1 - 1e-3) - 1e-12  # the grid's share of ε


def test_edges_hold_under_every_scheme():
    for name in (*ACCOUNTANTS, "shuffled"):
        for sampling in SAMPLINGS:
            for sigma, steps, delta, expected in ((1.0, 0, 1e-5, 0.0), (1.0, 5, 1.0, 0.0), (0.0, 5, 1e-5, math.inf)):
                assert spent(name, sampling, "replace_one", sigma=sigma, steps=steps, delta=delta) == expected


def test_an_epsilon_beyond_exponentials_where_no_batch_is_cut():
    cut = SubsampledGaussian(1.0, 0.5, "truncated_poisson", "zero_out", dataset_size=10, max_batch_size=10)
    whole = SubsampledGaussian(1.0, 0.5, adjacency="zero_out")
    found = [load_accountant("rdp").epsilon(each, steps=10_000, delta=1e-5) for each in (cut, whole)]
    assert found[0] == found[1] > 710


def test_batches_of_huge_data_sets_are_cut_as_those_of_large_ones():
    """Batches cut at their mean cost nearly the same for any n: half of them are cut."""
    sizes = [{"dataset_size": n, "max_batch_size": n // 1000} for n in (10**9, 2**31 + 9, 10**12)]
    scheme = ("truncated_poisson", "add_remove")
    found = [spent("prv", *scheme, q=1e-3, steps=100, sizes=each) for each in sizes]
    assert found[0] > 2 * spent("prv", "poisson", "add_remove", q=1e-3, steps=100)
    assert found[1:] == pytest.approx([found[0]] * 2, rel=1e-3)
