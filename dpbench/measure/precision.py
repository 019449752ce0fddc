"""Applies a precision profile (`dpbench.trials.precision`) to torch, and reads torch's switches.

TF32 is switched for cuBLAS and cuDNN together: torch's default has it on in cuDNN and off in cuBLAS, which is neither
profile. Autocast wraps the forward pass and the losses, not the backward pass, which runs in the same dtypes anyway.
"""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor

from clipping.core.batches import forward, map_tensors
from clipping.core.dtypes import formats
from dpbench.models.workload import Workload
from dpbench.trials.not_here import NotHere
from dpbench.trials.precision import Profile, profile_of

T = TypeVar("T")

#: NVIDIA's own switch overrides torch's in cuBLAS and cuDNN: "0" for no TF32, "1" for TF32 everywhere.
OVERRIDE = "NVIDIA_TF32_OVERRIDE"


def dtype_of(precision: str) -> torch.dtype:
    """The dtype of parameters and floating inputs."""
    dtype = getattr(torch, profile_of(precision).dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


@contextmanager
def arithmetic(precision: str, device: torch.device) -> Iterator[None]:
    """Set TF32 as the profile requires, inside the context.

    Raises:
        NotHere: the device lacks the profile, or the environment forbids it. Another profile is never used silently.
    """
    profile = profile_of(precision)
    _require(profile, device)
    with tf32(profile.tf32):
        yield


def _require(profile: Profile, device: torch.device) -> None:
    if profile.tf32 and device.type != "cuda":
        raise NotHere(f"TF32 is a format of CUDA's tensor cores, and {device.type} has none: run on --device cuda")
    if device.type != "cuda" or not torch.cuda.is_available():
        return
    if profile.tf32 and torch.cuda.get_device_capability(device) < (8, 0):
        raise NotHere(f"TF32 needs compute capability 8.0, and {torch.cuda.get_device_name(device)} has less")
    said = os.environ.get(OVERRIDE)
    if said is not None and profile.dtype == "float32" and (said != "0") != profile.tf32:
        raise NotHere(f"expected {OVERRIDE} unset for precision {profile.name}, got {said}: it overrules torch")


@contextmanager
def tf32(on: bool) -> Iterator[None]:
    """Allow TF32 on CUDA, or compute float32 in full on every device; restore the switches afterwards.

    torch has an older and a newer interface, and may refuse to read one if the other was set. The older one sets both;
    only the newer one can always be read.

    Args:
        on: allow TF32.
    """
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    parts = [matmul, cudnn.conv, cudnn.rnn]  # type: ignore[attr-defined]
    before = [part.fp32_precision for part in parts]
    highest, allowed = _if_readable(torch.get_float32_matmul_precision), _if_readable(lambda: cudnn.allow_tf32)
    torch.set_float32_matmul_precision("highest")  # a CPU's library may round, too
    matmul.allow_tf32 = cudnn.allow_tf32 = on
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(highest or "highest")
        cudnn.allow_tf32 = bool(allowed)
        for part, precision in zip(parts, before, strict=True):
            part.fp32_precision = precision


def _if_readable(switch: Callable[[], T]) -> T | None:
    """None if only the newer interface was used, and the older has no equivalent."""
    try:
        return switch()
    except RuntimeError:
        return None


def autocasting(workload: Workload, dtype: str, device: torch.device) -> Workload:
    """Make the forward pass and the losses run under torch.autocast; this changes the model itself.

    Args:
        dtype: torch's name for the dtype that products use.
    """
    model = workload.model
    around = functools.partial(_under, device.type, getattr(torch, dtype))
    own = model.forward
    if isinstance(own, MethodType):  # keep it a method, which a copy of the model (as by Opacus) binds to the copy
        model.forward = MethodType(around(own.__func__), model)
    else:
        model.forward = around(own)
    return Workload(model, around(workload.loss_fn), workload.batch)


def _under(device: str, dtype: torch.dtype, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, dtype):
            return function(*args, **kwargs)

    return run


def facts(precision: str, workload: Workload, inputs: Any, targets: Any) -> dict[str, Any]:
    """Read torch's switches, and the dtypes in which the losses of a batch's first samples are computed.

    {"profile", "parameters": [dtypes], "computed": [dtypes], "tf32": {"cublas", "cudnn"}, "matmul", "override"}: "tf32"
    has torch's words ("ieee" and "none" mean full float32), "matmul" its `float32_matmul_precision`, which affects a
    CPU as well, "override" the environment's NVIDIA_TF32_OVERRIDE or None.
    """
    few, target = map_tensors(lambda x: x[:2], (inputs, targets))
    with torch.enable_grad():
        losses: Tensor = workload.loss_fn(forward(workload.model, few), target)
    cudnn = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    return {
        "profile": precision,
        "parameters": _names({p.dtype for p in workload.model.parameters()}),
        "computed": _names(formats(losses)),
        "tf32": {"cublas": torch.backends.cuda.matmul.fp32_precision, "cudnn": cudnn.fp32_precision},
        "matmul": torch.get_float32_matmul_precision(),
        "override": os.environ.get(OVERRIDE),
    }


def _names(dtypes: set[torch.dtype]) -> list[str]:
    return sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)
