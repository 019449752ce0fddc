"""One step: ε of the Gaussian mechanism at δ, and its amplification by Poisson sampling.

Sensitivity 1, noise σ. With u = εσ and h = 1/(2σ), the Gaussian mechanism is (ε, δ)-private iff

    δ ≥ Φ(h − u) − e^ε Φ(−h − u)                                (Balle and Wang 2018, Theorem 8: exact)
      = φ(u − h) [m(u − h) − m(u + h)],   m(x) = Φ(−x)/φ(x)     (as e^ε φ(u + h) = φ(u − h))

The second form has no e^ε, and only m at two points 2h apart cancels. For small h the difference is its series −2[h
m'(u) + h³/6 m'''(u)], by m' = x m − 1, m'' = m + x m', m''' = 2m' + x m''. All is in logarithms, so that δ = 1e-300
spread over 1e9 steps does not underflow.

Classical (Dwork and Roth 2014, Theorem A.1): ε = √(2 ln(1.25/δ))/σ. Proved for ε < 1. The claim holds at some larger ε
and fails at others (at δ = 1e-5 by ε = 10), which the exact form decides.

Poisson sampling at rate q makes an (ε, δ)-private step (ln(1 + q(e^ε − 1)), qδ)-private, exactly (Balle, Barthe and
Gaboardi 2018, Theorem 8). The linear form (qε, qδ) of Abadi et al. 2016 is smaller, and no upper bound.

Uses plain `math`, because importing scipy.special takes longer than every formula of this package.

Functions take:
    u, h: ε·σ and 1/(2σ).
    log_target: ln δ.
"""

import math

_SQRT2, _LOG_SQRT_2PI = math.sqrt(2.0), 0.5 * math.log(2.0 * math.pi)


def mills_ratio(x: float) -> float:
    """m(x) = Φ(−x)/φ(x) for x ≥ 0, to a few ulp: by erfc, and for large x by Laplace's continued fraction.

    Args:
        x: at least 0.
    """
    if x < 5.0:
        return 0.5 * math.erfc(x / _SQRT2) * math.exp(0.5 * x * x + _LOG_SQRT_2PI)
    tail = x
    for k in range(60, 0, -1):
        tail = x + k / tail
    return 1.0 / tail


def log_delta(u: float, h: float) -> float:
    """ln δ of the Gaussian mechanism at ε = u/σ, for 0 ≤ u ≤ h + 60. Decreasing in u."""
    distance = u - h
    log_density = -0.5 * distance * distance - _LOG_SQRT_2PI  # ln φ(u − h)
    if h < 1e-3:
        m = mills_ratio(u)
        first = u * m - 1.0
        third = 2.0 * first + u * (m + u * first)
        difference = -2.0 * h * (first + h * h / 6.0 * third)
    elif distance > 0:
        difference = mills_ratio(distance) - mills_ratio(u + h)
    else:  # ε below 1/(2σ²): the density may underflow, but δ is not small
        return math.log(0.5 * math.erfc(distance / _SQRT2) - math.exp(log_density) * mills_ratio(u + h))
    return log_density + math.log(difference)


def exact_epsilon(sigma: float, log_target: float) -> float:
    """The smallest ε at which the Gaussian mechanism is (ε, e^log_target)-private; 0 if it is so at ε = 0.

    Bisection down to neighbouring floats, rounded up. As δ ≤ Φ(h − u) ≤ exp(−(u − h)²/2) for u ≥ h, the root lies at
    most √(−2 log_target) above h.
    """
    h = 0.5 / sigma
    if log_target >= 0 or log_delta(0.0, h) <= log_target:
        return 0.0
    low, high = 0.0, h + math.sqrt(-2.0 * log_target)
    while low < (middle := low + 0.5 * (high - low)) < high:
        if log_delta(middle, h) <= log_target:
            high = middle
        else:
            low = middle
    return high / sigma


def epsilon_of_shift(log_mu: float, log_target: float) -> float:
    """`exact_epsilon` of a Gaussian mechanism with mean shift μ = 1/σ; ∞ or an upper bound if σ or ε overflow.

    Args:
        log_mu: ln μ.
    """
    return math.inf if log_mu > 350.0 else exact_epsilon(math.exp(min(700.0, -log_mu)), log_target)


def classical_epsilon(sigma: float, log_target: float) -> float:
    """√(2 ln(1.25/δ))/σ at δ = e^log_target ≤ 1: a claim that does not always hold."""
    return _classical_u(log_target) / sigma


def classical_holds(sigma: float, log_target: float) -> bool:
    """Whether the classical claim is true at this σ and δ ≤ 1."""
    return log_delta(_classical_u(log_target), 0.5 / sigma) <= log_target


def _classical_u(log_target: float) -> float:
    return math.sqrt(2.0 * (math.log(1.25) - min(0.0, log_target)))


def amplified(epsilon: float, q: float) -> float:
    """ln(1 + q(e^ε − 1)): ε of one step on a Poisson sample of rate q; its δ becomes qδ.

    Args:
        epsilon: ε of the step on all records, at least 0.
    """
    if q == 1.0:
        return epsilon
    if epsilon < 700.0:
        return math.log1p(q * math.expm1(epsilon))
    above = epsilon + math.log(q)  # e^ε overflows soon
    return above + math.log1p((1.0 - q) * math.exp(-above)) if above > 0 else math.log1p(math.exp(above))


def indistinct(sigma: float, q: float, steps: float, delta: float) -> bool:
    """Whether T Poisson steps are (0, δ)-private by their distance in total variation alone.

    One step's distance is at most q, and ½χ, χ² = q²(e^{1/σ²} − 1). The distance of T steps is at most T times as much,
    and ½√((1 + χ²)^T − 1).
    """
    log_squared, twice = 2.0 * math.log(q) + log_variance(sigma), math.log1p(4.0 * delta * delta)
    one = min(math.log(q), 0.5 * log_squared - math.log(2.0))
    return math.log(steps) + one <= math.log(delta) or (twice > 0 and math.log(steps) + log_squared <= math.log(twice))


def log_variance(sigma: float) -> float:
    """ln(e^{1/σ²} − 1), for the χ² divergence of N(1, σ²) from N(0, σ²); ∞ where 1/σ² overflows."""
    x = 1.0 / sigma / sigma
    return x + math.log(-math.expm1(-x)) if x > 1e-17 else -2.0 * math.log(sigma)
