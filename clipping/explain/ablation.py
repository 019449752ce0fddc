"""`bk_mixed` with one optimisation removed; the experiment `ablation` measures the effect of each."""

from __future__ import annotations

import math
from typing import Any, ClassVar
from unittest import mock

from clipping.backends.tape import BkMixed
from clipping.core.types import ClippedGradient
from clipping.norms import collection
from clipping.numerics import kernels


class Ablated(BkMixed):
    """Runs each call without an optimisation.

    Attributes:
        module, values: replacements of some of a module's globals.
    """

    module: ClassVar[Any]
    values: ClassVar[dict[str, Any]]

    def __call__(self, inputs: Any, targets: Any) -> ClippedGradient:
        with mock.patch.multiple(self.module, **self.values):
            return super().__call__(inputs, targets)


class WithoutKernels(Ablated):
    """Uses torch's own operations in place of the kernels in C."""

    name = "bk_mixed:without_kernels"
    module: ClassVar[Any] = kernels
    values: ClassVar[dict[str, Any]] = {"cpu": kernels.Missing()}


class WithoutChunks(Ablated):
    """Forms a convolution's input gradient at once."""

    name = "bk_mixed:without_chunks"
    module: ClassVar[Any] = kernels
    values: ClassVar[dict[str, Any]] = {"chunked_conv": kernels.Missing()}


class WithoutOverwriting(Ablated):
    """Allocates memory for each activation gradient."""

    name = "bk_mixed:without_overwriting"
    module: ClassVar[Any] = kernels
    values: ClassVar[dict[str, Any]] = {"overwriting": kernels.Missing()}


class WithoutBatching(Ablated):
    """Sums small gradients parameter by parameter."""

    name = "bk_mixed:without_batching"
    module: ClassVar[Any] = collection
    values: ClassVar[dict[str, Any]] = {"SMALL": math.inf}
