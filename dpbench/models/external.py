"""Image models from elsewhere: timm, torchvision, and a function in the user's own file.

Any error while such a model is built, or processes its first image, becomes a `ModelError` of one line with the
original as its cause: most often the images are smaller than the architecture allows.

Functions take:
    name: of the model, in its library.
    options: of the reference: name -> value.
"""

import inspect
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from dpbench.errors import nearest
from dpbench.models.adapt import adapt, to_fake
from dpbench.models.options import refuse_taken, refuse_unknown
from dpbench.models.own import hinting, one_line, own_workload
from dpbench.models.references import FACTORY
from dpbench.models.workload import ModelError, Workload
from dpbench.trials.packages import to_be_installed
from dpbench.trials.reference import importable, load_module, split_file


@dataclass
class Classifier:
    """A model over images [B, 3, S, S] with logits [B, K], K >= classes; labels must be 0 .. classes-1."""

    model: nn.Module
    classes: int


def timm_model(name: str, options: dict[str, Any], *, num_classes: int, image_size: int) -> Classifier:
    """`timm.create_model` with these options and random weights; img_size is passed to architectures that take it.

    Raises:
        ModelError: timm is missing, has no such model or no such option, or cannot build it for such images.
    """
    with one_line(to_be_installed("timm")):
        import timm
    refuse_taken(f"timm:{name}", options, ("pretrained", "num_classes", "img_size", "in_chans"))
    if not timm.is_model(name):  # checked first: create_model would download "hf-hub:..."
        raise ModelError("a model that timm knows", name, nearest(name, timm.list_models()))

    def make() -> nn.Module:
        try:
            return timm.create_model(name, pretrained=False, num_classes=num_classes, img_size=image_size, **options)
        except TypeError as error:
            if "'img_size'" not in str(error):
                raise
        return timm.create_model(name, pretrained=False, num_classes=num_classes, **options)

    return classifier(f"timm:{name}", make, options, num_classes=num_classes, image_size=image_size)


def torchvision_model(name: str, options: dict[str, Any], *, num_classes: int, image_size: int) -> Classifier:
    """A classification model of torchvision, with these options and random weights.

    Raises:
        ModelError: torchvision is missing, has no such model or no such option, or cannot build it for such images.
    """
    with one_line(to_be_installed("torchvision")):
        from torchvision import models
    names = models.list_models(module=models)
    if name not in names:
        raise ModelError("a classification model that torchvision knows", name, nearest(name, names))
    ours: dict[str, Any] = {"weights": None, "num_classes": num_classes}
    if name.startswith("vit_"):
        ours["image_size"] = image_size
    elif name.startswith("maxvit"):
        ours["input_size"] = (image_size, image_size)
    elif name in ("googlenet", "inception_v3"):
        ours |= {"aux_logits": False, "init_weights": False}  # one output, as for all models; their own init is slow
    refuse_taken(f"torchvision:{name}", options, ours)
    make = partial(models.get_model, name, **ours, **options)
    return classifier(f"torchvision:{name}", make, options, num_classes=num_classes, image_size=image_size)


def file_model(ref: str, *, num_classes: int, image_size: int) -> Classifier | Workload:
    """Call ``factory()`` of ``path/file.py:factory``.

    It returns an nn.Module over images, a `Workload`, or a tuple of a model, (inputs, targets) and perhaps a loss
    function (`dpbench.models.own`). The file can import its neighbours. A model with fewer than `num_classes` logits
    gets labels below their number.

    Args:
        ref: ``path/file.py:factory``.

    Raises:
        ModelError: no such function; the file or the function raises, or returns something else.
    """
    path, name = split_file(ref, FACTORY)
    with unset_fake_temporarily() as mode, importable(path):
        with one_line(f"{path} to import", path):
            module = load_module(str(path))
        factory = getattr(module, name, None)
        if not callable(factory):
            functions = [key for key, value in vars(module).items() if callable(value)]
            raise ModelError(f"a function that {path} has", name, nearest(name, functions))
        with hinting() if _asks(factory) else nullcontext(), one_line(f"{name}() of {path} to return a model", path):
            result = factory()
        with hinting():
            if isinstance(result, tuple) and len(result) > 1:
                result = own_workload(f"{name}() of {path}", result)
            model = result.model if isinstance(result, Workload) else result
            if not isinstance(model, nn.Module):
                raise ModelError(f"{name}() of {path} to return an nn.Module or a Workload", type(result).__name__)
        model = adapt(model)
    model = to_fake(model, mode)
    if isinstance(result, Workload):
        return Workload(model, result.loss_fn, result.batch)
    with hinting():
        return Classifier(model, min(num_classes, _count_logits(ref, model, image_size)))


def _asks(factory: Callable[..., Any]) -> bool:
    """True if a function has required arguments."""
    try:
        inspect.signature(factory).bind()
    except TypeError:
        return True
    except ValueError:  # a C function without a signature
        pass
    return False


def classifier(
    ref: str, make: Callable[[], nn.Module], options: Collection[str] = (), *, num_classes: int, image_size: int
) -> Classifier:
    """Build a model, adapt it, and try it on one image.

    Args:
        make: builds the model; runs on real tensors even under FakeTensorMode.
        options: names of the reference's options.

    Raises:
        ModelError: it cannot be built, lacks one of the `options`, or fails on an image of this size.
    """
    with unset_fake_temporarily() as mode:
        with one_line(f"{ref} to build for {image_size}x{image_size} images"):
            try:
                model = make()
            except TypeError as error:
                refuse_unknown(ref, error, options)
                raise
        model = adapt(model)
    model = to_fake(model, mode)
    return Classifier(model, min(num_classes, _count_logits(ref, model, image_size)))


def _count_logits(ref: str, model: nn.Module, image_size: int) -> int:
    """K of the logits [1, K] for one image, with the model's own dtype and device."""
    first = next(model.parameters(), torch.empty(0))
    with one_line(f"{ref} to take {image_size}x{image_size} images"), torch.no_grad():
        outputs = model(torch.zeros(1, 3, image_size, image_size, dtype=first.dtype, device=first.device))
    outputs = getattr(outputs, "logits", outputs)
    if not isinstance(outputs, torch.Tensor) or outputs.dim() != 2 or outputs.shape[0] != 1:
        came = tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
        raise ModelError(f"{ref} to turn one image into logits [1, classes]", came)
    return outputs.shape[1]
