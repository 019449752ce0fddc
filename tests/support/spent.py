"""What an accountant answers for T steps, in one line."""

from __future__ import annotations

from typing import Any

from accounting import Guarantee, SubsampledGaussian, load_accountant


def answer(name: str, sigma: Any, q: Any, steps: Any, delta: Any, **scheme: Any) -> Guarantee:
    return load_accountant(name).guarantee(SubsampledGaussian(sigma, q, **scheme), steps=steps, delta=delta)


def epsilon(name: str, sigma: Any, q: Any, steps: Any, delta: Any, **scheme: Any) -> float:
    return answer(name, sigma, q, steps, delta, **scheme).epsilon
