"""What a backend cannot do it refuses, by name, with the reason: messages are tested as product."""

import ast
import inspect
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from oddities import filled_in_place, layer_and_vector
from torch import Tensor, nn

from clipping import Automatic, Flat, UnsupportedModel, load_backend
from clipping.backends import tape
from clipping.rules.handlers import COMPOSITES, HANDLERS, PER_SAMPLE
from clipping.rules.recurrent import RECURRENT
from clipping.tape.compiled import compiled_modules, explained
from clipping.tape.replaced import require_own
from dpbench.conformance.cases import cross_entropy
from dpbench.conformance.modules import Net

TAPE = ["ghost", "bk_mixed"]  # two passes, and one; all record alike
OURS = ["nonprivate", "microbatch", "vmap", *TAPE, "opacus_hooks"]
X, Y = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])


@pytest.mark.parametrize("backend", TAPE)
def test_every_problem_is_listed_and_hooks_are_gone(backend: str):
    """`test_refused_by_name` has the problems one by one."""
    first, second = (Net(filled_in_place, **layer_and_vector()) for _ in range(2))
    model = nn.Sequential(first, nn.Unflatten(1, (3, 1)), nn.Flatten(), nn.Linear(3, 6), second)
    with load_backend(backend)(model, cross_entropy) as b, pytest.raises(UnsupportedModel) as error:
        b(X, Y)
    assert [p.module for p in error.value.problems] == ["0.p", "4.p"]
    model(X).sum().backward()  # the model is as usable as before


@pytest.mark.parametrize("backend", [b for b in OURS if b != "nonprivate"])
def test_batch_norm_is_refused_with_a_remedy(backend: str):
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    with pytest.raises(UnsupportedModel, match=r"1: BatchNorm1d mixes the samples.*GroupNorm"):
        load_backend(backend)(model, cross_entropy)
    load_backend("nonprivate")(model, cross_entropy)(X, Y)


@pytest.mark.parametrize("backend", [b for b in OURS if b != "nonprivate"])
def test_a_lazy_layer_is_refused_until_the_model_has_run(backend: str):
    model = nn.Sequential(nn.Linear(6, 4), nn.LazyLinear(3))
    with pytest.raises(UnsupportedModel, match=r"1\.weight: is lazy: it has no shape yet \(remedy: run the model once"):
        load_backend(backend)(model, cross_entropy)
    model(X)
    with load_backend(backend)(model, cross_entropy) as b:
        b(X, Y)


@pytest.mark.parametrize("backend", OURS)
def test_a_loss_that_is_not_one_number_a_sample_is_refused(backend: str):
    for loss_fn in (
        lambda out, y: F.cross_entropy(out, y),
        lambda out, y: F.cross_entropy(out, y, reduction="none")[:, None],
        lambda out, y: F.softmax(out, 1).square(),
        lambda out, y: (cross_entropy(out, y), out),
    ):
        with (
            load_backend(backend)(nn.Linear(6, 3), loss_fn) as b,
            pytest.raises(ValueError, match=r"one loss a sample.*reduction='none'"),
        ):
            b(X, Y)


@pytest.mark.parametrize("backend", OURS)
def test_a_batch_that_disagrees_with_itself_is_refused(backend: str):
    with load_backend(backend)(nn.Linear(6, 3), cross_entropy) as b:
        with pytest.raises(ValueError, match=r"same first dimension.*\[4, 6\], \[3\]"):
            b(X, Y[:3])
        with pytest.raises(ValueError, match="same first dimension"):
            b({"input": X, "scale": torch.tensor(2.0)}, Y)
        with pytest.raises(ValueError, match=r"expected padded tensors.* got a nested one"):
            b(torch.nested.nested_tensor(list(X[:, None]), layout=torch.jagged), Y)


@pytest.mark.parametrize("backend", TAPE)
@pytest.mark.parametrize(("owner", "name"), [(F, "linear"), (F, "relu"), (Tensor, "exp")])
def test_a_function_that_was_put_into_torch_is_refused(backend: str, owner: Any, name: str, monkeypatch):
    """A mode is shown the replacement, or a handler calls it, and it would run twice."""
    own, model = getattr(owner, name), Net(lambda m, x: F.relu(m.layer(x)).exp(), layer=nn.Linear(6, 3))
    with load_backend(backend)(model, cross_entropy) as b:
        b(X, Y)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: own(*args, **kwargs) * 2)
        with pytest.raises(UnsupportedModel, match=f"{name} is not torch's own"):
            b(X, Y)


def test_no_function_of_torch_is_taken_for_another():
    """`torch.mm` and `torch.spmm` are equal."""
    assert {torch.mm, torch.matmul, F.linear, Tensor.matmul} <= {*HANDLERS}
    for func in (*HANDLERS, torch.spmm, torch.dsmm):
        require_own(func)


@pytest.mark.parametrize("backend", TAPE)
def test_a_parameter_is_multiplied_by_any_product_of_torch(backend: str):
    model = Net(lambda m, x: torch.spmm(torch.mm(x, m.a), m.b), a=torch.randn(6, 5), b=torch.randn(5, 3))
    with load_backend(backend)(model, cross_entropy) as b:
        b(X, Y)


def reversible(m, x):
    out = m.layer(x)
    if out.requires_grad:
        out.register_hook(lambda g: m.p.backward(g.sum(0)))
    return out + m.p.detach()


@pytest.mark.parametrize("backend", TAPE)
def test_a_gradient_that_the_backward_pass_writes_is_refused(backend: str):
    """Autograd returns none for it, so that the definition has none either."""
    model = Net(reversible, layer=nn.Linear(6, 3), p=torch.ones(3))
    with (
        load_backend(backend)(model, cross_entropy) as b,
        pytest.raises(UnsupportedModel, match=r"p: its .grad is written within the backward pass, as by a reversible"),
    ):
        b(X, Y)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("options", "said"),
    [({"max_norm": 1.0}, "max_norm"), ({"scale_grad_by_freq": True}, "whole batch")],
)
def test_embedding_options_without_a_rule_are_refused(options, said):
    model = nn.Sequential(nn.Embedding(7, 3, **options), nn.Flatten(), nn.Linear(6, 3))
    ids = torch.randint(0, 7, (4, 2))
    with (
        load_backend("ghost")(model, cross_entropy, verify=False) as b,
        pytest.raises(UnsupportedModel, match=f"0.weight: embedding: .*{said}"),
    ):
        b(ids, Y)


@pytest.mark.parametrize("table", [HANDLERS, COMPOSITES, PER_SAMPLE], ids=["rules", "composites", "per sample"])
def test_a_handler_reads_each_of_its_arguments(table):
    """An option that it passes over would change the model where nobody sees it."""
    harmless = {"norm_type", "embed_dim_to_check"}  # reads nothing without max_norm, which is refused; torch's check
    for handler in {*table.values()} - {*RECURRENT.values()}:
        tree = ast.parse(inspect.getsource(handler))
        read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert set(inspect.signature(handler).parameters) - read <= harmless, handler


@pytest.mark.parametrize("backend", TAPE)
def test_a_causal_mask_beside_one_of_parameters_is_refused_as_torch_does(backend: str):
    def attended(m: Net, x: Tensor) -> Tensor:
        h = x.view(-1, 3, 2)
        return m.layer(F.scaled_dot_product_attention(h, h, h, m.mask, is_causal=True).flatten(1))

    model = Net(attended, layer=nn.Linear(6, 3), mask=nn.Parameter(torch.zeros(3, 3)))
    with load_backend(backend)(model, cross_entropy, verify=False) as b, pytest.raises(RuntimeError, match="causal"):
        b(X, Y)


def test_a_frozen_model_has_nothing_to_clip():
    model = nn.Linear(6, 3).requires_grad_(False)
    for backend in OURS:
        if backend == "opacus_hooks":
            continue  # its wrapper needs something trainable
        with load_backend(backend)(model, cross_entropy) as b:
            out = b(X, Y)
        assert out.grads == {} and out.losses.shape == (4,)
        assert out.norms is None or not out.norms.any()


@given(st.lists(st.floats(0, 1e30), min_size=1), st.floats(0, 1e30))
def test_flat_never_exceeds_its_sensitivity(norms: list[float], bound: float):
    clip, n = Flat(bound), torch.tensor(norms, dtype=torch.float64)
    clipped = clip.factors(n) * n
    assert clip.sensitivity == bound
    assert (clipped <= bound * (1 + 1e-12) + 1e-300).all() and (clip.factors(n) <= 1).all()
    assert torch.equal(clipped[n <= bound], n[n <= bound])


def test_a_factor_too_small_for_its_digits_is_zero():
    """The nearest subnormal number would exceed the threshold, here by 1e-12 and by 61 %."""
    for bound, norm in ((1.9839673179013276e-285, 1.977961176730164e29), (4e-310, 1.3e14)):
        for clip in (Flat(bound), Automatic(bound)):
            assert clip.factors(torch.tensor([norm], dtype=torch.float64)).item() * norm <= bound


def test_flat_at_its_edges():
    n = torch.tensor([0.0, 1.0, math.inf, math.nan])
    assert Flat(0.0).factors(n[:2]).tolist() == [0, 0]
    assert Flat(math.inf).factors(n[:2]).tolist() == [1, 1]
    assert Flat(2.0).factors(n)[:3].tolist() == [1, 1, 0] and Flat(2.0).factors(n)[3].isnan()
    n = torch.tensor([0.0, 0.5, 1.5])
    assert Flat(1.0, stabiliser=0.5).factors(n).tolist() == [1, 1, 0.5]
    assert Automatic(1.0, stabiliser=0.5).factors(n).tolist() == [2, 1, 0.5]
    for bad in (-1.0, math.nan):
        with pytest.raises(ValueError, match="max_grad_norm"):
            Flat(bad)
    with pytest.raises(ValueError, match="stabiliser"):
        Flat(1.0, stabiliser=-1)


def squares_of(outputs: Tensor, _: Tensor) -> Tensor:
    return outputs.square().sum(1)


class NoMask(nn.Module):
    """As fused attention on a GPU: it takes no mask for many samples; without it all is well, or is not."""

    def __init__(self, never: bool = False) -> None:
        super().__init__()
        self.layer, self.never, self.tried = nn.Linear(3, 2), never, 0

    def forward(self, x: Tensor) -> Tensor:
        if torch._C._functorch.is_functorch_wrapped_tensor(x):
            self.tried += 1
            if torch.backends.cuda.mem_efficient_sdp_enabled():
                raise RuntimeError("attn_bias: wrong shape")
            if self.never:
                raise RuntimeError("the way without is closed, too")
        return self.layer(x)


def test_vmap_goes_without_fused_attention_where_that_fails():
    x, y = torch.randn(4, 3), torch.zeros(4)
    with load_backend("vmap")(model := NoMask(), squares_of) as b:
        b(x, y)
        before = model.tried
        b(x, y)
        assert model.tried == before + 1 and torch.backends.cuda.mem_efficient_sdp_enabled()
    with (
        load_backend("vmap")(NoMask(never=True), squares_of, verify=False) as b,
        pytest.raises(UnsupportedModel, match="the way without is closed"),
    ):
        b(x, y)


def test_a_gradient_that_does_not_arrive_is_refused(monkeypatch):
    class Loses(tape.Tape):
        def _settle(self):
            super()._settle()
            self.arrivals._hooks.pop().remove()

    monkeypatch.setattr(tape, "Tape", Loses)
    with (
        load_backend("ghost")(nn.Linear(6, 3), cross_entropy, verify=False) as b,
        pytest.raises(UnsupportedModel, match="linear with weight, bias arrived 0 times, expected once"),
    ):
        b(X, Y)


def compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


@pytest.mark.parametrize(
    ("compiles", "remedy"),
    [(lambda layer: torch.compile(layer, backend="eager"), "_orig_mod"), (compiled_in_place, "without Module.compile")],
    ids=["torch.compile", "Module.compile"],
)
def test_a_compiled_module_is_named_with_what_to_do(compiles, remedy: str):
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    (whole,) = compiled_modules(compiles(model))
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), compiles(nn.Linear(6, 3)))
    (part,) = compiled_modules(model)
    for problem, name in ((whole, "Sequential"), (part, "2")):
        assert problem.module == name and "is compiled" in problem.reason and remedy in problem.remedy


def test_an_error_of_the_compiler_is_told_from_the_models_own():
    from torch._dynamo.exc import InternalTorchDynamoError

    problem = explained(InternalTorchDynamoError("NameError: name\n 'x' is not defined"))
    assert problem is not None and "InternalTorchDynamoError: NameError: name 'x' is not defined" in problem.reason
    assert explained(RuntimeError("shapes")) is None
