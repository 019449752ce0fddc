"""Norms (`Way`) and clipped sums of rules by the kernels of `clipping.accel`."""

import math
from typing import Any, TypeVar

import torch
from torch import Tensor

from clipping.accel import cpu, cuda, fused
from clipping.core.dtypes import norm_dtype
from clipping.core.microbatching import Parts, power_of_two
from clipping.numerics.per_sample import added_at_once, added_in, part
from clipping.numerics.products import PADDED
from clipping.numerics.rounding_bounds import of_lost
from clipping.rules.base import Rule, Spec, Way, Work, of_columns
from clipping.rules.convolution import ConvolutionWeight
from clipping.rules.embedding import EmbeddingWeight
from clipping.rules.linear import LinearWeight
from clipping.rules.patches import is_last
from clipping.rules.pixel_gram import compiled_norms, reach_of_pixels

GRAM_KERNEL, NORM_KERNEL = "gram kernel", "norm kernel"
"""Triton's: by Gram tiles, and by tiles of the per-sample gradient."""
COMPILED = "compiled"
"""In C, also by Gram tiles."""
BUSY = 2**23
"""Least entries of all portions together that keep a GPU busy: 512 tiles of 128 by 128, a few for each processor."""
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
        if rule.turns(g):  # decided for the whole batch, as a block of one sample can have both layouts
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
    """Return the kernels that run for this rule; they store neither Gram matrices of the batch nor gradients."""
    return tuple(way for way in WAYS if isinstance(rule, way.kind) and way.supports(rule))


def weighted(rule: Rule, g: Tensor, factors: Tensor) -> Tensor | None:
    """Σ_i c_i g_i on a GPU in half precision, without scaled or wide copies; None if no kernel takes the operands."""
    if not fused.runs(rule.parameter):
        return None
    if isinstance(rule, ConvolutionWeight):
        supported = len(rule.kernel) == 2 and rule.groups == 1 and rule.positions > 0
        return _sum_of_images(rule, g, factors.to(torch.float32).contiguous()) if supported else None
    if isinstance(rule, LinearWeight) and rule.positions >= PADDED:
        return _sum_of_rows(rule, g, factors.to(torch.float32))
    return None


def _sum_of_images(rule: ConvolutionWeight, g: Tensor, factors: Tensor) -> Tensor:
    geometry, turns = rule.geometry(), rule.turns(g)

    def sums(samples: slice, count: int) -> Tensor:
        x, of = rule.operands(g, samples)
        if turns:
            x, of = (y if is_last(y) else fused.turned(y)[0] for y in (x, of))
        return fused.weighted_patches(x, of, part(factors, samples), geometry, count)

    return added_at_once(sums, rule.samples(g), *portions_of_images(rule, g))


def portions_of_images(rule: ConvolutionWeight, g: Tensor | Spec) -> tuple[int, int]:
    """Samples in a portion, and samples at once. There are enough portions to keep a GPU busy.

    As in `rounding_bounds.portion`, the batch size counts as the next power of two.
    """
    count, entries, room = power_of_two(rule.samples(g)), rule.parameter.numel(), rule.room()
    most = min(rule.most(g), max(1, count * entries // BUSY))
    most = 1 << most.bit_length() - 1
    portions = max(1, room // (2 * 4 * entries))  # two blocks may be added up at once
    return most, max(1, min(room // max(1, _copied(rule, g)), most * portions))


def _sum_of_rows(rule: LinearWeight, g: Tensor, factors: Tensor) -> Tensor | None:
    a, of = rule.operands(g, slice(0, rule.samples(g)))
    if not fused.weighs(a, of):  # e.g. rows are slices of longer rows
        return None
    a, of = (of, a) if rule.transposed else (a, of)
    size, count = portion_of_rows(rule, g), len(a)

    def sums(samples: slice, _: int) -> Tensor:
        return fused.weighted(part(a, samples), part(of, samples), part(factors, samples), size)

    step = size * max(1, rule.room() // (2 * 4 * a.shape[2] * of.shape[2]))  # two blocks may be added up at once
    several = [slice(start, min(start + step, count)) for start in range(0, max(1, count), step)]
    blocks = [(samples, -(-(samples.stop - samples.start) // size)) for samples in several]
    return rule.sliced(added_in(sums, blocks))


def portion_of_rows(rule: LinearWeight, g: Tensor | Spec) -> int:
    """Samples in a portion."""
    return fused.portion_of(rule.samples(g), rule.most(g), rule.inputs, rule.outputs)
