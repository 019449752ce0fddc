"""Batches to measure on. Real images by default, and never a download.

=================  ================================================================================================
``digits``         scikit-learn's 1797 handwritten digits, 8x8 grey, ten classes; part of its installation
``cifar10:ROOT``   CIFAR-10's training set, in the python form, as torchvision reads it from ROOT/cifar-10-batches-py
``synthetic``      normal pixels, uniform labels: no information in them, and the same cost
=================  ================================================================================================

Images are resized to S x S (bilinear), given three channels and normalised; labels are taken modulo `num_classes`. The
order of the samples is a permutation seeded by `seed`; a batch larger than the data set cycles through it. A batch of B
starts with the samples of every smaller batch, except for synthetic ones.

Functions that need torch import it: `validate_data` serves the parent process, which must not.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpbench.errors import UsageError, nearest

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DATA = ("digits", "cifar10", "synthetic")
_FORMS = "data: digits, synthetic or cifar10:ROOT"

Statistics = tuple[tuple[float, ...], tuple[float, ...]]
# mean and standard deviation of each channel of the training images, pixels in [0, 1]
DIGITS_STATISTICS: Statistics = ((0.3053,), (0.3760,))
CIFAR10_STATISTICS: Statistics = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


@dataclass(frozen=True)
class _ImageSet:
    """Images [n, C, H, W] with one or three channels and values from 0 to `white`, and labels [n], int64."""

    pixels: Tensor
    labels: Tensor
    white: float
    statistics: Statistics


def validate_data(spec: str) -> None:
    """Check `data` as far as possible without torch: the name, and that ROOT is a folder.

    Raises:
        UsageError: one line.
    """
    kind, root = _split(spec)
    if root is not None and not root.is_dir():
        raise UsageError(f"{kind}:ROOT with ROOT a folder", f"{root}, which is none")


def refuse_images(spec: str, reader: str) -> None:
    """Raise a UsageError if `spec` explicitly names images; the default `digits` passes.

    Args:
        reader: the model, in words.
    """
    if spec not in ("digits", "synthetic"):
        raise UsageError(f"data 'synthetic' for {reader}, which reads seeded random tokens", spec)


def images(
    spec: str, *, image_size: int, num_classes: int, device: str, dtype: torch.dtype, seed: int
) -> Callable[[int], tuple[Tensor, Tensor]]:
    """batch(B) -> (images [B, 3, S, S] of `dtype`, labels [B] int64), both on `device`.

    Raises:
        UsageError: the data set is missing or truncated (also in batch(B), for images read then).
    """
    import torch

    kind, root = _split(spec)
    if kind == "synthetic":

        def synthetic(batch_size: int) -> tuple[Tensor, Tensor]:
            # drawn on the CPU: the same values on every device, and FakeTensorMode's devices may have no generator
            generator = torch.Generator().manual_seed(seed + 1)  # not `seed`, which gives the weights
            labels = torch.randint(num_classes, (batch_size,), generator=generator)
            pixels = torch.randn(batch_size, 3, image_size, image_size, dtype=dtype, generator=generator)
            return pixels.to(device), labels.to(device)

        return synthetic

    source = _READERS[kind](root)
    order = torch.randperm(len(source.labels), generator=torch.Generator().manual_seed(seed)).tolist()

    def batch(batch_size: int) -> tuple[Tensor, Tensor]:
        pixels, labels = _normalised(source, order[:batch_size], image_size)
        pixels = pixels.to(dtype)
        if batch_size > len(source.labels):
            cycle = torch.arange(batch_size) % len(source.labels)
            pixels, labels = pixels[cycle], labels[cycle]
        pixels = pixels.expand(-1, 3, -1, -1)
        return pixels.to(device).contiguous(), (labels % num_classes).to(device)

    return batch


def split(spec: str, *, image_size: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(images [n, C, S, S] float32, labels [n]) for training, and for testing, each image once; C is 1 or 3.

    CIFAR has its own test set. Other data holds out a fifth, by a fixed permutation; `synthetic` has 1000 images.

    Raises:
        UsageError: the data set is missing or truncated.
    """
    import torch

    kind, root = _split(spec)
    if kind == "cifar10":
        parts = [_cifar(root, train) for train in (True, False)]
        train, test = (_normalised(part, list(range(len(part.labels))), image_size) for part in parts)
        return train, test
    if kind == "synthetic":
        batch = images(spec, image_size=image_size, num_classes=10, device="cpu", dtype=torch.float32, seed=1)
        pixels, labels = batch(1000)
    else:
        source = _READERS[kind](root)
        order = torch.randperm(len(source.labels), generator=torch.Generator().manual_seed(1)).tolist()
        pixels, labels = _normalised(source, order, image_size)
    cut = len(labels) - len(labels) // 5
    return (pixels[:cut], labels[:cut]), (pixels[cut:], labels[cut:])


def tokens(
    *, vocabulary: int, length: int, num_classes: int | None, positions: bool = False, device: str, seed: int
) -> Callable[[int], tuple[Any, Tensor]]:
    """batch(B) -> (token ids [B, length], targets), int64, uniformly random.

    Targets are labels [B] below `num_classes`, or, if that is None, the next tokens [B, length]. The first ten ids are
    left out: they include padding and other special tokens.

    Args:
        vocabulary: ids are below it.
        length: of a sequence, in tokens.
        num_classes: labels are below it; None for the next tokens.
        positions: the inputs are keyword arguments, ``input_ids`` and ``position_ids``, [B, length] each.
    """
    import torch

    def batch(batch_size: int) -> tuple[Any, Tensor]:
        generator = torch.Generator().manual_seed(seed + 1)
        first = min(10, vocabulary // 2)
        text = torch.randint(first, vocabulary, (batch_size, length + 1), generator=generator).to(device)
        inputs: Any = text[:, :-1].contiguous()
        if positions:
            inputs = {"input_ids": inputs, "position_ids": torch.arange(length, device=device).repeat(batch_size, 1)}
        if num_classes is None:
            return inputs, text[:, 1:].contiguous()
        return inputs, torch.randint(num_classes, (batch_size,), generator=generator).to(device)

    return batch


def _split(spec: str) -> tuple[str, Path | None]:
    kind, _, root = spec.partition(":")
    if kind not in DATA or (kind in ("digits", "synthetic")) != (kind == spec) or (":" in spec and not root):
        raise UsageError(_FORMS, spec, nearest(kind, DATA) if kind not in DATA else None)
    return kind, Path(os.path.expanduser(root)) if root else None


def _normalised(source: _ImageSet, rows: list[int], image_size: int) -> tuple[Tensor, Tensor]:
    """The images of these rows in this size, of mean 0 and deviation 1, and their labels."""
    import torch
    import torch.nn.functional as F

    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in source.statistics)
    pixels = source.pixels[rows].float() / source.white
    if pixels.shape[-2:] != (image_size, image_size):
        pixels = F.interpolate(pixels, (image_size, image_size), mode="bilinear", antialias=True)
    return (pixels - mean) / std, source.labels[rows]


def _digits(root: Path | None) -> _ImageSet:
    import torch

    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UsageError("scikit-learn to be installed, for data 'digits'", "no such package") from error
    values, labels = load_digits(return_X_y=True)
    pixels, classes = torch.from_numpy(values).view(-1, 1, 8, 8), torch.from_numpy(labels).long()
    return _ImageSet(pixels, classes, 16, DIGITS_STATISTICS)


def _cifar(root: Path | None, train: bool = True) -> _ImageSet:
    import torch
    from torchvision import datasets

    assert root is not None
    try:
        data = datasets.CIFAR10(str(root), train=train, download=False)
    except RuntimeError as error:
        fault = _cifar_fault(datasets.CIFAR10, root)
        if fault is None:
            raise
        raise UsageError(f"CIFAR-10 in its python form in {root / datasets.CIFAR10.base_folder}", fault) from error
    pixels = torch.from_numpy(data.data).permute(0, 3, 1, 2)
    return _ImageSet(pixels, torch.tensor(data.targets), 255, CIFAR10_STATISTICS)


def _cifar_fault(form: Any, root: Path) -> str | None:
    """The reason why torchvision refuses the folder, which its own message lacks."""
    from torchvision.datasets.utils import check_integrity

    folder = root / form.base_folder
    if not folder.is_dir():
        return "no such folder"
    for name, checksum in [*form.train_list, *form.test_list, (form.meta["filename"], form.meta["md5"])]:
        file = folder / name
        if not file.is_file():
            return f"no file {name}"
        if not check_integrity(str(file), checksum):
            return f"{name} of {file.stat().st_size:,} bytes, whose checksum is not the published one: truncated?"
    return None


_READERS: dict[str, Callable[[Path | None], _ImageSet]] = {"digits": _digits, "cifar10": _cifar}
