"""jax_privacy's whole training step, as a peer of the training steps in torch.

=========  ===========================================================================================
`models`   the benchmark's models as functions in jax, with PyTorch's parameters
`worker`   the process that computes and times the steps; it imports no torch
`handed`   starts that process with weights and a batch as numpy arrays, and talks to it
`entry`    the engine's entry in a `TrainingStepTrial`: verified, timed in turns, recorded
=========  ===========================================================================================
"""

import importlib
import os
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Settings:
    """Settings of the worker's process.

    Attributes:
        model: a key of `dpbench.measure.jax_peer.models.MODELS`.
        options: keyword arguments of its function.
        optimizer: "SGD" or "AdamW".
        max_grad_norm: C.
        precision: of products, as jax calls it: "highest" or "tensorfloat32"; None for jax's default.
        threads: of CPU operations.
        device: number of the device.
        room: bytes that a step may need.
    """

    model: str
    options: dict[str, Any]
    optimizer: str
    max_grad_norm: float
    precision: str | None
    threads: int
    device: int
    room: float


def prepare(variables: dict[str, str]) -> None:
    """Set the environment of the worker's process, before it imports jax.

    Args:
        variables: name -> value.
    """
    os.environ.update(variables)


def work(do: str, more: dict[str, Any]) -> Any:
    """Answer a request in the worker's process.

    Args:
        do, more: see `dpbench.measure.jax_peer.worker.answer`.
    """
    return importlib.import_module("dpbench.measure.jax_peer.worker").answer(do, more)
