"""Run a `NormsTrial`: compare every way to compute a per-sample norm, and the clipped sum, with float64.

The reference is autograd's gradient of torch's own function for each sample, in float64, on the same numbers (rounded
to the profile's dtype). So a row's error comes from the arithmetic of the way alone.

- A *ghost* or *instantiated* row is one way of one rule of `clipping.rules`, including the Triton programs if they run:
  max_i |n_i - ‖g_i‖| / ‖g_i‖.
- A *sum* row is the weighted gradient Σ_i c_i g_i: ‖Δ‖ / ‖reference‖.
- A *group norm* row is a backend's step, at batch sizes around the limit of 65,535 groups of CUDA's backward pass.

`limit` is the error due to rounding: four units of the coarsest number involved (2⁻¹¹ for TF32, 2⁻⁸ for bfloat16), and
2e-5 in float32, where summation dominates. A Triton program sums in float32 and multiplies float32 in full in every
profile: its limit is 1e-5, and 1e-4 for bfloat16, where tensor cores truncate sums.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipping import Flat, load_backend
from clipping.accel.ways import GRAM_KERNEL, NORM_KERNEL
from clipping.core.dtypes import norm_dtype
from clipping.rules.base import Route, Rule, made
from clipping.rules.handlers import HANDLERS
from dpbench.measure.bench import device_of
from dpbench.measure.precision import arithmetic, dtype_of
from dpbench.trials.evidence import NormsTrial
from dpbench.trials.outcome import Mismatch, Outcome, PartlyFailed, noted

LIMITS = {"float32": 2e-5, "tf32": 2.0**-9, "bfloat16": 2.0**-6}
KERNEL_LIMITS = {"float32": 1e-5, "tf32": 1e-5, "bfloat16": 1e-4}
#: 32 groups a sample: 65,504, 65,536 and 131,072 in a batch.
GROUP_NORM_BATCHES, GROUPS = (2047, 2048, 4096), 32
_PROGRAMS = (GRAM_KERNEL, NORM_KERNEL)
Row = dict[str, Any]


def run(trial: NormsTrial) -> dict[str, Any]:
    """{"rows": [{"operation", "sizes", "parameter", "route", "way", "error", "limit", "outcome", "evidence"}]}.

    Raises:
        Mismatch: an error is beyond its limit; with all rows.
        PartlyFailed: a way raised an error; with all rows.
        NotHere: TF32 on a device without it.
    """
    device = device_of(trial.device)
    if trial.precision not in LIMITS:
        raise ValueError(f"expected a precision, one of {', '.join(LIMITS)}, got {trial.precision!r}")
    with torch.no_grad(), arithmetic(trial.precision, device):
        rows = list(_rows(trial, device))
    wrong = [row for row in rows if row["outcome"] == Outcome.MISMATCH]
    failed = [row for row in rows if row["outcome"] not in (Outcome.OK, Outcome.MISMATCH, Outcome.UNSUPPORTED)]
    if wrong:
        worst = max(wrong, key=lambda row: row["error"] / row["limit"])
        said = f"{worst['operation']} ({worst['sizes']}), {worst['route']} {worst['way']}"
        raise Mismatch(
            {"rows": rows},
            f"{len(wrong)} of {len(rows)} norms differ from float64's; the worst: {said}, relative error "
            f"{worst['error']:.1e}, expected at most {worst['limit']:.1e}",
        )
    if failed:
        raise PartlyFailed(failed[0]["outcome"], {"rows": rows}, f"{len(failed)} ways failed: {failed[0]['evidence']}")
    return {"rows": rows}


def _rows(trial: NormsTrial, device: torch.device) -> Iterator[Row]:
    generator = torch.Generator().manual_seed(trial.seed)
    if trial.family == "group_norm":
        for batch_size in GROUP_NORM_BATCHES:
            yield from _group_norm_rows(trial, batch_size, generator, device)
    else:
        for case in _CASES[trial.family](trial.small):
            yield from _case_rows(case, trial.precision, generator, device)
            gc.collect()


def _case_rows(case: _Case, precision: str, generator: torch.Generator, device: torch.device) -> Iterator[Row]:
    """Every way of the rule of every parameter."""
    x, *parameters = case.tensors(generator, device, dtype_of(precision))
    output, found = case.call(HANDLERS[case.function], x, *parameters)
    g = torch.randn(output.shape, generator=generator).to(device, output.dtype)
    factors = torch.rand(len(g), generator=generator).to(device)
    references = _per_sample(case, x, parameters, g)
    rules = {id(gradient[0]): made(gradient) for gradient in found if gradient[0] is not None}
    for index, (parameter, expected) in enumerate(zip(parameters, references, strict=True)):
        rule = rules[id(parameter)]
        norms = expected.flatten(1).norm(dim=1)
        said = {"operation": case.operation, "sizes": case.sizes, "parameter": "weight" if not index else "bias"}
        for ghost, way in _ways(rule):
            limit = (KERNEL_LIMITS if way in _PROGRAMS else LIMITS)[precision]

            def norm_error(ghost: bool = ghost, way: str = way, rule: Rule = rule, norms: Tensor = norms) -> float:
                return _relative(rule.squared_norms(g, Route(ghost=ghost, way=way)).clamp(min=0).sqrt(), norms)

            yield _judged(said | {"route": "ghost" if ghost else "instantiated", "way": way}, norm_error, limit)

        def sum_error(rule: Rule = rule, expected: Tensor = expected) -> float:
            right = torch.tensordot(factors.double(), expected, 1)
            summed = rule.weighted(g, factors.to(norm_dtype(g.dtype))).double()
            return float((summed.reshape(right.shape) - right).norm() / right.norm())

        yield _judged(said | {"route": "sum", "way": ""}, sum_error, LIMITS[precision])


def _ways(rule: Rule) -> list[tuple[bool, str]]:
    """(ghost, way) pairs: torch's own operations first, since a Triton program that fails may break the process."""
    ghosts = sorted(rule.ghosts, key=lambda way: way in _PROGRAMS)
    return [*((False, way) for way in rule.instantiations), *((True, way) for way in ghosts)]


def _per_sample(case: _Case, x: Tensor, parameters: list[Tensor], g: Tensor) -> list[Tensor]:
    """Per-sample gradients in float64 [n, *shape] of each parameter, by autograd, one sample at a time."""
    wide = [p.double() for p in parameters]
    found: list[list[Tensor]] = []
    for i in range(len(x)):
        with torch.enable_grad():
            leaves = [p.detach().requires_grad_() for p in wide]
            one = x[i : i + 1]
            output = case.call(case.function, one.double() if one.is_floating_point() else one, *leaves)
            found.append(list(torch.autograd.grad(output, leaves, g[i : i + 1].double())))
    return [torch.stack(each) for each in zip(*found, strict=True)]


def _group_norm_rows(
    trial: NormsTrial, batch_size: int, generator: torch.Generator, device: torch.device
) -> Iterator[Row]:
    """By a backend's step: only the tape has rules for γ and β of a group norm."""
    dtype, channels = dtype_of(trial.precision), GROUPS if trial.small else 2 * GROUPS
    size = 2 if trial.small else 4
    x, g = (torch.randn(batch_size, channels, size, size, generator=generator).to(device, dtype) for _ in range(2))
    weight, bias = (torch.randn(channels, generator=generator).to(device, dtype) for _ in range(2))
    model = nn.GroupNorm(GROUPS, channels).to(device, dtype)
    model.weight.copy_(weight)
    model.bias.copy_(bias)
    grouped = x.double().reshape(batch_size, GROUPS, -1)
    mean, variance = grouped.mean(2, keepdim=True), grouped.var(2, keepdim=True, unbiased=False)
    normalised = ((grouped - mean) / (variance + model.eps).sqrt()).view(x.shape)
    squares = (normalised * g.double()).sum((2, 3)).square().sum(1) + g.double().sum((2, 3)).square().sum(1)
    norms = squares.sqrt()
    for name in ("nonprivate", "ghost", "bk_mixed"):

        def error(name: str = name) -> float:
            def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
                return (outputs * targets).flatten(1).sum(1)

            with torch.enable_grad(), load_backend(name)(model, loss_fn, clip=Flat(1.0), verify=False) as backend:
                found = backend(x, g)
            if found.norms is not None:
                return _relative(found.norms, norms)
            right = (normalised * g.double()).sum((0, 2, 3))  # the gradient of ordinary training, unclipped
            return float((found.grads["weight"].double() - right).norm() / right.norm())

        said = {"operation": "group norm", "sizes": f"B={batch_size}, {GROUPS} groups of {channels} channels"}
        route = "ordinary training" if name == "nonprivate" else "backend"
        yield _judged(said | {"parameter": "both", "route": route, "way": name}, error, LIMITS[trial.precision])


def _relative(found: Tensor, norms: Tensor) -> float:
    """max_i |found_i - norms_i| / norms_i; infinite if a value is not finite or the shapes differ."""
    if found.shape != norms.shape or not bool(found.isfinite().all()):
        return float("inf")
    return float(((found.double() - norms).abs() / norms.clamp(min=1e-30)).max())


def _judged(said: Row, error: Callable[[], float], limit: float) -> Row:
    """A row with its outcome; an error ends only this way."""
    row = said | {"error": None, "limit": limit, "outcome": Outcome.OK, "evidence": None}
    with noted(row):
        row["error"] = error()
        if not row["error"] <= limit:
            row["outcome"] = Outcome.MISMATCH
    return row


@dataclass(frozen=True)
class _Case:
    """One operation on one batch.

    Attributes:
        operation: its name.
        sizes: for people: "32×128, 384 to 1536".
        inputs: the shape of the input, samples first; the shape of ids if `rows` is not 0.
        parameters: the shape of each parameter.
        function: of torch, with a handler in `clipping.rules`.
        rows: of an embedding.
        call: calls the function, or its handler, with the input and the parameters.
    """

    operation: str
    sizes: str
    inputs: Sequence[int]
    parameters: Sequence[Sequence[int]]
    function: Callable[..., Tensor]
    rows: int = 0
    call: Callable[..., Any] = lambda function, *tensors: function(*tensors)

    def tensors(self, generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        """The input and the parameters, from N(0, 1), rounded to `dtype`; parameters scaled to keep outputs small."""

        def draw(shape: Sequence[int], scale: float = 1.0) -> Tensor:
            return (torch.randn(tuple(shape), generator=generator) * scale).to(device, dtype)

        if self.rows:
            ids = torch.randint(0, self.rows, tuple(self.inputs), generator=generator)
            ids[:, -1] = ids[:, 0]  # every sample reads one row twice
            return [ids.to(device), *(draw(shape) for shape in self.parameters)]
        return [draw(self.inputs), *(draw(shape, 0.05 if len(shape) > 1 else 1.0) for shape in self.parameters)]


def _linear(small: bool) -> list[_Case]:
    sizes = (
        [(3, 17, 20, 33), (2, 1, 5, 7)] if small else [(32, 128, 384, 1536), (4, 1024, 768, 768), (16, 197, 192, 577)]
    )
    found = []
    for n, t, d, p in sizes:
        said = f"{n}×{t}, {d} to {p}"
        found.append(_Case("linear", said, (n, t, d), ((p, d), (p,)), F.linear))
        found.append(_Case("matmul", said, (n, t, d), ((d, p),), torch.matmul))
    n, t, d, p = sizes[0]
    said, call = f"{n}×{t}, {d} to {p}", lambda function, x, w: function("btd,dp->btp", x, w)
    return [*found, _Case("einsum", said, (n, t, d), ((d, p),), torch.einsum, call=call)]


#: Name, then n, channels, size, outputs, kernel, stride, padding, groups: in full size, and small.
_CONVOLUTIONS = (
    ("convolution", (32, 64, (32, 32), 64, 3, 1, 1, 1), (2, 4, (8, 8), 6, 3, 1, 1, 1)),
    ("convolution", (32, 512, (4, 4), 512, 3, 1, 1, 1), (3, 20, (2, 2), 17, 3, 1, 1, 1)),
    ("convolution, stride", (32, 64, (32, 32), 128, 3, 2, 1, 1), (2, 4, (9, 7), 6, 3, 2, 1, 1)),
    ("convolution, patches", (4, 3, (224, 224), 768, 16, 16, 0, 1), (2, 3, (16, 16), 12, 4, 4, 0, 1)),
    ("convolution, groups", (16, 128, (16, 16), 128, 3, 1, 1, 32), (2, 8, (6, 6), 8, 3, 1, 1, 4)),
    ("convolution, depthwise", (16, 96, (28, 28), 96, 7, 1, 3, 96), (2, 6, (9, 9), 6, 5, 1, 2, 6)),
    ("convolution, pointwise", (32, 256, (16, 16), 64, 1, 1, 0, 1), (2, 20, (5, 5), 9, 1, 1, 0, 1)),
    ("convolution, one dimension", (8, 64, (400,), 128, 3, 2, 1, 1), (2, 6, (21,), 9, 3, 2, 1, 1)),
    ("convolution, transposed", (8, 64, (16, 16), 32, 4, 2, 1, 1), (2, 6, (5, 5), 4, 4, 2, 1, 1)),
)


def _convolutions(small: bool) -> list[_Case]:
    return [_convolution(name, *(few if small else full)) for name, full, few in _CONVOLUTIONS]


def _convolution(name: str, n: int, channels: int, size: tuple[int, ...], *shape: int) -> _Case:
    outputs, kernel, stride, padding, groups = shape
    spatial, transposed = len(size), name.endswith("transposed")
    weight = (channels, outputs // groups) if transposed else (outputs, channels // groups)
    return _Case(
        name,
        f"{n}×{channels}×{'×'.join(map(str, size))} to {outputs}, kernel {kernel}",
        (n, channels, *size),
        ((*weight, *[kernel] * spatial), (outputs,)),
        getattr(F, f"conv_transpose{spatial}d" if transposed else f"conv{spatial}d"),
        call=lambda function, *tensors: function(*tensors, stride=stride, padding=padding, groups=groups),
    )


def _embeddings(small: bool) -> list[_Case]:
    n, t, rows, p = (3, 9, 11, 6) if small else (8, 1024, 50257, 768)
    short = min(t, 128)
    call = lambda function, ids, table: function(ids, table, mode="sum")  # noqa: E731
    return [
        _Case("embedding", f"{n}×{t}, {rows} rows of {p}", (n, t), ((rows, p),), F.embedding, rows),
        _Case(
            "embedding bag", f"{n}×{short}, {rows} rows of {p}", (n, short), ((rows, p),), F.embedding_bag, rows, call
        ),
    ]


def _normalisations(small: bool) -> list[_Case]:
    n, t, d = (3, 5, 12) if small else (16, 512, 768)

    def call(function: Any, x: Tensor, *parameters: Tensor) -> Any:
        return function(x, [d], *parameters, *([1e-5] if len(parameters) == 1 else ()))  # RMS norm's own eps is another

    said, inputs = f"{n}×{t}×{d}", (n, t, d)
    return [
        _Case("layer norm", said, inputs, ((d,), (d,)), F.layer_norm, call=call),
        _Case("rms norm", said, inputs, ((d,),), F.rms_norm, call=call),
    ]


#: Family -> its cases; the same operations in small sizes.
_CASES = {"linear": _linear, "convolution": _convolutions, "embedding": _embeddings, "normalisation": _normalisations}
