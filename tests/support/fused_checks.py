"""Checks the kernels of `clipping.accel.fused` on a GPU or in Triton's interpreter, and compiles them.

TRITON_INTERPRET=1 python tests/support/fused_checks.py     run all checks on the CPU: {name: error or null}
python tests/support/fused_checks.py compile 90             compile for a GPU, present or not: {name: error or null}
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from interpreter import compiled, interpreted, outcome
from torch import Tensor, nn

from clipping import Flat, load_backend
from clipping.accel import cuda, fused, ways
from clipping.accel.ways import GRAM_KERNEL, NORM_KERNEL
from clipping.numerics.rounding_bounds import of_rows, row_norms
from clipping.rules.base import Route
from clipping.rules.convolution import ConvolutionWeight, convolution, transposed_convolution
from clipping.rules.linear import LinearWeight
from clipping.rules.normalisation import LayerNormWeight, layer_norm

#: channels, outputs, size, kernel, stride, padding, dilation, groups
CONVOLUTIONS: dict[str, tuple[Any, ...]] = {
    "as in ResNet18": (4, 5, (6, 7), (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "more tiles than one": (3, 2, (9, 8), (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "stride 2": (3, 4, (8, 6), (3, 3), (2, 2), (1, 1), (1, 1), 1),
    "stride 2, odd sizes": (3, 4, (7, 9), (3, 3), (2, 2), (1, 1), (1, 1), 1),
    "a shortcut": (3, 4, (7, 8), (1, 1), (2, 2), (0, 0), (1, 1), 1),
    "a shortcut that begins in the padding": (3, 4, (7, 8), (1, 1), (2, 2), (1, 1), (1, 1), 1),
    "stride above the kernel": (2, 3, (9, 8), (2, 2), (3, 4), (1, 0), (1, 1), 1),
    "dilated": (2, 3, (9, 8), (3, 2), (1, 2), (2, 1), (2, 3), 1),
    "dilated by the stride": (2, 3, (9, 8), (3, 3), (2, 2), (2, 2), (2, 2), 1),
    "in groups": (4, 6, (5, 6), (3, 2), (1, 2), (1, 0), (1, 1), 2),
    "of one dimension": (3, 4, (40,), (5,), (2,), (2,), (1,), 1),
    "of one dimension, wide padding": (3, 4, (5,), (3,), (1,), (4,), (1,), 1),
    "more than a tile of outputs": (9, 70, (5, 5), (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "one pixel for each position": (20, 17, (4, 5), (1, 1), (1, 1), (0, 0), (1, 1), 1),
    "kernel larger than the image": (2, 3, (3, 2), (5, 5), (1, 1), (2, 2), (1, 1), 1),
    "padding larger than the kernel": (2, 3, (3, 3), (2, 2), (2, 2), (3, 3), (1, 1), 1),
    "one pixel": (3, 4, (1, 1), (1, 1), (1, 1), (0, 0), (1, 1), 1),
    "nothing but padding": (3, 4, (1, 1), (1, 1), (2, 2), (1, 1), (1, 1), 1),
}


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    assert found.shape == expected.shape and found.dtype == torch.float32, (found.shape, found.dtype)
    error = float((found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-30))
    assert error <= tolerance, f"relative error {error:.1e}: {found.tolist()} for {expected.tolist()}"


def made(
    case: tuple[Any, ...], device: str, dtype: torch.dtype, *, transposed: bool = False
) -> tuple[Any, Any, Tensor]:
    """A convolution's rule in `dtype` and in float64, and its output's gradient in float64."""
    channels, outputs, size, kernel, stride, padding, dilation, groups = case
    shape = (channels, outputs // groups) if transposed else (outputs, channels // groups)
    weight = torch.randn(*shape, *kernel, dtype=torch.float64, device=device).to(dtype)
    x = torch.randn(3, channels, *size, dtype=torch.float64, device=device).to(dtype)
    found = []
    for each in (dtype, torch.float64):
        if transposed:
            made_of = (x.to(each), weight.to(each), None, stride, padding, 0, groups, dilation)
            output, gradients = transposed_convolution(*made_of)
        else:
            output, gradients = convolution(x.to(each), weight.to(each), None, stride, padding, dilation, groups)
        parameter, kind, *others = gradients[0]
        found.append(kind(parameter, *others))
    g = torch.randn(output.shape, dtype=torch.float64, device=device).to(dtype)
    return *found, g


def with_kernels(run: Callable[[], Any]) -> Any:
    """Call `run` with kernels, even on a CPU (in the interpreter)."""
    before, fused.runs = fused.runs, lambda *tensors: tensors[0].dtype != torch.float64
    try:
        return run()
    finally:
        fused.runs = before


def convolutions(name: str, device: str, *, transposed: bool = False) -> None:
    """Squared norms and reaches equal those of torch's operations in float64."""
    for dtype in (torch.float32, torch.bfloat16):
        rule, wide, g = made(CONVOLUTIONS[name], device, dtype, transposed=transposed)
        alone = with_kernels(lambda rule=rule, g=g: rule.reach(g))
        least = rule.reach(g).lost  # by torch's operations, in the dtype that underflows
        close(alone.lost, least)
        expected = wide.squared_norms(g.double(), Route())
        for way in ("pixels" if "pixels" in rule.ghosts else "patches", GRAM_KERNEL, NORM_KERNEL):
            route = Route(ghost=True, way=way)
            squares, reach = with_kernels(lambda rule=rule, g=g, route=route: rule.squares_and_reach(g, route))
            assert bool(reach) == (way != "patches")
            assert (squares - expected).abs().max() <= 1e-5 * max(expected.max(), squares.new_tensor(1e-30)), way
            for found in filter(None, (reach, alone)):
                close(found.terms, wide.reach(g.double()).terms)
                close(found.apart, wide.reach(g.double()).apart)
            if reach:
                none = way == "pixels" and name == "nothing but padding"
                close(reach.lost, torch.zeros_like(least) if none else least)


def linear_layers(device: str) -> None:
    """Norm and reach of every way of the kernels are float64's."""
    for dtype in (torch.float32, torch.bfloat16):
        for count, positions, inputs, outputs in ((3, 1, 5, 7), (2, 5, 6, 4), (2, 70, 16, 32), (1, 131, 7, 5)):
            a, g = (torch.randn(count, positions, size, device=device).to(dtype) for size in (inputs, outputs))
            rule = LinearWeight(torch.empty(outputs, inputs, device=device), a)
            wide = torch.einsum("ntp,ntd->npd", g.double(), a.double()).square().sum((1, 2))
            terms = a.double().norm(dim=2) * g.double().norm(dim=2)
            for way in ("gram", GRAM_KERNEL, NORM_KERNEL):
                assert way in rule.ghosts
                route = Route(True, way)
                squares, reach = with_kernels(lambda rule=rule, route=route, g=g: rule.squares_and_reach(g, route))
                close(squares, wide)
                close(reach.terms, terms.sum(1))
                close(reach.apart, terms.square().sum(1))
                close(reach.lost, of_rows(row_norms(a), row_norms(g), inputs, outputs).lost)
            close(with_kernels(lambda rule=rule, g=g: rule.reach(g)).terms, terms.sum(1))


def sums_of_rows(device: str) -> None:
    """Of linear layers in half precision: exact products in float32, in one portion and in several."""
    for dtype in (torch.bfloat16, torch.float16):
        for count, positions, inputs, outputs, turned in (
            (0, 16, 16, 16, False),
            (1, 16, 16, 16, False),
            (5, 33, 32, 144, False),
            (9, 130, 16, 32, True),
            (4, 70, 144, 160, True),
        ):
            if device == "cpu" and dtype == torch.float16 and positions > 33:
                continue  # the interpreter takes seconds
            a, g = (torch.randn(count, positions, size, device=device).to(dtype) for size in (inputs, outputs))
            weight = torch.empty((inputs, outputs) if turned else (outputs, inputs), device=device)
            rule, factors = LinearWeight(weight, a, turned), torch.rand(count, device=device) * 2.0**-7
            expected = torch.einsum("n,nto,nti->oi", factors.double(), g.double(), a.double())
            summed(rule, g, factors, expected.t() if turned else expected)
            if count:  # of any strides
                several, turned_around = a.repeat(1, 1, 2)[..., :inputs], a.mT.contiguous().mT
                for x, known in ((a, True), (several, True), (a[..., :15], False), (turned_around, False)):
                    assert cuda.rows_at_once(x.mT, g.mT) == known


def sums_over_images(device: str) -> None:
    """Of a remainder, and of a factor of 0, too."""
    for dtype, case in (
        (torch.bfloat16, (16, 32, (5, 4), (3, 2), (2, 1), (1, 0), (1, 1), 1)),
        (torch.float16, (3, 5, (6, 5), (3, 3), (1, 2), (0, 1), (2, 1), 1)),
        (torch.float16, (3, 70, (8, 9), (1, 1), (1, 1), (0, 0), (1, 1), 1)),
    ):
        rule, wide, g = made(case, device, dtype)
        factors = torch.tensor([0.5, 0.0, 3.0], device=device)
        summed(rule, g, factors, wide.weighted(g.double(), factors.double()))


def summed(rule: Any, g: Tensor, factors: Tensor, expected: Tensor) -> None:
    """Σ_i c_i g_i as expected, in one portion and in as many as there are samples; all at once, or in turn."""
    busy, count = cuda.BUSY, len(factors)
    for cuda.BUSY in (1, busy):
        size = with_kernels(lambda: ways.portion(rule, g))
        assert size == (1 if cuda.BUSY > 1 else 1 << max(0, count - 1).bit_length()), size
        for room in (2**30, 0):
            rule.room = lambda room=room: room
            found = with_kernels(lambda: rule.weighted(g, factors))
            close(found, expected, 2e-6 if g.device.type == "cpu" else 1e-5)  # tensor cores cut off what they add
    cuda.BUSY = busy


def transposed(device: str) -> None:
    for name in ("stride 2", "in groups"):
        convolutions(name, device, transposed=True)


def any_strides(device: str) -> None:
    """The same results to the bit of images of any strides, in several launches, and of a wider input."""
    narrow, lost = torch.float16, (1.0, 2.0)  # the interpreter rounds bfloat16 downwards
    rule, wide, g = made((4, 6, (5, 4), (2, 1), (1, 1), (1, 0), (1, 1), 2), device, torch.float32)
    last, turned = g.to(memory_format=torch.channels_last), rule.x.transpose(2, 3).contiguous().transpose(2, 3)
    whole = cuda.PROGRAMS
    for norms in (cuda.gram_norms, cuda.gradient_norms):
        found = norms(rule.x, g, rule.geometry(), 2, lost)
        close(found[:, 0].view(3, 2).sum(1), wide.squared_norms(g.double(), Route()))
        cuda.PROGRAMS = 8
        assert torch.equal(found, norms(turned, last, rule.geometry(), 2, lost))
        cuda.PROGRAMS = whole
        both = [norms(x, g.to(narrow), rule.geometry(), 2, lost) for x in (rule.x, rule.x.to(narrow))]
        assert torch.equal(*both)


def turned(device: str) -> None:
    """Half precision is copied, channels last: the output's gradient once for norm and sum, which stay the same."""
    rule, wide, g = made((16, 32, (5, 4), (3, 2), (2, 1), (1, 0), (1, 1), 1), device, torch.float16)
    factors = torch.rand(3, device=device)
    for y in (g, g.mT.contiguous().mT, g.contiguous(memory_format=torch.channels_last)):
        assert with_kernels(lambda y=y: rule.laid_out(y, ghost=False)) is y
        last = with_kernels(lambda y=y: rule.laid_out(y, ghost=True))
        for x, of in zip(with_kernels(lambda: rule.images(g, slice(0, 3))), (rule.x, g), strict=True):
            assert torch.equal(x, of) and x.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(last, y) and with_kernels(lambda last=last: rule.laid_out(last, ghost=True)) is last
        for way in (GRAM_KERNEL, NORM_KERNEL):
            squares, reach = with_kernels(lambda last=last, way=way: rule.squares_and_reach(last, Route(True, way)))
            close(squares, wide.squared_norms(g.double(), Route()))
            close(reach.terms, wide.reach(g.double()).terms)
        for _ in range(2):
            found = with_kernels(lambda last=last: rule.weighted(last, factors))
            close(found, wide.weighted(g.double(), factors.double()))
            with_kernels(lambda last=last: rule.lay_out_input(last))
            assert rule.x.is_contiguous(memory_format=torch.channels_last)


def rows(device: str) -> None:
    for count, positions in ((1, 1), (3, 5), (2, 1500)):
        a, g = (torch.rand(count, positions, device=device) for _ in "ab")
        for x in (a, a[:, :1], a[:, :1].expand(count, positions), a.repeat(1, 2)[:, ::2]):
            found = with_kernels(lambda x=x, g=g: of_rows(x, g, 3, 5))
            of = x if x.shape == g.shape else x.expand_as(g)
            close(found.terms, (of.double() * g.double()).sum(1))
            close(found.lost, of_rows(of, g, 3, 5).lost)


def sums_in_float64(device: str) -> None:
    for count, *shape in ((1, 1), (3, 5), (40, 33, 70)):
        parts = torch.randn(count, *shape, device=device) * 2.0 ** torch.randint(
            -20, 20, (count, *shape), device=device
        )
        torch.testing.assert_close(fused.added(parts), parts.double().sum(0).float(), rtol=2e-7, atol=1e-12)
        expected = (parts.double().sum(0) + 2 * parts[:1].double().sum(0)).float()
        torch.testing.assert_close(
            fused.added(parts, parts[:1].repeat(2, *[1] * len(shape))), expected, rtol=2e-7, atol=1e-9
        )
    parts = torch.tensor([[2.0**24], *[[1.0]] * 8], device=device)  # float32 would lose each 1
    assert fused.added(parts).item() == 2.0**24 + 8


def scales_of_layer_norm(device: str) -> None:
    for shape, normalized in (((2, 3, 5), (5,)), ((3, 70, 130), (130,)), ((4, 7), (7,)), ((2, 3, 4, 5), (4, 5))):
        for dtype in (torch.float32, torch.bfloat16):
            x, g = (torch.randn(shape, device=device).to(dtype) for _ in "ab")
            weight = torch.ones(normalized, device=device, dtype=dtype)
            _, gradients = layer_norm(3 * x + 5, normalized, weight)
            parameter, kind, *others = gradients[0]
            assert kind is LayerNormWeight
            rule = kind(parameter, *others)
            everyone = slice(0, len(x))
            found = with_kernels(lambda rule=rule, g=g, everyone=everyone: rule.instantiate(g, everyone))
            terms = (rule.x.double() - rule.mean.double()) * rule.rstd.double() * g.double()
            close(found, terms.flatten(1, -1 - len(normalized)).sum(1) if len(shape) > 1 + len(normalized) else terms)
            turned = g.transpose(0, 1).contiguous().transpose(0, 1)  # not contiguous, so torch's operations run
            close(with_kernels(lambda rule=rule, g=turned, everyone=everyone: rule.instantiate(g, everyone)), found)


def infinities_come_through(device: str) -> None:
    """An overflow stays infinite for its own sample, and does not affect other samples."""
    case = CONVOLUTIONS["stride 2"]
    rule, _, g = made(case, device, torch.float32)
    rule.x[1, 0, 3, 3] = 3e38
    squares, reach = with_kernels(lambda: rule.squares_and_reach(g, Route(True, "pixels")))
    assert squares.isfinite().tolist() == [True, False, True] and reach.terms.isfinite().tolist() == [True, False, True]


def whole_steps_in_half_precision(device: str) -> None:
    """Norms and sums by every kernel are those of torch's operations on the same gradients, accumulated in float32."""
    layers = nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU(), nn.Flatten()
    model = nn.Sequential(*layers, nn.Linear(144, 3)).to(device, torch.bfloat16)
    x, targets = torch.randn(5, 3, 6, 6, device=device).bfloat16(), torch.randint(0, 3, (5,), device=device)

    def step() -> Any:
        with load_backend("bk_ghost")(model, of_outputs, clip=Flat(0.5), verify=False) as backend:
            return backend(x, targets)

    def of_outputs(outputs: Tensor, of: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs.float(), of, reduction="none")

    plain, ghosts = step(), ConvolutionWeight.best_way
    for way in (GRAM_KERNEL, NORM_KERNEL, "pixels"):
        ConvolutionWeight.best_way = lambda self, g, *, ghost, way=way: way if ghost else ghosts(self, g, ghost=ghost)
        found = with_kernels(step)
        close(found.norms, plain.norms)
        for key, grad in plain.grads.items():
            assert (found.grads[key] - grad).abs().max() <= 1e-5 * grad.abs().max(), (way, key)
    ConvolutionWeight.best_way = ghosts


CHECKS: dict[str, Callable[[str], None]] = {
    **{name: lambda device, name=name: convolutions(name, device) for name in CONVOLUTIONS},
    "transposed convolutions": transposed,
    "images of any strides": any_strides,
    "images turned": turned,
    "sums over images": sums_over_images,
    "rows": rows,
    "linear layers": linear_layers,
    "sums of rows": sums_of_rows,
    "scales of layer norm": scales_of_layer_norm,
    "sums in float64": sums_in_float64,
    "infinities come through": infinities_come_through,
    "whole steps in half precision": whole_steps_in_half_precision,
}


# program, and the kernel's sides (or depth)
COMPILED = {
    **{program: (program, 3) for program in ("shifted", "reach")},
    **{program: (program, 1) for program in ("scale", "turned", "added")},
    "reach of rows": ("reach", 1),
}


def compile_(name: str, capability: int) -> None:
    """Compile for a GPU of this capability, present or not; no register may spill."""
    from clipping.accel import fused_programs  # needs Triton

    program, kernel = COMPILED[name]
    geometry = {"KERNEL": kernel, "STRIDE": 2, "PADDING": 1, "DILATION": 1, "PHASES": min(2, kernel)}
    values = {f"{key}_{axis}": value for key, value in geometry.items() for axis in "HW"} | {"COUNT": 27, "RESTS": 1}
    values |= dict.fromkeys(("BLOCK_T", "BLOCK_N", "BLOCK_C"), fused.TILE)
    values["BLOCK"] = fused.TILE if program == "shifted" else cuda.LINE
    kinds = dict.fromkeys(("x", "g", "parts", "rest", "mean", "rstd", "out"), "*fp32")
    compiled(getattr(fused_programs, program), capability, kinds, values, shared=48, num_warps=cuda.WARPS)


def main(arguments: list[str]) -> dict[str, str | None]:
    if arguments[:1] == ["compile"]:
        return {name: outcome(compile_, name, int(arguments[1])) for name in COMPILED}
    return interpreted({name: CHECKS[name] for name in arguments or CHECKS})


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
