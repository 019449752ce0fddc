"""Arithmetic by precision profile: the dtype of model and data, TF32, and autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def dtype_of(precision: str) -> torch.dtype:
    """The dtype of parameters and floating inputs."""
    return torch.bfloat16 if precision == "bfloat16" else torch.float32


@contextmanager
def arithmetic(precision: str) -> Iterator[None]:
    """Products of float32 on CUDA with TF32 in the profile of that name, and in full in any other, while this lasts."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """What goes around a forward pass and its losses."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16-autocast")
