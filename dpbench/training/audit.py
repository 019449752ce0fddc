"""Run an `AuditTrial`: test whether the engine's releases are as private as it claims.

Two adversaries attack an engine that trains on canaries (`dpbench.training.canaries`).

The first sees every released gradient and knows the scheme but not the batches, which is the adversary that ε assumes.
It guesses which canaries are in the data, each by a fair coin. A canary's score is its log likelihood ratio, the
optimal score against a sound engine: over all steps under Poisson sampling, over its only possible step for batches cut
in order. Both are tried. It guesses "in" for the highest eighth of the scores, and "out" for the lowest.

The second also knows coins and batches: the adversary of DP-SGD's proof, from whom noise alone hides a record. It tests
each part of the claim. The noise is the release at the coordinates of canaries outside the batch. One canary's part of
a sum is the difference of two releases with the same noise, of data with and without it.

For banded noise, the second adversary first multiplies the releases by C, and takes of each block of b rows the
projection named in the proof of `accounting.banded`. The results are Gaussian releases, one a block, at the rate of a
group; all tests use these. For a BLT all releases together are the block (`accounting.blt`); the directions orthogonal
to a canary's projection have noise alone, and are tested for that.

Each test wrongly refutes a sound engine with probability at most `LEVEL` over their number, and all together with
`LEVEL`; `sensitivity` involves no chance.
"""

import warnings
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.signal import lfilter

from accounting import refutation
from accounting.audit import epsilon_lower_bound, epsilon_of_mu, mu_lower_bound
from accounting.banded import coefficients
from accounting.blt import Blt
from dpbench.engine import PrivacyEngine, PrivacyWarning
from dpbench.errors import one_of
from dpbench.training import FAULTS, FORMS, LEVEL, TESTS, AuditTrial
from dpbench.training.canaries import PARAMETERS, Array, Canaries, Flags, Release, Target
from dpbench.training.faults import SEEDS
from dpbench.trials.outcome import Mismatch

DELTA = 1e-8
REPLAYS = 5
ROUNDING = 1e-3
"""Tolerance of a difference of two releases, in units of C: the noise's grid and float32, in 64,000 coordinates."""
_EACH = LEVEL / (len(TESTS) - 1)


class Seen(NamedTuple):
    """An engine's claims, and its observed behaviour.

    Attributes:
        epsilon, sigma, rate: the claimed ε of the training, noise multiplier and sample rate.
        most: batches that a record may be in; None if that is random.
        in_turn: with correlated noise, each canary is in the steps of one turn alone.
        coins: [m], whether the canary is in the data.
        training: the releases that ε is claimed for.
        resumed: the next step, and the same step after resuming from an earlier checkpoint; of a BLT, noise alone.
        shards: [2, N], the noise of two shards, over σC.
        sensitivity: the largest observed effect of a record on a sum, in units of C.
    """

    epsilon: float
    sigma: float
    rate: float
    most: int | None
    in_turn: bool
    coins: Flags
    training: list[Release]
    resumed: list[Release]
    shards: Array
    sensitivity: float


def run(trial: AuditTrial) -> dict[str, Any]:
    """The claims, the certified lower bounds, the p-values, and the tests that refute the claims.

    Raises:
        Mismatch: an engine less private than claimed, or a seeded fault that was not found.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)  # for the audit's own steps after the accounted ones
        seen = _see(trial)
    result = _judge(seen)
    refuted_by = result["refuted_by"]
    said = (
        f"certified are ε >= {result['epsilon_lower_bound']:.3g} where {seen.epsilon:.3g} is claimed and "
        f"μ >= {result['mu_lower_bound']:.3g} where {1 / seen.sigma:.3g} is; the noise is {result['sigma_hat']:.4g} "
        f"and the sensitivity {seen.sensitivity:.4g} of the claim"
    )
    if refuted_by and not trial.fault:
        name = f"{trial.backend}, {trial.form}"
        raise Mismatch(result, f"{name}: less private than it says, by {', '.join(refuted_by)}: {said}")
    if trial.fault and not refuted_by:
        raise Mismatch(result, f"the audit does not find the fault {trial.fault!r} ({FAULTS[trial.fault]}): {said}")
    return result


def _see(trial: AuditTrial) -> Seen:
    """Train, replay, and resume from a checkpoint."""
    coins = np.random.default_rng(trial.seed).integers(0, 2, trial.canaries).astype(bool)
    target = _target(trial)
    training = target.releases(coins, trial.steps)
    epsilon = target.engine.privacy_spent().epsilon
    sensitivity = _sensitivity(target)
    checkpoint = target.save()
    resumed = [target.released(coins)]
    target.go_on(checkpoint)
    resumed.append(target.released(coins))
    shards = target.of_shards(2)
    target.engine.detach()
    settings = target.engine.settings
    in_turn = True
    if settings.bands > 1:
        training, in_turn = _blocks(training, np.array(coefficients(settings.bands, trial.steps)))
        resumed = []
    most = -(-trial.steps // settings.steps_per_epoch) if trial.form == "one_pass" else None
    sigma, rate = settings.mechanism.noise_multiplier, settings.mechanism.sample_rate
    if settings.blt is not None:
        training, resumed, in_turn = _whole(training, settings.blt)
        sigma, rate, most = sigma / settings.blt.sensitivity(trial.steps), 1.0, 1
    return Seen(epsilon, sigma, rate, most, in_turn, coins, training, resumed, shards, sensitivity)


def _judge(seen: Seen) -> dict[str, Any]:
    """Compute the record's result."""
    guesses, correct, bound = _one_run(seen)
    releases = seen.training + seen.resumed
    errors = _errors(releases, seen.coins)
    mu = mu_lower_bound(**errors, confidence=1 - _EACH)
    p_values, sigma_hat = _noise_tests(releases, seen.coins, seen.sigma)
    p_values["shards"] = float(refutation.correlated(*_products(seen.shards), seen.shards.shape[1])[0, 1])
    p_values["sampling"] = _batches(seen)
    found = {"one_run": bound > seen.epsilon, "mu": mu > 1 / seen.sigma, "sensitivity": seen.sensitivity > 1 + ROUNDING}
    found |= {name: p < _EACH for name, p in p_values.items()}
    return {
        "claimed_epsilon": seen.epsilon,
        "epsilon_lower_bound": bound,
        "claimed_mu": 1 / seen.sigma,
        "mu_lower_bound": mu,
        "claimed_step_epsilon": epsilon_of_mu(1 / seen.sigma, DELTA),
        "step_epsilon_lower_bound": epsilon_of_mu(mu, DELTA),
        "sigma_hat": sigma_hat,
        "sensitivity": seen.sensitivity,
        "p_values": p_values,
        "level": LEVEL,
        "refuted_by": [name for name in TESTS if found[name]],
        "violated": any(found.values()),
        "guesses": guesses,
        "correct": correct,
        **errors,
        "releases": len(releases),
        "noise_multiplier": seen.sigma,
        "delta": DELTA,
    }


def _target(trial: AuditTrial) -> Target:
    """An engine with the default noise, keys from the trial's seed, and the fault."""
    fault, form = trial.fault and one_of("a fault", trial.fault, FAULTS), one_of("a form", trial.form, FORMS)
    torch.manual_seed(trial.seed)
    model = Canaries(trial.canaries)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = PrivacyEngine(
        model,
        batch_size=max(1, round(trial.sample_rate * trial.canaries)),
        sample_size=trial.canaries,
        steps=trial.steps,
        target_epsilon=trial.target_epsilon,
        target_delta=DELTA,
        max_grad_norm=trial.max_grad_norm,
        backend=trial.backend,
        sampling="one_pass" if form in ("one_pass", "blt") else "poisson",
        noise={"banded": "banded:4", "blt": "blt:3"}.get(form, "gaussian"),
    )
    engine.attach(optimizer)
    state, key = engine.state_dict(), trial.seed.to_bytes(32, "little")
    seeded: dict[str, Any] = {"kind": "secure", "key": key}
    noise = state["noise"] | {"source": seeded} if engine.settings.correlated else seeded
    engine.load_state_dict(state | {"key": key, "noise": noise}, replay=True)
    if fault:
        SEEDS[fault](engine)
    return Target(model, optimizer, engine, form)


def _sensitivity(target: Target) -> float:
    """The largest effect of records on a sum, from replays of a step with other data and the same noise, in units of C.

    All canaries against none shows each one's part at its own coordinate. All against all but one is the distance of
    neighbours, with any other effect of the one's absence.
    """
    everybody = np.ones(target.engine.settings.sample_size, dtype=bool)
    most = 0.0
    for _ in range(REPLAYS):
        checkpoint = target.save()
        nobody = target.released(~everybody)
        target.go_on(checkpoint, replay=True)
        others = everybody.copy()
        others[np.flatnonzero(nobody.drawn)[:1]] = False
        without = target.released(others).moved
        target.go_on(checkpoint, replay=True)
        whole = target.released(everybody).moved
        parts = np.linalg.norm(whole - nobody.moved, axis=0)
        most = max(most, float(parts.max()), float(np.linalg.norm(whole - without)))
    return most


def _one_run(seen: Seen) -> tuple[int, int, float]:
    """(guesses, correct guesses, the ε that they refute), by the better of the two scores."""
    coins, q = seen.coins, seen.rate
    steps, m = seen.training[-1].step + 1, len(coins)
    evidence = np.zeros((steps, m))
    for release in seen.training:
        evidence[release.step] += _signal(release)
    evidence = (evidence - 0.5) / seen.sigma**2
    size, few = round(q * m), m // 8
    turn = np.arange(m) // size
    scores = [
        np.logaddexp(np.log1p(-min(q, 1 - 1e-12)), np.log(q) + evidence).sum(0),
        np.where(turn == np.arange(steps)[:, None] % (m // size), evidence, 0.0).sum(0),
    ]
    orders = [np.argsort(score, kind="stable") for score in scores]
    correct = max(int(coins[order[-few:]].sum() + (~coins[order[:few]]).sum()) for order in orders)
    return 2 * few, correct, epsilon_lower_bound(m, 2 * few, correct, DELTA, 1 - _EACH / len(scores))


def _errors(releases: list[Release], coins: Flags) -> dict[str, int]:
    """Errors of a test that says "in the sum" if a canary's signal exceeds a half."""
    signal = np.stack([_signal(release) for release in releases])
    there = np.stack([release.drawn & coins for release in releases])
    return {
        "false_positives": int((signal[~there] > 0.5).sum()),
        "negatives": int((~there).sum()),
        "false_negatives": int((signal[there] <= 0.5).sum()),
        "positives": int(there.sum()),
    }


def _batches(seen: Seen) -> float:
    """The p-value of the batches: 0 or 1 if the claim involves no chance."""
    drawn = np.zeros((seen.training[-1].step + 1, len(seen.coins)), dtype=bool)
    for release in seen.training:
        drawn[release.step] |= release.drawn
    if not seen.in_turn:
        return 0.0
    if seen.most is None:
        return refutation.not_poisson(drawn, seen.rate)
    return float(drawn.sum(0).max() <= seen.most)


def _blocks(training: list[Release], c: Array) -> tuple[list[Release], bool]:
    """The releases without the correlation of their noise, one a block; and whether each canary keeps to one turn."""
    moved, drawn = np.stack([each.moved for each in training]), np.stack([each.drawn for each in training])
    (steps, canaries), bands = drawn.shape, len(c)
    rows = lfilter(c, [1.0], moved, axis=0)
    turns, each = drawn.argmax(0) % bands, np.arange(canaries)
    found = []
    for k in range((steps - bands + 1) // bands):
        first = turns + k * bands
        whole = sum(c[i] * rows[first + i, :, each].T for i in range(bands))
        found.append(Release(k, drawn[first, each], whole))
    away = np.arange(steps)[:, None] % bands != turns
    return found, not (drawn & away).any()


def _whole(training: list[Release], blt: Blt) -> tuple[list[Release], list[Release], bool]:
    """All releases combined into one, those without any canary, and whether each canary keeps to one turn.

    A reflection maps each canary's projection, the sum of its steps' columns of C, to the first axis.
    """
    moved, drawn = np.stack([each.moved for each in training]), np.stack([each.drawn for each in training])
    steps, c = len(moved), blt.coefficients(len(moved))
    turns = drawn.argmax(0) % blt.separation
    regular = np.arange(steps)[:, None] % blt.separation == turns
    columns = lfilter(c, [1.0], regular.astype(float), axis=0)  # [T, m]
    across = columns / np.linalg.norm(columns, axis=0)
    across[0] += 1.0
    across /= np.linalg.norm(across, axis=0)
    rows = lfilter(c, [1.0], moved, axis=0)  # [T, P, m]
    rows = (2 * across[:, None] * (across[:, None] * rows).sum(0) - rows) / blt.sensitivity(steps)
    there = np.logical_or.reduce(drawn, axis=0)
    nobody = np.zeros_like(there)
    found = [Release(k, nobody if k else there, row) for k, row in enumerate(rows)]
    return found[:1], found[1:], not (drawn & ~regular).any()


def _noise_tests(releases: list[Release], coins: Flags, sigma: float) -> tuple[dict[str, float], float]:
    """p-values of the noise at the coordinates of canaries outside a sum, and its deviation over the claimed one."""
    away = np.stack([~(release.drawn & coins) for release in releases]).astype(float)  # [R, m]
    noise = np.stack([release.moved for release in releases]) / sigma * away[:, None]  # [R, P, m]
    squares, count = np.square(noise).sum(-1), np.broadcast_to(away.sum(-1)[:, None], noise.shape[:2])  # [R, P]
    axes: tuple[Any, ...] = (None, 0, 1)  # in all, by parameter, by release
    small = np.concatenate([np.ravel(refutation.too_small(squares.sum(a), count.sum(a))) for a in axes])
    together = PARAMETERS * away @ away.T
    steps = refutation.correlated(*_products(noise.reshape(len(noise), -1), np.tile(away, PARAMETERS)), together)
    parameters = refutation.correlated(*_products(noise.swapaxes(0, 1).reshape(PARAMETERS, -1)), away.sum())
    some = noise.swapaxes(1, 2)[away.astype(bool)][:5000]
    return {
        "scale": refutation.bonferroni(small),
        "shape": refutation.not_gaussian(some),
        "steps": refutation.bonferroni(steps[np.triu_indices(len(steps), 1)]),
        "parameters": refutation.bonferroni(parameters[np.triu_indices(len(parameters), 1)]),
    }, float(np.sqrt(squares.sum() / count.sum()))


def _products(draws: Array, kept: Array | None = None) -> tuple[Array, Array, Array]:
    """Of draws [R, N] their products and the squares of either, [R, R] each.

    `kept` [R, N] is 0 for a draw that was set to 0, else 1: a pair uses the coordinates that both have.
    """
    kept = np.ones_like(draws) if kept is None else kept
    squares = np.square(draws) @ kept.T
    return draws @ draws.T, squares, squares.T


def _signal(release: Release) -> Array:
    """[m], in units of C: 1 for a canary in the sum, 0 for another, with noise of deviation σ."""
    found: Array = release.moved.sum(0) / PARAMETERS**0.5
    return found
