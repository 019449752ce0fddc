"""Samples that do not stay apart are refused in the step in which they first meet; those that do, never."""

import itertools
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from clipping import Flat, UnsupportedModel, load_backend
from clipping.checks.sample_independence import RATE, Occasions, separating
from clipping.numerics.rng_replay import same_for_each
from dpbench.conformance.modules import Net

TAPE = ("ghost", "bk_mixed")  # two passes, and one; all record and look alike
B, T, D = 5, 4, 6


def squares(outputs, targets):
    return ((outputs.flatten(1) - targets[:, None]) ** 2).mean(1)


def refused(mixes):
    return pytest.raises(UnsupportedModel, match="samples mix") if mixes else nullcontext()


@pytest.mark.parametrize("backend", TAPE)
@pytest.mark.parametrize("gate", [None, 0.0])
def test_what_integers_are_looked_up_is_poisoned(gate, backend):
    """Of integers alone, whose embeddings meet behind a gate that is closed yet."""

    def forward(net, x):
        h = net.words(x) + net.places(torch.arange(T * B))[:T]  # B·T of these are no rows of samples
        return net.out(h if gate is None else h + gate * h.mean(0))

    model = Net(forward, words=nn.Embedding(9, D), places=nn.Embedding(T * B, D), out=nn.Linear(D, 3)).double()
    x, y = torch.randint(0, 9, (B, T), generator=torch.Generator().manual_seed(1)), torch.arange(B).double()
    with load_backend(backend)(model, squares) as b, refused(gate is not None):
        b(x, y)


def test_what_refuses_numbers_that_are_none_is_looked_at_by_other_records():
    def binary(outputs, targets):
        return F.binary_cross_entropy(outputs, targets[:, None].expand_as(outputs) / B, reduction="none").sum(1)

    for how, mixes in ((lambda h: h, False), (WAYS["detached statistics"], True)):
        model = nn.Sequential(mixing(how), nn.Flatten(), nn.Sigmoid())
        with load_backend("bk_mixed")(model, binary) as b, refused(mixes):
            b._verify = False  # or two samples are refused first
            b(*batch())


def batch(positions=T, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, positions, D, generator=generator, dtype=torch.float64), torch.arange(B).double()


def mixing(how, when=lambda net, x: True):
    """A model that calls `how` between its layers, where `when` says so."""

    def forward(net, x):
        h = net.a(x)
        return net.b(how(h) if when(net, x) else h)

    return Net(forward, a=nn.Linear(D, D), b=nn.Linear(D, 3)).double()


def attention(h):
    flat = h.flatten(1)
    return ((flat @ flat.t()).softmax(1) @ flat).view_as(h)


WAYS = {
    "detached statistics": lambda h: h / h.detach().norm(dim=(1, 2)).mean(),
    "attention over the batch": attention,
    "a share of the batch": lambda h: h * h.detach()[:, 0, 0].sigmoid().mean(),
    "the largest": lambda h: h - h.detach().amax(0),
}


@pytest.mark.parametrize("backend", TAPE)
@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_mixing_that_begins_with_longer_sequences_is_refused(how, backend):
    model = mixing(how, lambda net, x: x.shape[1] > T)
    with load_backend(backend)(model, squares) as b:
        b(*batch())
        for _ in range(2):  # whoever catches the refusal, and goes on, is refused in the next step, too
            with pytest.raises(UnsupportedModel, match="samples mix"):
                b(*batch(T + 1))


def in_order(net, x):
    """By length, and undone: no sample touches another, but rows are in an order that nothing tells."""
    order = torch.tensor(x[:, 0, 0].tolist()).argsort(stable=True)
    return net.layer(torch.tensordot(F.one_hot(order, len(x)).double(), x, 1))[order.argsort()]


@pytest.mark.parametrize("order", itertools.permutations(range(3)))
def test_rows_in_another_order_are_refused(order):
    """Of the first two samples none moves; and in one case none of the others, until some are replaced."""
    x, y = batch()
    x[:2, 0, 0] = torch.tensor([-9.0, -8.0])
    x[2:, 0, 0] = torch.tensor(order).double()
    with (
        load_backend("ghost")(Net(in_order, layer=nn.Linear(D, 3)).double(), squares) as b,
        pytest.raises(UnsupportedModel, match="layer" if order != (0, 1, 2) else "samples mix"),
    ):
        b(x, y)


#: What draws random numbers in training, in every way that people have.
RANDOM = {
    "dropout": lambda h: F.dropout(h, 0.5, training=True),
    "drop path": lambda h: h * h.new_empty(h.shape[0], 1, 1).bernoulli_(0.5),
    "noise": lambda h: h + torch.randn_like(h),
    "masking": lambda h: h * (torch.rand(h.shape[0], T, 1) > 0.5),
    "attention": lambda h: F.scaled_dot_product_attention(h, h, h, dropout_p=0.3),
    "gumbel": lambda h: F.gumbel_softmax(h),
    "as many numbers as there are negative entries": lambda h: F.rrelu(h, training=True),
    "positions in another order": lambda h: h[:, torch.randperm(T)],
}


@pytest.mark.parametrize("how", RANDOM.values(), ids=RANDOM)
def test_what_draws_in_training_passes(how):
    """Each sample draws the same alone as beside another: the verification runs in the mode that trains."""
    model = mixing(how, lambda net, x: net.training)
    with load_backend("bk_mixed")(model, squares, clip=Flat(0.5)) as b:
        for _ in range(3):
            b(*batch())


def test_generators_and_buffers_are_as_one_step_leaves_them():
    """Verifying, and looking at samples, draws nothing that training would, and counts nothing."""

    def counted(net, x):
        net.count += 1
        return net.training

    found = []
    for verify in (True, False):
        torch.manual_seed(0)
        model = mixing(RANDOM["dropout"], counted)
        model.register_buffer("count", torch.zeros(()))
        with load_backend("ghost")(model, squares, verify=verify) as b:
            b(*batch())
            before = float(model.count)
            out = b(*batch(T + 1))  # new shapes: looked at
        assert float(model.count) == before + 1
        found.append((out.norms, torch.rand(3)))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_any_two_samples_are_told_apart():
    for batch_size in [2, 3, 4, 7, 33, 64, 257]:
        sets = torch.stack(separating(batch_size))
        for i in range(batch_size):
            holds_i_alone = sets[:, i : i + 1] & ~sets
            assert holds_i_alone.any(0).sum() == batch_size - 1
        assert len(sets) <= 2 + 1.6 * torch.tensor(float(batch_size)).log2()


def looked(occasions, graph, shape):
    """How many looks a step takes, all of which pass."""
    rows = occasions.rows(8, graph)
    occasions.rows_passed(graph)
    others = occasions.changes(8, torch.zeros(8, shape))
    occasions.others_passed()
    return bool(rows) + bool(others)


def test_how_often_is_looked():
    occasions, n = Occasions(), 40_000
    found = [looked(occasions, 1, 3) for _ in range(n)]
    assert found[0] == 2
    assert sum(found[1:]) / n == pytest.approx(2 * RATE, rel=0.2)
    assert not occasions.rows(1, 77)
    assert len(occasions.changes(1, torch.zeros(1, 9))) == 1
    occasions.others_passed()
    assert not any(occasions.changes(1, torch.zeros(1, 9)) for _ in range(n))


def test_shapes_without_end_are_not_looked_at_without_end():
    occasions = Occasions()
    assert sum(looked(occasions, 0, length) for length in range(1, 3000)) < 1 + 32 + 12 + 3 * 3000 * 2 * RATE
    assert sum(looked(occasions, number, 5) for number in range(3000)) < 32 + 3 * 3000 * 2 * RATE


def test_attention_that_drops_is_drawn_for_each_sample():
    """By a kernel as a GPU has them, which gives the state of its generator beside the output."""
    q = torch.empty(4, 2, 8, 16, device="meta")
    with same_for_each(4):
        output, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.3)
    assert output.shape == q.shape
