"""A backward pass that gives other gradients when it runs again is refused: norms and sums may come from two."""

import pytest
import torch
import torch.nn.functional as F
from attached import attached, cross_entropy
from torch import nn
from torch.utils.checkpoint import checkpoint

from clipping import UnsupportedModel, load_backend
from clipping.checks.verification import WrongGradient
from dpbench.conformance.modules import Net

B = 6
TAPE = ["ghost", "mixed_ghost", "fastgradclip", "bk_ghost", "bk_mixed"]
SAID = r"gives other gradients when it runs again.*\(remedy: let each backward pass do the same"

pytestmark = pytest.mark.filterwarnings("ignore")


def doubles_once(register):
    """Register a hook of a tensor or a node that doubles the first gradient, and removes itself."""

    def hook(g, *_):
        handle.remove()
        return tuple(2 * x for x in g) if isinstance(g, tuple) else 2 * g

    handle = register(hook)


class Counting(torch.autograd.Function):
    """Multiplies its gradient by the number of the backward pass."""

    @staticmethod
    def forward(ctx, x):
        ctx.calls = 0
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        ctx.calls += 1
        return g * ctx.calls


def plain(net, x):
    return net.last(net.first(x).tanh())


def of_node(net, x):
    hidden = net.first(x).tanh()
    doubles_once(hidden.grad_fn.register_hook)
    return net.last(hidden)


def before_node(net, x):
    hidden = net.first(x).tanh()
    doubles_once(hidden.grad_fn.register_prehook)
    return net.last(hidden)


def of_function(net, x):
    return net.last(Counting.apply(net.first(x)))


def drops_anew(net, x):
    def part(x):
        return net.last(F.dropout(net.first(x)))

    return checkpoint(part, x, use_reentrant=False, preserve_rng_state=False)


def drops_again(net, x):
    return checkpoint(lambda x: net.last(F.dropout(net.first(x))), x, use_reentrant=False)


def hooked(outputs, targets):
    doubles_once(outputs.register_hook)
    return cross_entropy(outputs, targets)


def node_hooked(outputs, targets):
    doubles_once(outputs.grad_fn.register_prehook)
    return cross_entropy(outputs, targets)


LOSSES = {"a hook of the output": hooked, "a hook of the output's node": node_hooked}
FORWARDS = {
    "a hook of a node": of_node,
    "a hook before a node": before_node,
    "ctx": of_function,
    "random numbers": drops_anew,
}


def net_of(forward=plain, width=40):
    torch.manual_seed(0)
    return Net(forward, first=nn.Linear(width, width), last=nn.Linear(width, 3)).double()


X, Y = torch.randn(B, 40, dtype=torch.float64), torch.arange(B) % 3


def in_a_loop(model, backend):
    options = {"batch_size": B, "sample_size": 60, "steps": 9, "max_grad_norm": 0.5, "noise_multiplier": 0.0}
    return attached(model, backend=backend, **options)[1:]


@pytest.mark.parametrize("case", FORWARDS)
@pytest.mark.parametrize("backend", TAPE)
def test_by_load_backend(backend, case):
    with load_backend(backend)(net_of(FORWARDS[case]), cross_entropy) as b:
        for _ in range(2):  # also after an error that was caught
            with pytest.raises((UnsupportedModel, WrongGradient)) as error:
                b(X, Y)
            assert "\n" not in str(error.value)


@pytest.mark.parametrize("case", [*FORWARDS, *LOSSES])
@pytest.mark.parametrize("backend", [*TAPE, "microbatch"])
def test_in_a_loop(backend, case):
    model, loss_fn = net_of(FORWARDS.get(case, plain)), LOSSES.get(case, cross_entropy)
    optimizer, engine = in_a_loop(model, backend)
    for _ in range(2):
        with pytest.raises(UnsupportedModel, match=SAID):
            optimizer.step(loss=loss_fn(model(X), Y))
    assert engine.steps == 0


@pytest.mark.parametrize("backend", ["ghost", "bk_mixed"])
def test_a_hook_of_a_parameter_in_a_loop(backend):
    model = net_of()
    optimizer, engine = in_a_loop(model, backend)
    optimizer.step(loss=cross_entropy(model(X), Y))
    doubles_once(model.first.weight.register_hook)
    with pytest.raises(WrongGradient, match=r"hooks on parameters \(1 of register_hook\) may change gradients: remove"):
        optimizer.step(loss=cross_entropy(model(X), Y))
    assert engine.steps == 1


@pytest.mark.parametrize("backend", TAPE)
def test_a_checkpoint_that_draws_the_same_numbers_again_is_exact(backend):
    with load_backend(backend)(net_of(drops_again), cross_entropy) as b:
        b(X, Y)
    model = net_of(drops_again)
    optimizer, engine = in_a_loop(model, backend)
    optimizer.step(loss=cross_entropy(model(X), Y))
    assert engine.steps == 1


class Atomic(torch.autograd.Function):
    """Rounds its gradient otherwise in each pass, as additions in any order do."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * (1 + torch.finfo(g.dtype).eps * torch.randn(g.shape, generator=NOISE))


NOISE = torch.Generator().manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rounding_is_no_other_gradient(dtype):
    model = net_of(lambda net, x: net.last(Atomic.apply(net.first(x)).tanh())).to(dtype)
    with load_backend("bk_mixed")(model, lambda out, y: cross_entropy(out.float(), y)) as b:
        for _ in range(8):
            b(X.to(dtype), Y)
