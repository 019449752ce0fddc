"""What a private step asks of a GPU: few launches, however large the batch; and that few give what many gave.

On tensors of no values and no device ("meta"), by `dpbench.measure.launches`.
"""

from __future__ import annotations

import copy
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
from fused_checks import CHECKS, COMPILED
from interpreter import outcome, results
from marks import slow_unless
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from clipping import Flat, load_backend
from clipping.accel import cuda, fused
from clipping.accel.ways import GRAM_KERNEL, NORM_KERNEL
from clipping.numerics import chunked_sums as portions
from clipping.numerics.chunked_sums import added_at_once, of_one_size, weighted_at_once
from clipping.numerics.rounding_bounds import portion
from clipping.numerics.traced_operations import tracing
from clipping.planning.costs import predicted
from clipping.planning.planner import UNTIMED
from clipping.rules import base, weight
from clipping.rules.base import Route
from clipping.rules.convolution import ConvolutionWeight
from clipping.rules.linear import LinearWeight
from clipping.rules.transposed import TransposedConvolutionWeight
from dpbench.conformance.sensitivity.records import RECORDS
from dpbench.measure.launches import Launches, as_on_a_gpu
from dpbench.measure.sensitivity import sensitivity
from dpbench.models.loading import load_workload
from dpbench.models.workload import Workload

TRITON = pytest.mark.skipif(not cuda._has_triton(), reason="Triton is not installed")
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: none here")


#: The interpreter takes longest on these, whose kernels others run as well.
LONG = (
    *("stride 2, odd sizes", "dilated by the stride", "transposed convolutions", "whole steps"),
    *("linear layers", "tiles of a convolution's Gram matrices"),
)


@cache
def interpreted(*names: str) -> dict[str, str | None]:
    return results("fused_checks.py", *names, TRITON_INTERPRET="1")


@TRITON
@pytest.mark.parametrize("name", slow_unless(lambda name: name not in LONG, CHECKS))
def test_the_kernels_in_the_interpreter(name: str):
    names = LONG if name in LONG else tuple(set(CHECKS) - set(LONG))
    found = interpreted(*sorted(names))
    assert found.keys() == set(names) and found[name] is None, found[name]


@TRITON
@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "90"])
def test_the_kernels_compile_without_a_gpu_and_stay_in_registers(capability: str, tmp_path: Path):
    found = results("fused_checks.py", "compile", capability, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert found == dict.fromkeys(COMPILED)


@pytest.mark.gpu
@TRITON
@GPU
@pytest.mark.parametrize("name", CHECKS)
def test_the_kernels_on_a_gpu(name: str):
    assert outcome(CHECKS[name], "cuda") is None


@cache
def resnet() -> Workload:
    return load_workload("resnet18", data="synthetic")


def of_a_step(name: str, batch_size: int, *, triton: bool) -> Counter[str]:
    workload = resnet()
    x, targets = (each.to("meta")[:1].expand(batch_size, *each.shape[1:]) for each in workload.batch(1))
    made = load_backend(name)(copy.deepcopy(workload.model).to("meta"), workload.loss_fn, verify=False)
    with made as backend, as_on_a_gpu(Launches(), triton=triton) as launches:
        backend(x, targets)
    return launches.found


@pytest.mark.parametrize("triton", [True, False])
def test_ordinary_training_takes_142_launches(triton):
    assert sum(of_a_step("nonprivate", 1000, triton=triton).values()) == 142


@pytest.mark.parametrize(
    ("name", "triton", "most", "batch_size"),
    [
        *(("bk_mixed", True, 2.6, 1000), ("bk_mixed", True, 2.6, 1024), ("mixed_ghost", True, 3.2, 1000)),
        *(("bk_mixed", False, 6.6, 1000), ("mixed_ghost", False, 7.6, 1024)),
    ],
)
def test_a_step_of_a_large_batch_takes_few_times_the_launches_of_ordinary_training(name, triton, most, batch_size):
    private = of_a_step(name, batch_size, triton=triton)
    most += 0.3 if batch_size % 64 else 0  # portions leave something over
    assert sum(private.values()) <= most * 142, (sum(private.values()), private.most_common(30))
    assert triton == (private["shifted"] > 0 and private["reach"] > 0)


@pytest.mark.parametrize(
    ("name", "triton"), [("bk_mixed", True), ("ghost", False), ("fastgradclip", False), ("fastgradclip", True)]
)
def test_no_image_is_unfolded(name: str, triton: bool):
    """torch's `unfold`, im2col, launches once a sample."""
    assert not {"im2col", "col2im"} & of_a_step(name, 64, triton=triton).keys()


@pytest.mark.parametrize(
    ("channels", "size", "way"),
    [(64, 32, NORM_KERNEL), (128, 16, NORM_KERNEL), (256, 8, "pixels"), (512, 4, "pixels"), (1024, 8, GRAM_KERNEL)],
)
def test_the_formulas_take_gram_matrices_of_small_images_and_never_copies_of_patches(channels, size, way):
    """Of ResNet18's layers, and of a pointwise one of ResNet50, in bfloat16, where nothing is timed."""
    kernel = 1 if channels == 1024 else 3
    x, g = (torch.empty(8, c, size, size, device="meta", dtype=torch.bfloat16) for c in (channels, min(channels, 512)))
    parameter = torch.empty(g.shape[1], channels, kernel, kernel, device="meta", dtype=x.dtype)
    with as_on_a_gpu(Launches()) as launches:
        rule = ConvolutionWeight(parameter, x, g.shape[2:], [1, 1], [kernel // 2] * 2, [1, 1], 1)
        norms = predicted(rule, g, kernels=UNTIMED[True]).norms
        ghost, found, _ = min(norms, key=norms.__getitem__)
        assert (ghost, found) == (True, way)
        assert 2 * norms[True, GRAM_KERNEL, 0] < norms[True, NORM_KERNEL, 0] or size > 8
        launches.found.clear()
        squares, reaches = rule.squares_and_reach(g, Route(True, GRAM_KERNEL))
        by_gram = dict(launches.found)
        launches.found.clear()
        rule.squares_and_reach(g, Route(True, NORM_KERNEL))
    assert squares.shape == (8,) and len(reaches) == 1
    # the norm and its reach are one launch, of copies with channels last where patches overlap
    turned, more = {"turned": 2} if kernel > 1 else {}, {"sum": 1} if size > 8 else {}
    assert by_gram == {"convolution_gram": 1} | turned | more
    assert launches.found == {"convolution": 1, "sum": 1} | (turned and turned | {"reach": 1, "cat": 1})


@pytest.mark.parametrize("last", [True, False])
def test_a_sum_over_images_in_half_precision_scales_and_widens_no_copy(last):
    layout = torch.channels_last if last else torch.contiguous_format
    x = torch.empty(256, 64, 32, 32, device="meta", dtype=torch.bfloat16, memory_format=layout)
    parameter = torch.empty(64, 64, 3, 3, device="meta", dtype=x.dtype)
    with as_on_a_gpu(Launches()) as launches:
        rule = ConvolutionWeight(parameter, x, x.shape[2:], [1, 1], [1, 1], [1, 1], 1)
        most, together = rule._kernel_portions(x)
        assert rule.weighted(x, torch.empty(256, device="meta")).shape == parameter.shape
        assert most == 1 and together >= 256 and rule._kernel_portions(base.Spec(x.shape, x.dtype)) == (most, together)
    assert launches.found == {"weighted_patches": 1, "added": 1} | ({} if last else {"turned": 2})


def test_a_transposed_convolution_is_planned_before_its_gradient_exists():
    x, parameter = (
        torch.empty(shape, device="meta", dtype=torch.bfloat16) for shape in ((8, 32, 5, 5), (32, 16, 3, 3))
    )
    with as_on_a_gpu(Launches()):
        rule = TransposedConvolutionWeight(parameter, x, x.shape[2:], [1, 1], [0, 0], [1, 1], 1)
        output = base.Spec(torch.Size((8, 16, 7, 7)), x.dtype)
        copied = 2 * (32 * 25 + 16 * 49)
        assert rule.work(output, GRAM_KERNEL).workspace == 4096 + copied


def test_the_scale_of_a_layer_norm_takes_one_launch_and_no_pass_of_torchs():
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.LayerNorm(16)).to("meta")
    x, targets = torch.empty(5, 9, 8, device="meta"), torch.empty(5, device="meta")
    with load_backend("bk_ghost")(model, lambda y, _: y.square().sum((1, 2)), verify=False) as backend:
        with as_on_a_gpu(Launches(), triton=True) as launches:
            backend(x, targets)
        with as_on_a_gpu(Launches(), triton=False) as without:
            backend(x, targets)
    assert launches.found["scale"] == 1 and launches.found["sub"] == 0
    assert without.found["scale"] == 0 and without.found["sub"] == 1


class NormsOfRows(TorchDispatchMode):
    """Passes that norms of rows take over activations, which kernels read once for everything."""

    def __init__(self, entries: int) -> None:
        super().__init__()
        self.entries, self.seen = entries, list[tuple[torch.dtype, torch.Size]]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.linalg_vector_norm.default and args[0].numel() >= self.entries:
            self.seen.append((args[0].dtype, args[0].shape))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("triton", [True, False])
@pytest.mark.parametrize(
    ("ghost", "way", "programs"),
    [
        (True, GRAM_KERNEL, {"gram": 1}),
        (True, NORM_KERNEL, {"instantiated": 1}),
        (True, "gram", {"bmm": 2, "shifted": 1}),
        (False, "direct", {"bmm": 1, "rows": 1}),
    ],
)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_norm_and_its_reach_take_one_pass(kind, ghost, way, programs, triton):
    """Of any way, of activations of either dtype; torch's operations take two more passes."""
    if not triton and way in (GRAM_KERNEL, NORM_KERNEL):
        return
    with as_on_a_gpu(Launches(), triton=triton) as launches, NormsOfRows(8 * 96 * 32) as norms:
        weight, a, g = (torch.empty(*s, dtype=kind, device="meta") for s in ((48, 32), (8, 96, 32), (8, 96, 48)))
        rule = LinearWeight(weight, a)
        assert rule.ghosts == (("gram", GRAM_KERNEL, NORM_KERNEL) if triton else ("gram",))
        squares, reaches = rule.squares_and_reach(g, Route(ghost, way))
        for each in (squares, *(reaches or [rule.reach(g)])[0]):
            assert each.shape == (8,) and each.dtype == torch.float32
    assert bool(norms.seen) != triton, norms.seen
    assert bool(reaches) == (triton and ghost)
    if triton:
        assert programs.items() <= launches.found.items() and launches.found.total() <= 6, launches.found


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("batch_size", "most"), [(64, {"weighted": 1, "added": 1}), (1, {"weighted": 1})])
def test_a_weighted_sum_of_half_precision_makes_no_scaled_copy(transposed, batch_size, most):
    with as_on_a_gpu(Launches()) as launches:
        weight, a, g = (
            torch.empty(*shape, dtype=torch.bfloat16, device="meta")
            for shape in ((3072, 768), (batch_size, 128, 768), (batch_size, 128, 3072))
        )
        rule = LinearWeight(weight.t() if transposed else weight, a, transposed)
        assert rule.weighted(g, torch.empty(batch_size, device="meta")).shape == rule.parameter.shape
    products = 2 * batch_size * 128 * 768 * 3072
    assert launches.flops == products and launches.found == most
    with as_on_a_gpu(Launches(), triton=False) as copies:
        rule.weighted(g, torch.empty(batch_size, device="meta"))
    assert copies.flops == 2 * products and copies.found["mul"] == 1 and copies.bytes_read > 2 * launches.bytes_read


def of_half(*shape: int, layout: torch.memory_format = torch.contiguous_format) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta", memory_format=layout)


def large_sums(batch_size: int) -> tuple[weight.Bilinear, ...]:
    """Of few positions, whose portions are large, and whose output gradient is their input."""
    image = of_half(batch_size, 512, 4, 4, layout=torch.channels_last)
    geometry = [[1, 1], [1, 1], [1, 1], 1]
    convolution = ConvolutionWeight(of_half(512, 512, 3, 3), image, image.shape[2:], *geometry)
    return LinearWeight(of_half(4096, 4096), of_half(batch_size, 16, 4096)), convolution


@pytest.mark.parametrize(("which", "program"), [(0, "weighted"), (1, "weighted_patches")])
def test_portions_that_a_kernel_sums_at_once_stay_within_the_room(which, program, monkeypatch):
    formed, form = [], getattr(fused, program)

    def formed_at_once(*given):
        formed.append(form(*given))
        return formed[-1]

    monkeypatch.setattr(fused, program, formed_at_once)
    with as_on_a_gpu(Launches()) as launches:
        rule = large_sums(2**14)[which]
        g, room = rule.held_input(), rule.room()
        assert rule.weighted(g, torch.empty(2**14, device="meta")).shape == rule.parameter.shape
    assert launches.found[program] == len(formed) > 2
    assert all(2 * each.nbytes <= room for each in formed)
    assert 3 * sum(each.nbytes for each in formed) > room * len(formed)  # and fill it


@pytest.mark.parametrize(("fewer", "more"), [(495, 496), (513, 1024), (257, 511)])
def test_the_size_of_portions_is_that_of_the_next_power_of_two(fewer, more):
    """T = 197 allows 63 samples of 495, and 64 of fewer."""
    assert portion(fewer, 197, torch.float32) == portion(more, 197, torch.float32)
    sizes = []
    with as_on_a_gpu(Launches()):
        for batch_size in (fewer, more):
            linear, convolution = large_sums(batch_size)
            vit = LinearWeight(of_half(768, 768), of_half(batch_size, 197, 768))
            small = ConvolutionWeight(of_half(64, 512, 3, 3), convolution.x, [4, 4], [1, 1], [1, 1], [1, 1], 1)
            of_linear = [rule._portion(rule.a) for rule in (linear, vit)]
            sizes.append([*of_linear, *(rule._kernel_portions(rule.x)[0] for rule in (convolution, small))])
    assert sizes[0] == sizes[1]


def test_channels_of_a_block_do_not_decide_how_the_batch_is_read():
    """A block of one sample has channels last where the batch has gaps."""
    x, gaps = (of_half(n, 32, 6, 6, layout=torch.channels_last) for n in (3, 6))
    with as_on_a_gpu(Launches()):
        rule, g = ConvolutionWeight(of_half(32, 32, 3, 3), x, x.shape[2:], [1, 1], [1, 1], [1, 1], 1), gaps[::2]
        assert rule.turns(g) and not rule.turns(g[:1])
        for way in (NORM_KERNEL, GRAM_KERNEL):
            squares, (reach,) = rule.squares_and_reach(g, Route(True, way, block=1))
            assert squares.shape == reach.terms.shape == (3,)
            assert rule.squared_norms(g, Route(True, way, block=1)).shape == (3,)


@pytest.mark.parametrize(("layout", "kernels"), [(torch.channels_last, 0), (torch.contiguous_format, 1)])
def test_images_that_have_channels_last_pass_no_kernel_of_a_graph(layout, kernels):
    """An operation of a graph may not return its operand."""
    x = torch.empty(2, 16, 3, 3, dtype=torch.bfloat16).contiguous(memory_format=layout)
    with tracing():
        graph = make_fx(fused.turned, tracing_mode="fake")(x).graph
    assert sum(node.target is torch.ops.dpbench.kernel.default for node in graph.nodes) == kernels


def test_gram_matrices_that_do_not_fit_the_workspace_are_never_whole():
    with as_on_a_gpu(Launches()) as launches:
        a = torch.empty(1, 2**15, 8, device="meta")
        squares, reaches = LinearWeight(a[0, :8], a).squares_and_reach(a, Route(True, "gram"))
    assert squares.shape == (1,) and not reaches and launches.found["bmm"] > 2 and not launches.found["shifted"]


@pytest.mark.parametrize("name", ["bk_mixed", "bk_ghost", "mixed_ghost"])
def test_a_step_of_linear_layers_takes_no_norms_of_rows_of_activations(name):
    """GPT-2 with a tied head, in bfloat16: 4 samples of 64 positions of 48 features."""
    tiny = "transformers:gpt2?n_layer=2&n_embd=48&n_head=2&vocab_size=100@64"
    with FakeTensorMode(allow_non_fake_inputs=True):
        workload = load_workload(tiny, data="synthetic", device="meta", dtype="bfloat16")
        batch = workload.batch(4)
        for triton in (True, False):
            made = load_backend(name)(workload.model, workload.loss_fn, verify=False)
            with made as backend, as_on_a_gpu(Launches(), triton=triton), NormsOfRows(4 * 64 * 48) as norms:
                backend(*batch)
            of_activations = [shape for dtype, shape in norms.seen if dtype == torch.bfloat16]  # gradients are wide
            assert bool(of_activations) != triton, of_activations


def test_a_count_that_grows_is_found(monkeypatch):
    """One portion after the other, as on a CPU: the count tells."""
    for module in (weight, portions):
        monkeypatch.setattr(module, "at_once", lambda x: False)
    assert sum(of_a_step("bk_mixed", 1024, triton=True).values()) > 6 * 142


@pytest.mark.parametrize(
    ("batch_size", "most", "together"), [(1, 1, 1), (7, 3, 7), (64, 5, 64), (97, 8, 40), (5, 9, 2), (1024, 19, 100)]
)
def test_portions_are_no_larger_than_they_may_be_and_leave_nothing_out(batch_size, most, together):
    seen, sizes = [], []
    for samples, count in of_one_size(batch_size, most, together):
        length = samples.stop - samples.start
        assert length % count == 0 and length // count <= most and length <= together
        seen += range(samples.start, samples.stop)
        sizes += [length // count] * count
    assert seen == list(range(batch_size)) and len(set(sizes[:-1])) <= 1
    more = [
        (s.stop - s.start) // count for s, count in of_one_size(batch_size + 1, most, together) for _ in range(count)
    ]
    assert more[: len(sizes) - 1] == sizes[:-1]  # a record more changes one portion, or is one


def test_portions_are_added_up_in_float64():
    """In float32 the small ones would be lost in the large one, in whatever order."""
    large, small = 2.0**24, torch.ones(4096)
    rows = torch.cat([torch.tensor([large]), small]).unsqueeze(1)
    assert weighted_at_once(torch.ones(4097), rows, 1).tolist() == [large + 4096]
    assert added_at_once(lambda samples, count: rows[samples].view(count, -1).sum(1), 4097, 1, 100) == large + 4096


class Layers(nn.Module):
    """A convolution with groups, a strided and a transposed one; linear layers, one of them of an einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 6, 3, 2, 1, groups=2), nn.ConvTranspose2d(6, 4, 3, 2)
        self.linear, self.head = nn.Linear(4, 6), nn.Parameter(torch.randn(2, 3, 5))
        self.third = nn.Conv1d(5, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).relu()).flatten(2).transpose(1, 2)
        x = torch.einsum("btgd,gdp->btp", self.linear(x).relu().unflatten(2, (2, 3)), self.head)
        return self.third(x.transpose(1, 2)).mean(2)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum(1)


@pytest.mark.parametrize(
    ("name", "batch_size"),
    [("bk_mixed", 13), ("bk_ghost", 12), ("bk_ghost", 13), ("mixed_ghost", 13), ("fastgradclip", 13)],
)
def test_portions_at_once_are_the_sum(name, batch_size, monkeypatch):
    torch.manual_seed(0)
    model, x, targets = Layers().double(), torch.randn(batch_size, 4, 6, 6).double(), torch.zeros(batch_size, 3)
    monkeypatch.setattr("clipping.norms.collection.SMALL", 2**40)
    found, formed = [], Counter[int]()
    for most in (100, 2):
        for module in ("clipping.backends.tape", "clipping.rules.weight", "clipping.numerics.per_sample"):
            monkeypatch.setattr(f"{module}.portion", lambda *_, most=most: most)
        for module in ("clipping.numerics.per_sample", "clipping.rules.weight", "clipping.norms.collection"):
            monkeypatch.setattr(f"{module}.at_once", lambda x, most=most: most == 2)

        def added(*given, most=most):
            formed[most] += 1
            return added_at_once(*given)

        monkeypatch.setattr(weight, "added_at_once", added)
        with load_backend(name)(model, loss, clip=Flat(0.5)) as backend:
            found.append(backend(x, targets))
    assert formed[100] == 0 and (formed[2] > 0 or name == "bk_mixed")
    torch.testing.assert_close(found[0].norms, found[1].norms, rtol=1e-12, atol=0)
    for key, grad in found[0].grads.items():
        torch.testing.assert_close(found[1].grads[key], grad, rtol=1e-10, atol=1e-13)
    assert not all(torch.equal(found[1].grads[key], grad) for key, grad in found[0].grads.items())


@pytest.mark.parametrize("name", ["bk_mixed", "mixed_ghost"])
def test_no_hard_record_moves_a_sum_of_portions_at_once_by_more_than_c(name, monkeypatch):
    for module in ("clipping.numerics.per_sample", "clipping.rules.weight", "clipping.norms.collection"):
        monkeypatch.setattr(f"{module}.at_once", lambda x: True)
    cases = [case for case in RECORDS if "thousands" in case.name or "worst order" in case.name]
    assert len(cases) == 4
    found = list(sensitivity(load_backend(name), "float32", cases=cases))
    assert {one.case: (one.outcome, one.excess) for one in found if one.outcome != "within"} == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_formed_at_once_stays_within_the_room(dtype):
    """Of a large weight few portions at a time; they are in float32."""
    rule = linear_rule(512, 512, 64)
    rule.parameter = rule.parameter.to("meta")
    rule.room = lambda: 8 * 2**20
    g = base.Spec(torch.Size((4096, 64, 512)), dtype)
    most, together = rule._most(g), rule._together(g)
    assert 2 * together // most * 512 * 512 * 4 <= 8 * 2**20 and together * 64 * 512 * dtype.itemsize <= 8 * 2**20


def linear_rule(outputs: int, inputs: int, positions: int) -> weight.Bilinear:
    return LinearWeight(torch.empty(outputs, inputs), torch.empty(4096, positions, inputs, device="meta"))
