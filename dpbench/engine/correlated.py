"""Noise correlated over steps, `noise="banded:8"` or `"blt:3"`: the stream C⁻¹Z, one row a step.

    x_t = (z_t - c_1 x_{t-1} - c_2 x_{t-2} - ...) / c_0,    z_t ~ N(0, σ²S²I), independent

    banded   c_i = 0 from i = b on (`accounting.banded`). The state is the last b - 1 rows x.
    blt      c_i = Σ_j ω_j θ_j^{i-1} and c_0 = 1 (`accounting.blt`). The state is the buffers
             y_j = Σ_i θ_j^{i-1} x_{t-i}. x_t = z_t - Σ_j ω_j y_j, and then y_j becomes θ_j y_j + x_t.

Each row of the state is in float64 and takes twice the memory of the parameters in float32.

**Security.** A step releases round(total - Σ c_i x_{t-i} / c_0 + N(0, (σS/c_0)²)), drawn and rounded by `Secure`. x is
the released value minus the total, rounding included. Let G be the totals, one row a step. The normal's mean is then a
function of earlier releases and of (CG)_t / c_0, so an attack on a step is an attack on `Secure`. x reveals the totals
of released steps: a checkpoint holds it and is as secret as the data.

**Restarts.** A fresh stream drops the history. That is private (see both modules) and costs some accuracy. It happens:
when the parameters differ from those of the step before; when the loader's batch was left out, as a record's steps
would lie fewer than b apart; in a copy and in a forked process; and when training resumes from a checkpoint with a
fresh key, as two trainings would share the history. With `replay` the stream continues.

The deviation never falls within a stream: a later row's noise covers what an earlier step's record moved.
"""

import os
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accounting.banded import coefficients
from accounting.blt import Blt
from clipping.noise.chacha import Segments
from dpbench.engine.noise import OTHER_KIND, Noise, emptied_and_divided

_Where = tuple[int, tuple[int, ...], tuple[int, ...]]  # process, and indices and sizes of the parameters


class _Past(NamedTuple):
    """State of a flat tensor's noise up to `step`: `rows` [R, n] in float64."""

    step: int
    rows: Tensor


class Correlated(Noise):
    """Adds the stream C⁻¹Z; another source draws the independent normals Z.

    Args:
        source: draws the normals, `Secure` or `Pseudo`.
        words: describes this noise.
        mark: settings that a checkpoint's noise must share.
        first: c_0.
        count: R, the rows of the state.
    """

    def __init__(self, source: Noise, words: str, mark: dict[str, Any], first: float, count: int) -> None:
        self.source, self._mark, self._first, self._count = source, mark, first, count
        self.constant = mark["kind"]
        self.words = f"{words}; {source.words}"
        self.private, self.repeatable = source.private, source.repeatable
        self._past: dict[_Where, _Past]
        self._process: int
        self._most: float
        self._ahead: int
        self._forget()

    @abstractmethod
    def weights(self, step: int) -> Sequence[float]:
        """The rows' weights [R] in Σ c_i x_{t-i} / c_0."""

    @abstractmethod
    def remember(self, rows: Tensor, step: int, row: Tensor) -> None:
        """Put x_t into the state, in place.

        Args:
            rows: the state, [R, n].
            step: t.
            row: x_t [n].
        """

    def deviation(self, noise_multiplier: float, sensitivity: float, coordinates: int = 0) -> float:
        """σS, or the largest σS of an earlier step."""
        self._most = max(self._most, self.source.deviation(noise_multiplier, sensitivity, coordinates))
        return self._most

    def in_turn(self, ahead: int | None) -> None:
        """Start a fresh stream if a batch of the loader was skipped since the last step."""
        if ahead is not None and ahead != self._ahead:
            self._past.clear()
            self._ahead = ahead

    def add_to_flat(
        self, flat: Tensor, segments: Segments, deviation: float, step: int, process: int, **given: Any
    ) -> None:
        """As `Noise.add_to_flat`; raises what its source raises."""
        where = process, segments.labels, segments.counts
        with emptied_and_divided(flat, **given):
            wide = flat.double() - self._shift(where, step, flat)
            self.source.add_to_flat(wide, segments, deviation / self._first, step, process)
            rows = self._past[where].rows
            self.remember(rows, step, wide - flat)
            self._past[where] = _Past(step, rows)
            flat.copy_(wide)

    def state_dict(self) -> dict[str, Any]:
        past = {where: (step, rows.clone()) for where, (step, rows) in self._past.items()}
        state = {"past": past, "most": self._most, "ahead": self._ahead, "weights": list(self.weights(0))}
        return {**self._mark, "source": self.source.state_dict(), **state}

    def load_state_dict(self, state: dict[str, Any], *, replay: bool = False) -> None:
        """As `Noise.load_state_dict`. Without `replay` key and stream are fresh, but a caller's generator continues.

        Raises:
            ValueError: a checkpoint of other noise, or of a stream with other weights.
        """
        if any(state.get(name) != value for name, value in self._mark.items()):
            raise ValueError(OTHER_KIND)
        goes_on = replay or self.repeatable
        if goes_on and state.get("weights") != list(self.weights(0)):  # one stream has one sensitivity
            raise ValueError("expected a checkpoint of as many planned steps: of others the noise has other weights")
        self.source.load_state_dict(state["source"], replay=replay)
        self._forget()
        if goes_on:
            self._past = {where: _Past(step, rows.clone()) for where, (step, rows) in state["past"].items()}
            self._most, self._ahead = state["most"], state["ahead"]

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles lack the history: two noises with different keys may not share it."""
        return {name: x for name, x in vars(self).items() if name not in ("_past", "_process", "_most", "_ahead")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    def _forget(self) -> None:
        self._past = {}
        self._process, self._most, self._ahead = os.getpid(), 0.0, 1

    def _shift(self, where: _Where, step: int, like: Tensor) -> Tensor:
        """Σ c_i x_{t-i} / c_0, [n] in float64, on the device of `like`; 0 where a stream starts."""
        if self._process != os.getpid():
            self._forget()
        for other in [other for other, past in self._past.items() if past.step < step - 1]:
            del self._past[other]  # no noise in the step before
        past = self._past.get(where)
        if past is None or past.step != step - 1:
            rows = torch.zeros(self._count, like.numel(), dtype=torch.float64, device=like.device)
        else:
            rows = past.rows.to(like.device)
        self._past[where] = _Past(step - 1, rows)
        return torch.tensor(self.weights(step), dtype=torch.float64).to(like.device) @ rows


class Banded(Correlated):
    """The noise of `accounting.banded`. The state is rows t - b + 1, ..., t - 1, with row t at t mod (b - 1).

    Args:
        source: draws the normals, `Secure` or `Pseudo`.
        bands: b, at least 2.
        steps: planned number. Only how well the noise cancels depends on it.
    """

    def __init__(self, source: Noise, bands: int, steps: int) -> None:
        self.coefficients = c = coefficients(bands, steps)
        words, mark = f"banded, correlated over {bands} steps", {"kind": "banded", "bands": bands}
        super().__init__(source, words, mark, first=c[0], count=bands - 1)

    def weights(self, step: int) -> Sequence[float]:
        c, count = self.coefficients, len(self.coefficients) - 1
        return [c[(step - place - 1) % count + 1] / c[0] for place in range(count)]

    def remember(self, rows: Tensor, step: int, row: Tensor) -> None:
        rows[step % len(rows)] = row


class Buffered(Correlated):
    """The noise of `accounting.blt`. The state is its buffers.

    Args:
        source: draws the normals, `Secure` or `Pseudo`.
        blt: C.
    """

    def __init__(self, source: Noise, blt: Blt) -> None:
        self.blt, count = blt, len(blt.omega)
        words = f"blt, correlated over all steps by {count} buffer{'s' * (count > 1)}"
        mark = {"kind": "blt", "buffers": count}
        super().__init__(source, words, mark, first=1.0, count=count)

    def weights(self, step: int) -> Sequence[float]:
        return self.blt.omega

    def remember(self, rows: Tensor, step: int, row: Tensor) -> None:
        theta = torch.tensor(self.blt.theta, dtype=torch.float64).to(rows.device)
        rows.mul_(theta[:, None]).add_(row)
