"""Write a CIFAR-10 of a few images in the real layout, with the checksums that torchvision checks."""

import hashlib
import pickle
from pathlib import Path

import numpy as np
from torchvision import datasets


def write(folder: Path, monkeypatch, train: list, test: tuple) -> Path:
    """Write pickled batches below `folder`. `train`: five pairs (pixels [n, 3, 32, 32] uint8, labels); `test`: one."""
    root = folder / "cifar-10-batches-py"
    root.mkdir()

    def file(name, content):
        (root / name).write_bytes(pickle.dumps(content))
        return hashlib.md5((root / name).read_bytes()).hexdigest()

    def batch(name, part):
        pixels, labels = part
        return [name, file(name, {"data": np.asarray(pixels).reshape(len(labels), 3072), "labels": list(labels)})]

    listed = [batch(f"data_batch_{i + 1}", part) for i, part in enumerate(train)]
    meta = file("batches.meta", {"label_names": [str(i) for i in range(10)]})
    monkeypatch.setattr(datasets.CIFAR10, "train_list", listed)
    monkeypatch.setattr(datasets.CIFAR10, "test_list", [batch("test_batch", test)])
    monkeypatch.setattr(datasets.CIFAR10, "meta", {"filename": "batches.meta", "key": "label_names", "md5": meta})
    return folder
