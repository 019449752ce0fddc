"""Where the noise comes from: N(0, 1) in the shape of a parameter, and how it is added.

`Pseudo`  torch's own generator, seeded by the operating system, or one that the caller gives. Not cryptographically
          secure: who learns enough of its output, or tries its seeds (32 bits on a CPU), knows the rest. With a
          generator of the caller's the noise can be repeated, which is for tests and benchmarks: it is not private.
          A float32 normal has at most 2^32 values or so, and the sum with a gradient is rounded to a grid that depends
          on the gradient: an adversary who reads the last bits of a released parameter may tell neighbouring data apart
          (Mironov 2012). Take `Secure` where the parameters themselves are published.

`Secure`  every bit from the operating system's cryptographic generator; nothing of it can be predicted or repeated.
          Each normal is the sum of four, halved, made by Box-Muller in float64: finding the four from the bits of the
          sum is what the attack on single draws would have to do (Mironov 2012; Holohan and Braghin 2021). The noisy
          sum is then rounded to multiples of a power of two near 2^-20 of the noise's deviation, the same for every
          batch, so that the last bits of the gradient are not released. Not protected: the time that it takes, the
          process's memory; and the accountants compose real Gaussians, so no theorem covers this finite one. It is a
          rounded Gaussian, not the discrete Gaussian of Canonne, Kamath and Steinke (2020), whose proof it borrows not.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

_CHUNK = 2**20
"""Normals drawn at once by `Secure`: 32 MiB of random bits."""


def secret(generator: torch.Generator | None) -> bytes:
    """32 bytes of the operating system, or of the generator: the key of the sampling."""
    if generator is None:
        return os.urandom(32)
    words = torch.randint(256, (32,), generator=generator, device=generator.device, dtype=torch.uint8)
    return bytes(words.tolist())


class Noise(ABC):
    """A source of normals.

    Attributes:
        words: what it is, for the record.
        private: whoever knows the code and the seed that is in it cannot repeat the noise.
        repeatable: it comes from a generator that is in the same state in every process.
    """

    words: str
    private: bool
    repeatable = False

    @abstractmethod
    def added(self, total: Tensor, deviation: float) -> Tensor:
        """`total` + N(0, deviation²) in each entry, in float32 or wider; `total` itself is not changed."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Pseudo(Noise):
    """torch's generator: one that is given, or one for each device, seeded by the operating system."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self._given = generator
        self._own: dict[str, torch.Generator] = {}
        self.private = generator is None
        self.repeatable = generator is not None
        self.words = "pseudo-random, seeded by the operating system"
        if generator is not None:
            self.words = "seeded by the caller: can be repeated, not private"

    def added(self, total: Tensor, deviation: float) -> Tensor:
        generator = self._generator(total.device)
        wide = torch.promote_types(total.dtype, torch.float32)
        drawn = torch.randn(total.shape, generator=generator, device=generator.device, dtype=wide)
        return total.to(wide) + drawn.to(total.device) * deviation

    def _generator(self, device: torch.device) -> torch.Generator:
        if self._given is not None:
            return self._given
        if str(device) not in self._own:
            self._own[str(device)] = torch.Generator(device).manual_seed(int.from_bytes(os.urandom(8), "little") >> 1)
        return self._own[str(device)]

    def state_dict(self) -> dict[str, Any]:
        states = {name: g.get_state() for name, g in self._own.items()}
        return {"kind": "pseudo", "given": None if self._given is None else self._given.get_state(), "own": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["kind"] != "pseudo" or (state["given"] is None) != (self._given is None):
            raise ValueError("expected a checkpoint with the same kind of noise (secure, generator) as this engine's")
        if self._given is not None:
            self._given.set_state(state["given"])
        for name, own in state["own"].items():
            self._own[name] = torch.Generator(name)
            self._own[name].set_state(own)


class Secure(Noise):
    """The operating system's cryptographic generator; see the module's text."""

    words = "cryptographically secure (operating system)"
    private = True

    def added(self, total: Tensor, deviation: float) -> Tensor:
        drawn = np.empty(total.numel(), dtype=np.float64)
        for start in range(0, drawn.size, _CHUNK):
            part = drawn[start : start + _CHUNK]
            part[:] = sum(_normals(part.size) for _ in range(4)) / 2
        noise = torch.from_numpy(drawn).view(total.shape)
        exact = total.detach().to("cpu", torch.float64) + noise * deviation
        if deviation > 0:
            grid = 2.0 ** (math.floor(math.log2(deviation)) - 20)
            exact = torch.round(exact / grid) * grid
        return exact.to(total.device, torch.promote_types(total.dtype, torch.float32))

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "secure"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["kind"] != "secure":
            raise ValueError("expected a checkpoint with the same kind of noise (secure, generator) as this engine's")


def _normals(count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Box-Muller on 53 random bits a uniform, in (0, 1]: normals up to 8.6 in size."""
    pairs = (count + 1) // 2
    bits = np.frombuffer(os.urandom(16 * pairs), dtype="<u8") >> np.uint64(11)
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-53
    radius, angle = np.sqrt(-2.0 * np.log(uniform[:pairs])), 2.0 * np.pi * uniform[pairs:]
    found: np.ndarray[Any, np.dtype[np.float64]] = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    return found[:count]
