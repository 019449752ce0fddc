"""Ways of rules that the kernels of `clipping.accel` add."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import torch
from torch import Tensor

from clipping.accel import cpu, cuda, fused
from clipping.core.dtypes import norm_dtype
from clipping.core.microbatching import Parts
from clipping.numerics.rounding_bounds import of_lost
from clipping.rules.base import Rule, Spec, Way, Work, of_columns
from clipping.rules.convolution import ConvolutionWeight
from clipping.rules.embedding import EmbeddingWeight
from clipping.rules.linear import LinearWeight
from clipping.rules.pixel_gram import compiled_norms, reach_of_pixels

GRAM_KERNEL, NORM_KERNEL = "gram kernel", "norm kernel"
"""Triton's: by Gram tiles, and by tiles of the per-sample gradient."""
COMPILED = "compiled"
"""In C, also by Gram tiles."""
MOST_PIXELS = 1024
"""Most pixels of an image for C; each thread holds the whole Gram matrix of one sample's pixels."""

R = TypeVar("R", bound=Rule)


class _Triton(Way[R]):
    is_kernel = True
    kind: type[Rule]

    def supports(self, rule: R) -> bool:
        """True if the kernel runs for this rule."""
        return cuda.supported(rule.parameter)

    def work(self, rule: R, g: Tensor | Spec) -> Work:
        return Work(rule.positions**2 * rule.groups * (rule.inputs + rule.outputs), 0, 4096)


class _C(_Triton[R]):
    name = COMPILED

    def supports(self, rule: R) -> bool:
        return rule.positions > 1 and cpu.supported(rule.parameter)


class _Compiled(_C[LinearWeight]):
    kind = LinearWeight

    def norms(self, rule: LinearWeight, g: Tensor, samples: slice) -> Parts:
        return of_columns(cpu.gram_norm_and_reach(*rule.operands(g, samples), rule.lost(g)))


class _GramTiles(_Triton[LinearWeight]):
    kind, name = LinearWeight, GRAM_KERNEL

    def norms(self, rule: LinearWeight, g: Tensor, samples: slice) -> Parts:
        return of_columns(cuda.gram_norm_and_reach(*rule.operands(g, samples), rule.lost(g)))


class _GradientTiles(_Triton[LinearWeight]):
    kind, name = LinearWeight, NORM_KERNEL

    def norms(self, rule: LinearWeight, g: Tensor, samples: slice) -> Parts:
        return of_columns(cuda.instantiated_norm_and_reach(*rule.operands(g, samples), rule.lost(g)))

    def work(self, rule: LinearWeight, g: Tensor | Spec) -> Work:
        return Work(rule.positions * rule.parameter.numel(), 0, 4096)


class _TilesOfIds(_Triton[EmbeddingWeight]):
    kind, name = EmbeddingWeight, GRAM_KERNEL

    def norms(self, rule: EmbeddingWeight, g: Tensor, samples: slice) -> Parts:
        ids, rows = rule.by_position(g, samples)
        return of_columns(cuda.embedding_gram_norm_and_reach(ids, rows, of_lost(g.dtype, 1, rule.outputs)))


class _OfImages(_Triton[ConvolutionWeight]):
    kind = ConvolutionWeight

    def supports(self, rule: ConvolutionWeight) -> bool:
        """True in one or two dimensions; a depthwise convolution has no Gram form."""
        return len(rule.kernel) <= 2 and bool(rule.ghosts) and super().supports(rule)


class _CompiledPixels(_OfImages, _C[ConvolutionWeight]):
    def supports(self, rule: ConvolutionWeight) -> bool:
        return max(rule.positions, math.prod(rule.x.shape[2:])) <= MOST_PIXELS and super().supports(rule)

    def norms(self, rule: ConvolutionWeight, g: Tensor, samples: slice) -> Parts:
        x, of = map(rule.grouped, rule.operands(g, samples))
        return rule.by_sample(compiled_norms(x, of, rule.geometry(), rule.lost(g)))

    def work(self, rule: ConvolutionWeight, g: Tensor | Spec) -> Work:
        """Half of the pairs."""
        pairs, size = rule.positions**2 * rule.groups, g.element_size()
        traffic = math.prod(rule.kernel) * pairs / 2 * norm_dtype(g.dtype).itemsize
        return Work(rule.multiplications_of_pixels() / 2, traffic, size)

    def bytes_at_once(self, rule: ConvolutionWeight, g: Tensor | Spec, block: int) -> int:
        features = max(rule.parameter.shape[1], rule.outputs)
        return cpu.scratch_bytes(math.prod(rule.x.shape[2:]), rule.positions, features, block, g.dtype)


class _PatchTiles(_OfImages):
    name = GRAM_KERNEL

    def norms(self, rule: ConvolutionWeight, g: Tensor, samples: slice) -> Parts:
        x, of = rule.operands(g, samples)
        if rule.turns(g):  # decided by the whole batch: a block of one sample may have channels last where it has not
            x, of = (fused.turned(y)[0] for y in (x, of))
        return rule.by_sample(fused.patch_norms(x, of, rule.geometry(), rule.groups, rule.lost(g)))

    def work(self, rule: ConvolutionWeight, g: Tensor | Spec) -> Work:
        sizes = rule.positions, rule.parameter.shape[1], rule.outputs, math.prod(rule.kernel)
        copied = _copied(rule, g)
        return Work(rule.groups * fused.multiplications(*sizes), 2 * copied, 4096 + copied)


class _GradientTilesOfPatches(_OfImages):
    name = NORM_KERNEL

    def norms(self, rule: ConvolutionWeight, g: Tensor, samples: slice) -> Parts:
        (x, of), geometry = rule.operands(g, samples), rule.geometry()
        if not rule.turns(g):
            return (cuda.convolution_norm(x, of, *geometry, rule.groups),)
        (x, pixels), (of, rows) = fused.turned(x), fused.turned(of)
        reach = reach_of_pixels(pixels, rows.flatten(1), geometry, of.shape[-1], rule.lost(g))
        return of_columns(torch.cat([cuda.convolution_norm(x, of, *geometry, 1).unsqueeze(1), reach], 1))

    def work(self, rule: ConvolutionWeight, g: Tensor | Spec) -> Work:
        copied = _copied(rule, g)
        return Work(rule.positions * rule.parameter.numel(), 2 * copied, 4096 + copied)


def _copied(rule: ConvolutionWeight, g: Tensor | Spec) -> int:
    """Bytes of one sample's copies with channels last."""
    return sum(rule.bytes_of_operands(g)) if rule.turns(g) else 0


OF_IMAGES = _PatchTiles(), _GradientTilesOfPatches(), _CompiledPixels()
WAYS: tuple[_Triton[Any], ...] = _GramTiles(), _GradientTiles(), _Compiled(), _TilesOfIds(), *OF_IMAGES


def of(rule: Rule) -> tuple[Way[Any], ...]:
    """Return the kernels that run for this rule; they store neither Gram matrices of the batch nor gradients.

    Args:
        rule: any rule.
    """
    return tuple(way for way in WAYS if isinstance(rule, way.kind) and way.supports(rule))
