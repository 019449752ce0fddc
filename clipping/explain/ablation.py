"""`bk_mixed` with one optimisation removed; the experiment `ablation` measures the effect of each."""

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


def _without(part: str, module: Any, **values: Any) -> type[Ablated]:
    name = f"Without{part.capitalize()}"
    return type(name, (Ablated,), {"name": f"bk_mixed:without_{part}", "module": module, "values": values})


WithoutKernels = _without("kernels", kernels.cpu, supported=lambda *tensors: False)
"""Uses torch's own operations in place of the kernels in C."""
WithoutChunks = _without("chunks", kernels, chunked_conv=kernels.Missing())
"""Forms a convolution's input gradient at once."""
WithoutOverwriting = _without("overwriting", kernels, overwriting=kernels.Missing())
"""Allocates memory for each activation gradient."""
WithoutBatching = _without("batching", collection, SMALL=math.inf)
"""Sums small gradients parameter by parameter."""
