"""`bk_mixed` with one optimisation removed; the experiment `ablation` measures the effect of each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from clipping.backends.tape import BkMixed
from clipping.core.types import ClippedGradient
from clipping.norms import collection
from clipping.numerics import kernels


@contextmanager
def replaced(module: Any, **values: Any) -> Iterator[None]:
    """Replace globals of a module inside.

    Args:
        module: whose globals are replaced.
        values: by name.
    """
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


class Ablated(BkMixed):
    """Runs each call without the optimisation that it names."""

    def without(self) -> tuple[Any, dict[str, Any]]:
        """A module, and the replacements of some of its globals."""
        raise NotImplementedError

    def __call__(self, inputs: Any, targets: Any) -> ClippedGradient:
        module, values = self.without()
        with replaced(module, **values):
            return super().__call__(inputs, targets)


class WithoutKernels(Ablated):
    """Uses torch's own operations in place of the kernels in C."""

    name = "bk_mixed:without_kernels"

    def without(self) -> tuple[Any, dict[str, Any]]:
        return kernels, {"cpu": kernels.Missing()}


class WithoutChunks(Ablated):
    """Forms a convolution's input gradient at once."""

    name = "bk_mixed:without_chunks"

    def without(self) -> tuple[Any, dict[str, Any]]:
        return kernels, {"chunked_conv": kernels.Missing()}


class WithoutOverwriting(Ablated):
    """Allocates memory for each activation gradient."""

    name = "bk_mixed:without_overwriting"

    def without(self) -> tuple[Any, dict[str, Any]]:
        return kernels, {"overwriting": kernels.Missing()}


class WithoutBatching(Ablated):
    """Sums small gradients parameter by parameter."""

    name = "bk_mixed:without_batching"

    def without(self) -> tuple[Any, dict[str, Any]]:
        return collection, {"SMALL": math.inf}
