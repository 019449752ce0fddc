"""Gradients of what was made of parameters, pulled back to them; rows that are copies of one another, once."""

import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clipping import Flat, compare, load_backend
from clipping.backends.recording import one_by_one
from clipping.core.reference import definition
from clipping.tape.record import Tape
from dpbench.conformance.modules import Net

SAMPLES = 3
INDEX = torch.tensor([[0, 4, 4], [2, 0, 1]])
CONSTANT = torch.full((2, 4), 7.0, dtype=torch.float64)

MADE = {
    "table": lambda p, q: p[INDEX.flatten()].view(2, 3, 4).permute(2, 0, 1).contiguous()[None],
    "two indices": lambda p, q: p[INDEX, torch.tensor([3, 3, 0])],
    "mask": lambda p, q: p[torch.tensor([True, False, True, True, False])],
    "slices": lambda p, q: p[1:, ::2][..., None, 1],
    "index_select": lambda p, q: torch.index_select(p, 1, torch.tensor([0, 0, 2])),
    "cat with a constant": lambda p, q: torch.cat((q, CONSTANT, p, q)),
    "cat with a whole number": lambda p, q: torch.cat([p, torch.tensor([[1, 2, 3, 0]])]),
    "stack": lambda p, q: torch.stack((p[:2], q, CONSTANT), dim=1),
    "narrow": lambda p, q: p.narrow(0, 1, 2),
    "narrow at a tensor": lambda p, q: p.narrow(0, torch.tensor(1), 2),
    "select": lambda p, q: torch.select(p, dim=1, index=2),
    "expand": lambda p, q: p[:1].expand(4, -1),
    "expand a number": lambda p, q: p[0, 0].expand(()),
    "repeat": lambda p, q: q.repeat(2, 3),
    "transposed": lambda p, q: p.t()[1:],
    "product": lambda p, q: p[:2] * q,
    "of a product": lambda p, q: (p * 2)[:2],
    "chunk": lambda p, q: p.chunk(2, 1)[1],
    "cast": lambda p, q: p.float()[:2],
    "changed in place": lambda p, q: torch.cat((p, q)).mul_(3),
    "changed through a view": lambda p, q: changed_through_a_view(p, q),
    "the origin changed in place": lambda p, q: torch.cat((p, q)).mul_(3)[1:],
    "over a power iteration": lambda p, q: p / (p @ power_iteration(p)).norm(),
}


@torch.no_grad()
def power_iteration(p: Tensor) -> Tensor:
    """As spectral normalisation does it, by views of the parameter."""
    v = p.new_ones(p.shape[1])
    return nn.functional.normalize(p.H @ (p @ v), dim=0, out=v)


def changed_through_a_view(p: Tensor, q: Tensor) -> Tensor:
    made = torch.cat((p, q))
    made[0].mul_(3)
    return made


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets[:, None]).square().sum(1)


@pytest.mark.parametrize("name", MADE)
def test_what_is_made_of_parameters_is_exact(name):
    """The model multiplies its input by a function of two parameters."""
    torch.manual_seed(0)
    times = lambda net, x: (x * MADE[name](net.p, net.q).to(x.dtype).flatten()).sin()  # noqa: E731
    model = Net(times, p=torch.randn(5, 4), q=torch.randn(2, 4)).double()
    x, y = torch.randn(SAMPLES, 1, dtype=torch.float64), torch.ones(SAMPLES).double()
    clip = Flat(max_grad_norm=0.5)
    wanted = definition(model, squares, x, y, clip=clip)
    for backend in ("ghost", "bk_mixed"):
        with load_backend(backend)(model, squares, clip=clip, verify=False) as b:
            assert compare(b(x, y), wanted).within(1e-5 if name == "cast" else 1e-9)


def test_what_is_copied_in_low_precision_is_added_up_in_float32():
    table, index = nn.Parameter(torch.zeros(1, 1, dtype=torch.bfloat16)), torch.zeros(1000, dtype=torch.long)
    tape = Tape({"table": table}, torch.zeros(2), 2)
    with tape:
        made = table[index]
    tape.close()
    source = next(source for source in tape.sources() if source.tensor is made)
    found = source.pull_back(torch.ones(2, 1000, 1, dtype=torch.bfloat16))["table"]
    assert found.dtype == torch.float32 and (found == 1000).all()


def test_layers_of_two_precisions():
    """Beside a weight that is made of two parameters, and a table of biases."""
    model = Net(
        lambda net, x: net.last((net.linear(x) + net.table[torch.tensor([0, 3, 3, 1])]).double()),
        linear=nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)),
        table=torch.randn(5),
        last=nn.Linear(4, 3, dtype=torch.float64),
    )
    x, y = torch.randn(SAMPLES, 7, 6), torch.zeros(SAMPLES)
    loss, clip = lambda outputs, _: outputs.square().flatten(1).sum(1), Flat(max_grad_norm=0.5)
    with load_backend("bk_mixed")(model, loss, clip=clip, verify=False) as b:
        found = b(x, y)
    assert compare(found, definition(model, loss, x, y, clip=clip)).within(1e-5)
    assert all(found.grads[name].dtype == p.dtype for name, p in model.named_parameters())


def test_gradients_that_were_joined_share_no_memory():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    backend = load_backend("bk_mixed")(model, lambda o, t: o.square().sum(1), verify=False)
    grads = backend(torch.randn(SAMPLES, 3), torch.zeros(SAMPLES)).grads
    assert len({grad.untyped_storage().data_ptr() for grad in grads.values()}) == len(grads)
    assert all(grad.untyped_storage().nbytes() == grad.numel() * 4 for grad in grads.values())


def test_the_input_of_a_frozen_weight_is_not_held():
    layer = nn.Linear(3, 2)
    layer.weight.requires_grad_(False)
    x = torch.randn(4, 3)
    tape = Tape({"bias": layer.bias}, (x,), 4)
    with tape:
        hidden = x * 2
        there = weakref.ref(hidden)
        output = layer(hidden)
        del hidden
        assert there() is None
    assert [use.operation for use in tape.uses] == ["linear"] and output.requires_grad
    tape.close()


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
    wanted = one_by_one(loss(model(x), y), dict(model.named_parameters()), clip)
    for backend in ["bk_mixed", "ghost"]:
        with load_backend(backend)(model, loss, clip=clip, verify=False) as clipped:
            assert compare(clipped(x, y), wanted).within(1e-12)
