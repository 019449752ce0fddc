"""Gradients of what was made of parameters, pulled back to them: by numbers where entries were only copied."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

from clipping import Flat, compare, load_backend
from clipping.core.reference import definition
from clipping.provenance.derived_parameters import Source
from clipping.tape.record import Tape

SAMPLES = 3
INDEX = torch.tensor([[0, 4, 4], [2, 0, 1]])
CONSTANT = torch.full((2, 4), 7.0, dtype=torch.float64)

COPIED = {
    "table": lambda p, q: p[INDEX.flatten()].view(2, 3, 4).permute(2, 0, 1).contiguous()[None],
    "two indices": lambda p, q: p[INDEX, torch.tensor([3, 3, 0])],
    "mask": lambda p, q: p[torch.tensor([True, False, True, True, False])],
    "slices": lambda p, q: p[1:, ::2][..., None, 1],
    "index_select": lambda p, q: torch.index_select(p, 1, torch.tensor([0, 0, 2])),
    "cat with a constant": lambda p, q: torch.cat((q, CONSTANT, p, q)),
    "cat with a whole number": lambda p, q: torch.cat([p, torch.tensor([[1, 2, 3, 0]])]),
    "stack": lambda p, q: torch.stack((p[:2], q, CONSTANT), dim=1),
    "narrow": lambda p, q: p.narrow(0, 1, 2),
    "select": lambda p, q: torch.select(p, dim=1, index=2),
    "expand": lambda p, q: p[:1].expand(4, -1),
    "repeat": lambda p, q: q.repeat(2, 3),
    "transposed": lambda p, q: p.t()[1:],
}

OTHERS = {
    "product": lambda p, q: p[:2] * q,
    "of a product": lambda p, q: (p * 2)[:2],
    "chunk": lambda p, q: p.chunk(2, 1)[1],
    "cast": lambda p, q: p.float()[:2],
    "changed in place": lambda p, q: torch.cat((p, q)).mul_(3),
    "changed through a view": lambda p, q: changed_through_a_view(p, q),
    "the origin changed in place": lambda p, q: torch.cat((p, q)).mul_(3)[1:],
}


def changed_through_a_view(p: Tensor, q: Tensor) -> Tensor:
    made = torch.cat((p, q))
    made[0].mul_(3)
    return made


def made_of(make) -> tuple[Source, dict[str, nn.Parameter], Tensor]:
    """The source, its parameters and random per-sample gradients of it."""
    torch.manual_seed(0)
    parameters = {name: nn.Parameter(torch.randn(n, 4, dtype=torch.float64)) for name, n in (("p", 5), ("q", 2))}
    tape = Tape(parameters, torch.zeros(SAMPLES), SAMPLES)
    with tape:
        made = make(*parameters.values())
    tape.close()
    (source,) = [source for source in tape.sources() if source.tensor is made]
    return source, parameters, torch.randn(SAMPLES, *made.shape, dtype=made.dtype)


def assert_pulled_back(source: Source, parameters: dict[str, nn.Parameter], gradients: Tensor) -> None:
    found = source.pull_back(gradients)
    assert found.keys() == source.parameters.keys()
    for i in range(SAMPLES):
        one = source.pull_back(gradients[i : i + 1])
        for name in found:
            (expected,) = torch.autograd.grad(source.tensor, parameters[name], gradients[i], retain_graph=True)
            torch.testing.assert_close(found[name][i], expected)
            torch.testing.assert_close(one[name], expected[None])


def test_pulled_back_as_autograd_does_sample_by_sample():
    for name in [*COPIED, *OTHERS]:
        assert_pulled_back(*made_of({**COPIED, **OTHERS}[name]))


@pytest.mark.parametrize("name", COPIED)
def test_copies_are_pulled_back_without_the_graph(name, monkeypatch):
    source, _, gradients = made_of(COPIED[name])
    monkeypatch.setattr(torch.autograd, "grad", None)
    assert source.pull_back(gradients).keys() == source.parameters.keys()


def test_all_else_goes_through_the_graph(monkeypatch):
    for name in OTHERS:
        source, _, gradients = made_of(OTHERS[name])
        monkeypatch.setattr(torch.autograd, "grad", None)
        with pytest.raises(TypeError, match="'NoneType' object is not callable"):
            source.pull_back(gradients)


def test_what_is_copied_in_low_precision_is_added_up_in_float32():
    table = nn.Parameter(torch.zeros(1, 1, dtype=torch.bfloat16))
    tape = Tape({"table": table}, torch.zeros(2), 2)
    with tape:
        made = table[torch.zeros(1000, dtype=torch.long)]
    tape.close()
    source = next(source for source in tape.sources() if source.tensor is made)
    found = source.pull_back(torch.ones(2, 1000, 1, dtype=torch.bfloat16))["table"]
    assert found.dtype == torch.float32 and (found == 1000).all()


class Normed(nn.Module):
    """A weight that is made of two parameters, a table of biases, and layers of two precisions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(6, 4))
        self.table = nn.Parameter(torch.randn(5))
        self.index = torch.tensor([0, 3, 3, 1])
        self.last = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.linear(x) + self.table[self.index]).double())


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("share", [2**40, 64])
def test_what_is_kept_of_small_gradients_changes_no_result(small, share, monkeypatch):
    monkeypatch.setattr("clipping.norms.collection.is_small_pulled_back", lambda *_: small)
    monkeypatch.setattr("clipping.norms.collection.SMALL", share)
    model, x, y = Normed(), torch.randn(SAMPLES, 7, 6), torch.zeros(SAMPLES)
    found = [
        load_backend(name)(model, lambda o, t: o.square().flatten(1).sum(1), clip=Flat(0.5), verify=False)(x, y)
        for name in ("bk_mixed", "microbatch")
    ]
    torch.testing.assert_close(found[0].norms, found[1].norms)
    for name, expected in found[1].grads.items():
        torch.testing.assert_close(found[0].grads[name], expected, rtol=1e-5, atol=1e-6)


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


class Sparse(nn.Module):
    """Trains a few entries of a weight (SHiRA), beside a sparse buffer; vmap knows no sparse tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.entries = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(2))
        self.register_buffer("graph", torch.eye(4).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        entries = torch.sparse_coo_tensor(torch.tensor([[0, 2], [1, 3]]), self.entries, (3, 4))
        return nn.functional.linear(torch.sparse.mm(self.graph, x.t()).t(), self.weight + entries)


@pytest.mark.parametrize("backend", ["ghost", "bk_mixed", "fastgradclip"])
def test_sparse_tensors_made_of_parameters(backend):
    torch.manual_seed(0)
    model = Sparse().double()
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, dtype=torch.float64)

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.tanh().sum(1) - targets).square()

    wanted = definition(model, loss_fn, x, y, clip=Flat(0.5))
    with load_backend(backend)(model, loss_fn, clip=Flat(0.5), verify=False) as b:
        assert compare(b(x, y), wanted).within(1e-9)
