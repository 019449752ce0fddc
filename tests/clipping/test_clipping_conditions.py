"""Steps whose shapes depend on values run as programs only while the traced step's conditions hold."""

from collections.abc import Callable

import pytest
import torch
from graphs import CLIP, opened, require_equal
from torch import Tensor, nn

import clipping.program.graphs
from clipping import UnsupportedModel, compare, load_backend
from clipping.core.reference import definition
from dpbench.conformance.cases import cross_entropy

Of = Callable[["Marked", Tensor, Tensor], Tensor]


class Marked(nn.Module):
    """Combines hidden states h [B, 4, 4] by a mask [B, 4], the sign of the first feature; counts its steps."""

    def __init__(self, of: Of) -> None:
        super().__init__()
        self.first, self.head, self.of = nn.Linear(5, 4), nn.Linear(4, 3), of
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x):
        self.count += 1
        h = torch.dropout(torch.tanh(self.first(x)), 0.3, True)
        return self.head(self.of(self, h, x[..., 0] > 0))


def batch(*marked: int, size: int = 6) -> tuple[Tensor, Tensor]:
    """A batch in which these positions of all samples are marked."""
    x = torch.randn(size, 4, 5, dtype=torch.float64)
    x[..., 0] = -x[..., 0].abs()
    x[:, list(marked), 0] *= -1
    return x, torch.randint(3, (size,))


def broadcast(_, h, mask):
    """TorchDynamo assumes that both selections have one length; one position broadcasts over three."""
    return (h[:, mask.any(0)] * h.sigmoid()[:, mask.all(0)]).sum(1)


def test_an_assumption_about_shapes_is_a_condition():
    two, three = batch(0, 2), batch(0, 1, 3)
    three[0][1:, 1:, 0] = -1.0
    for batches, missed in (([two] * 5 + [three, two], 1), ([two] * 3 + [three, two, two, two], 0)):
        b = require_equal(Marked(broadcast), batches)
        (graph,) = b.graphs._graphs
        assert graph.is_conditional and graph.missed == missed
        assert b.graphs.steps == 3


class TwoOrders(Marked):
    """Multiplies rows in two orders, which are the same unless a sample's first two signs differ."""

    def forward(self, x):
        one, two = (x[:, i, 0].sign().argsort(stable=True) for i in (0, 1))
        return self.head((self.first(x[one]).tanh() * self.first(x[two]).sigmoid()).mean(1))[one.argsort()]


def test_that_rows_of_two_orders_agree_is_a_condition():
    batches = [batch(0, 1) for _ in range(7)]
    for i, (x, _) in enumerate(batches):
        x[::2, :2, 0] *= -1
        if i == 5:  # the first order is that of the samples
            x[:, 0, 0] = x[:, 0, 0].abs()
    b = require_equal(TwoOrders(broadcast), batches)
    assert (b.graphs.steps, b.graphs._graphs[0].missed) == (3, 1)


def split(_, h, mask):
    before, after = h.tensor_split(mask.sum(1).max()[None], 1)
    return before.sum(1) - after.sum(1)


@pytest.mark.parametrize(
    "of", [split, lambda model, h, mask: split(model, h[(o := mask.sum(1).argsort())], mask)[o.argsort()]]
)
def test_a_function_that_reads_values_from_memory_is_refused(of):
    """A tracer does not see that `tensor_split` reads its indices: they would be those of the traced batch."""
    with pytest.raises(UnsupportedModel, match=r"its step is no graph.*tensor_split reads values without an operation"):
        require_equal(Marked(of), [batch(0, 1)] * 5 + [batch(0)])


def counted(model, h, mask):
    model.count.copy_(torch.stack([mask.sum(), mask.any(0).sum(), mask.all(0).sum()]).to(h.dtype))
    return h.mean(1)


def test_numbers_of_a_batch_are_stacked():
    b = require_equal(Marked(counted), [batch(0, 1)] * 5 + [batch(0)])
    assert b.graphs.steps == 3


class OneByOne(Marked):
    """Sums the marked positions of one sample after another."""

    def forward(self, x):
        rows = [self.first(each[each[:, 0] > 0]).tanh().sum(0) for each in x]
        return self.head(torch.stack(rows))


def test_samples_without_rows():
    some, none = (batch(0, 1, size=3) for _ in range(2))
    none[0][2, :, 0] = -1.0
    b = require_equal(OneByOne(broadcast), [some] * 5 + [none, some])
    assert (b.graphs.steps, b.graphs._graphs[0].missed) == (3, 1)
    x, y = none
    model = OneByOne(broadcast).double()
    with load_backend("bk_mixed")(model, cross_entropy, clip=CLIP, verify=False) as eager:
        assert compare(eager(x, y), definition(model, cross_entropy, x, y, clip=CLIP)).within(1e-12)


def rolled(model, h, mask):
    rows = torch.eye(len(h), dtype=h.dtype).roll(1, 0)  # by a product, which no owner of rows shows
    return torch.where(model.count[0] > 20, torch.tensordot(rows, h, 1), h).mean(1)


def test_samples_that_mix_in_a_later_step_of_a_program_are_found(monkeypatch):
    """A count in a buffer decides; the first steps do not mix."""
    model = Marked(rolled).double()
    b = opened("bk_mixed", model)
    while model.count[0] < 15:
        b(*batch(0, 1))
    monkeypatch.setattr(clipping.program.graphs, "LOOKS", 1.0)
    with pytest.raises(UnsupportedModel, match="samples mix"):
        for _ in range(10):
            b(*batch(0, 1))
    assert b.graphs.steps > 0
