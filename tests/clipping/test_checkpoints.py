"""Activation checkpointing: what is computed once more is what the forward pass computed, in every backward pass."""

import copy
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
from graphs import require_equal
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from clipping import Flat, UnsupportedModel, compare, load_backend
from clipping.backends.recording import Recording
from clipping.checks.sample_independence import Occasions
from clipping.core.reference import definition
from clipping.core.types import ClippedGradient
from clipping.program.capture import _nesting, modes_kept
from dpbench.conformance.cases import cross_entropy
from dpbench.conformance.modules import Net
from dpbench.measure.memory import measured_peak

BATCH = 4
#: A part of a network, [B, 8, 6, 6] -> the same.
PARTS = {
    "group norm": lambda: nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU()),
    "in place": lambda: nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(inplace=True)),
    "instance norm": lambda: nn.Sequential(nn.Conv2d(8, 8, 1), nn.InstanceNorm2d(8, affine=True), nn.Tanh()),
    "a norm at the end": lambda: nn.Sequential(nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.GroupNorm(2, 8)),
    "weight norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 1)), nn.PReLU()),
    "norms of a weight and of groups": lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 1)), nn.GroupNorm(2, 8), nn.Tanh()
    ),
    "linear": lambda: nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.GELU(), nn.Linear(12, 6)),
    "table": lambda: Net(
        lambda net, x: x + nn.functional.embedding((x > 0).long().sum(-1), net.table.exp()),
        table=torch.linspace(-1, 1, 48).view(8, 6).sin(),
    ),
    "attention": lambda: Net(  # over the 48 rows of an image
        lambda net, x: net.layer(x.flatten(1, 2)).view_as(x),
        layer=nn.TransformerEncoderLayer(6, 2, 12, 0.0, batch_first=True),
    ),
}


class Network(nn.Module):
    """A first part on the image itself, which needs no gradient, and `depth` more; checkpointed or not."""

    def __init__(self, part: str, checkpointed: bool, depth: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList([nn.Conv2d(3, 8, 1), *(PARTS[part]() for _ in range(depth))])
        self.head, self.checkpointed = nn.Linear(8, 3), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=False) if self.checkpointed else part(x)
        return self.head(x.mean((2, 3)))


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, 3, 6, 6, generator=generator, dtype=torch.float64), torch.arange(BATCH) % 3


@cache
def without(part: str, clip: float) -> ClippedGradient:
    """What the definition says, and nothing is checkpointed."""
    return definition(Network(part, False).double(), cross_entropy, *batch(), clip=Flat(max_grad_norm=clip))


@pytest.mark.parametrize(
    ("part", "backend"),
    [
        *product(PARTS, ["bk_mixed"]),
        *product(["norms of a weight and of groups"], ["mixed_ghost", "ghost", "fastgradclip"]),
        *product(["in place"], ["mixed_ghost", "ghost", "fastgradclip", "bk_ghost", "bk_mixed:time"]),
    ],
)
def test_as_without(part, backend):
    model, (x, y) = Network(part, True).double(), batch()
    with load_backend(backend)(model, cross_entropy, clip=Flat(max_grad_norm=0.1)) as clipped:
        for _ in range(2):  # of which the second looks at the batch no more
            found = clipped(x, y)
    assert compare(found, without(part, 0.1)).within(1e-12)


@cache
def share_of_memory(name: str) -> float:
    """What a step needs with checkpoints, of what it needs without."""
    peaks = []
    for checkpointed in (True, False):
        model = Network("group norm", checkpointed, depth=8)
        with load_backend(name)(model, cross_entropy, verify=False, timing=False) as clipped:
            x, y = torch.randn(16, 3, 24, 24), torch.zeros(16, dtype=torch.long)
            for _ in range(3):
                clipped(x, y)
            peaks.append(measured_peak(lambda c=clipped, x=x, y=y: c(x, y), [], torch.device("cpu")).peak_bytes)
    return peaks[0] / peaks[1]


@pytest.mark.parametrize("backend", ["vmap", "ghost", "bk_mixed"])
def test_dropout_is_verified_with_the_numbers_that_it_draws_again(backend, monkeypatch):
    dropping = nn.Conv2d(8, 8, 3, padding=1), nn.Dropout(0.3), nn.Tanh(), nn.Dropout(0.1), nn.Conv2d(8, 8, 1)
    monkeypatch.setitem(PARTS, "dropout", lambda: nn.Sequential(*copy.deepcopy(dropping)))
    model, x = Network("dropout", backend != "vmap"), torch.randn(BATCH, 3, 6, 6)
    with load_backend(backend)(model, cross_entropy, clip=Flat(max_grad_norm=0.1)) as clipped:
        assert clipped(x, torch.arange(BATCH) % 3).norms.isfinite().all()


def test_a_program_computes_it_again():
    backend = require_equal(Network("group norm", True, depth=1), [batch()] * 4)
    assert backend.graphs.steps > 0


class Half(nn.Module):
    """A checkpoint within a checkpoint, both with a part in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(5, 5), nn.Linear(5, 3)

    def inner(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.layer(x)

    def outer(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return checkpoint(self.inner, x, use_reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.outer, x, use_reentrant=False).float())


def test_a_program_leaves_autocast_as_it_was():
    """What ends early, such as a checkpoint that is computed again, skips the call that leaves autocast."""
    model, x, y = Half(), torch.randn(4, 5), torch.tensor([0, 1, 2, 0])
    with load_backend("bk_mixed")(model, cross_entropy, compile=True, verify=False, timing=False) as backend:
        backend.graphs._timing = False
        for _ in range(4):
            backend(x, y)
        assert backend.graphs.steps > 0
    assert _nesting() == 0 and not torch.is_autocast_enabled("cpu")


def test_an_error_in_a_graph_leaves_autocast_as_it_was():
    with pytest.raises(ZeroDivisionError), modes_kept():
        torch.amp.autocast_mode._enter_autocast("cpu", torch.float16, True, True)
        raise ZeroDivisionError
    assert _nesting() == 0 and not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") == torch.bfloat16


def test_what_torch_does_not_compute_again_in_a_graph_runs_without():
    """Frozen parameters that move in a checkpoint: in a graph they are inputs of it, which torch refuses."""

    def part(net: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            net.teacher.weight.mul_(0.9).add_(net.layer.weight, alpha=0.1)
        return (net.layer(x) - net.teacher(x)).tanh()

    parts = {"layer": nn.Linear(5, 3), "teacher": nn.Linear(5, 3).requires_grad_(False)}
    model = Net(lambda net, x: checkpoint(part, net, x, use_reentrant=False), **parts)
    x, y = torch.randn(4, 5), torch.tensor([0, 1, 2, 0])
    with load_backend("bk_mixed")(model, cross_entropy, compile="auto", verify=False) as backend:
        for _ in range(4):
            backend(x, y)
        assert "what was captured does not run" in backend.ways["others"]


@pytest.mark.parametrize("backend", ["mixed_ghost", "bk_mixed"])
def test_memory_is_saved(backend):
    """Two passes free what is computed again, as ordinary training does."""
    ordinary = share_of_memory("nonprivate")
    assert ordinary < 0.8
    assert share_of_memory(backend) < ordinary + 0.1


@pytest.mark.parametrize(
    ("part", "backend", "looked_at"),
    [
        *product(["in place", "attention", "table"], ["bk_mixed"], [True]),
        *product(["group norm"], ["microbatch", "mixed_ghost", "bk_mixed:time"], [False]),
    ],
)
def test_a_recording_is_verified_by_what_is_computed_once_more(part, backend, looked_at):
    model, (x, y) = Network(part, True).double(), batch()
    with load_backend(backend)(model, cross_entropy, clip=Flat(1.0), verify=False) as recorder:
        recording = Recording(recorder, (x,), BATCH, occasions=Occasions() if looked_at else None)
        with recording:
            losses = cross_entropy(model(x), y)
        found = recording.finish(losses, verify=True)
    assert compare(found, without(part, 1.0)).within(1e-13)


@pytest.mark.parametrize(("backend", "verify"), [("ghost", False), ("mixed_ghost", True), ("bk_mixed", True)])
def test_what_serves_one_backward_pass_is_refused_by_name(backend, verify):
    """Keeps its products, and computes the rest once more."""
    keeps = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    part = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    model = Net(lambda net, x: checkpoint(net.part, x, use_reentrant=False, context_fn=keeps), part=part)
    with (
        pytest.raises(UnsupportedModel, match=r"context_fn keeps is for one backward pass.*remedy: checkpoint without"),
        load_backend(backend)(model, cross_entropy, clip=Flat(1.0), verify=verify) as b,
    ):
        b(torch.randn(BATCH, 6), torch.arange(BATCH) % 3)


@pytest.mark.parametrize("backend", ["ghost", "mixed_ghost", "fastgradclip", "bk_mixed"])
def test_experts_with_few_and_with_many_rows(backend: str):
    """The inputs of those with many are freed, and the weights that they read are recomputed parts of one parameter."""

    def experts(net: Any, x: Tensor) -> Tensor:
        few, many = x[:, :1], x[:, 1:]
        return torch.cat([nn.functional.linear(few, net.p[0]), nn.functional.linear(many, net.p[1])], 1).tanh()

    def forward(net: Any, x: Tensor) -> Tensor:
        return net.head(checkpoint(partial(experts, net), net.first(x), use_reentrant=False).mean(1))

    torch.manual_seed(0)
    model = Net(forward, p=torch.randn(2, 32, 32), first=nn.Linear(8, 32), head=nn.Linear(32, 3)).double()
    x, y = torch.randn(BATCH, 12, 8, dtype=torch.float64), torch.arange(BATCH) % 3
    with load_backend(backend)(model, cross_entropy, clip=Flat(max_grad_norm=1e-2), verify=False) as b:
        assert compare(b(x, y), definition(model, cross_entropy, x, y, clip=b.clip)).within(1e-9)
