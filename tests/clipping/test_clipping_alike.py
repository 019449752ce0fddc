"""Rows that are copies of one another, and made of parameters, are computed once; others are what they were."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clipping import Flat, load_backend
from clipping.provenance.broadcast_once import done_once
from clipping.tape.record import Tape

SAMPLES, C = 3, 0.05


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


FORMS = ("", "of a token", "own rows", "in place", "along the batch", "again")


@pytest.mark.parametrize("form", FORMS)
def test_what_is_expanded_to_the_batch_is_exact(form):
    for backend in ["bk_mixed", "ghost"]:
        model, x, y = Positions(form).double(), torch.randn(SAMPLES, 5, 4).double(), torch.tensor([0, 3, 1])
        parameters = dict(model.named_parameters())
        losses = F.cross_entropy(model(x), y, reduction="none")
        each = [torch.autograd.grad(x, [*parameters.values()], retain_graph=True, allow_unused=True) for x in losses]
        norms = torch.stack([torch.stack([g.norm() for g in grads if g is not None]).norm() for grads in each])
        with load_backend(backend)(
            model, partial(F.cross_entropy, reduction="none"), clip=Flat(C), verify=False
        ) as clipped:
            found = clipped(x, y)
        torch.testing.assert_close(found.norms, norms, rtol=1e-9, atol=0)
        for grads, name in zip(zip(*each, strict=True), parameters, strict=True):
            if grads[0] is not None:
                wanted = sum(g * (C / norm).clamp(max=1) for g, norm in zip(grads, norms, strict=True))
                torch.testing.assert_close(found.grads[name], wanted, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize(("form", "once"), [("", True), ("of a token", True), ("own rows", False), ("in place", False)])
def test_rows_that_are_copies_are_computed_once(form, once):
    model = Positions(form)
    tape = Tape(dict(model.named_parameters()), x := torch.randn(SAMPLES, 5, 4), SAMPLES)
    with tape:
        model(x)
    tape.close()
    sources = [source for use in tape.uses for source, _ in use.rules if "positions.weight" in source.parameters]
    assert [source.tensor.shape[0] == 1 for source in sources] == [once]


@pytest.mark.filterwarnings("ignore:Implicit dimension")
@pytest.mark.parametrize(
    ("func", "args", "kwargs"),
    [
        (F.softmax, (torch.ones(1, 2, 2).expand(3, 2, 2),), {}),  # along the rows, where no dimension is said
        (torch.softmax, (torch.ones(1, 2).expand(3, 2), -2), {}),
        (F.dropout, (torch.ones(1, 2).expand(3, 2),), {}),
        (torch.add, (torch.ones(1, 2).expand(3, 2), torch.ones(3, 2)), {}),
        (torch.sum, (torch.ones(1, 2, 2).expand(3, 2, 2), 1), {}),
    ],
)
def test_operations_whose_rows_are_not_copies_are_not_done_once(func, args, kwargs):
    assert done_once(func, args, kwargs, func(*args, **kwargs), {}) is None


def test_an_operation_in_place_is_not_done_again():
    x, row = torch.full((3, 2), -1.0), torch.full((1, 2), -1.0)
    for args, kwargs in (((x, True), {}), ((), {"input": x, "inplace": True})):
        assert done_once(F.relu, args, kwargs, F.relu(*args, **kwargs), {id(x): row}) is None
    assert (row == -1).all()
