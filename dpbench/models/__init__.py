"""Models to measure: the built-in CIFAR-form networks, and references to models that are defined elsewhere.

A reference is one string:

=======================  ==========================================================================================
``resnet18``             a built-in, one of `BUILTIN`
``timm:NAME``            ``timm.create_model``, random weights
``torchvision:NAME``     a classification model of torchvision, random weights
``transformers:NAME``    a model built from its configuration; ``transformers:NAME@T`` for sequences of T tokens
``tiny:HEAD/TYPE``       a type of transformers made small, for what it is trained (`dpbench.models.tiny`)
``path/file.py:factory`` ``factory()`` returns an ``nn.Module`` over images [B, 3, H, W], or a `Workload`
=======================  ==========================================================================================

A NAME may be followed by options, ``?option=value&option=value``: keyword arguments of the constructor for timm and
torchvision, fields of the configuration for transformers. So ``timm:vit_tiny_patch16_224?patch_size=4`` and
``transformers:gpt2?n_layer=6&n_embd=384&n_head=6@1024``. Values are numbers, ``true``, ``false``, ``none``, tuples like
``(3,3,9,3)``, and otherwise text (see `dpbench.models.options`).

Nothing is ever downloaded. Importing this package does not import torch: `BUILTIN`, `validate_reference` and
`required_modules` serve the parent process, which must not.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpbench.errors import UsageError, nearest
from dpbench.trials.packages import SCHEMES, required_modules

if TYPE_CHECKING:
    import torch

__all__ = ["BUILTIN", "ModelError", "Workload", "load_workload", "required_modules", "validate_reference"]

BUILTIN: dict[str, tuple[str, str]] = {
    "cnn": (
        "dpbench.models.cnn:cnn",
        "CNN of Tramèr & Boneh 2021, tanh, 0.55M parameters (Table 4 of arXiv:2205.10683)",
    ),
    "resnet18": ("dpbench.models.resnet:resnet18", "ResNet-18, CIFAR form, GroupNorm, 11.2M parameters"),
    "resnet34": ("dpbench.models.resnet:resnet34", "ResNet-34, CIFAR form, GroupNorm, 21.3M parameters"),
    "resnet50": ("dpbench.models.resnet:resnet50", "ResNet-50, CIFAR form, GroupNorm, 23.5M parameters"),
    "resnet101": ("dpbench.models.resnet:resnet101", "ResNet-101, CIFAR form, GroupNorm, 42.5M parameters"),
    "resnet152": ("dpbench.models.resnet:resnet152", "ResNet-152, CIFAR form, GroupNorm, 58.2M parameters"),
    "wide_resnet": ("dpbench.models.resnet:wide_resnet", "WRN-16-4 of De et al. 2022, GroupNorm, 2.7M parameters"),
    "resnext": ("dpbench.models.resnet:resnext", "ResNeXt-29 32x4d, grouped convolutions, GroupNorm, 4.8M parameters"),
    "vgg11": ("dpbench.models.vgg:vgg11", "VGG-11, CIFAR form, GroupNorm, 9.2M parameters"),
    "vgg13": ("dpbench.models.vgg:vgg13", "VGG-13, CIFAR form, GroupNorm, 9.4M parameters"),
    "vgg16": ("dpbench.models.vgg:vgg16", "VGG-16, CIFAR form, GroupNorm, 14.7M parameters"),
    "vgg19": ("dpbench.models.vgg:vgg19", "VGG-19, CIFAR form, GroupNorm, 20.0M parameters"),
}

_FORMS = "timm:NAME, torchvision:NAME, transformers:NAME, tiny:HEAD/TYPE or path/file.py:factory"


class ModelError(UsageError, ValueError):
    """A reference names a model that cannot be built, or not in the size asked for. One line."""


@dataclass
class Workload:
    """What a training step is measured on.

    model: in train mode, its parameters on `device` in `dtype`.
    loss_fn: (outputs, targets) -> losses [B], no reduction over samples.
    batch: B -> (inputs, targets) with B samples, on the model's device; floating inputs in its dtype. `inputs` is a
        tensor, a tuple (positional) or a dict (keyword arguments). The same B gives the same batch every time.
    """

    model: torch.nn.Module
    loss_fn: Callable[[Any, Any], torch.Tensor]
    batch: Callable[[int], tuple[Any, Any]]


def split_reference(ref: str) -> tuple[str, str]:
    """(scheme, name) of a reference: scheme is "builtin", "timm", "torchvision", "transformers" or "file".

    Raises:
        UsageError: an unknown built-in or scheme, with the nearest known name.
    """
    scheme, colon, name = ref.partition(":")
    path = ref.rpartition(":")[0] or ref
    if path.endswith(".py"):
        return "file", ref
    if not colon:
        if ref not in BUILTIN:
            raise UsageError(f"a model, one of {', '.join(BUILTIN)}, or {_FORMS}", ref, nearest(ref, BUILTIN))
        return "builtin", ref
    if scheme not in SCHEMES:
        raise UsageError(f"a model reference {_FORMS}", ref, nearest(scheme, SCHEMES))
    if not name:
        raise UsageError(f"a model's name after {scheme}:", ref)
    return scheme, name


def split_file(ref: str) -> tuple[Path, str]:
    """(path, factory) of ``path/file.py:factory``.

    Raises:
        UsageError: no factory is named, or there is no such file.
    """
    path, _, factory = ref.rpartition(":")
    if not path.endswith(".py") or not factory.isidentifier():
        raise UsageError("path/file.py:factory", ref)
    file = Path(os.path.expanduser(path))
    if not file.is_file():
        raise UsageError("path/file.py:factory of an existing file", ref)
    return file, factory


def validate_reference(ref: str) -> None:
    """Check what can be checked of a reference without torch: the built-in, the scheme, the file, the form of options.

    Whether timm, torchvision or transformers know the name and the options, and whether the file has such a function,
    shows when the model is built (`load_workload`).

    Raises:
        UsageError: with the nearest known name where there is one.
    """
    from dpbench.models.options import split_options

    scheme, name = split_reference(ref)
    if scheme == "file":
        split_file(name)
    elif scheme != "builtin":
        split_options(name)


def load_workload(
    ref: str,
    *,
    image_size: int = 32,
    num_classes: int = 10,
    data: str = "digits",
    device: str = "cpu",
    dtype: str = "float32",
    seed: int = 0,
) -> Workload:
    """Build the model and its data.

    The weights and the batches are functions of `seed` alone; the global random state is left as it was. Referenced
    models are changed in two ways, alike for every backend and for ordinary training (see `dpbench.models.adapt`):
    BatchNorm becomes GroupNorm, and dropout is off.

    Args:
        ref: see the module's docstring.
        image_size: height and width of the images; the constructor is told where it asks.
        num_classes: labels are 0 .. num_classes-1.
        data: see `dpbench.models.data`. Text models read seeded random tokens whatever `data` says, except that real
            images for a text model are refused.
        device: where the model and the batches lie.
        dtype: "float32", "float64", "bfloat16" or "float16", of the parameters and floating inputs; tokens and labels
            stay int64.
        seed: of the weights, of the order of the samples, and of synthetic values.

    Under ``FakeTensorMode`` it works with data="synthetic" alone.

    Raises:
        UsageError: an unknown name, a missing or truncated data set, a dtype that is none.
        ModelError: (a UsageError and a ValueError) a model that cannot be built so.
    """
    from dpbench.models.loading import load

    return load(ref, image_size=image_size, num_classes=num_classes, data=data, device=device, dtype=dtype, seed=seed)
