"""`privacy_engine.accountant`: the engine's accounting by the names that Opacus' accountants have."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from accounting import SubsampledGaussian, load_accountant
from dpbench.engine import Misuse, PrivacyEngine, PrivacyWarning
from dpbench.engine.adjust import begin_after

History = list[tuple[float, float, int]]
IGNORED = frozenset({"eps_error", "delta_error", "alphas", "poisson"})
"""Arguments of Opacus' accountants that say how exactly to search: here ε is searched to the end."""


class Accountant:
    """What is spent, read from the engine.

    Args:
        name: "rdp", "prv", "gdp", or another name of `accounting`.
        engine: gives the engine that accounts; None before `make_private`.

    Raises:
        ValueError: no accountant's name.
    """

    def __init__(self, name: str, engine: Callable[[], PrivacyEngine | None]) -> None:
        load_accountant(name)
        self._name, self._engine = name, engine
        self._told = False
        self._loaded: History = []

    def mechanism(self) -> str:
        """Its name."""
        return self._name

    @property
    def history(self) -> History:
        """[(noise multiplier, sample rate, steps), ...] of all that was released."""
        engine = self._engine()
        if engine is None:
            return list(self._loaded)
        settings, told = engine.settings, 0
        found: History = []
        for each, steps in settings.earlier:
            found.append((each.noise_multiplier, each.sample_rate, steps))
            told += steps
        if engine.steps > told:
            now = settings.mechanism
            found.append((now.noise_multiplier, now.sample_rate, engine.steps - told))
        return found

    def __len__(self) -> int:
        return len(self.history)

    def get_epsilon(self, delta: float, **options: Any) -> float:
        """ε at δ of all steps so far, as the engine's `privacy_spent` says it; 0 before the first.

        Args:
            delta: in [0, 1].
            options: Opacus' own; they change nothing here.

        Raises:
            TypeError: an option that no accountant of Opacus' has.
            NoAnswer: no bound is known.
        """
        unknown = sorted(options.keys() - IGNORED)
        if unknown:
            raise TypeError(f"expected get_epsilon(delta), got {unknown[0]!r} beside it")
        engine = self._engine()
        if engine is None or not engine.steps:
            return 0.0
        spent = engine.privacy_spent(delta)
        if not spent.private and not self._told:
            self._told = True
            warnings.warn(str(spent), PrivacyWarning, stacklevel=2)
        return spent.epsilon

    def get_privacy_spent(self, *, delta: float, alphas: Any = None) -> tuple[float, float]:
        """(ε, the Rényi order that it has it at), by "rdp"; `alphas` is ignored: all orders are tried.

        Args:
            delta: in [0, 1].
            alphas: Opacus' orders.

        Raises:
            Misuse: another accountant.
        """
        if self._name.partition(":")[0] != "rdp":
            raise Misuse(f"expected accountant='rdp', whose ε has a Rényi order, got {self._name!r}: take get_epsilon")
        epsilon, engine = self.get_epsilon(delta), self._engine()
        if engine is None or not engine.steps:
            return epsilon, 0.0
        found = engine.settings.guarantee(engine.steps, delta)
        return epsilon, float(found.detail.get("order", 0.0))

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Never the caller's.

        Args:
            noise_multiplier, sample_rate: Opacus' arguments.

        Raises:
            Misuse: always.
        """
        raise Misuse("expected no accountant.step(): the engine counts every optimizer.step() itself")

    def state_dict(self, destination: Any = None) -> Any:
        """As Opacus' has it: "history" and "mechanism".

        Args:
            destination: a dict to put it into; None for a new one.
        """
        found = OrderedDict() if destination is None else destination
        found["history"], found["mechanism"] = self.history, self._name
        return found

    def load_state_dict(self, state_dict: Any) -> None:
        """Account for the steps of an earlier training, too: of Opacus', or of this package's.

        Args:
            state_dict: what `state_dict` gave, here or in Opacus.

        Raises:
            ValueError: a state that is none, or of another accountant.
            Misuse: after a step.
        """
        if not state_dict or "history" not in state_dict or "mechanism" not in state_dict:
            raise ValueError("expected a state_dict with 'history' and 'mechanism', got none or another one")
        if state_dict["mechanism"] != self._name:
            raise ValueError(
                f"expected a state_dict of accountant={self._name!r}, got one of {state_dict['mechanism']!r}"
            )
        self._loaded = [(float(sigma), float(q), int(steps)) for sigma, q, steps in state_dict["history"]]
        self.hand_over()

    def hand_over(self) -> None:
        """What was loaded before there was an engine is the engine's from now on."""
        engine = self._engine()
        if engine is None or not self._loaded:
            return
        loaded, self._loaded = self._loaded, []
        if engine.steps and loaded == self.history:
            return
        now = engine.settings.mechanism
        begin_after(engine, [(_alike(now, sigma, q), steps) for sigma, q, steps in loaded])


def _alike(mechanism: SubsampledGaussian, noise_multiplier: float, sample_rate: float) -> SubsampledGaussian:
    return SubsampledGaussian(
        noise_multiplier,
        sample_rate,
        sampling=mechanism.sampling,
        adjacency=mechanism.adjacency,
        dataset_size=mechanism.dataset_size,
    )
