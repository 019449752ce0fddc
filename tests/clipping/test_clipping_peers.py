"""The peers behind our interface: exact, or refused, or found out; their defects as strict expectations.

private_CNN and fastDP are not on the package index, and Opake is no dependency: their tests run where they are
importable, else they say so.
"""

import sys

import pytest
import test_clipping_exact as exact
import torch
from cases import FIFTEEN, NOT_FOR, PEERS
from torch import nn

from clipping import Automatic, Flat, GlobalBound, PerLayer, UnsupportedModel, WrongGradient, compare, load_backend
from dpbench.conformance.cases import CASES, cross_entropy, images, tokens
from dpbench.conformance.contract import CHECKS
from dpbench.conformance.modules import Net, Skipping
from dpbench.conformance.refusals import REFUSALS

MODELS = {case.name: case for case in CASES}
every_peer = pytest.mark.parametrize("backend", PEERS)


def layers() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 3))


def outcome(backend: str, problem, verify: bool) -> str:
    """exact, refuses or wrong; found out if the backend's own verification says so."""
    model, inputs, targets, loss_fn = problem
    clip = exact.median_clip(*problem)
    oracle = load_backend("microbatch")(model, loss_fn, clip=clip)(inputs, targets)
    try:
        with load_backend(backend)(model, loss_fn, clip=clip, verify=verify) as b:
            agreement = compare(b(inputs, targets), oracle)
    except UnsupportedModel as error:
        assert "\n" not in str(error) and "remedy: " in str(error)
        return "refuses"
    except WrongGradient:
        return "found out"
    return "exact" if agreement.within(exact.TOLERANCE) else "wrong"


@every_peer
def test_cases(backend: str):
    """All cases in one comparison, so that a failure names each case that differs."""
    expected = dict.fromkeys(FIFTEEN, "exact") | {n: said for n, said in NOT_FOR[backend].items() if n in MODELS}
    found, silent = {}, []
    for name in expected:
        torch.manual_seed(0)
        found[name] = outcome(backend, MODELS[name].make(), verify=False)
        if found[name] == "wrong":  # never in silence; two samples may already be too few for it
            torch.manual_seed(0)
            if outcome(backend, MODELS[name].make(), verify=True) not in ("found out", "refuses"):
                silent.append(name)
    assert found == expected and silent == []


@every_peer
def test_the_contract(backend: str):
    """All of it by Opacus' hooks; by each, odd batches and sizes, half precision, and a model left as it was."""
    for name in CHECKS:
        if backend == "opacus_hooks" or name.startswith(("batch: ", "norms in bfloat16", "the model left")):
            exact.require(name, backend)


@every_peer
def test_what_few_can_be_exact_on(backend: str):
    for name in REFUSALS:
        exact.require(name, backend)


REFUSED_CLIPPING = {
    ("opacus_ghost", "PerLayer"): "Opacus' ghost mode has one factor a sample",
    ("private_cnn", "PerLayer"): "private_CNN has one factor a sample",
    ("fastdp", "GlobalBound"): "fastDP's hooks cannot express GlobalBound.* use one of Flat, Automatic, PerLayer",
    ("fastdp", "Automatic without stabiliser"): "0/0 at a norm of zero.*use a stabiliser",
    ("fastdp", "C = 0"): "0/0 at a norm of zero.*C > 0",
    ("opake", "flat"): "Opake has a stabiliser in automatic clipping, and none in flat clipping",
    ("opake", "Automatic without stabiliser"): "Opake has a stabiliser in automatic clipping",
    ("opake", "C = 0"): "threshold must be positive",
    ("opake", "GlobalBound"): "Opake has no GlobalBound.* use Flat or Automatic",
    ("opake", "PerLayer"): "Opake has no PerLayer.* use Flat or Automatic",
}


CLIPPING = {
    "flat": Flat(0.5, stabiliser=0.01),
    "C = 0": Flat(0.0),
    "C = inf": Flat(float("inf")),
    "Automatic": Automatic(0.5, stabiliser=0.01),
    "Automatic without stabiliser": Automatic(0.5),
    "GlobalBound": GlobalBound(0.5, bound=1.0),
    "PerLayer": PerLayer(0.5, stabiliser=0.001),
}


@every_peer
def test_clipping_functions(backend: str):
    model, x, y, loss = images(layers(), nn.Tanh())
    for kind, clip in CLIPPING.items():
        if refused := REFUSED_CLIPPING.get((backend, kind)):
            with pytest.raises(UnsupportedModel, match=refused):
                load_backend(backend)(model, loss, clip=clip)
            continue
        oracle = load_backend("microbatch")(model, loss, clip=clip)(x, y)
        with load_backend(backend)(model, loss, clip=clip) as b:
            assert compare(b(x, y), oracle).within(exact.TOLERANCE), kind


@every_peer
def test_the_model_is_free_while_a_peer_is_open_on_it(backend: str):
    """Two of them at once, ordinary training between their steps, parameters frozen and modules switched."""
    model, x, y, loss = images(layers(), nn.Dropout(0.5), nn.Linear(3, 3))
    model[1].eval()
    clip = Flat(0.5)
    oracle = load_backend("microbatch")(model, loss, clip=clip)
    before = [dict(vars(m)) for m in model.modules()]
    with load_backend(backend)(model, loss, clip=clip) as a, load_backend(backend)(model, loss, clip=clip) as b:
        first = a(x, y)
        assert compare(first, oracle(x, y)).within(exact.TOLERANCE)
        assert [dict(vars(m)) for m in model.modules()] == before and not any(vars(p) for p in model.parameters())
        torch.testing.assert_close(b(x, y).grads, first.grads)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p -= 0.1 * first.grads[name]
        loss(model(x), y).sum().backward()
        kept = model[0][0].weight.grad.clone()
        assert compare(a(x, y), oracle(x, y)).within(exact.TOLERANCE)
        assert torch.equal(model[0][0].weight.grad, kept)
        model[0][0].weight.requires_grad_(False)
        out = b(x, y)
        assert "0.0.weight" not in out.grads and compare(out, oracle(x, y)).within(exact.TOLERANCE)
        model[0][0].weight.requires_grad_(True)
        model[1].train()
        assert not torch.equal(a(x, y).losses, a(x, y).losses)


@every_peer
def test_a_step_that_fails_leaves_nothing_behind(backend: str):
    failing = "lstm" if backend == "opake" else "self attention"
    model, x, y, loss = MODELS[failing].make()
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    with load_backend(backend)(model, loss) as b, pytest.raises(UnsupportedModel):
        b(x, y)
    assert not any(vars(p) for p in model.parameters())
    assert [p.grad is None for p in model.parameters()].count(False) == 1
    model, x, y, loss = images(layers(), nn.Tanh())
    assert outcome(backend, (model, x, y, loss), verify=True) == "exact"


# What is silently wrong in a peer, beside what the cases show.


@every_peer
def test_frequency_scaled_embeddings_are_found_out(backend: str):
    """The scale is the token's count in the whole batch, so that samples are mixed; the peers leave it out."""
    problem = tokens(nn.Sequential(nn.Embedding(7, 4, scale_grad_by_freq=True), nn.Linear(4, 5)), 5)
    if backend in ("opacus_functorch", "opake"):
        assert outcome(backend, problem, verify=False) == "exact"  # each sample's own counts, as in the oracle
    else:
        assert outcome(backend, problem, verify=False) == "wrong"
        assert outcome(backend, problem, verify=True) == "found out"


@every_peer
def test_convolutions_of_channels_last_images_are_found_out(backend: str):
    """Opacus unfolds an image by its strides, taking them for those of a channels-first one.
    A LayerNorm over channels makes it so, as in ConvNeXt, and `memory_format=torch.channels_last`.
    """
    turned = Net(lambda _, x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2))
    problem = images(turned, nn.Conv2d(4, 6, 3, padding=1), nn.Tanh())
    wrong = backend in ("opacus_hooks", "opacus_ghost")
    assert outcome(backend, problem, verify=False) == ("wrong" if wrong else "exact")
    assert outcome(backend, problem, verify=True) == ("found out" if wrong else "exact")


@every_peer
def test_a_refusal_of_many_parameters_names_a_few(backend: str):
    """One line that can be read, of a model with hundreds of parameters that the library does not know."""
    model = nn.Sequential(*(nn.ConvTranspose2d(4, 4, 1) for _ in range(9)))
    problem = images(model, nn.Conv2d(4, 2, 3))
    if backend in ("private_cnn", "fastdp"):
        with load_backend(backend)(problem[0], problem[3]) as b, pytest.raises(UnsupportedModel) as error:
            b(*problem[1:3])
        assert "0.0.weight, 0.0.bias, 0.1.weight" in str(error.value) and "0.3.bias and 10 more: " in str(error.value)
    else:
        assert outcome(backend, problem, verify=False) == ("refuses" if backend == "opacus_ew" else "exact")


@every_peer
def test_the_norm_of_a_skipped_layer_is_not_that_of_the_step_before(backend: str):
    model, x, y = Skipping().double(), torch.randn(5, 6).double(), torch.tensor([0, 1, 2, 0, 1])
    with load_backend(backend)(model, cross_entropy, clip=Flat(0.5)) as b:
        b(x, y)
        model.all_of_it = False
        oracle = load_backend("microbatch")(model, cross_entropy, clip=Flat(0.5))(x, y)
        if backend == "private_cnn":
            with pytest.raises(UnsupportedModel, match=r"sometimes.weight, sometimes.bias: private_CNN left no norm"):
                b(x, y)
        else:
            assert compare(b(x, y), oracle).within(exact.TOLERANCE)


@pytest.mark.parametrize(
    ("backend", "ghost", "fallback"),
    [
        ("opacus_hooks", [], ["prelu"]),
        ("opacus_functorch", [], []),
        ("opacus_ghost", ["linear", "embedding"], ["prelu"]),
        ("private_cnn", ["linear", "embedding"], None),
        ("fastdp", ["embedding"], None),
    ],
)
def test_coverage_says_how_the_norms_were_found(backend: str, ghost: list[str], fallback: list[str] | None):
    known = nn.ModuleDict({"embedding": nn.Embedding(7, 4), "norm": nn.LayerNorm(4), "linear": nn.Linear(4, 5)})
    if fallback is not None:
        known["prelu"] = nn.PReLU(5)
    sizes = {name: sum(p.numel() for p in m.parameters()) for name, m in known.items()}
    model, x, y, loss = tokens(nn.Sequential(*known.values()), 5)
    if "prelu" in known:
        loss = lambda out, y, inner=loss: inner(out, y)  # noqa: E731
        model[3] = nn.PReLU(1).double()
        sizes["prelu"] = 1
    with load_backend(backend)(model, loss) as b:
        b(x, y)
        total = sum(sizes.values())
        bias = 5 if "linear" in ghost else 0
        assert b.coverage["ghost"] == pytest.approx((sum(sizes[g] for g in ghost) - bias) / total)
        assert b.coverage["fallback"] == pytest.approx(sum(sizes[f] for f in fallback or []) / total)
        assert sum(b.coverage.values()) == pytest.approx(1)


@pytest.mark.parametrize("backend", ["fastdp"])
def test_fastdp_computes_the_weight_gradient_of_its_origin_alone(backend: str):
    """Where all layers are computed from the first one's output; else it computes all of them."""
    seen: list[tuple[bool, ...]] = []
    for beside in (False, True):
        model, x, y, loss = images(layers(), nn.Linear(3, 3))
        if beside:
            constants = Net(lambda net, x: x + net.layer(x.new_ones(len(x), 2)), layer=nn.Linear(2, 3))
            model = nn.Sequential(model, constants).double()
        seen.clear()
        hook = lambda module, _, seen=seen: seen.append(tuple(p.requires_grad for p in module.parameters()))  # noqa: E731
        model.register_forward_pre_hook(hook)
        assert outcome(backend, (model, x, y, loss), verify=False) == "exact"
        assert all(p.requires_grad for p in model.parameters())
        every = (True,) * len(seen[-1])
        alone = (False, True, *(False,) * (len(every) - 2))
        assert seen[-2:] == ([alone, every] if beside else [every, alone])  # after the oracle's


@pytest.mark.parametrize("backend", ["private_cnn"])
def test_private_cnn_leaves_its_global_mode_as_it_was(backend: str):
    from private_CNN.privacy_utils import autograd_grad_sample

    before = autograd_grad_sample.get_hooks_mode(), autograd_grad_sample._hooks_disabled
    test_a_step_that_fails_leaves_nothing_behind(backend)
    assert (autograd_grad_sample.get_hooks_mode(), autograd_grad_sample._hooks_disabled) == before


# Packages that are not there.


@pytest.mark.parametrize(
    ("peer", "package", "remedy"),
    [
        ("opacus_hooks", "opacus", "pip install opacus"),
        ("private_cnn", "private_CNN", "clone JialinMao/private_CNN from GitHub and put it on PYTHONPATH"),
        ("fastdp", "fastDP", "clone awslabs/fast-differential-privacy from GitHub and put it on PYTHONPATH"),
        ("opake", "opake.dpsgd", "pip install opake"),
    ],
)
def test_a_missing_package_is_named_with_the_way_to_get_it(peer: str, package: str, remedy: str, tmp_path, monkeypatch):
    (tmp_path / package).mkdir()  # a folder of the name, such as the clone itself, is no package
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in (package, package.partition(".")[0]):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert load_backend(peer).unavailable() == f"the package {package} is not importable; {remedy}"
    with pytest.raises(UnsupportedModel) as error:
        load_backend(peer)(nn.Linear(2, 2), cross_entropy)
    assert f"{package}: the package {package} is not importable (remedy: {remedy})" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_package_that_cannot_be_imported_says_why(tmp_path, monkeypatch):
    (tmp_path / "private_CNN").mkdir()
    (tmp_path / "private_CNN" / "__init__.py").write_text("import a_module_that_nobody_has")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "private_CNN", raising=False)
    reason = load_backend("private_cnn").unavailable()
    assert reason == (
        "the package private_CNN fails when imported: ModuleNotFoundError: No module named 'a_module_that_nobody_has'"
    )
