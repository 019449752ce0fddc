"""What a private step asks of a GPU: few launches, however large the batch; and that few give what many gave.

On tensors of no values and no device ("meta"), by `dpbench.measure.launches`.
"""

import copy
import heapq
from collections import Counter
from functools import cache
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from clipping import Flat, load_backend
from clipping.accel import cuda, tiles
from clipping.accel.ways import FEW, GRADIENT_KERNEL, GRAM_KERNEL, NORM_KERNEL, portion_of
from clipping.numerics.per_sample import added_at_once, of_one_size, weighted_at_once
from clipping.numerics.rounding_bounds import excess, portion
from clipping.planning.costs import predicted
from clipping.planning.planner import choices_of
from clipping.rules import linear
from clipping.rules.base import UNTIMED, Route, Rule, Spec
from clipping.rules.convolution import ConvolutionWeight
from clipping.rules.embedding import EmbeddingWeight
from clipping.rules.linear import LinearWeight
from dpbench.conformance.modules import Net
from dpbench.measure.launches import Launches, as_on_a_gpu
from dpbench.models.loading import load_workload
from dpbench.models.workload import Workload


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
    assert triton == (private["shifted"] > 0 and private["rows"] > 0)


@pytest.mark.parametrize(
    ("name", "triton"), [("bk_mixed", True), ("ghost", False), ("fastgradclip", False), ("fastgradclip", True)]
)
def test_no_image_is_unfolded(name: str, triton: bool):
    """torch's `unfold`, im2col, launches once a sample."""
    assert not {"im2col", "col2im"} & of_a_step(name, 64, triton=triton).keys()


def of_half(*shape: int, layout: torch.memory_format = torch.contiguous_format) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta", memory_format=layout)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_every_way_of_a_gpu_takes_few_launches(layout):
    ids = torch.empty(64, 96, dtype=torch.int64, device="meta")
    with as_on_a_gpu(Launches()) as launches:
        image = of_half(64, 32, 8, 8, layout=layout)
        rules = [
            (LinearWeight(of_half(48, 32), of_half(64, 96, 32)), of_half(64, 96, 48)),
            (EmbeddingWeight(of_half(100, 48), ids), of_half(64, 96, 48)),
            (ConvolutionWeight(of_half(32, 32, 3, 3), image, image.shape[2:], [1, 1], [1, 1], [1, 1], 1), image),
        ]
        for rule, g in rules:
            for way in rule.ghosts:
                launches.found.clear()
                squares, _ = rule.squares_and_reach(g, Route(True, way))
                assert squares.shape == (64,) and launches.found.total() <= 16, (way, launches.found)


@pytest.mark.parametrize(("positions", "way"), [(128, "gram"), (197, GRAM_KERNEL)])
def test_a_kernel_forms_gram_matrices_whose_rows_are_not_aligned(positions, way):
    """As measured on an H200, for RoBERTa and for ViT."""
    with as_on_a_gpu(Launches()):
        rule = LinearWeight(of_half(3072, 768), of_half(64, positions, 768))
        route, _ = predicted(rule, of_half(64, positions, 3072), kernels=UNTIMED).best(ghost=True)
    assert route.way == way


@pytest.mark.parametrize("rows", [514, 50_265])
def test_a_kernel_compares_ids_whatever_the_size_of_the_table(rows):
    with as_on_a_gpu(Launches()):
        ids, g = torch.empty(64, 128, dtype=torch.int64, device="meta"), of_half(64, 128, 768)
        costs = predicted(EmbeddingWeight(of_half(rows, 768), ids), g, kernels=UNTIMED)
    assert costs.best(ghost=True)[0].way == GRAM_KERNEL


@pytest.mark.parametrize(("size", "kept"), [(32, True), (16, False)])
def test_gradients_of_a_large_image_s_convolution_are_worth_keeping(size, kept):
    """Those of ResNet18's first stage are about as small as the output's gradient; its second stage's are not."""
    channels = 2048 // size
    with as_on_a_gpu(Launches()):
        image, geometry = of_half(256, channels, size, size), [[1, 1], [1, 1], [1, 1], 1]
        rule = ConvolutionWeight(of_half(channels, channels, 3, 3), image, image.shape[2:], *geometry)
        output = Spec(image.shape, image.dtype)
        choices = choices_of(rule, output, predicted(rule, output, kernels=UNTIMED))
    fastest = min(choices, key=lambda choice: choice.seconds)
    assert fastest.route == (Route(way=GRADIENT_KERNEL, kept=True) if kept else Route(True, NORM_KERNEL))


@pytest.mark.parametrize(
    ("channels", "outputs", "size", "kernel", "stride", "way"),
    [
        (128, 512, 16, 1, 1, GRAM_KERNEL),
        (512, 128, 16, 1, 1, GRAM_KERNEL),
        (128, 256, 16, 3, 2, GRAM_KERNEL),
        (128, 128, 16, 3, 1, NORM_KERNEL),
        (256, 256, 8, 3, 1, "pixels"),
    ],
)
def test_a_convolution_s_norm_takes_the_way_that_copies_least(channels, outputs, size, kernel, stride, way):
    """Of ResNets in half precision: a kernel waits for copies to shared memory, not for its multiplications."""
    seconds = {}
    with as_on_a_gpu(Launches()) as launches:
        image, g = of_half(256, channels, size, size), of_half(256, outputs, size // stride, size // stride)
        options = [stride, stride], [kernel // 2, kernel // 2], [1, 1], 1
        rule = ConvolutionWeight(of_half(outputs, channels, kernel, kernel), image, g.shape[2:], *options)
        output = Spec(g.shape, g.dtype)
        choices = choices_of(rule, output, predicted(rule, output, kernels=UNTIMED))
        for name in rule.ghosts:
            before = launches.seconds
            rule.squares_and_reach(g, Route(True, name))
            seconds[name] = launches.seconds - before
    assert min(choices, key=lambda choice: choice.seconds).route == Route(True, way)
    assert seconds[way] <= 1.05 * min(seconds.values()), seconds


def large_sums(batch_size: int) -> tuple[linear.Bilinear, ...]:
    """Of few positions, whose portions are large, and whose output gradient is their input."""
    image = of_half(batch_size, 512, 4, 4, layout=torch.channels_last)
    geometry = [[1, 1], [1, 1], [1, 1], 1]
    convolution = ConvolutionWeight(of_half(512, 512, 3, 3), image, image.shape[2:], *geometry)
    return LinearWeight(of_half(4096, 4096), of_half(batch_size, 16, 4096)), convolution


@pytest.mark.parametrize("which", [0, 1])
def test_portions_that_a_kernel_sums_at_once_stay_within_the_room(which, monkeypatch):
    formed, form = [], cuda.weighted

    def formed_at_once(*given, **named):
        formed.append(form(*given, **named))
        return formed[-1]

    monkeypatch.setattr(cuda, "weighted", formed_at_once)
    with as_on_a_gpu(Launches()) as launches:
        rule = large_sums(2**14)[which]
        g, room = rule.x if which else rule.a, rule.room()
        assert rule.weighted(g, torch.empty(2**14, device="meta")).shape == rule.parameter.shape
    assert launches.found["weighted"] == len(formed) > 2
    assert all(2 * each.nbytes <= room for each in formed)
    assert 3 * sum(each.nbytes for each in formed) > room * len(formed)  # and fill it


def test_rows_of_the_last_portion_are_padded_as_the_others(monkeypatch):
    """Alone its product would be too small for padding to pay."""
    shapes, form = set(), cuda.weighted

    def formed(*given, **named):
        parts = form(*given, **named)
        shapes.add(parts.shape[1:])
        return parts

    monkeypatch.setattr(cuda, "portion_of", lambda *_: 4)
    monkeypatch.setattr(cuda, "weighted", formed)
    with as_on_a_gpu(Launches()) as launches:
        rule = LinearWeight(of_half(4096, 4097), of_half(5, 16, 4097))
        rule.room = lambda: 0
        assert rule.weighted(of_half(5, 16, 4096), torch.empty(5, device="meta")).shape == (4096, 4097)
    assert launches.found["weighted"] == 2 and len(shapes) == 1


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
            of_linear = [portion_of(rule, rule.a) for rule in (linear, vit)]
            sizes.append([*of_linear, *(portion_of(rule, rule.x) for rule in (convolution, small))])
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(("count", "positions"), [(64, 1), (1024, 1), (4096, 16)])
def test_a_sum_in_units_of_its_last_factor_is_rounded_within_the_bound(count, positions):
    """As the Triton program forms it, for records that are all alike but for their factors."""
    factors, row = torch.rand(count).mul(-6).exp(), torch.randn(200)
    rows = (row / row.norm() / factors[:, None]).bfloat16().float()
    total, most = torch.zeros(200, dtype=torch.float64), portion(count, max(positions, FEW), torch.float32)
    for c, g in zip(factors.split(most), rows.split(most), strict=True):
        found = g[0]
        for before, now, each in zip(c, c[1:], g[1:], strict=False):
            found = found * (before / now) + each
        total += (found * c[-1]).double()
    error = (total - factors.double() @ rows.double()).norm()
    assert error <= excess(count, positions, 1, portion(count, positions, torch.float32), torch.float32)[0]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((64, 178, 197, 768, 3072), 43),  # beside 72 tiles, those of a portion of 21, one or two each
        ((64, 178, 197, 768, 2304), 28),
        ((64, 10, 197, 768, 3072), 9),
        ((2, 312, 2048, 4096, 11008), 2),
        ((1, 1, 0, 1, 1), 1),
    ],
)
def test_few_portions_keep_the_multiprocessors_busy(sizes, expected):
    assert cuda.portion_of(cuda.Sums(*sizes, 128, 256)) == expected


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((256, 256, 9, 1), 9),  # ResNet18's second stage: two rounds of 9, not 18 of one, or one of 19
        ((256, 256, 36, 1), 24),
        ((3, 256, 9, 1), 1),
        ((256, 256, 1, 8), 1),
        ((0, 0, 1, 1), 1),
    ],
)
def test_programs_take_samples_in_turn_if_there_are_many(sizes, expected):
    assert tiles.samples_in_turn(*sizes) == expected


@pytest.mark.parametrize(
    ("sizes", "most", "expected"),  # on 132 multiprocessors
    [
        ((64, 221, 128, 768, 768), 32, 22),  # of 18 tiles: RoBERTa's
        ((64, 221, 128, 768, 3072), 12, 11),  # of 72
        ((64, 178, 197, 768, 2304), 12, 12),  # of 54: ViT's
        ((2, 312, 2048, 4096, 4096), 4, 1),  # of 512: no number of them fills more
    ],
)
def test_one_launch_sums_as_many_equal_layers_as_fill_the_multiprocessors(sizes, most, expected):
    assert cuda.layers_of(cuda.Sums(*sizes, 128, 256), most) == expected


class EqualLayers(nn.Module):
    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*size) for size in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


@pytest.mark.parametrize(
    ("batch_size", "room", "expected"),
    [(64, 22, 3), (64, 5, 5), (8, 22, 24)],  # a sum of 8 samples takes more than half of the memory of its operands
)
def test_equal_layers_are_summed_together_as_far_as_memory_allows(batch_size, room, expected):
    model, x = EqualLayers(*[768] * 25).to("meta", torch.bfloat16), of_half(batch_size, 128, 768)
    made = load_backend("bk_mixed")(model, lambda y, _: y.sum((1, 2)), verify=False)
    memory = mock.patch.object(Rule, "room", lambda rule: room * 2 * 4 * 768**2)  # undone before that of `as_on_a_gpu`
    with made as backend, as_on_a_gpu(Launches()) as launches, memory:
        backend(x, torch.empty(batch_size, device="meta"))
    assert launches.found["weighted"] == expected and launches.found["gram"] == 1


@pytest.mark.parametrize(("pairs", "grams", "products"), [(2, 0, 8), (3, 2, 0)])
def test_whole_gram_matrices_of_equal_layers_are_left_to_one_launch_that_fills_the_gpu(pairs, grams, products):
    """The library's product of one layer is faster than a launch for one; so RoBERTa's plan has products."""
    model, x = EqualLayers(*[768, 3072] * pairs, 768).to("meta", torch.bfloat16), of_half(64, 128, 768)
    made = load_backend("bk_mixed")(model, lambda y, _: y.sum((1, 2)), verify=False)
    with made as backend, as_on_a_gpu(Launches()) as launches:
        backend(x, torch.empty(64, device="meta"))
    assert (launches.found["gram"], launches.found["bmm"]) == (grams, products)


@pytest.mark.parametrize(
    "sizes", [(64, 18, 144), (64, 64, 108), (64, 22, 36), (5, 2, 300), (7, 3, 1), (9, 1, 133), (3, 2, 132)]
)
def test_the_busiest_multiprocessor_is_that_of_programs_in_their_order(sizes):
    count, size, programs = sizes
    free = [0] * tiles.MULTIPROCESSORS
    for start in range(0, count, size):
        for _ in range(programs):
            heapq.heapreplace(free, free[0] + min(size, count - start))
    assert tiles.busiest(*sizes) == max(free)


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


def layers() -> Net:
    """A shared table; a convolution with groups, a strided and a transposed one; linear layers, one an einsum."""

    def forward(net: Any, ids: Tensor) -> Tensor:
        x = net.norm(net.table(ids)).view(-1, 4, 6, 6)
        x = net.second(net.first(x).relu()).flatten(2).transpose(1, 2)
        x = torch.einsum("btgd,gdp->btp", net.linear(x).relu().unflatten(2, (2, 3)), net.head)
        return net.third(x.transpose(1, 2)).mean(2) @ net.table.weight.T

    parts = {"table": nn.Embedding(7, 24), "norm": nn.LayerNorm(24), "third": nn.Conv1d(5, 24, 2)}
    parts |= {"first": nn.Conv2d(4, 6, 3, 2, 1, groups=2), "second": nn.ConvTranspose2d(6, 4, 3, 2)}
    return Net(forward, **parts, linear=nn.Linear(4, 6), head=torch.randn(2, 3, 5))


@pytest.mark.parametrize(
    ("name", "batch_size"),
    [("bk_mixed", 13), ("bk_ghost", 12), ("bk_ghost", 13), ("mixed_ghost", 13), ("ghost", 13), ("fastgradclip", 13)],
)
def test_portions_at_once_are_the_sum(name, batch_size, monkeypatch):
    model, x, targets = layers().double(), torch.randint(7, (batch_size, 6)), torch.zeros(batch_size, 7)
    loss = lambda outputs, targets: (outputs - targets).square().sum(1)  # noqa: E731
    monkeypatch.setattr("clipping.norms.collection.SMALL", 2**40)
    found, formed = [], Counter[int]()
    for most in (100, 2):
        for module in ("clipping.backends.tape", "clipping.rules.linear", "clipping.numerics.per_sample"):
            monkeypatch.setattr(f"{module}.portion", lambda *_, most=most: most)
        for module in ("clipping.numerics.per_sample", "clipping.rules.linear", "clipping.norms.collection"):
            monkeypatch.setattr(f"{module}.at_once", lambda x, most=most: most == 2)

        def added(*given, most=most):
            formed[most] += 1
            return added_at_once(*given)

        monkeypatch.setattr(linear, "added_at_once", added)
        with load_backend(name)(model, loss, clip=Flat(0.5)) as backend:
            found.append(backend(x, targets))
    assert formed[100] == 0 and (formed[2] > 0 or name == "bk_mixed")
    torch.testing.assert_close(found[0].norms, found[1].norms, rtol=1e-12, atol=0)
    torch.testing.assert_close(found[1].grads, found[0].grads, rtol=1e-10, atol=1e-13)
    assert not all(torch.equal(found[1].grads[key], grad) for key, grad in found[0].grads.items())
