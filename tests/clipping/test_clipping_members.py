"""The parameters of a model by one walk are those of `named_parameters`, in its order."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrizations

from clipping.core.named_parameters import named_parameters


class Shared(nn.Module):
    """Modules and parameters that are there twice, others that are not there at all, and names set in odd orders."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4)) for _ in range(2)])
        self.again = self.blocks[0]
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.normed = parametrizations.weight_norm(nn.Linear(4, 4))
        self.register_parameter("nothing", None)
        self.register_module("nobody", None)
        self.own = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.own_again = self.own


class Renamed(nn.Linear):
    """Has names of its own."""

    def named_parameters(self, *args, **kwargs):
        yield "other", self.weight


def test_parameters_are_those_of_named_parameters():
    for model in (Shared(), nn.Sequential(Shared(), Shared()), nn.Linear(2, 3), nn.ReLU(), Renamed(2, 3)):
        expected = list(model.named_parameters())
        found = list(named_parameters(model).items())
        assert [name for name, _ in found] == [name for name, _ in expected]
        assert all(a is b for (_, a), (_, b) in zip(found, expected, strict=True))
