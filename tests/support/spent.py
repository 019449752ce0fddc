"""What an accountant answers for T steps, in one line."""

from typing import Any

from accounting import Guarantee, SubsampledGaussian, load_accountant


def answer(name: str, sigma: Any, q: Any, steps: Any, delta: Any, **scheme: Any) -> Guarantee:
    return load_accountant(name).guarantee(SubsampledGaussian(sigma, q, **scheme), steps=steps, delta=delta)


def epsilon(name: str, sigma: Any, q: Any, steps: Any, delta: Any, **scheme: Any) -> float:
    return answer(name, sigma, q, steps, delta, **scheme).epsilon


def by_dp_accounting(
    sigma: float, q: float, steps: int, delta: float, interval: float, pessimistic: bool = True
) -> float:
    """ε by dp-accounting's privacy loss distributions: above or below the truth."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    one = pld.from_gaussian_mechanism(
        sigma,
        sampling_prob=q,
        pessimistic_estimate=pessimistic,
        use_connect_dots=pessimistic,
        value_discretization_interval=interval,
    )
    return one.self_compose(steps).get_epsilon_for_delta(delta)
