"""Reject NaN or infinite gradients, which no factor can clip."""

from __future__ import annotations

import torch

from clipping.core.types import ClippedGradient

NAMED = 8
"""The most records that an error names."""


def require_numbers(found: ClippedGradient) -> None:
    """Reject a sum that a record has made NaN or infinite. A norm that overflowed has factor 0, and is harmless.

    Only on a CPU: on other devices the check would wait for the device, and the sum itself shows NaN.

    Args:
        found: a backend's result.

    Raises:
        FloatingPointError: naming the records by their positions in the batch.
    """
    norms = found.norms
    if norms is None or type(norms) is not torch.Tensor or norms.device.type != "cpu" or bool(norms.isfinite().all()):
        return
    if all(bool(grad.isfinite().all()) for grad in found.grads.values()):
        return
    wrong = norms.isfinite().logical_not().nonzero().flatten().tolist()
    named = ", ".join(map(str, wrong[:NAMED])) + (" ..." if len(wrong) > NAMED else "")
    raise FloatingPointError(
        f"expected gradients that are numbers, got NaN or infinity in that of record{'s' if len(wrong) > 1 else ''} "
        f"{named} of the batch of {len(norms)}: leave it out, or look for what overflows in the model"
    )
