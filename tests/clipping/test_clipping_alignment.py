"""Products of half precision whose rows are padded by zeros: norms and sums are exact, and none is left unaligned."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from clipping import load_backend
from clipping.numerics import products
from clipping.numerics.products import aligned, padding
from clipping.rules import linear
from clipping.rules.base import Route, Spec
from clipping.rules.embedding import EmbeddingWeight
from clipping.rules.linear import LinearWeight, cross_gram
from dpbench.measure.launches import Launches, as_on_a_gpu
from dpbench.models.loading import load_workload

#: Of a product: multiplications that a kernel for unaligned rows may take, 40 µs at a fifth of an H100's rate.
LEFT = 2**31


def test_what_pays_is_padded_by_sizes_alone():
    half = torch.bfloat16
    assert padding((8, 1024, 50_257), half, 768) == 15  # GPT-2's head, to 50,272
    assert padding((256, 10), half, 512) == 0  # ten classes: less than a launch
    assert padding((2**16, 10), half, 2**12) == 6
    assert padding((8, 1024, 50_304), half, 768) == padding((8, 1024, 50_264), half, 768) == 0
    assert padding((8, 1024, 50_257), half, 64) == 0  # the copy is as large as the product
    assert padding((8, 1024, 50_257), torch.float32, 768) == 0


def test_zeros_are_added_to_rows(monkeypatch):
    monkeypatch.setattr(products, "PADS_FROM", 1)
    x = torch.randn(3, 4, 19).to(torch.float16)
    found = aligned(x, 128)
    assert found.shape == (3, 4, 32) and found.is_contiguous()
    assert torch.equal(found[..., :19], x) and not found[..., 19:].any()
    assert aligned(found, 128) is found and aligned(x, 127) is x and aligned(x.float(), 128).shape == x.shape


@pytest.fixture
def padded(monkeypatch):
    """Whatever is unaligned, on a CPU."""
    monkeypatch.setattr(products, "PADS_FROM", 1)
    monkeypatch.setattr(products, "OTHERS", 1)
    monkeypatch.setattr(linear, "on_gpu", lambda x: True)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("inputs", "outputs", "fold"), [(24, 19, 1), (19, 24, 1), (13, 19, 2)])
def test_norms_and_sums_are_exact(padded, inputs, outputs, fold, transposed):
    torch.manual_seed(0)
    weight = torch.empty((inputs, outputs) if transposed else (outputs, inputs))
    a, g = (torch.randn(4 * fold, 5, size).to(torch.bfloat16) for size in (inputs, outputs))
    rule, factors = LinearWeight(weight, a, transposed, fold), torch.rand(4)
    at_arrival = rule.padded(g)
    assert at_arrival.shape[-1] == (32 if outputs == 19 else 24)
    x, y = (each.double().unflatten(0, (4, fold)).flatten(1, 2) for each in (a, g))
    each = torch.einsum("nti,nto->nio" if transposed else "nti,nto->noi", x, y)
    for of in (g, at_arrival):
        for ghost, ways in ((True, rule.ghosts), (False, rule.instantiations)):
            for way in ways:
                found = rule.squared_norms(of, Route(ghost, way)).double()
                torch.testing.assert_close(found, each.square().sum((1, 2)), rtol=1e-5, atol=0)
        torch.testing.assert_close(rule.instantiate_all(of, Route()).double(), each, rtol=1e-5, atol=1e-5)
        total = torch.einsum("n,npd->pd", factors.double(), each)
        for found in (rule.weighted(of, factors), rule.gradients(*rule._scaled(of, factors, slice(0, 4)), 2).sum(0)):
            assert found.shape == weight.shape and found.is_contiguous()
            torch.testing.assert_close(found.double(), total, rtol=1e-5, atol=1e-5)
        expected = (x.norm(dim=2) * y.norm(dim=2)).sum(1)
        torch.testing.assert_close(rule.reach(of).terms.double(), expected, rtol=1e-5, atol=0)
        torch.testing.assert_close(
            cross_gram(*rule.operands(of, slice(0, 4)), *rule.operands(g, slice(0, 4)), 2**20).double(),
            each.square().sum((1, 2)), rtol=1e-5, atol=0,
        )  # fmt: skip


def of_two_uses(rule, g, other, other_g) -> None:
    expected = (rule.instantiate_all(g, Route()).double() * other.instantiate_all(other_g, Route()).double()).flatten(1)
    found = rule.inner(g, other, other_g)
    torch.testing.assert_close(found.double(), expected.sum(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(24, 19), (19, 24), (13, 19)])
def test_cross_terms_of_uses_of_which_one_is_padded_are_exact(padded, monkeypatch, inputs, outputs, transposed):
    monkeypatch.setattr(products, "PADS_FROM", 4 * 4 * inputs * outputs)  # few positions are not padded
    weight = torch.empty((inputs, outputs) if transposed else (outputs, inputs))
    a, g, b, h = (torch.randn(4, t, size).to(torch.bfloat16) for t in (5, 2) for size in (inputs, outputs))
    rule, other = (LinearWeight(weight, x, transposed) for x in (a, b))
    assert [rule.operands(g, slice(0, 4))[i].shape[2] % 8 for i in (0, 1)] == [0, 0] and other.padded(h) is h
    of_two_uses(rule, rule.padded(g), other, h)
    of_two_uses(other, h, rule, g)


@pytest.mark.parametrize(("hidden", "tokens"), [(19, 24), (24, 19), (19, 21)])
def test_cross_terms_of_a_tied_embedding_and_a_padded_head_are_exact(padded, hidden, tokens):
    weight = torch.empty(tokens, hidden)
    a, g, h = (torch.randn(4, 5, size).to(torch.bfloat16) for size in (hidden, hidden, tokens))
    rule, head = EmbeddingWeight(weight, torch.randint(tokens, (4, 5))), LinearWeight(weight, a)
    for at_arrival in (h, head.padded(h)):
        of_two_uses(rule, g, head, at_arrival)


def test_the_bytes_of_the_copy_are_stated():
    weight, a = (torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((50_257, 768), (8, 1024, 768)))
    g = Spec(torch.Size((8, 1024, 50_257)), torch.bfloat16)
    rule = LinearWeight(weight, a)
    arrived = torch.empty(g.shape, dtype=g.dtype, device="meta")
    assert rule.padded(arrived).nbytes == 8 * 1024 * 50_272 * 2
    assert rule.copied(g) == 1024 * 768 * 2
    turned = LinearWeight(weight.t(), arrived)
    assert turned.copied(Spec(a.shape, a.dtype)) == 1024 * (768 + 50_272) * 2


class Unaligned(TorchDispatchMode):
    """Products of half precision of which an operand's rows begin at no multiple of 16 bytes, beyond `LEFT`."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [x for x in args if isinstance(x, Tensor)][-2:]
        if func._schema.name.rpartition("::")[2] in ("mm", "addmm", "bmm", "baddbmm"):
            x, y = given
            self.products += 1
            if x.numel() * y.shape[-1] > LEFT and any(max(each.stride()[-2:]) % 8 for each in given):
                self.seen.add(f"{func._schema.name} {list(x.shape)} {list(y.shape)}")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("name", "tied"), [("bk_mixed", True), ("bk_ghost", False), ("fastgradclip", True)])
def test_of_a_gpt_2_s_step_only_ordinary_training_s_products_are_unaligned(name, tied):
    """The activation gradient of the head: its weight gradient, which ordinary training's has also, is ours."""
    model = f"transformers:gpt2?n_layer=1&n_embd=256&n_head=2&tie_word_embeddings={tied}@64"
    found = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        workload = load_workload(model, data="synthetic", device="meta", dtype="bfloat16")
        batch = workload.batch(8)
        for each in ("nonprivate", name):
            made = load_backend(each)(workload.model, workload.loss_fn, verify=False)
            with made as backend, as_on_a_gpu(Launches()), Unaligned() as mode:
                backend(*batch)
            found[each] = mode
    assert min(mode.products for mode in found.values()) > 10
    plain, private = (found[each].seen for each in ("nonprivate", name))
    assert len(plain) == 2 and private == {"aten::mm [512, 50257] [50257, 256]"}
