"""Rows that are copies of one another, and made of parameters, are computed once; others are what they were."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clipping import Flat, load_backend

SAMPLES = 3


class Positions(nn.Module):
    """Attention with scores of positions that are expanded to the batch before they are used, as ConViT has."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.form = form
        self.qk, self.v, self.positions = nn.Linear(4, 8), nn.Linear(4, 4), nn.Linear(3, 2)
        self.norm, self.gate, self.token = (
            nn.LayerNorm(2),
            nn.Parameter(torch.randn(2)),
            nn.Parameter(torch.randn(5, 2)),
        )
        self.register_buffer("between", torch.randn(1, 5, 5, 3))

    def scores(self, batch_size: int) -> Tensor:
        found = self.positions(self.between.expand(batch_size, -1, -1, -1))
        if self.form == "of a token":
            token = self.norm(self.token.expand(batch_size, -1, -1))
            found = found + torch.matmul(token, token.transpose(1, 2)).unsqueeze(-1)
        if self.form == "own rows":  # each sample's scores are others: nothing is a copy
            found = found * torch.linspace(1, 2, batch_size).view(-1, 1, 1, 1).to(found)
        if self.form == "in place":
            found.mul_(torch.linspace(1, 2, batch_size).view(-1, 1, 1, 1).to(found))
        if self.form == "along the batch":
            return found.permute(0, 3, 1, 2).softmax(dim=0) + found.permute(0, 3, 1, 2)
        return F.softmax(found.permute(0, 3, 1, 2), dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.qk(x).view(*x.shape[:2], 2, 2, 2).permute(2, 0, 3, 1, 4)
        gate = torch.sigmoid(self.gate).view(1, -1, 1, 1)
        scores = checkpoint(self.scores, len(x), use_reentrant=False) if self.form == "again" else self.scores(len(x))
        mixed = (1 - gate) * (q @ k.transpose(-2, -1)).softmax(-1) + gate * scores
        return (mixed @ self.v(x).view(*x.shape[:2], 2, 2).transpose(1, 2)).flatten(1)


@pytest.mark.parametrize("form", ["", "of a token", "own rows", "in place", "along the batch", "again"])
def test_what_is_expanded_to_the_batch_is_exact(form):
    model, x, y = Positions(form).double(), torch.randn(SAMPLES, 5, 4).double(), torch.tensor([0, 3, 1])
    loss, clip = partial(F.cross_entropy, reduction="none"), Flat(0.05)
    names, parameters = zip(*model.named_parameters(), strict=True)
    wanted = [
        torch.autograd.grad(each, parameters, retain_graph=True, materialize_grads=True) for each in loss(model(x), y)
    ]
    norms = torch.stack([torch.stack([g.norm() for g in grads]).norm() for grads in wanted])
    for backend in ["bk_mixed", "ghost"]:
        with load_backend(backend)(model, loss, clip=clip, verify=False) as clipped:
            found = clipped(x, y)
        torch.testing.assert_close(found.norms, norms, rtol=1e-9, atol=0)
        for name, grads in zip(names, zip(*wanted, strict=True), strict=True):
            expected = sum(f * grad for f, grad in zip(clip.factors(norms), grads, strict=True))
            torch.testing.assert_close(found.grads[name], expected, rtol=1e-8, atol=1e-12)
