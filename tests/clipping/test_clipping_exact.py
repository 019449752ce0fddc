"""Every backend of ours through the conformance suite.

The suite's oracle is the definition: `tests/whole/test_contributing.py` writes a step by hand.
The tape's backends share their rules. test_clipping_routes.py holds every way of every rule on each case; here `vmap`,
which has no rules, and `bk_mixed`, which may take any way, meet all cases, and the others those of `FIFTEEN`. The
contract is met by a backend of each kind, and a few of its checks by all.
test_clipping_peers.py has the peers.
"""

import pytest
import torch
from cases import FIFTEEN, NOT_FOR, TAPE
from marks import name_of
from torch import nn

import clipping.rules.base
from clipping import Flat, compare, load_backend
from clipping.backends.recording import Recording
from dpbench.conformance.cases import CASES, Case, cross_entropy, images
from dpbench.conformance.contract import CHECKS
from dpbench.conformance.judging import TOLERANCE, judge
from dpbench.conformance.refusals import REFUSALS
from dpbench.conformance.suite import checks

KNOWN = checks()
PRIVATE = ["vmap", *TAPE]
#: No tape, two passes, and one. The other backends of the tape differ from the last two in the routes of norms alone.
KINDS = ["vmap", "ghost", "bk_mixed"]
#: What every backend meets of the contract.
SOME = ("clipping: per layer", "sensitivity: flat", "batch: changing sizes", "norms beyond float16")


def median_clip(model, inputs, targets, loss_fn) -> Flat:
    """A threshold that clips some samples and not others."""
    norms = load_backend("microbatch")(model, loss_fn)(inputs, targets).norms
    return Flat(max_grad_norm=float(norms.median()))


def require(name: str, *backends: str, device: str = "cpu") -> None:
    """Assert what `NOT_FOR` says of the case, strictly: a refusal that ends has to come off it."""
    for backend in backends:
        verdict = judge(name, KNOWN[name], load_backend(backend), device)
        assert verdict.result == NOT_FOR.get(backend, {}).get(name, "exact"), f"{backend}: {verdict.reason}"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_exact(case: Case):
    """In float64 and in float32."""
    require(case.name, *(PRIVATE if case.name in FIFTEEN else ("vmap", "bk_mixed")))


def test_gradients_that_cancel_in_the_sum_are_verified():
    """One number is trained. Two records' clipped gradients point in opposite directions; only rounding is left."""
    model = nn.Linear(1, 1, bias=False).double()
    x = torch.tensor([[1.3], [-2.9]], dtype=torch.float64)
    for name in KINDS:
        with load_backend(name)(model, lambda outputs, x: outputs[:, 0], clip=Flat(0.1)) as b:
            assert 0 < b(x, x).grads["weight"].abs() < 1e-15
    with load_backend("bk_mixed")(model, cross_entropy, clip=Flat(0.1), verify=False) as b:
        recording = Recording(b, (x,), 2)
        with recording:
            outputs = model(x)
        assert 0 < recording.finish(outputs[:, 0], verify=True).grads["weight"].abs() < 1e-15


def test_autocast_s_casts_of_an_earlier_pass_do_not_mislead_the_verification():
    """It casts the model to float64 in place, which cuts them off from the parameters."""
    model, x, y = nn.Linear(5, 3), torch.randn(4, 5), torch.arange(4) % 3
    with torch.autocast("cpu", torch.bfloat16):
        model(x)
        with load_backend("ghost")(model, lambda o, y: cross_entropy(o.float(), y), clip=Flat(1.0)) as b:
            assert (b(x, y).norms > 0).all()


@pytest.mark.parametrize("case", [case for case in CASES if case.name in FIFTEEN], ids=name_of)
def test_the_first_batch_verification_lets_every_exact_case_pass(case: Case):
    """The suite runs without it; ordinary use does not. It asks nothing of how a backend found its answer."""
    model, inputs, targets, loss_fn = case.make()
    for backend in KINDS:
        if case.name not in NOT_FOR.get(backend, ()):
            with (
                load_backend(backend)(model, loss_fn) as b,
                load_backend(backend)(model, loss_fn, verify=False) as plain,
            ):
                assert compare(b(inputs, targets), plain(inputs, targets)).within(TOLERANCE), backend


class Normalises(nn.Linear):
    """Normalises its inputs in place."""

    def forward(self, x):
        return super().forward(x.sub_(0.5).mul_(2))


@pytest.mark.parametrize("compile", [False, True])
def test_what_is_written_to_a_batch_is_written_once(compile: bool):
    """Verification, other looks and programs run the model again."""

    def loss_fn(outputs, targets):
        return cross_entropy(outputs, targets.add_(1).remainder_(3))

    torch.manual_seed(0)
    model, clip = Normalises(5, 3).double(), Flat(0.5)
    options = {"compile": compile, "timing": False}
    with (
        load_backend("bk_mixed")(model, loss_fn, clip=clip, **options) as b,
        load_backend("microbatch")(model, loss_fn, clip=clip, verify=False) as oracle,
    ):
        for _ in range(5):
            x, y = torch.randn(6, 5).double(), torch.randint(3, (6,))
            mine, other = (x, y), (x.clone(), y.clone())
            assert compare(b(*mine), oracle(*other)).within(TOLERANCE)
            assert all(map(torch.equal, mine, other))


@pytest.mark.parametrize("case", ["conv2d groups", "linear 3-D", "embedding", "layer norm over positions", "tied head"])
def test_exact_in_blocks(case: str, monkeypatch):
    """The same with a workspace so small that samples and Gram rows are treated one at a time."""
    monkeypatch.setattr(clipping.rules.base, "WORKSPACE", {"cpu": 64, "cuda": 64})
    require(case, *TAPE)


@pytest.mark.parametrize("backend", ["nonprivate", "ghost"])
def test_a_closed_backend_says_so(backend: str):
    model, x, y, loss = images(nn.Linear(4, 3), size=(4,))
    with load_backend(backend)(model, loss) as b:
        b(x, y)
    assert model[0].weight.grad is None and not vars(model[0].weight)
    with pytest.raises(RuntimeError, match="after close"):
        b(x, y)


@pytest.mark.parametrize("name", CHECKS)
def test_the_contract(name: str):
    """Every clipping function, the black-box sensitivity of each, odd batches, precisions, the model left as it was."""
    others = ["microbatch"] if name == "the model left as it was" else []
    require(name, *(PRIVATE if name in SOME else KINDS), *others)


@pytest.mark.parametrize("name", REFUSALS)
def test_what_few_can_be_exact_on(name: str):
    """Hidden reads of parameters and samples that mix: refused, but by who gives each sample to the model alone."""
    require(name, "microbatch", *KINDS)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", PRIVATE)
def test_exact_on_cuda(backend: str):
    for name in KNOWN:
        require(name, backend, device="cuda")


@pytest.mark.parametrize("backend", ["microbatch", "ghost", "bk_mixed"])
@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_dense_sums(backend: str, layer: type[nn.Module]):
    ids, targets = torch.tensor([[0, 2], [1, 1], [4, 0]]), torch.tensor([0, 2, 1])
    sums = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(layer(7, 3, sparse=sparse), nn.Flatten(), nn.LazyLinear(3))
        model(ids)
        with load_backend(backend)(model, cross_entropy) as b:
            sums.append(b(ids, targets))
    torch.testing.assert_close(sums[1].grads, sums[0].grads)
    torch.testing.assert_close(sums[1].norms, sums[0].norms)
