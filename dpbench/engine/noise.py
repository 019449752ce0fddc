"""Where the noise comes from: N(0, 1) in the shape of a parameter, and how it is added.

`Secure`  what everybody has. A key of 256 bits from the operating system, of which the cipher ChaCha20 makes the bits
          of every normal (`clipping.noise.chacha`): who knows all noise but one coordinate's cannot guess that one
          without breaking the cipher, and there is no smaller seed to be tried. Step, process and parameter are the
          cipher's nonce (`At`): no two draws of a key read the same bits, and a draw is a function of its place.

          A normal is one of two that Box-Muller makes of 128 bits in float64; the noisy sum is formed in float64 and
          rounded to multiples of a power of two near 2^-20 of the noise's deviation, the same for every batch. The
          attack on floating-point noise (Mironov 2012) reads from the last bits of a release which sums could have
          led to it: some numbers are reached from one sum alone. Here those bits are not released. To a grid point
          near the middle some 2^105 of the 2^127 pairs of words are rounded, whatever the sum. The normals have errors
          of 2^-50 or so, which move the edges of its interval by 2^-30 of its width: its probability is that of the
          real Gaussian in the interval to about one part in 2^30. That is why one draw is no worse here than the sum
          of four (Holohan and Braghin 2021), which hides the bits of single ones where the grid is not coarse.

          It is an estimate and no proof. Radii are spaced more widely in the tail, and the part grows: to about 2^-28
          at 6 deviations, 2^-18 at 7 and 2^-7 at 8, beyond which a normal lies with probability 1e-15, and beyond 9.4
          never. The accountants compose real Gaussians; this is a rounded one, and borrows no proof from the discrete
          Gaussian (`dpbench.engine.discrete`, which has one). Not protected: the process's memory, and checkpoints,
          which hold the key.

`Pseudo`  a torch.Generator of the caller's: noise that can be repeated, for tests and benchmarks. It is not private: on
          a CPU the generator has 32 bits of seed, which can be tried, and its sums are not rounded.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from clipping.noise.chacha import Segments, add_to_flat, noisy
from dpbench.engine.errors import Misuse

OTHER_KIND = (
    "expected a checkpoint with the same kind of noise (gaussian, discrete, banded, blt, seeded) as this engine's"
)


def secret(generator: torch.Generator | None) -> bytes:
    """32 bytes of the operating system, or of the generator: the key of the sampling.

    Args:
        generator: of the caller's, or None.
    """
    if generator is None:
        return os.urandom(32)
    words = torch.randint(256, (32,), generator=generator, device=generator.device, dtype=torch.uint8)
    return bytes(words.tolist())


class At(NamedTuple):
    """The place of a draw, as three words of 32 bits: with one key, different places have independent noise.

    Attributes:
        step: the engine's count of logical batches.
        process: the rank of the process that draws: of several that hold shards, each its own.
        parameter: its index among the model's `named_parameters()`.
    """

    step: int
    process: int
    parameter: int


class Noise(ABC):
    """A source of normals.

    Attributes:
        words: what it is, for the record.
        private: whoever knows the code and the seed that is in it cannot repeat the noise.
        repeatable: it comes from a generator that is in the same state in every process.
        constant: its name, if its noise multiplier must not change; else "".
    """

    words: str
    private: bool
    repeatable = False
    constant = ""

    def deviation(self, noise_multiplier: float, sensitivity: float) -> float:
        """Of the noise in each coordinate: σS; 0 without noise, however far a record may move the sum.

        Args:
            noise_multiplier: σ.
            sensitivity: S.
        """
        return noise_multiplier * sensitivity if noise_multiplier else 0.0

    def in_turn(self, ahead: int | None) -> None:  # noqa: B027 - most noise has no turns
        """Told before each step; see `dpbench.engine.correlated`.

        Args:
            ahead: the loader's batches so far, less the steps: it grows where one was left out. None for a batch of the
                caller's.
        """

    def added(self, total: Tensor, deviation: float, at: At) -> Tensor:
        """As `added_to_all`, of one, which is not changed.

        Args:
            total: a sum, of a parameter's shape.
            deviation: of the noise in each entry, >= 0.
            at: step, process and parameter; no other draw is at this place.
        """
        return self.added_to_all([total.clone()], deviation, [at])[0]

    @abstractmethod
    def added_to_all(
        self, totals: Sequence[Tensor], deviation: float, places: Sequence[At], *, divisor: float = 1.0
    ) -> list[Tensor]:
        """(Each total + N(0, deviation²)) / divisor in each entry, in float32 or wider.

        Args:
            totals: used up: what is returned may lie in their memory.
            deviation: >= 0.
            places: of each total; no other draw is at one of them.
            divisor: > 0, of what has its noise.
        """

    @abstractmethod
    def add_to_flat(self, flat: Tensor, segments: Segments, deviation: float, step: int, process: int) -> None:
        """The same in place: flat [segments.length] holds the sums of parameters, of which `labels` are the numbers.

        Args:
            flat: the sums, changed in place.
            segments: where each of them lies.
            deviation: of the noise in each entry.
            step, process: of the place.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` goes on from, keys among it: as secret as the data."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any], *, replay: bool = False) -> None:
        """Go on from `state_dict`.

        Args:
            state: of the same kind of noise.
            replay: draw the same noise again that the state's owner drew after it.

        Raises:
            ValueError: another kind, or a state that holds nothing to replay.
        """


class Pseudo(Noise):
    """A generator of the caller's. Its draws depend on their order, not their place; its state is always restored."""

    words = "seeded by the caller: can be repeated, not private"
    private = False
    repeatable = True

    def __init__(self, generator: torch.Generator) -> None:
        self._given = generator

    def added_to_all(
        self, totals: Sequence[Tensor], deviation: float, places: Sequence[At], *, divisor: float = 1.0
    ) -> list[Tensor]:
        wide = [total.to(torch.promote_types(total.dtype, torch.float32)) for total in totals]
        return [total.add_(self._drawn(total).mul_(deviation)).div_(divisor) for total in wide]

    def add_to_flat(self, flat: Tensor, segments: Segments, deviation: float, step: int, process: int) -> None:
        """One draw of all on a GPU's generator; on a CPU's one after the other, as `added_to_all` does."""
        drawn = torch.zeros_like(flat, device=self._given.device)
        for part in segments.parts(drawn) if drawn.device.type == "cpu" else [drawn]:
            part.copy_(self._drawn(part))
        flat.add_(drawn.to(flat.device), alpha=deviation)

    def _drawn(self, like: Tensor) -> Tensor:
        where = self._given.device
        return torch.randn(like.shape, generator=self._given, device=where, dtype=like.dtype).to(like.device)

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "pseudo", "given": self._given.get_state()}

    def load_state_dict(self, state: dict[str, Any], *, replay: bool = False) -> None:
        if state["kind"] != "pseudo" or state["given"] is None:
            raise ValueError(OTHER_KIND)
        self._given.set_state(state["given"])


class Secure(Noise):
    """ChaCha20 with a key of the operating system; see the module's text.

    A place is drawn once: two draws at one place are the same, and their difference shows the data. A copy of any kind,
    in any process, has a key of its own.
    """

    words = "cryptographically secure (ChaCha20, key of the operating system)"
    private = True
    kind = "secure"

    _step: int
    _drawn: set[At]

    def __init__(self) -> None:
        self._take(secret(None))

    def added_to_all(
        self, totals: Sequence[Tensor], deviation: float, places: Sequence[At], *, divisor: float = 1.0
    ) -> list[Tensor]:
        """As `Noise.added_to_all`; noisy sums are multiples of a power of two, 2^-21 to 2^-20 of the deviation.

        Raises:
            Misuse: noise was drawn at one of these places, or of a later step.
            ValueError: a number that is no word of 32 bits, a deviation that is negative or not finite.
        """
        grid = _grid(deviation)
        if grid == 0:
            return [total.detach().to(torch.promote_types(total.dtype, torch.float32)) / divisor for total in totals]
        return noisy(totals, deviation, grid, self._key_for(places), places, in_place=True, divisor=divisor)

    def add_to_flat(self, flat: Tensor, segments: Segments, deviation: float, step: int, process: int) -> None:
        """As `Noise.add_to_flat`, rounded and refused as in `added_to_all`."""
        grid = _grid(deviation)
        if flat.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise Misuse("expected a step outside of a CUDA graph: each replay would draw the same noise again")
        if grid:
            key = self._key_for([At(step, process, label) for label in segments.labels])
            add_to_flat(flat, segments, deviation, grid, key, (step, process))

    def _key_for(self, places: Sequence[At]) -> bytes:
        """The key; its places are taken. Refuses all of them if one was before."""
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
        """As `Noise.load_state_dict`. Without `replay` the key is a fresh one: two trainings that go on from one
        checkpoint share no noise.
        """
        if state["kind"] != self.kind and (state["kind"] != "pseudo" or state["given"] is not None):
            raise ValueError(OTHER_KIND)
        if replay and "key" not in state:
            raise ValueError(
                "expected a checkpoint that holds the noise's key to replay it, got one of an older version"
            )
        self._take(state["key"] if replay else secret(None))

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: without the key. Two that share one draw the same noise."""
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


def _grid(deviation: float) -> float:
    """What a draw is rounded to multiples of; 0 where nothing is drawn."""
    if not 0 <= deviation < math.inf:
        raise ValueError(f"expected a finite deviation >= 0, got {deviation!r}")
    return 2.0 ** (math.floor(math.log2(deviation)) - 20) if deviation else 0.0
