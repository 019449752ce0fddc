"""Gradients that are no numbers: no factor clips them, and none of the others' could be told from such a sum."""

from __future__ import annotations

import torch

from clipping.core.types import ClippedGradient

NAMED = 8
"""Records that an error names at the most."""


def require_numbers(found: ClippedGradient) -> None:
    """Refuse a sum that a record has made NaN or infinite; a norm that overflowed has factor 0, and harms nobody.

    On a CPU alone: elsewhere to look would be to wait for the device, and the sum shows it.

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
