"""Launches, bytes and operations of a step, counted without a GPU: rules of counting, and the counts on record."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from clipping import load_backend
from clipping.accel import cuda
from clipping.numerics import per_sample
from clipping.rules import linear
from clipping.rules.pixel_gram import LINEAR
from dpbench.experiment import load_experiment
from dpbench.measure import launches
from dpbench.measure.launches import Launches, as_on_a_gpu, counted, run
from dpbench.records.store import read_records
from dpbench.trials.evidence import LaunchesTrial
from dpbench.trials.outcome import PartlyFailed


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta", requires_grad=True)


def test_a_linear_layer_by_hand():
    """y = xWᵀ, L = Σ y: of x [8, 6], W [5, 6] ordinary training takes one product forward and one backward."""
    model = nn.Linear(6, 5, bias=False, device="meta")
    with load_backend("nonprivate")(model, lambda y, _: y.sum(1), verify=False) as backend:
        found = counted(backend, torch.empty(8, 6, device="meta"), torch.empty(8, device="meta"))
    assert found["operations"] == {"mm": 2, "sum": 2, "ones_like": 1}
    assert found["flops"] == 2 * (2 * 8 * 6 * 5)
    x, w, y, losses = 8 * 6, 5 * 6, 8 * 5, 8
    expanded = 1  # the gradient of a sum is one number, expanded
    assert found["bytes_read"] == 4 * ((x + w) + y + losses + expanded + x)
    assert found["bytes_written"] == 4 * (y + losses + 1 + 1 + w)


@pytest.mark.parametrize("groups", [1, 4, 8])
@pytest.mark.parametrize("transposed", [False, True])
def test_both_gradients_of_a_convolution_take_what_its_forward_pass_takes(groups, transposed):
    """Of one with groups, too, where torch's own formula says more."""
    function, x = F.conv_transpose2d if transposed else F.conv2d, meta(3, 8, 9, 9)
    w = meta(8, 16 // groups, 3, 3) if transposed else meta(16, 8 // groups, 3, 3)
    with Launches() as forward:
        y = function(x, w, padding=1, groups=groups)
    with Launches() as backward:
        torch.autograd.grad(y.sum(), (x, w))
    assert forward.flops == 2 * 3 * 81 * 9 * 16 * 8 // groups and backward.flops == 2 * forward.flops


@pytest.mark.parametrize("wanted", [("x", "w"), ("x",), ("w",)])
def test_each_gradient_of_a_convolution_reads_that_of_its_output(wanted):
    """Of y = w * x, by 1x1: a kernel reads g and w for the gradient of x, and another g and x for that of w."""
    x, w, g = meta(3, 8, 9, 9), meta(16, 8, 1, 1), meta(3, 16, 9, 9).detach()
    y = F.conv2d(x, w)
    with Launches() as launches:
        torch.autograd.grad(y, [{"x": x, "w": w}[name] for name in wanted], g)
    assert dict(launches.found) == {"convolution_backward": 1}
    size, other = {"x": x.numel(), "w": w.numel()}, {"x": "w", "w": "x"}
    assert launches.bytes_read == 4 * sum(g.numel() + size[other[name]] for name in wanted)
    assert launches.bytes_written == 4 * sum(size[name] for name in wanted)
    assert launches.seconds == pytest.approx((launches.bytes_read + launches.bytes_written) / 3.0e12)


def test_the_gradient_of_a_bias_alone_is_counted():
    g, bias = meta(3, 16, 9, 9).detach(), meta(16)
    y = F.conv2d(meta(3, 8, 9, 9).detach(), meta(16, 8, 1, 1).detach(), bias)
    with Launches() as launches:
        torch.autograd.grad(y, bias, g)
    assert launches.bytes_read >= 4 * g.numel() and launches.bytes_written == 4 * 16


def test_views_launch_nothing_and_what_is_read_and_written_is_counted():
    x, into, table = meta(4, 6).detach(), meta(4, 6).detach(), meta(100, 6).detach()
    ids = torch.empty(5, dtype=torch.int64, device="meta")
    with Launches() as views:
        x.t().unsqueeze(0).expand(3, 6, 4)[1:].detach().view(2, 6, 4).split(1)
    assert views.found.total() == 0 and views.bytes_read == views.bytes_written == 0
    for operation, name, read, written in (
        (lambda: x + into, "add", 48, 24),
        (lambda: x + x, "add", 24, 24),
        (lambda: x.add_(into), "add_", 48, 24),
        (lambda: into.copy_(x), "copy_", 24, 24),
        (lambda: x.zero_(), "zero_", 0, 24),
        (lambda: torch.zeros_like(x), "zeros_like", 0, 24),
        (lambda: x.new_full((5,), 3.0), "new_full", 0, 5),
        (lambda: x + x[:1].expand(4, 6), "add", 24, 24),
        (lambda: x + into[:1].expand(4, 6), "add", 30, 24),
        (lambda: table[ids], "index", 2 * 5 + 30, 30),  # a number of 8 bytes is two of 4
        (lambda: F.embedding(ids, table), "embedding", 2 * 5 + 30, 30),
        (lambda: table.index_add_(0, ids, table[:5]), "index_add_", 2 * 5 + 30, 30),
    ):
        with Launches() as launches:
            operation()
        assert dict(launches.found) == {name: 1}
        assert (launches.bytes_read, launches.bytes_written) == (4 * read, 4 * written), name


def test_triton_programs_are_counted_with_the_operations_of_their_products():
    with as_on_a_gpu(Launches()) as launches:
        rows, lost = [meta(2, 7, size).mT for size in (3, 5)], (0.0, 0.0)
        cuda.gram_norms(*rows, LINEAR, 1, lost)
        assert launches.flops == 2 * 7 * 7 * (3 + 5)
        cuda.gradient_norms(*rows, LINEAR, 1, lost)
        assert launches.flops == 2 * 7 * 7 * (3 + 5) + 2 * 2 * 7 * 3 * 5
        images, geometry = (meta(2, 4, 6, 6), meta(2, 8, 6, 6)), ((3, 3), (1, 1), (1, 1), (1, 1))
        for program, flops in (
            (lambda: cuda.gradient_norms(*images, geometry, 2, lost), 36 * 8 * 2 * 9),
            (lambda: cuda.gram_norms(*images, geometry, 2, lost), 36 * 36 * (2 * 9 + 4)),
            (lambda: cuda.weighted(images[:1], images[1:], meta(2), 1, geometry), 36 * 8 * 4 * 9),
        ):
            before = launches.flops
            program()
            assert launches.flops - before == 2 * 2 * flops
    counts = {"gram": 2, "gradient": 2, "collected": 2, "weighted": 1}
    assert {name: launches.found[name] for name in counts} == counts
    assert not cuda.supported(meta(1))


def test_attention_is_the_kernel_that_cuda_takes():
    q = meta(2, 3, 16, 8)
    mask = torch.ones(16, 16, dtype=torch.bool, device="meta")
    with as_on_a_gpu(Launches()) as launches:
        F.scaled_dot_product_attention(q, q, q, mask).sum().backward()
    assert launches.found["_scaled_dot_product_efficient_attention"] == 1
    assert launches.found["_scaled_dot_product_efficient_attention_backward"] == 1 and launches.found["bmm"] == 0
    with Launches() as without:
        F.scaled_dot_product_attention(q, q, q, mask)
    assert without.found["bmm"] == 2


@pytest.mark.parametrize("place", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_small_model_is_counted(place):
    trial = load_experiment("launches").smoke("cpu")[place]
    backends = run(trial)["backends"]
    plain = backends["nonprivate"]
    assert list(backends) == list(trial.backends) and plain["launches"] == sum(plain["operations"].values())
    for entry in backends.values():
        assert entry["outcome"] == "ok" and entry["launches"] >= plain["launches"]
        assert entry["flops"] >= plain["flops"] and entry["bytes_read"] >= plain["bytes_read"]


def test_a_backend_that_fails_does_not_end_the_others(monkeypatch):
    monkeypatch.setattr("clipping.backends.tape.BkMixed.__call__", lambda *given: 1 / 0)
    trial = LaunchesTrial(model="cnn", backends=["bk_mixed", "nonprivate"], batch_size=2)
    with pytest.raises(PartlyFailed, match=r"bk_mixed \(error\)") as raised:
        run(trial)
    entries = raised.value.result["backends"]
    assert entries["nonprivate"]["outcome"] == "ok" and "ZeroDivisionError" in entries["bk_mixed"]["evidence"]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_predicted_time_by_hand(kind):
    """Bytes or operations, whichever takes longer; a convolution takes TF32.

    Of 528 Gram tiles in half precision, a multiprocessor gets four, and reads 256 rows of 8,192 features for each, or
    128 for the 32 on the diagonal. In float32 Triton takes half of a product's rate.
    """
    x, small, odd = (
        torch.empty(*shape, dtype=kind, device="meta") for shape in ((4096, 4096), (4096, 8), (4096, 4095))
    )
    rate, size = {torch.float32: (52e12, 4), torch.bfloat16: (767e12, 2)}[kind]
    image, weight = (torch.empty(*shape, dtype=kind, device="meta") for shape in ((64, 256, 32, 32), (256, 256, 3, 3)))
    of_convolution = rate if size == 2 else 400e12
    rows = 256 - 128 * 32 / 528
    of_tiles = 4 * (rows * 8192 * 2 / (8e12 / 132) + 0.9e-6)
    if size == 4:
        of_tiles = 16 * (2 * 64**2 * 8192 / (rate / 2 / 132) + 0.9e-6)
    for operation, seconds in (
        (lambda: x @ x, 2 * 4096**3 / rate),
        (lambda: x @ odd, 2 * 4096**2 * 4095 / (rate * (0.2 if size == 2 else 1))),
        (lambda: x @ small, size * (4096**2 + 2 * 4096 * 8) / 3.0e12),
        (lambda: x + x, size * 2 * 4096**2 / 3.0e12),
        (lambda: F.conv2d(image, weight, padding=1), 2 * 64 * 1024 * 9 * 256**2 / of_convolution),
        (lambda: cuda.gram_norms(x[None], x[None], LINEAR, 1, (0.0, 0.0)), of_tiles),
    ):
        with as_on_a_gpu(Launches()) as launches:
            operation()
        assert launches.seconds == pytest.approx(seconds, rel=1e-3)


@pytest.mark.parametrize(
    ("sizes", "by_gradients", "by_grams"),  # B, T, d, p; milliseconds on an H200 in bfloat16, by tiles of today's sizes
    [
        ((8, 1024, 768, 2304), 0.070, 0.101),
        ((8, 1024, 768, 3072), 0.103, 0.120),
        ((8, 1024, 768, 768), 0.043, 0.058),
        ((64, 197, 768, 3072), 0.184, None),
        ((64, 128, 768, 3072), 0.133, None),
        ((2, 2048, 4096, 11008), 0.734, 0.422),
    ],
)
def test_predicted_times_of_norms_are_near_those_measured(sizes, by_gradients, by_grams, monkeypatch):
    """The Gram program that was measured copied the rows of a tile on the diagonal twice; the other took one sample."""
    monkeypatch.setattr(cuda, "samples_in_turn", lambda *given: 1)
    monkeypatch.setattr(launches, "_by_gram_tiles", lambda t, entries, tile: entries * (-(-t // tile["BLOCK"]) + 1))
    count, positions, inputs, outputs = sizes
    rows = [torch.empty(count, positions, size, dtype=torch.bfloat16, device="meta").mT for size in (inputs, outputs)]
    for norms, measured in ((cuda.gradient_norms, by_gradients), (cuda.gram_norms, by_grams)):
        if measured is not None:
            with as_on_a_gpu(Launches()) as counts:
                norms(*rows, LINEAR, 1, (0.0, 0.0))
            assert 0.7 <= counts.seconds / (1e-3 * measured) <= 1.15


#: (model, dtype) -> the most launches, bytes, operations and predicted seconds of `bk_mixed`, of ordinary training's.
MOST = {
    ("resnet18", "float32"): (2.45, 1.35, 1.05, 1.3),
    ("resnet50", "float32"): (2.55, 1.25, 1.05, 1.3),
    ("transformers:gpt2@1024", "float32"): (1.65, 1.15, 1.15, 1.15),
    ("timm:vit_base_patch16_224", "float32"): (1.9, 1.25, 1.15, 1.15),
    ("transformers:roberta@128", "float32"): (2.05, 1.3, 1.1, 1.1),
    ("transformers:llama-block@2048", "float32"): (1.8, 1.25, 1.1, 1.1),
    ("resnet18", "bfloat16"): (2.45, 1.4, 1.1, 1.45),
    ("resnet50", "bfloat16"): (2.3, 1.25, 1.15, 1.25),
    ("transformers:gpt2@1024", "bfloat16"): (1.65, 1.3, 1.25, 1.0),
    ("timm:vit_base_patch16_224", "bfloat16"): (1.1, 1.1, 1.1, 1.15),
    ("transformers:roberta@128", "bfloat16"): (1.2, 1.15, 1.1, 1.15),
    ("transformers:llama-block@2048", "bfloat16"): (1.85, 1.25, 1.15, 1.15),
}


@pytest.fixture(scope="module")
def recorded():
    """(model, dtype) -> the ratios on record."""
    lines = read_records(Path(__file__).resolve().parents[2] / "results/launches")
    return {(r["trial"]["model"], r["trial"]["dtype"]): ratios(r["result"]) for r in lines if r["outcome"] == "ok"}


def ratios(result):
    def of(name):
        entry = result["backends"][name]
        return entry["launches"], entry["bytes_read"] + entry["bytes_written"], entry["flops"], entry["seconds"]

    return [x / y for x, y in zip(of("bk_mixed"), of("nonprivate"), strict=True)]


@pytest.mark.parametrize("case", MOST, ids=str)
def test_committed_counts_are_within_their_limits(case, recorded):
    assert all(x <= y for x, y in zip(recorded[case], MOST[case], strict=True)), recorded[case]


def test_today_s_code_takes_no_more_than_is_on_record_and_a_regression_is_seen(recorded, monkeypatch):
    """A sum in one portion after the other, as on a CPU, is beyond the limit."""
    trial = next(t for t in load_experiment("launches").cells("cpu") if (t.model, t.dtype) == ("resnet18", "float32"))
    trial, slack = (
        trial.replace(backends=("nonprivate", "bk_mixed")),
        [1.05 * x for x in recorded["resnet18", "float32"]],
    )
    assert all(x <= y for x, y in zip(ratios(run(trial)), slack, strict=True))
    for module in (linear, per_sample):
        monkeypatch.setattr(module, "at_once", lambda x: False)
    assert ratios(run(trial))[0] > max(slack[0], MOST["resnet18", "float32"][0])
