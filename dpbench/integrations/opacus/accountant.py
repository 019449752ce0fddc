"""`privacy_engine.accountant`: the engine's accounting under the names of Opacus' accountants."""

import secrets
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from accounting import load_accountant
from dpbench.engine import Misuse, PrivacyEngine, PrivacyWarning
from dpbench.engine.adjust import begin_after, parts

History = list[tuple[float, float, int]]
Parts = list[tuple[dict[str, Any], int]]
"""(fields of a mechanism, steps) of each part of a training; the engine's own mechanism has the other fields."""
IGNORED = frozenset({"eps_error", "delta_error", "alphas", "poisson"})
"""Precision arguments of Opacus' accountants; here ε always has full precision."""


class Accountant:
    """Reads the spent privacy from the engine.

    Args:
        name: "rdp", "prv", "gdp", or another name of `accounting`.
        engine: returns the engine; None before `make_private`.

    Raises:
        ValueError: an unknown name.

    Methods take:
        delta: in [0, 1].
    """

    def __init__(self, name: str, engine: Callable[[], PrivacyEngine | None]) -> None:
        load_accountant(name)
        self._name, self._engine = name, engine
        self._told = False
        self._loaded: Any = {}  # the state that is handed over once the engine exists
        self._known: set[str | None] = set()  # names of states whose steps the engine counts

    def mechanism(self) -> str:
        """Returns the accountant's name."""
        return self._name

    @property
    def history(self) -> History:
        """(noise multiplier, sample rate, steps) of each part of training. Steps that were skipped or undone count."""
        return [(fields["noise_multiplier"], fields["sample_rate"], steps) for fields, steps in self._parts]

    @property
    def _parts(self) -> Parts:
        engine = self._engine()
        if engine is None:
            return parts_in(self._loaded)
        return [(asdict(mechanism), steps) for mechanism, steps in parts(engine)]

    def __len__(self) -> int:
        return len(self.history)

    def get_epsilon(self, delta: float, **options: Any) -> float:
        """ε at δ of all steps so far, as in the engine's `privacy_spent`; 0 before the first.

        Args:
            options: Opacus' own; ignored.

        Raises:
            TypeError: an option that no accountant of Opacus has.
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
        """(ε, its Rényi order), by "rdp".

        Args:
            alphas: Opacus' orders; ignored, as all orders are tried.

        Raises:
            Misuse: another accountant.
        """
        if self._name.partition(":")[0] != "rdp":
            raise Misuse(f"expected accountant='rdp', whose ε has a Rényi order, got {self._name!r}: take get_epsilon")
        epsilon, engine = self.get_epsilon(delta), self._engine()
        if engine is None or not engine.steps:
            return epsilon, 0.0
        found = engine.settings.guarantee(engine.accounted, delta)
        return epsilon, float(found.detail.get("order", 0.0))

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Always raises Misuse, as the engine counts the steps.

        Args:
            noise_multiplier, sample_rate: Opacus' arguments.
        """
        raise Misuse("expected no accountant.step(): the engine counts every optimizer.step() itself")

    def state_dict(self, destination: Any = None) -> Any:
        """Opacus' "history" and "mechanism", a unique "name", and "parts", which say how batches were drawn.

        Args:
            destination: a dict to fill; None for a new one.
        """
        found = OrderedDict() if destination is None else destination
        found["history"], found["mechanism"], found["parts"] = self.history, self._name, self._parts
        found["name"] = secrets.token_hex(8)
        if self._engine() is not None:
            self.know(found)
        return found

    def load_state_dict(self, state_dict: Any) -> None:
        """Also account for the steps of an earlier training, by Opacus or this package.

        Args:
            state_dict: from `state_dict`, here or in Opacus.

        Raises:
            ValueError: an invalid state, or one of another accountant.
            Misuse: the engine has released steps.
        """
        if not state_dict or "history" not in state_dict or "mechanism" not in state_dict:
            raise ValueError("expected a state_dict with 'history' and 'mechanism', got none or another one")
        if state_dict["mechanism"] != self._name:
            raise ValueError(
                f"expected a state_dict of accountant={self._name!r}, got one of {state_dict['mechanism']!r}"
            )
        if "name" in state_dict and state_dict["name"] in self._known:
            return
        self._loaded = state_dict
        self.hand_over()

    def know(self, state_dict: Any) -> None:
        """Remember a state whose steps the engine counts already, so that it is not loaded.

        Args:
            state_dict: the state.
        """
        self._known.add(state_dict.get("name"))

    def hand_over(self) -> None:
        """Move the steps that were loaded before the engine existed to the engine."""
        engine = self._engine()
        if engine is None or not self._loaded:
            return
        now = engine.settings.mechanism
        begin_after(engine, [(replace(now, **fields), steps) for fields, steps in parts_in(self._loaded)])
        self.know(self._loaded)
        self._loaded = {}


def parts_in(state_dict: Any) -> Parts:
    """The parts of a state; one of Opacus' does not say how batches were drawn.

    Args:
        state_dict: from `state_dict`, here or in Opacus.
    """
    opacus = [({"noise_multiplier": s, "sample_rate": q}, steps) for s, q, steps in state_dict.get("history", ())]
    return list(state_dict.get("parts", opacus))
