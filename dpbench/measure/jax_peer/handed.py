"""Starts the process of jax_privacy's steps, hands it weights and a batch as numpy arrays, and talks to it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clipping import ClippedGradient
from dpbench.models.workload import Workload
from dpbench.trials.not_here import NotHere
from dpbench.trials.packages import to_be_installed

WORKER = "dpbench.measure.jax_peer.worker"
#: Seconds that the process has to end after its input.
PATIENCE = 5.0


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
        settings: the fields of `dpbench.measure.jax_peer.worker.Settings`.
        cuda: whether jax uses a GPU.

    Raises:
        NotHere: jax has no such device.
        RuntimeError: it did not start.
    """

    graphs = None  # torch runs no graph of it

    def __init__(self, workload: Workload, inputs: Tensor, targets: Tensor, settings: dict[str, Any], cuda: bool):
        self._folder = tempfile.TemporaryDirectory()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        path = Path(self._folder.name) / "batch.npz"
        hand_over(path, workload, inputs, targets)
        wide = next(workload.model.parameters()).dtype == torch.float64
        variables = {"JAX_ENABLE_X64": str(int(wide)), "JAX_PLATFORMS": "cuda" if cuda else "cpu"}
        variables["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # torch needs the same GPU
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", WORKER, str(path), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=os.environ | variables | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            text=True,
        )
        try:
            self.versions: dict[str, str] = self._answer()["versions"]
        except BaseException:
            self.close()
            raise

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        """Send a request and wait for the answer.

        Args:
            do: "clip", "compile" or "steps".
            more: its arguments.

        Raises:
            MemoryError: the step needs more memory than there is.
            RuntimeError: another error of the process, or its end.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"do": do} | more) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def clipped(self, samples: int) -> ClippedGradient:
        """The clipped sum of the first samples, by PyTorch's names and layouts."""
        path = Path(self._folder.name) / "clipped.npz"
        self.ask("clip", samples=samples, to=str(path))
        with np.load(path) as arrays:
            found = {name: torch.from_numpy(np.ascontiguousarray(arrays[name])) for name in arrays.files}
        grads = {name[2:]: grad for name, grad in found.items() if name.startswith("p/")}
        return ClippedGradient(grads, found["norms"], found["losses"])

    def close(self) -> None:
        """End the process."""
        try:
            self._process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._log.close()
        self._folder.cleanup()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._log.seek(0)
            said = self._log.read().decode(errors="replace").strip().splitlines()[-3:]
            raise RuntimeError(f"jax_privacy's process ended with code {code}: {' | '.join(said)}")
        told: dict[str, Any] = json.loads(line)
        if "error" not in told:
            return told
        if told["kind"] == "MemoryError" or "RESOURCE_EXHAUSTED" in told["error"]:
            raise MemoryError(told["error"])
        if "initialize backend" in told["error"]:
            raise NotHere(f"jax has no such device here: {told['error'].splitlines()[0]} (pip install 'jax[cuda13]')")
        raise RuntimeError(f"jax_privacy: {told['kind']}: {told['error']}")


def hand_over(path: Path, workload: Workload, inputs: Tensor, targets: Tensor) -> None:
    """Write trainable parameters, as ``p/NAME``, and the batch as numpy arrays in PyTorch's layouts.

    Tokens and labels become int32, jax's integers.

    Args:
        path: of the npz file.
        workload: with the model.
        inputs, targets: the batch.
    """
    arrays: dict[str, Tensor] = {f"p/{name}": p for name, p in workload.model.named_parameters() if p.requires_grad}
    arrays |= {"inputs": inputs, "targets": targets}
    plain = {name: x.detach().cpu().numpy() for name, x in arrays.items()}
    given = {name: x if x.dtype.kind == "f" else x.astype(np.int32) for name, x in plain.items()}
    np.savez(path, **given)  # type: ignore[arg-type]
