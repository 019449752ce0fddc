"""Turns a reference into a `Workload`: builds the model, moves it to the device, adds loss and batches."""

import functools
import inspect
from typing import Any

import torch
from torch import nn

from clipping.core.batches import map_tensors
from dpbench.errors import nearest, one_of
from dpbench.models import data as datasets
from dpbench.models.adapt import moved, place
from dpbench.models.external import Classifier, file_model, timm_model, torchvision_model
from dpbench.models.language import TextModel, transformers_model
from dpbench.models.losses import classification_loss, token_loss
from dpbench.models.options import split_options
from dpbench.models.references import BUILTIN, split_reference
from dpbench.models.tiny import tiny_model
from dpbench.models.workload import ModelError, Workload
from dpbench.trials.reference import load_object

HARNESS_OPTIONS = ("frozen", "positions")
"""Options of any reference with options, which are the harness' own: see `dpbench.models`."""
DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}


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

    Weights and batches depend on `seed` alone; the global random state is restored. Referenced models are changed for
    all backends and for ordinary training alike (see `dpbench.models.adapt`): BatchNorm becomes GroupNorm, and dropout
    is off. Under ``FakeTensorMode`` only data="synthetic" works.

    Args:
        ref: see `dpbench.models`.
        image_size: height and width of the images, passed to constructors that take it.
        data: see `dpbench.models.data`. Text models always read seeded random tokens; explicit images are an error.
        dtype: "float32", "float64", "bfloat16" or "float16", of the parameters and floating inputs; tokens and labels
            stay int64.

    Raises:
        UsageError: an unknown name, a missing or truncated data set, an unknown dtype.
        ModelError: (a UsageError and a ValueError) the model cannot be built so.
    """
    scheme, name = split_reference(ref)
    kind = DTYPES[one_of("a dtype", dtype, DTYPES)]
    datasets.validate_data(data)  # checked before minutes of building
    options: dict[str, Any] = {}
    if scheme not in ("builtin", "file"):
        name, options = split_options(name)
    own = {key: options.pop(key) for key in HARNESS_OPTIONS if key in options}
    with torch.random.fork_rng(devices=[]):
        # not torch.manual_seed, which also seeds CUDA; models are built on the CPU
        torch.default_generator.manual_seed(seed)
        built = _build(scheme, name, options, num_classes=num_classes, image_size=image_size)
    positions = own.get("positions") is True
    if positions and not (isinstance(built, TextModel) and _reads_positions(built.model)):
        raise ModelError("positions=true for a text model that takes position_ids", ref)
    _freeze(ref, built.model, own.get("frozen", ()))
    if isinstance(built, Workload):
        return Workload(
            place(built.model, device, kind).train(),
            built.loss_fn,
            lambda batch_size: map_tensors(lambda x: moved(x, device, kind), built.batch(batch_size)),
        )
    model = place(built.model, device, kind).train()
    if isinstance(built, TextModel):
        datasets.refuse_images(data, f"the text model {ref}")
        tokens = functools.partial(datasets.tokens, vocabulary=built.vocabulary, length=built.length)
        batch = tokens(num_classes=built.classes, positions=positions, device=device, seed=seed)
        return Workload(model, token_loss if built.classes is None else classification_loss, batch)
    batch = datasets.images(
        data, image_size=image_size, num_classes=built.classes, device=device, dtype=kind, seed=seed
    )
    return Workload(model, classification_loss, batch)


def _reads_positions(model: nn.Module) -> bool:
    return "position_ids" in inspect.signature(model.forward).parameters


def _freeze(ref: str, model: nn.Module, names: str | tuple[str, ...]) -> None:
    """Freeze parameters, named by themselves or by their modules.

    Raises:
        ModelError: no parameter and no module has that name.
    """
    for name in (names,) if isinstance(names, str) else names:
        found = {key: p for key, p in model.named_parameters() if f"{key}.".startswith(f"{name}.")}
        if not found:
            raise ModelError(f"a parameter of {ref} to freeze", name, nearest(name, dict(model.named_parameters())))
        for p in found.values():
            p.requires_grad_(False)


def _build(
    scheme: str, name: str, options: dict[str, Any], *, num_classes: int, image_size: int
) -> Classifier | TextModel | Workload:
    if scheme == "builtin":
        model = load_object(BUILTIN[name][0])(num_classes=num_classes, image_size=image_size)
        return Classifier(model, num_classes)
    if scheme == "file":
        return file_model(name, num_classes=num_classes, image_size=image_size)
    make = {
        "timm": timm_model,
        "torchvision": torchvision_model,
        "transformers": transformers_model,
        "tiny": tiny_model,
    }[scheme]
    return make(name, options, num_classes=num_classes, image_size=image_size)
