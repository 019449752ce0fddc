"""Starts the process of jax_privacy's steps, hands it weights and a batch as numpy arrays, and talks to it."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clipping import ClippedGradient
from dpbench.measure.jax_peer import Settings, prepare, work
from dpbench.models.workload import Workload
from dpbench.trials.not_here import NotHere
from dpbench.trials.packages import to_be_installed


def unavailable() -> str | None:
    """Why jax_privacy cannot run here, with the remedy; None if it can. Imports nothing."""
    for package in ("jax", "jax_privacy"):
        if importlib.util.find_spec(package) is None:
            return f"expected {to_be_installed(package)}"
    return None


class Process(contextlib.AbstractContextManager["Process"]):
    """The process with one model and batch; a context manager.

    Args:
        workload: its model's parameters are handed over.
        inputs, targets: the batch.
        settings: of the process.
        cuda: whether jax uses a GPU.

    Raises:
        NotHere: jax has no such device.
        RuntimeError: it did not start.
    """

    graphs = None  # torch runs no graph of it

    def __init__(self, workload: Workload, inputs: Tensor, targets: Tensor, settings: Settings, cuda: bool):
        wide = next(workload.model.parameters()).dtype == torch.float64
        variables = {"JAX_ENABLE_X64": str(int(wide)), "JAX_PLATFORMS": "cuda" if cuda else "cpu"}
        variables["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # torch needs the same GPU
        spawn = multiprocessing.get_context("spawn")  # a fork would have torch and its threads
        self._pool = ProcessPoolExecutor(1, spawn, prepare, (variables,))
        try:
            self.versions = self.ask("start", settings=settings, arrays=arrays_of(workload, inputs, targets))
        except BaseException:
            self.close()
            raise

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        """Send a request and wait for the answer.

        Args:
            do: "start", "clip", "compile" or "steps".
            more: its arguments.

        Raises:
            MemoryError: the step needs more memory than there is.
            NotHere: jax has no such device.
            RuntimeError: another error of the process, or its end.
        """
        try:
            told: Any = self._pool.submit(work, do, more).result()
        except BrokenProcessPool:
            raise RuntimeError("jax_privacy's process went away") from None
        if isinstance(told, dict):
            return told
        kind, error = told
        if kind == "MemoryError" or "RESOURCE_EXHAUSTED" in error:
            raise MemoryError(error)
        if "initialize backend" in error:
            raise NotHere(f"jax has no such device here: {error.splitlines()[0]} (pip install 'jax[cuda13]')")
        raise RuntimeError(f"jax_privacy: {kind}: {error}")

    def clipped(self, samples: int) -> ClippedGradient:
        """The clipped sum of the first samples, by PyTorch's names and layouts."""
        told = self.ask("clip", samples=samples)
        grads = {name: torch.from_numpy(np.ascontiguousarray(grad)) for name, grad in told["grads"].items()}
        return ClippedGradient(grads, torch.from_numpy(told["norms"]), torch.from_numpy(told["losses"]))

    def close(self) -> None:
        """End the process."""
        self._pool.shutdown()

    def __exit__(self, *_: object) -> None:
        self.close()


def arrays_of(workload: Workload, inputs: Tensor, targets: Tensor) -> dict[str, np.ndarray]:
    """Trainable parameters, as ``p/NAME``, and the batch as numpy arrays in PyTorch's layouts.

    Tokens and labels become int32, jax's integers.
    """
    tensors: dict[str, Tensor] = {f"p/{name}": p for name, p in workload.model.named_parameters() if p.requires_grad}
    tensors |= {"inputs": inputs, "targets": targets}
    arrays = {name: x.detach().cpu().numpy() for name, x in tensors.items()}
    return {name: x if x.dtype.kind == "f" else x.astype(np.int32) for name, x in arrays.items()}
