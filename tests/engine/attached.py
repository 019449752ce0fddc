"""A model under an engine, as most tests of the engine begin."""

import re
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dpbench import PrivacyEngine, PrivacyWarning
from dpbench.conformance.cases import cross_entropy  # noqa: F401  # of most tests

SETTINGS = {"batch_size": 8, "sample_size": 64, "max_grad_norm": 1.0, "noise_multiplier": 1.0}


def small():
    """[B, 5] -> [B, 3]."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def attached(model=None, kind=torch.optim.SGD, lr=1.0, attach=True, **changes):
    """(model, optimizer, engine), without a warning that seeded noise is not private."""
    model = small() if model is None else model
    optimizer, engine = kind(model.parameters(), lr=lr), PrivacyEngine(model, **SETTINGS | changes)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*not private", PrivacyWarning)
        if attach:
            engine.attach(optimizer)
    return model, optimizer, engine


def batch(count, seed=0):
    """(x [count, 5], y [count] of 3 classes)."""
    numbers = torch.Generator().manual_seed(seed)
    return torch.randn(count, 5, generator=numbers), torch.randint(0, 3, (count,), generator=numbers)


def data(count=64):
    return TensorDataset(*batch(count, seed=1))


def parameters(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def says(kind, pattern):
    """The whole message is one line."""
    return pytest.raises(kind, match=re.compile(rf"^(?=[^\n]*\Z).*{pattern}"))
