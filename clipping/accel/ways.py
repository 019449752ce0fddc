"""Norms (`Way`) and clipped sums of rules by the kernels of `clipping.accel`."""

import math
from typing import Any, TypeVar

import torch
from torch import Tensor

from clipping.accel import cpu, cuda, fused, tiles
from clipping.core.dtypes import HALF, norm_dtype
from clipping.core.microbatching import Parts, power_of_two
from clipping.numerics.per_sample import added_in, part
from clipping.numerics.products import PADDED
from clipping.numerics.rounding_bounds import of_lost, portion
from clipping.rules.base import Route, Rule, Spec, Way, Work, of_columns
from clipping.rules.convolution import ConvolutionWeight
from clipping.rules.embedding import EmbeddingWeight
from clipping.rules.linear import GRAM, LinearWeight
from clipping.rules.patches import FromOperands, OfPatches
from clipping.rules.pixel_gram import compiled_norms

GRAM_KERNEL, NORM_KERNEL = "gram kernel", "norm kernel"
"""Triton's: by Gram tiles, and by tiles of the per-sample gradient."""
GRADIENT_KERNEL = "gradient kernel"
"""Triton's, for per-sample gradients to keep."""
COMPILED = "compiled"
"""In C, also by Gram tiles."""
FEW = 64
"""Least number of positions that limits a portion: a sum is also rounded between samples, which few would not cover."""
MOST_PIXELS = 1024
"""Most pixels of an image for C; each thread holds the whole Gram matrix of one sample's pixels."""

R = TypeVar("R", bound=Rule)


class _Triton(Way[R]):
    is_kernel = True
    kind: type[Rule] | tuple[type[Rule], ...]

    def supports(self, rule: R) -> bool:
        """True if the kernel runs for this rule."""
        return cuda.supported(rule.parameter)

    def work(self, rule: R, g: Tensor | Spec) -> Work:
        return Work(rule.positions**2 * rule.groups * (rule.inputs + rule.outputs), 0, 4096)


Imaged = LinearWeight | ConvolutionWeight
"""Rules whose norms and sums are products of images."""


def _is_flat(rule: Imaged) -> bool:
    """True in one or two dimensions; a depthwise convolution has no Gram form."""
    return len(rule.geometry().kernel) <= 2 and bool(rule.ghosts)


class _GramTiles(_Triton[Imaged]):
    kind, name = (LinearWeight, ConvolutionWeight), GRAM_KERNEL

    def supports(self, rule: Imaged) -> bool:
        return _is_flat(rule) and super().supports(rule)

    def norms(self, rule: Imaged, g: Tensor, samples: slice) -> Parts:
        (x, of), bias = rule.images(g, samples), rule.bias is not None
        beside = [rule.images(each, samples)[1] for each in rule.beside]
        options = rule.geometry(), rule.groups, rule.lost(g)
        return rule.by_sample(cuda.gram_norms(x, of, *options, bias=bias, beside=beside))

    def work(self, rule: Imaged, g: Tensor | Spec) -> Work:
        """Whole tiles of a triangle with its diagonal."""
        copied = _copied(rule, g)
        side, offsets = tiles.power(rule.positions, 64), math.prod(rule.geometry().kernel)
        channels, outputs = (-(-size // 16) * 16 for size in (rule.inputs // offsets, rule.outputs))
        products = cuda.pairs(rule.positions, side) * side**2 * (offsets * channels + outputs)
        return Work(rule.groups * products, 2 * copied, 4096 + copied)


class _GradientTiles(_GramTiles):
    name = NORM_KERNEL

    def norms(self, rule: Imaged, g: Tensor, samples: slice) -> Parts:
        images = rule.images(g, samples)
        return rule.by_sample(cuda.gradient_norms(*images, rule.geometry(), rule.groups, rule.lost(g)))

    def work(self, rule: Imaged, g: Tensor | Spec) -> Work:
        copied = _copied(rule, g)
        return Work(rule.positions * rule.parameter.numel(), 2 * copied, 4096 + copied)


def _copied(rule: Imaged | OfPatches, g: Tensor | Spec) -> int:
    """Bytes of one sample's copy of the input with channels last."""
    return rule.bytes_of_operands(g)[0] if isinstance(rule, OfPatches) and rule.turns(g) else 0


class _Instantiated(_Triton[ConvolutionWeight], FromOperands):
    """Per-sample gradients, as clipped sums of one sample each; kept, they save the sum of a large image's patches."""

    kind, name = ConvolutionWeight, GRADIENT_KERNEL

    def supports(self, rule: ConvolutionWeight) -> bool:
        known = len(rule.kernel) == 2 and rule.groups == 1 and not rule.is_pointwise()
        return known and rule.positions > 0 and super().supports(rule)

    def gradients(self, rule: OfPatches, x: Tensor, g: Tensor) -> Tensor:
        return cuda.weighted(*rule.turned(x, g), torch.ones(len(x), device=x.device), 1, rule.geometry())

    def work(self, rule: OfPatches, g: Tensor | Spec) -> Work:
        entries, copied = rule.parameter.numel(), _copied(rule, g)
        made = entries * torch.float32.itemsize
        return Work(rule.positions * entries, 2 * (made + copied), made + copied)


class _TilesOfIds(_Triton[EmbeddingWeight]):
    kind, name = EmbeddingWeight, GRAM_KERNEL

    def norms(self, rule: EmbeddingWeight, g: Tensor, samples: slice) -> Parts:
        ids, rows = rule.by_position(g, samples)
        return of_columns(cuda.embedding_gram_norms(ids, rows, of_lost(g.dtype, 1, rule.outputs)))

    def work(self, rule: EmbeddingWeight, g: Tensor | Spec) -> Work:
        """Ids are compared, so only the gradient's rows are multiplied, whatever the number of ids."""
        return Work(rule.positions**2 * rule.outputs, 0, 4096)


class _C(_Triton[R]):
    name = COMPILED

    def supports(self, rule: R) -> bool:
        return rule.positions > 1 and cpu.supported(rule.parameter)


class _Compiled(_C[LinearWeight]):
    kind = LinearWeight

    def norms(self, rule: LinearWeight, g: Tensor, samples: slice) -> Parts:
        return of_columns(cpu.gram_norm_and_reach(*rule.operands(g, samples), rule.lost(g)))


class _CompiledPixels(_C[ConvolutionWeight]):
    kind = ConvolutionWeight

    def supports(self, rule: ConvolutionWeight) -> bool:
        few = max(rule.positions, math.prod(rule.image[1:])) <= MOST_PIXELS
        return few and _is_flat(rule) and super().supports(rule)

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
        return cpu.scratch_bytes(math.prod(rule.image[1:]), rule.positions, features, block, g.dtype)


WAYS: tuple[_Triton[Any], ...] = (
    _GramTiles(),
    _GradientTiles(),
    _Instantiated(),
    _TilesOfIds(),
    _Compiled(),
    _CompiledPixels(),
)


def of(rule: Rule) -> tuple[Way[Any], ...]:
    """Return the kernels that run for this rule; they store neither Gram matrices of the batch nor gradients."""
    return tuple(way for way in WAYS if isinstance(rule, way.kind) and way.supports(rule))


def weighted(rule: Rule, g: Tensor, factors: Tensor) -> Tensor | None:
    """Σ_i c_i g_i on a GPU in half precision, without scaled or wide copies; None if no kernel takes the operands.

    Portions are added up in float64; as many are formed at once as the room holds, with their copies of images.
    """
    if not isinstance(rule, (LinearWeight, ConvolutionWeight)) or not fused.runs(rule.parameter):
        return None
    size, count, factors = portion_of(rule, g), rule.samples(g), factors.to(torch.float32).contiguous()
    if isinstance(rule, LinearWeight):
        whole = rule.images(g, slice(0, count))  # padded alike in each block
        taken = _are_taken(rule, whole)
    else:
        whole, taken = None, len(rule.kernel) == 2 and rule.groups == 1 and rule.positions > 0
    if not taken:
        return None

    def sums(samples: slice, _: int) -> Tensor:
        x, of = rule.images(g, samples) if whole is None else (part(y, samples) for y in whole)
        return cuda.weighted(x, of, part(factors, samples), size, rule.geometry(), bias=rule.bias is not None)

    of_sums, of_images = 2 * 4 * rule.parameter.numel(), size * _copied(rule, g)  # two blocks may be added up at once
    step = size * max(1, rule.room() // max(1, of_sums, of_images))
    several = [slice(start, min(start + step, count)) for start in range(0, max(1, count), step)]
    found = added_in(sums, [(samples, -(-(samples.stop - samples.start) // size)) for samples in several])
    return rule.sliced(found.squeeze(2)) if isinstance(rule, LinearWeight) and rule.bias is None else found


def _are_taken(rule: LinearWeight, images: tuple[Tensor, Tensor]) -> bool:
    """True if the kernel sums these images; rows may be slices of longer rows."""
    return rule.positions >= PADDED and tiles.rows_at_once(*images)


def takes_bias(rule: Rule, g: Tensor, route: Route) -> bool:
    """True if Gram matrices and sum of a linear layer can include its bias, which need not read g again.

    Its inputs are 1: the norms are Σ_{t,u} (a_t · a_u + 1)(g_t · g_u), and the reach is that of rows (a_t, 1).

    Args:
        route: of the weight.
    """
    if type(rule) is not LinearWeight or rule.transposed or not route.ghost or g.dtype not in HALF:
        return False
    if rule.a.dtype != g.dtype or not fused.runs(rule.parameter, g):
        return False
    images = rule.images(g, slice(0, rule.samples(g)))
    unpadded = [x.shape[1] for x in images] == [rule.inputs, rule.outputs]
    return _by_gram(rule, g, route) != "" and unpadded and _are_taken(rule, images)


def shares_input(rule: Rule, route: Route, g: Tensor, other: Rule, other_route: Route, other_g: Tensor) -> bool:
    """True if the norms of two linear layers of one input (a query's and a key's) may share its Gram matrix.

    Args:
        rule, route, g: of the first layer, which may share it with others already.
        other, other_route, other_g: of the other layer.
    """
    if type(rule) is not LinearWeight or type(other) is not LinearWeight or rule.a is not other.a:
        return False
    alike = g.shape == other_g.shape and g.stride() == other_g.stride() and g.dtype == other_g.dtype
    alike = alike and rule.fold == other.fold and (rule.bias is None) == (other.bias is None)
    if not alike or rule.transposed or other.transposed or not fused.runs(rule.parameter, g):
        return False
    way = _by_gram(rule, g, route)
    if way == GRAM_KERNEL:  # half precision that is not read at once would spill registers
        images = rule.images(g, slice(0, rule.samples(g)))
        fits = len(rule.beside) < cuda.BESIDE and (g.dtype not in HALF or _are_taken(rule, images))
    else:
        fits = way == GRAM.name
    return fits and way == _by_gram(other, other_g, other_route)


def _by_gram(rule: LinearWeight, g: Tensor, route: Route) -> str:
    """Name of the way by whole Gram matrices or Gram tiles that this route takes, or ""."""
    way = rule.named(route.way or rule.best_way(g, ghost=route.ghost))
    return way.name if way.name == GRAM_KERNEL or (way is GRAM and GRAM.is_whole(rule, g)) else ""


def portion_of(rule: Imaged, g: Tensor | Spec) -> int:
    """Samples in a portion of `weighted`, which also rounds its whole sum twice between two samples."""
    count = rule.samples(g)
    most = portion(count, max(rule.positions, FEW), norm_dtype(g.dtype))
    sizes = rule.positions, rule.inputs, rule.outputs
    tile = tiles.sum_tiles(*sizes, g.dtype, cuda.generation(rule.parameter), True, rule.geometry())
    return cuda.portion_of(power_of_two(count), most, *sizes, tile.rows, tile.columns)
