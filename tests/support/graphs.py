"""Steps that run as graphs: traced ones beside eager ones, without TorchInductor, which compiles for minutes."""

import torch

import clipping.program.graphs
import clipping.program.step
from clipping import Flat, load_backend
from clipping.checks.verification import compare
from dpbench.conformance.cases import cross_entropy

CLIP = Flat(max_grad_norm=0.5)


def not_compiled(monkeypatch) -> None:
    """Make every compilation by TorchInductor fail."""

    def refused(self, *given):
        raise clipping.program.step.no_graph("a test", "it is a test", RuntimeError("told so"))

    monkeypatch.setattr(clipping.program.step.Graph, "_made", refused)


def only(monkeypatch, way) -> None:
    """Run every graph in this way."""
    take_fastest = clipping.program.step.Graph.take_fastest
    given_way = lambda graph, _, *given: take_fastest(graph, [way], *given)  # noqa: E731
    monkeypatch.setattr(clipping.program.step.Graph, "take_fastest", given_way)


def planned(backend):
    """Options that plan by formula, because a timed plan may differ from run to run."""
    return {"timing": False} if backend == "bk_mixed" else {}


def opened(backend, model, loss=cross_entropy, *, timing=False, clip=CLIP, **options):
    """A backend whose steps are traced, and not timed unless `timing`."""
    made = load_backend(backend)(model, loss, clip=clip, compile=True, **planned(backend), **options)
    made.graphs._timing = timing
    return made


def require_equal(model, batches, loss=cross_entropy, clip=CLIP):
    """Compare each step with the eager one from the same random state and buffers; return the backend."""
    model.double()
    b = opened("bk_mixed", model, loss, clip=clip, verify=False)
    eager = load_backend("bk_mixed")(model, loss, clip=clip, verify=False, timing=False)
    for x, y in batches:
        before, state = torch.get_rng_state(), {name: each.clone() for name, each in model.named_buffers()}
        found, after = b(x.clone(), y), torch.get_rng_state()
        changed = {name: each.clone() for name, each in model.named_buffers()}
        torch.set_rng_state(before)
        for name, each in model.named_buffers():
            each.copy_(state[name])
        assert compare(found, eager(x.clone(), y)).within(0)
        assert all(torch.equal(changed[name], each) for name, each in model.named_buffers())
        assert torch.equal(after, torch.get_rng_state())
    return b
