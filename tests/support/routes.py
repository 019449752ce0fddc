"""Operations of every kind with random shapes, and a planner with forced choices."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from clipping.backends.tape import BkMixed
from clipping.planning.planner import Plan, Planner, has_choice
from clipping.rules.base import Route, Rule, made
from clipping.rules.convolution import convolution, transposed_convolution
from clipping.rules.embedding import embedding, embedding_bag
from clipping.rules.linear import addmm, linear, matmul
from clipping.rules.normalisation import layer_norm, rms_norm

BATCH = 3


@dataclass(frozen=True)
class Operation:
    """One use of a weight: `run(inputs, weight)` returns the output and the weight's rule."""

    run: Callable[[Tensor, Tensor], tuple[Tensor, Rule]]
    weight: Tensor
    inputs: Tensor


def of(handler: Callable[..., Any], *args: Any, position: int = 0, **options: Any) -> Callable[..., Any]:
    """The handler as a function of input and weight that returns the output and the rule at `position`."""

    def run(inputs: Tensor, weight: Tensor) -> tuple[Tensor, Rule]:
        output, found = handler(inputs, *args, weight, **options)
        return output, made(found[position])

    return run


def random_convolution(seed: int, dims: int, style: str) -> Operation:
    """A convolution with random kernel, stride, padding and dilation in each dimension.

    `style`: "plain", "groups", "depthwise", "pointwise", "multiplier" (depthwise with more outputs) or "transposed".
    """
    pick = random.Random(f"{seed} {dims} {style}")

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(pick.randint(low, high) for _ in range(dims))

    most = 3 if dims < 3 else 2
    kernel, stride, dilation = each(1, most), each(1, most), each(1, 2)
    padding = tuple(pick.randint(0, d * (k - 1)) for k, d in zip(kernel, dilation, strict=True))
    if style == "pointwise":
        kernel, stride, padding = (1,) * dims, (1,) * dims, (0,) * dims
    size = tuple(d * (k - 1) + pick.randint(1, 7 - 2 * (dims - 1)) for k, d in zip(kernel, dilation, strict=True))
    channels, outputs, groups = {
        "plain": (pick.randint(1, 4), pick.randint(1, 5), 1),
        "pointwise": (pick.randint(1, 4), pick.randint(1, 5), 1),
        "groups": (4, 6, 2),
        "depthwise": (3, 3, 3),
        "multiplier": (3, 6, 3),
        "transposed": (4, 6, pick.choice((1, 2))),
    }[style]
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    x = torch.randn(BATCH, channels, *size, dtype=torch.float64)
    if style == "transposed":
        weight = torch.randn(channels, outputs // groups, *kernel, dtype=torch.float64)
        # padding shrinks the output, which must not become empty
        options["padding"] = tuple(min(p, (n - 1) * s // 2) for p, n, s in zip(padding, size, stride, strict=True))
        options["output_padding"] = tuple(pick.randint(0, s - 1) for s in stride)
        return Operation(of(transposed_convolution, **options), weight, x)
    weight = torch.randn(outputs, channels // groups, *kernel, dtype=torch.float64)
    return Operation(of(convolution, **options), weight, x)


def ids(*shape: int) -> Tensor:
    found = torch.randint(0, 7, shape)
    found[:, -1] = found[:, 0]  # read twice by every sample
    return found


def doubles(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def weighted_bag(inputs: Tensor, weight: Tensor) -> tuple[Tensor, Rule]:
    scale = torch.linspace(-1, 2, inputs.numel(), dtype=torch.float64).view(inputs.shape)
    output, (found,) = embedding_bag(inputs, weight, mode="sum", per_sample_weights=scale)
    return output, made(found)


def windows(inputs: Tensor, weight: Tensor) -> tuple[Tensor, Rule]:
    """A linear layer with two rows for each sample, as if windows or tokens were folded into the batch."""
    output, found = linear(inputs.flatten(0, 1), weight)
    return output, made(found[0]).regroup(2)


def conv_of_frames(inputs: Tensor, weight: Tensor) -> tuple[Tensor, Rule]:
    output, found = convolution(inputs.flatten(0, 1), weight, padding=1)
    return output, made(found[0]).regroup(2)


def bias_of(handler: Callable[..., Any], weight: Tensor) -> Callable[..., Any]:
    """The operation as a function of input and bias, with the bias's rule."""
    return lambda inputs, bias: (lambda output, found: (output, made(found[-1])))(*handler(inputs, weight, bias))


OPERATIONS: dict[str, Callable[[], Operation]] = {
    "linear": lambda: Operation(of(linear), doubles(4, 5), doubles(BATCH, 5)),
    "linear, positions": lambda: Operation(of(linear), doubles(4, 5), doubles(BATCH, 6, 5)),
    "linear, many positions": lambda: Operation(of(linear), doubles(4, 5), doubles(BATCH, 300, 5)),
    "linear, two dimensions": lambda: Operation(of(linear), doubles(4, 5), doubles(BATCH, 3, 2, 5)),
    "linear, windows": lambda: Operation(windows, doubles(4, 5), doubles(BATCH, 2, 3, 5)),
    "linear, bias": lambda: Operation(bias_of(linear, doubles(4, 5)), doubles(4), doubles(BATCH, 6, 5)),
    "matmul": lambda: Operation(of(matmul), doubles(5, 4), doubles(BATCH, 6, 5)),
    "addmm": lambda: Operation(
        lambda x, w: (lambda y, found: (y, made(found[0])))(*addmm(doubles(4) * 0, x, w)),
        doubles(5, 4),
        doubles(BATCH, 5),
    ),
    "frames": lambda: Operation(conv_of_frames, doubles(6, 4, 3, 3), doubles(BATCH, 2, 4, 5, 5)),
    "convolution, bias": lambda: Operation(
        bias_of(convolution, doubles(6, 4, 3, 3)), doubles(6), doubles(BATCH, 4, 5, 5)
    ),
    "embedding": lambda: Operation(of(embedding), doubles(7, 4), ids(BATCH, 6)),
    "embedding, one id": lambda: Operation(of(embedding), doubles(7, 4), torch.arange(BATCH)),
    "embedding, two dimensions": lambda: Operation(of(embedding), doubles(7, 4), ids(BATCH, 3, 2)),
    "embedding, padding_idx": lambda: Operation(of(embedding, padding_idx=3), doubles(7, 4), ids(BATCH, 9)),
    "embedding, last row padded": lambda: Operation(of(embedding, padding_idx=-1), doubles(7, 4), ids(BATCH, 9)),
    "bag, sum": lambda: Operation(of(embedding_bag, mode="sum"), doubles(7, 4), ids(BATCH, 6)),
    "bag, mean": lambda: Operation(of(embedding_bag, mode="mean"), doubles(7, 4), ids(BATCH, 6)),
    "bag, mean, padding_idx": lambda: Operation(of(embedding_bag, padding_idx=3), doubles(7, 4), ids(BATCH, 9)),
    "bag, weighted": lambda: Operation(weighted_bag, doubles(7, 4), ids(BATCH, 6)),
    "layer norm": lambda: Operation(of(layer_norm, [4]), doubles(4), doubles(BATCH, 5, 4)),
    "rms norm": lambda: Operation(of(rms_norm, [4]), doubles(4), doubles(BATCH, 5, 4)),
}


def gradients(operation: Operation, g: Tensor) -> Tensor:
    """∂(g_i · output_i)/∂weight for every sample by autograd, [B, *shape]."""
    found = []
    fold = g.shape[0] // BATCH
    for i in range(BATCH):
        weight = operation.weight.clone().requires_grad_()
        output, _ = operation.run(operation.inputs, weight)
        rows = slice(i * fold, (i + 1) * fold)
        found.append(torch.autograd.grad((output[rows] * g[rows]).sum(), weight)[0])
    return torch.stack(found)


class Forced(Planner):
    """Plans as usual, then replaces each choice by one kind of route: the rule's n-th way, in small blocks.

    Attributes:
        taken: every forced (rule, route).
        most: the largest number of ways of a rule; 1 if there was no choice.
    """

    def __init__(self, kind: str, nth: int = 0, block: int = 2) -> None:
        super().__init__("memory")
        self.kind, self.nth, self.block = kind, nth, block
        self.taken: set[tuple[str, str]] = set()
        self.most = 1

    def plan(self, tape: Any, losses: Tensor, count: int = 0) -> Plan:
        plan = super().plan(tape, losses, count)
        readings = [(source, rule) for use in tape.uses for source, rule in use.rules]
        routes = [
            self.forced(route, rule) if has_choice(source, rule) else route
            for route, (source, rule) in zip(plan.routes, readings, strict=True)
        ]
        return replace(plan, routes=routes)

    def forced(self, route: Route, rule: Rule) -> Route:
        ways = rule.ghosts if self.kind == "ghost" else rule.instantiations
        if not ways:
            return route
        self.most = max(self.most, len(ways))
        way = ways[self.nth % len(ways)]
        self.taken.add((type(rule).__name__, way))
        return Route(self.kind == "ghost", way, self.block, kept=self.kind == "kept")


class ForcedBackend(BkMixed):
    """`bk_mixed` with a `Forced` planner; `planners` has the planner of each instance."""

    name = "bk_mixed, forced"
    how: ClassVar[tuple[str, int, int]]
    planners: ClassVar[list[Forced]]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.planner = Forced(*self.how)
        self.planners.append(self.planner)


def forced(kind: str, nth: int = 0, block: int = 2) -> type[ForcedBackend]:
    """A backend class with one kind of route: "ghost", "kept" or "discarded"."""
    return type("OfOneRoute", (ForcedBackend,), {"how": (kind, nth, block), "planners": []})


def cancelling(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss with opposite gradients in the first and second half of the positions."""
    half = outputs.shape[1] // 2
    return (outputs[:, :half] - outputs[:, half:]).flatten(1).mul(targets[:, None]).sum(1)
