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
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from clipping import Flat, load_backend
from clipping.accel.ways import GRAM_KERNEL, NORM_KERNEL
from clipping.core.dtypes import norm_dtype
from clipping.rules.base import Route, Rule, made
from dpbench.measure.bench import device_of
from dpbench.measure.norm_cases import Case, cases
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
        for case in cases(trial.family, trial.small):
            yield from _case_rows(case, trial.precision, generator, device)
            gc.collect()


def _case_rows(case: Case, precision: str, generator: torch.Generator, device: torch.device) -> Iterator[Row]:
    """Every way of the rule of every parameter."""
    x, *parameters = case.tensors(generator, device, dtype_of(precision))
    output, found = case.handler(x, *parameters)
    g = torch.randn(output.shape, generator=generator).to(device, output.dtype)
    factors = torch.rand(len(g), generator=generator).to(device)
    references = _per_sample(case.function, x, parameters, g)
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


def _per_sample(function: Callable[..., Tensor], x: Tensor, parameters: list[Tensor], g: Tensor) -> list[Tensor]:
    """Per-sample gradients in float64 [n, *shape] of each parameter, by autograd, one sample at a time."""
    wide = [p.double() for p in parameters]
    found: list[list[Tensor]] = []
    for i in range(len(x)):
        with torch.enable_grad():
            leaves = [p.detach().requires_grad_() for p in wide]
            one = x[i : i + 1]
            output = function(one.double() if one.is_floating_point() else one, *leaves)
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
