"""Turns a trial into a step that can be run, and defines the record of its memory."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clipping import Backend
from clipping.core.batches import tensors_of
from clipping.core.types import LossFunction
from clipping.program.graphs import Graphs
from dpbench.measure.precision import autocasting
from dpbench.models.loading import load_workload
from dpbench.models.workload import Workload
from dpbench.trials import CheckTrial, ConfirmTrial, OverheadTrial, PeakTrial, StepTrial
from dpbench.trials.evidence import PartsTrial, ProfileTrial
from dpbench.trials.precision import profile_of

FORWARD, BACKWARD = "forward", "backward"
NAMES = ("model", FORWARD, BACKWARD, "step")
"""In the order of a record: permanent memory, and the peaks of the forward pass, the rest, and the whole step."""


def open_workload(
    trial: StepTrial | OverheadTrial | PeakTrial | ConfirmTrial | CheckTrial | PartsTrial | ProfileTrial,
    device: str | None = None,
) -> Workload:
    """Load the model and data of a trial in its precision, except for TF32.

    TF32 is a switch of the whole process: see `dpbench.measure.precision.arithmetic`.

    Args:
        device: "cpu" or "cuda"; None for the trial's own.
    """
    wanted = ("image_size", "num_classes", "data", "dtype", "seed")
    settings = {name: getattr(trial, name) for name in wanted if getattr(trial, name, None) is not None}
    where = device or trial.device
    if isinstance(trial, CheckTrial):
        return load_workload(trial.model, device=where, **settings)
    profile = profile_of(trial.precision)
    workload = load_workload(trial.model, device=where, dtype=profile.dtype, **settings)
    return workload if profile.autocast is None else autocasting(workload, profile.autocast, torch.device(where))


@dataclass
class Step:
    """One training step, ready to run: `step()` computes the gradients of the batch and keeps only the losses [B]."""

    backend: Backend
    inputs: Any
    targets: Any
    losses: Tensor | None = None

    def __call__(self) -> None:
        self.losses = self.backend(self.inputs, self.targets).losses

    def close(self) -> None:
        """Remove the backend's hooks from the model."""
        self.backend.close()

    @property
    def graphs(self) -> Graphs | None:
        """The graphs that run it; None if it runs eagerly."""
        return self.backend.graphs

    def holds(self) -> list[Tensor]:
        """Tensors that live before and after the step: parameters, buffers and the batch."""
        model = self.backend.model
        return [*model.parameters(), *model.buffers(), *tensors_of((self.inputs, self.targets))]


@dataclass(frozen=True)
class Memory:
    """Peak memory of a step, in bytes.

    Attributes:
        source: "cuda_allocator", "cpu_allocator" or "simulated". They count different things: compare within one.
        peak_bytes: the most alive at once, including the baseline and, on CUDA, the pools of CUDA graphs.
        baseline_bytes: parameters, buffers and the batch.
        reserved_bytes: CUDA's peak of memory reserved from the card.
        phases: the peak of each part of the step (`Phases`), if recorded.
    """

    source: str
    peak_bytes: int
    baseline_bytes: int
    reserved_bytes: int | None = None
    phases: dict[str, int] | None = None

    def as_record(self) -> dict[str, Any]:
        """Its fields by name, without fields that are None."""
        return {name: value for name, value in asdict(self).items() if value is not None}


class Phases:
    """Reports the running phase of a step: forward, from a call of the model to its loss, or backward, all else.

    Phases are detected by a hook on the model and by the loss function, for any backend.

    Attributes:
        entered: called with FORWARD or BACKWARD when that phase begins.
    """

    def __init__(self) -> None:
        self.entered: Callable[[str], None] = lambda phase: None

    @contextmanager
    def watched(self, model: nn.Module, loss_fn: LossFunction) -> Iterator[LossFunction]:
        """Hook the model, and yield the loss function to open a backend with; unhook afterwards.

        Args:
            loss_fn: (outputs, targets) -> [B].
        """

        def loss_of(outputs: Any, targets: Any) -> Any:
            losses = loss_fn(outputs, targets)
            self.entered(BACKWARD)
            return losses

        handle = model.register_forward_pre_hook(lambda *_: self.entered(FORWARD))
        try:
            yield loss_of
        finally:
            handle.remove()


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind tensors; a shared storage counts once, in full.

    Args:
        tensors: with a storage each.
    """
    return sum({s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


def parameter_count(model: nn.Module) -> int:
    """Number of entries of all trainable parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def device_of(name: str) -> torch.device:
    """The device called `name`, with an index on CUDA. A card becomes the current one, whose streams events mark.

    Args:
        name: "cpu", "cuda" or "cuda:1".
    """
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if device.index is not None:
        torch.cuda.set_device(device)
    return torch.device("cuda", torch.cuda.current_device())
