"""Arithmetic by precision profile: the dtype of model and data, TF32, and autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def dtype_of(precision: str) -> torch.dtype:
    """The dtype of parameters and floating inputs."""
    return torch.bfloat16 if precision == "bfloat16" else torch.float32


@contextmanager
def in_precision(precision: str, device: torch.device) -> Iterator[None]:
    """The profile's arithmetic, while this lasts."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = precision == "tf32"
    try:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16-autocast"):
            yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
