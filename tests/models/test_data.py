"""Batches: digits are the digits, CIFAR is read as it lies, and what is said when they cannot be."""

import re
import shutil
import sys

import fake_cifar
import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from dpbench.errors import UsageError
from dpbench.models import data


def batches(spec, image_size=32, num_classes=10, dtype=torch.float32, seed=0):
    return data.images(spec, image_size=image_size, num_classes=num_classes, device="cpu", dtype=dtype, seed=seed)


def denormalised(pixels, statistics):
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in statistics)
    return pixels * std + mean


def test_digits_are_scikit_learns_with_their_labels():
    truth = load_digits()
    label_of = {image.astype(int).tobytes(): label for image, label in zip(truth.images, truth.target, strict=True)}
    pixels, labels = batches("digits", image_size=8)(1797)
    assert torch.equal(pixels[:, 0], pixels[:, 2])
    grey = (denormalised(pixels[:, :1], data.DIGITS_STATISTICS) * 16).round().long().numpy()
    assert [label_of[image.tobytes()] for image in grey] == labels.tolist()
    assert labels.bincount().tolist() == np.bincount(truth.target).tolist()


def test_digits_are_resized_and_normalised():
    pixels, _ = batches("digits", image_size=8)(1797)
    assert abs(pixels.mean()) < 1e-3
    assert abs(pixels.std() - 1) < 1e-3
    large, _ = batches("digits", image_size=32)(1797)
    assert large.shape == (1797, 3, 32, 32)
    torch.testing.assert_close(torch.nn.functional.avg_pool2d(large, 4).mean(0), pixels.mean(0), rtol=0.2, atol=0.2)


def test_digits_without_scikit_learn_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(UsageError, match=r"^expected scikit-learn to be installed, for data 'digits', got"):
        batches("digits")


@pytest.mark.parametrize("spec", ["digits", "synthetic"])
def test_a_batch_is_the_same_every_time_and_follows_the_seed(spec):
    batch = batches(spec)
    (first, labels), (again, labels_again), (other, _) = batch(7), batch(7), batches(spec, seed=1)(7)
    assert torch.equal(first, again)
    assert torch.equal(labels, labels_again)
    assert not torch.equal(first, other)


def test_batches_cycle_through_the_data_and_begin_alike():
    batch = batches("digits", image_size=8)
    pixels, labels = batch(4000)
    assert torch.equal(pixels[:1797], pixels[1797:3594])
    assert torch.equal(labels[:406], labels[3594:])
    assert torch.equal(batch(5)[0], pixels[:5])
    assert not torch.equal(pixels[0], pixels[1])


@pytest.mark.parametrize("spec", ["digits", "synthetic"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_types_shapes_and_label_range(spec, dtype):
    pixels, labels = batches(spec, image_size=12, num_classes=3, dtype=dtype)(40)
    assert (pixels.shape, pixels.dtype) == ((40, 3, 12, 12), dtype)
    assert pixels.is_contiguous()
    assert labels.dtype == torch.int64
    assert set(labels.tolist()) == {0, 1, 2}


def test_tokens_shift_by_one_or_carry_labels():
    options = {"vocabulary": 30, "length": 16, "device": "cpu", "seed": 0}
    text, following = data.tokens(num_classes=None, **options)(50)
    assert torch.equal(text[:, 1:], following[:, :-1])
    assert (text.min(), text.max()) == (10, 29)
    text, labels = data.tokens(num_classes=4, **options)(50)
    assert (text.shape, set(labels.tolist())) == ((50, 16), {0, 1, 2, 3})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("digit", "got 'digit'; did you mean 'digits'?"),
        ("cifar10", "expected data: digits, synthetic or cifar10:ROOT, got 'cifar10'"),
        ("cifar10:", "or cifar10:ROOT, got 'cifar10:'"),
        ("digits:/tmp", "got 'digits:/tmp'"),
        ("cifar10:/no/such", "expected cifar10:ROOT with ROOT a folder, got '/no/such, which is none'"),
    ],
)
def test_unusable_names_are_one_line(spec, message):
    with pytest.raises(UsageError, match=re.escape(message) + "$"):
        data.validate_data(spec)


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    """CIFAR-10 of five batches of four images, image i of value 10·i in red and 0 elsewhere, label i mod 10."""

    def batch(first):
        pixels = np.zeros((4, 3, 32, 32), dtype=np.uint8)
        pixels[:, 0] = 10 * np.arange(first, first + 4)[:, None, None]
        return pixels, [i % 10 for i in range(first, first + 4)]

    return fake_cifar.write(tmp_path, monkeypatch, [batch(4 * i) for i in range(5)], batch(20))


def numbers(pixels):
    """Of images of the CIFAR-10 above."""
    values = denormalised(pixels, data.CIFAR10_STATISTICS) * 25.5
    assert values[:, 1:].abs().max() < 1e-4
    return values[:, 0, 5, 7].round().long().tolist()


def test_cifar_is_read_as_it_lies_and_has_a_test_set_of_its_own(cifar):
    pixels, labels = batches(f"cifar10:{cifar}")(20)
    found = numbers(pixels)
    assert sorted(found) == list(range(20)) != found and labels.tolist() == [number % 10 for number in found]
    (x, y), (test_x, test_y) = data.split(f"cifar10:{cifar}", image_size=32)
    assert numbers(x) == list(range(20)) and y.tolist() == 2 * list(range(10))
    assert numbers(test_x) == [20, 21, 22, 23] and test_y.tolist() == [0, 1, 2, 3]


def test_a_fifth_of_other_data_is_held_out():
    (x, y), (test_x, test_y) = data.split("digits", image_size=8)
    assert x.shape == (1438, 1, 8, 8) and test_x.shape == (359, 1, 8, 8) and len(y) == 1438 and len(test_y) == 359
    assert len(torch.cat([x, test_x]).flatten(1).unique(dim=0)) > 1790  # each once, but for a few that are equal


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: shutil.rmtree(file.parent), "got 'no such folder'"),
        (lambda file: file.unlink(), "got 'no file data_batch_3'"),
        (
            lambda file: file.write_bytes(file.read_bytes()[:2000]),
            "got 'data_batch_3 of 2,000 bytes, whose checksum is",
        ),
    ],
)
def test_incomplete_cifar_is_one_line(cifar, damage, message):
    damage(cifar / "cifar-10-batches-py" / "data_batch_3")
    with pytest.raises(UsageError) as caught:
        batches(f"cifar10:{cifar}")
    assert str(caught.value).startswith(
        f"expected CIFAR-10 in its python form in {cifar}/cifar-10-batches-py, {message}"
    )
