"""Sources of N(0, 1) noise in the shape of a parameter, and how the noise is added.

`Secure`  the default. A 256-bit key from the operating system; the cipher ChaCha20 turns it into the bits of every
          normal (`clipping.noise.chacha`). Even with all other coordinates' noise known, guessing one coordinate means
          breaking the cipher; there is no smaller seed to try. Step, process and parameter are the cipher's nonce
          (`At`): no two draws of a key read the same bits, and a draw is a function of its place.

          Box-Muller makes two normals of 128 bits in float64. The noisy sum is formed in float64 and rounded to
          multiples of a power of two near 2^-20 of the noise's deviation, the same for every batch. The attack on
          floating-point noise (Mironov 2012) uses the last bits of a release: some values can result from one sum
          only. Here those bits are not released. About 2^105 of the 2^127 pairs of words
          are rounded to a grid point near the middle, whatever the sum. The normals' errors of about 2^-50 move the
          edges of a grid point's interval by 2^-30 of its width: its probability is the real Gaussian's to about one
          part in 2^30. So one draw serves as well as the sum of four (Holohan and Braghin 2021), which hides the bits
          of single draws if the grid is not coarse.

          This is an estimate, not a proof. Radii are spaced more widely in the tail, where the error grows: to about
          2^-28 at 6 deviations, 2^-18 at 7 and 2^-7 at 8. A normal exceeds 8 with probability 1e-15, and 9.4 never. The
          accountants compose real Gaussians; this is a rounded one, without the proof that the discrete Gaussian has
          (`dpbench.engine.discrete`). The process's memory, and checkpoints, which hold the key, are not protected.

`Pseudo`  the caller's torch.Generator: repeatable noise, for tests and benchmarks. It is not private: on a CPU the
          generator has a 32-bit seed, which can be tried, and sums are not rounded.
"""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clipping.noise.chacha import Segments, add_to_flat
from dpbench.engine.errors import Misuse

OTHER_KIND = (
    "expected a checkpoint with the same kind of noise (gaussian, discrete, banded, blt, seeded) as this engine's"
)


def secret(generator: torch.Generator | None) -> bytes:
    """32 bytes from the operating system, or from the generator: the key of the sampling."""
    if generator is None:
        return os.urandom(32)
    words = torch.randint(256, (32,), generator=generator, device=generator.device, dtype=torch.uint8)
    return bytes(words.tolist())


class At(NamedTuple):
    """The place of a draw, as three 32-bit words: with one key, different places have independent noise.

    Attributes:
        step: the engine's count of logical batches.
        process: the rank of the process that draws; each process with a shard draws its own noise.
        parameter: its index among the model's `named_parameters()`.
    """

    step: int
    process: int
    parameter: int


class Noise(ABC):
    """A source of normals.

    Attributes:
        words: describes the noise in reports.
        private: False if the code and its seed are enough to repeat the noise.
        repeatable: it comes from a generator that is in the same state in every process.
        constant: its name if its noise multiplier must not change; else "".

    Methods take:
        deviation: standard deviation of the noise in each entry, >= 0.
    """

    words: str
    private: bool
    repeatable = False
    constant = ""

    def deviation(self, noise_multiplier: float, sensitivity: float, coordinates: int = 0) -> float:
        """σS, the noise's standard deviation in each coordinate; 0 without noise, even if S is infinite.

        Args:
            coordinates: of all parameters in this step: a model may have grown. 0: as when the noise was created.
        """
        return noise_multiplier * sensitivity if noise_multiplier else 0.0

    def in_turn(self, ahead: int | None) -> None:  # noqa: B027 - most noise has no turns
        """Called before each step; see `dpbench.engine.correlated`.

        Args:
            ahead: number of the loader's batches so far minus number of steps, which grows if a batch is left out.
                None for a batch of the caller's.
        """

    def added(self, total: Tensor, deviation: float, at: At) -> Tensor:
        """`total` + N(0, deviation²), in float32 or wider; `total` is not changed.

        Args:
            total: a sum, of a parameter's shape.
            at: no other draw may be at this place.
        """
        segments = Segments((total.numel(),), (at.parameter,))
        dtype = torch.promote_types(total.dtype, torch.float32)
        found = total.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)
        self.add_to_flat(found.view(-1), segments, deviation, at.step, at.process)
        return found

    @abstractmethod
    def add_to_flat(
        self, flat: Tensor, segments: Segments, deviation: float, step: int, process: int, **given: Any
    ) -> None:
        """Add N(0, deviation²) in place to the sums of several parameters in one tensor.

        Args:
            flat: the sums [segments.length], or without the last gap, float32 or wider, changed in place.
            segments: where each sum lies; its `labels` are the parameters' indices.
            step, process: of the place; no other draw may be at one of these places.
            given: `spoiled` and `divisor` of `emptied_and_divided`, for a deviation > 0.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The state for `load_state_dict`, with the keys: as secret as the data."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any], *, replay: bool = False) -> None:
        """Resume from `state_dict`.

        Args:
            state: of the same kind of noise.
            replay: draw the same noise again that followed the state.

        Raises:
            ValueError: a state of another kind.
        """


class Pseudo(Noise):
    """A generator of the caller's. Its draws depend on their order, not their place; its state is always restored."""

    words = "seeded by the caller: can be repeated, not private"
    private = False
    repeatable = True

    def __init__(self, generator: torch.Generator) -> None:
        self._given = generator

    def add_to_flat(
        self, flat: Tensor, segments: Segments, deviation: float, step: int, process: int, **given: Any
    ) -> None:
        """Draws once for all on a GPU's generator, and one by one on a CPU's."""
        drawn = torch.zeros_like(flat, device=self._given.device)
        for part in segments.parts(drawn) if drawn.device.type == "cpu" else [drawn]:
            part.normal_(generator=self._given)
        with emptied_and_divided(flat, **given):
            flat.add_(drawn.to(flat.device), alpha=deviation)

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "pseudo", "given": self._given.get_state()}

    def load_state_dict(self, state: dict[str, Any], *, replay: bool = False) -> None:
        if state["kind"] != "pseudo":
            raise ValueError(OTHER_KIND)
        self._given.set_state(state["given"])


class Secure(Noise):
    """ChaCha20 with a key from the operating system; see the module's text.

    Each place is drawn once: two draws at one place are equal, and their difference reveals the data. A copy of any
    kind, in any process, has a key of its own.
    """

    words = "cryptographically secure (ChaCha20, key of the operating system)"
    private = True
    kind = "secure"

    _step: int
    _drawn: set[At]

    def __init__(self) -> None:
        self._take(secret(None))

    def add_to_flat(
        self, flat: Tensor, segments: Segments, deviation: float, step: int, process: int, **given: Any
    ) -> None:
        """As `Noise.add_to_flat`; noisy sums are multiples of a power of two, 2^-21 to 2^-20 of the deviation.

        Raises:
            Misuse: noise was drawn at one of these places, or of a later step.
            ValueError: a number that does not fit 32 bits, a deviation that is negative or not finite.
        """
        grid, places = _grid(deviation), [At(step, process, label) for label in segments.labels]
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise Misuse("expected a step outside of a CUDA graph: each replay would draw the same noise again")
        if grid:
            add_to_flat(flat, segments, deviation, grid, self._key_for(places), (step, process), **given)

    def _key_for(self, places: Sequence[At]) -> bytes:
        """The key, with these places marked as drawn. Raises Misuse if any was drawn before."""
        key = self._key_here()
        for at in places:
            if at.step < self._step or (at.step == self._step and at in self._drawn):
                raise Misuse(f"expected a place at which no noise was drawn, got {at} after step {self._step}")
        for at in places:
            if at.step > self._step:
                self._drawn.clear()
            self._step = at.step
            self._drawn.add(at)
        return key

    def state_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "key": self._key_here()}

    def load_state_dict(self, state: dict[str, Any], *, replay: bool = False) -> None:
        """As `Noise.load_state_dict`. Without `replay` the key is fresh, and two trainings share no noise."""
        if state["kind"] != self.kind:
            raise ValueError(OTHER_KIND)
        self._take(state["key"] if replay else secret(None))

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles lack the key, as two noises with one key draw the same noise."""
        return {name: x for name, x in vars(self).items() if name not in ("_key", "_process", "_step", "_drawn")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._take(secret(None))

    def _take(self, key: bytes) -> None:
        self._key, self._process = key, os.getpid()
        self._step, self._drawn = -1, set()

    def _key_here(self) -> bytes:
        if self._process != os.getpid():
            self._take(secret(None))
        return self._key


@contextmanager
def emptied_and_divided(flat: Tensor, spoiled: Tensor | None = None, divisor: float = 1.0) -> Iterator[None]:
    """Context in which the caller adds noise to sums: sets spoiled sums to 0 before, and divides the result.

    Args:
        flat: the sums, changed in place.
        spoiled: bool [], on the device of `flat`: True to take zeros for the sums.
        divisor: > 0.
    """
    if spoiled is not None:
        flat.masked_fill_(spoiled, 0.0)
    yield
    if divisor != 1:
        flat.div_(divisor)


def _grid(deviation: float) -> float:
    """The rounding of a draw, a power of two; 0 without noise."""
    if not 0 <= deviation < math.inf:
        raise ValueError(f"expected a finite deviation >= 0, got {deviation!r}")
    return 2.0 ** (math.floor(math.log2(deviation)) - 20) if deviation else 0.0
