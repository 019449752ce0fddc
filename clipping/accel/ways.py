"""Norms (`Way`) and clipped sums of rules by the kernels of `clipping.accel`."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from clipping.accel import cpu, cuda, fused, tiles
from clipping.core.dtypes import HALF, norm_dtype
from clipping.core.microbatching import Parts, power_of_two
from clipping.numerics.per_sample import added_in, part
from clipping.numerics.products import PADDED
from clipping.numerics.rounding_bounds import Reach, of_lost, portion
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
LOADED = 3 / 8
"""A byte that is copied from the L2 cache to shared memory, in bytes that are read from memory."""
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
        geometry = rule.geometry()
        offsets = math.prod(geometry.kernel)
        channels, outputs = (-(-size // 16) * 16 for size in (rule.inputs // offsets, rule.outputs))
        generation = cuda.generation(rule.parameter)
        tile = tiles.gram_tiles(rule.positions, max(channels, outputs), g.dtype, generation, True, geometry)
        entries = offsets * channels + outputs
        products = cuda.pairs(rule.positions, tile.rows) * tile.rows**2 * entries
        copies = tiles.meetings(rule.positions, tile.rows, once=tile.reads_once(geometry))
        return _by_tiles(rule, g, products, rule.positions * copies * entries)


class _GradientTiles(_GramTiles):
    name = NORM_KERNEL

    def norms(self, rule: Imaged, g: Tensor, samples: slice) -> Parts:
        images = rule.images(g, samples)
        return rule.by_sample(cuda.gradient_norms(*images, rule.geometry(), rule.groups, rule.lost(g)))

    def work(self, rule: Imaged, g: Tensor | Spec) -> Work:
        tile = tiles.gradient_tiles(*_sizes(rule), g.dtype, cuda.generation(rule.parameter), True, rule.geometry())
        loaded = rule.positions * tiles.entries(rule.inputs, rule.outputs, tile.rows, tile.columns)
        work = _by_tiles(rule, g, rule.positions * rule.inputs * rule.outputs, loaded)
        return work._replace(traffic=work.traffic + LOADED * sum(rule.bytes_of_operands(g)))


def _by_tiles(rule: Imaged, g: Tensor | Spec, products: int, loaded: int) -> Work:
    """Work of a norm by tiles.

    Args:
        products, loaded: multiplications, and entries that tiles copy to shared memory, of one sample and group.
    """
    copied, size = _copied(rule, g), g.element_size()
    return Work(rule.groups * products, 2 * copied + LOADED * rule.groups * loaded * size, 4096 + copied)


def _copied(rule: Imaged | OfPatches, g: Tensor | Spec) -> int:
    """Bytes of one sample's copy of the input with channels last."""
    return rule.bytes_of_operands(g)[0] if isinstance(rule, OfPatches) and rule.turns(g) else 0


class _Instantiated(_Triton[ConvolutionWeight], FromOperands):
    """Per-sample gradients with their squared norms; kept, they save the sum of a large image's patches."""

    kind, name = ConvolutionWeight, GRADIENT_KERNEL

    def supports(self, rule: ConvolutionWeight) -> bool:
        known = len(rule.kernel) == 2 and rule.groups == 1 and not rule.is_pointwise()
        return known and rule.positions > 0 and super().supports(rule)

    def gradients(self, rule: OfPatches, x: Tensor, g: Tensor) -> Tensor:
        return cuda.gradients(*rule.turned(x, g), rule.geometry(), rule.groups)[0]

    def kept(self, rule: OfPatches, g: Tensor, samples: slice) -> tuple[Tensor, Tensor]:
        made, squares = cuda.gradients(*rule.images(g, samples), rule.geometry(), rule.groups)
        return made.view(-1, *rule.parameter.shape), squares

    def work(self, rule: OfPatches, g: Tensor | Spec) -> Work:
        entries, copied = rule.parameter.numel(), _copied(rule, g)
        made = entries * torch.float32.itemsize
        traffic = made + 2 * copied + loaded_by_sum(rule, g)
        return Work(rule.positions * entries, traffic, made + copied)


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


def weighted(rules: Sequence[Any], gs: Sequence[Tensor], factors: Tensor) -> list[Tensor] | None:
    """Σ_i c_i g_i on a GPU in half precision, without scaled or wide copies; None if no kernel takes the operands.

    Portions are added up in float64; as many are formed at once as the room holds, with their copies of images.

    Args:
        rules, gs: of each layer; if there are several, `together` has found that one launch forms their sums.
    """
    rule, g, layers = rules[0], gs[0], len(rules)
    if not isinstance(rule, Imaged) or not fused.runs(rule.parameter):
        return None
    size, count = cuda.portion_of(_sums(rule, g), layers), rule.samples(g)
    factors = factors.to(torch.float32).contiguous()
    if isinstance(rule, LinearWeight):
        whole = [each.images(of, slice(0, count)) for each, of in zip(rules, gs, strict=True)]  # padded alike in blocks
        taken = _are_taken(rule, whole[0])
    else:
        whole, taken = [], len(rule.kernel) == 2 and rule.groups == 1 and rule.positions > 0
    if not taken:
        return None

    def sums(samples: slice, _: int) -> Tensor:
        some = [(part(x, samples), part(of, samples)) for x, of in whole] or [rule.images(g, samples)]
        xs, of = zip(*some, strict=True)
        return cuda.weighted(xs, of, part(factors, samples), size, rule.geometry(), bias=rule.bias is not None)

    of_sums, of_images = layers * _bytes_of_sums(rule), size * _copied(rule, g)
    step = size * max(1, rule.room() // max(1, of_sums, of_images))
    several = [slice(start, min(start + step, count)) for start in range(0, max(1, count), step)]
    found = added_in(sums, [(samples, -(-(samples.stop - samples.start) // size)) for samples in several])
    return [rule.sliced(x.squeeze(2)) if isinstance(rule, LinearWeight) and rule.bias is None else x for x in found]


def together(layers: Iterator[tuple[Rule, Tensor]]) -> int:
    """Number of the first layers whose sums one launch should form, so that it fills the GPU; 1 if none is like it.

    Their operands are freed when all are summed, so sums must take at most half as much.

    Args:
        layers: at least one rule and gradient of outputs, in half precision.
    """
    rule, g = next(layers)
    if type(rule) is not LinearWeight or not fused.runs(rule.parameter, g):
        return 1
    known, sums = _layout(rule, g), _sums(rule, g)
    of_sums = -(-sums.samples // cuda.portion_of(sums, 2)) * _bytes_of_sums(rule)
    if not known or of_sums > rule.a.nbytes + g.nbytes:
        return 1
    others = itertools.islice(layers, max(0, min(cuda.LAYERS, rule.room() // of_sums) - 1))
    return cuda.layers_of(sums, 1 + sum(1 for _ in itertools.takewhile(lambda layer: _layout(*layer) == known, others)))


def normed_together(layers: Mapping[int, tuple[Any, Route, Tensor]]) -> dict[int, tuple[Tensor, Reach]]:
    """Squared norms by Gram tiles and their reach, of equal layers by one launch; nothing of other layers.

    Layers that fill the GPU together take it for Gram matrices of one tile, too: it reads the operands once, where the
    library's products also write the matrices.

    Args:
        layers: any number -> rule, route and gradient of outputs, in half precision.
    """
    alike: dict[Any, list[int]] = {}
    for i, layer in layers.items():
        if known := _layout_of_norms(*layer):
            alike.setdefault(known, []).append(i)
    found: dict[int, tuple[Tensor, Reach]] = {}
    for (*_, way), places in alike.items():
        for some in (places[at : at + cuda.LAYERS] for at in range(0, len(places), cuda.LAYERS)):
            rule, _, g = layers[some[0]]
            if way != GRAM_KERNEL and power_of_two(rule.samples(g)) * len(some) < tiles.MULTIPROCESSORS:
                continue
            every, several = slice(0, rule.samples(g)), [layers[i] for i in some]
            images = [[each.images(of, every) for of in (g, *each.beside)] for each, _, g in several]
            of, *beside = zip(*[[of for _, of in image] for image in images], strict=True)
            options = rule.geometry(), rule.groups, rule.lost(g)
            norms = cuda.gram_norms_of_layers(
                [image[0][0] for image in images], of, *options, bias=rule.bias is not None, beside=beside
            )
            for i, norm in zip(some, norms, strict=True):
                squares, *reach = rule.by_sample(norm)
                found[i] = squares, Reach(*reach)
    return found


def _layout_of_norms(rule: Rule, route: Route, g: Tensor) -> tuple[Any, ...]:
    """What equal layers have in common, and their way, if Gram tiles may find their norms in one block; else ()."""
    if type(rule) is not LinearWeight or not fused.runs(rule.parameter, g):
        return ()
    way, beside = _by_gram(rule, g, route), len(rule.beside)
    tile = tiles.gram_tiles(rule.positions, rule.inputs, g.dtype, cuda.generation(g), True)
    one_tile = 1 < rule.positions <= tile.rows and beside <= cuda.BESIDE
    if not (way == GRAM_KERNEL or (way and one_tile)) or len(rule.blocks(g, way, route.block)) > 1:
        return ()
    known = _layout(rule, g)
    return known and (*known, beside, way)


def _layout(rule: Rule, g: Tensor) -> tuple[Any, ...]:
    """What equal layers have in common, if their operands are read where they lie; else ()."""
    if type(rule) is not LinearWeight or rule.a.dtype != g.dtype:
        return ()
    x, of = images = rule.images(g, slice(0, rule.samples(g)))
    if [x.shape[1], of.shape[1]] != [rule.inputs, rule.outputs] or not _are_taken(rule, images):
        return ()
    return x.shape, x.stride(), of.shape, of.stride(), of.dtype, rule.transposed, rule.bias is None


def _bytes_of_sums(rule: Rule) -> int:
    """Bytes of a layer's sum in a block of portions and in the one before it: two blocks may be added up at once."""
    return 2 * torch.float32.itemsize * rule.parameter.numel()


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
    """Samples in a portion of `weighted` of one layer."""
    return cuda.portion_of(_sums(rule, g))


def _sums(rule: Imaged, g: Tensor | Spec) -> cuda.Sums:
    """Sizes of the sum. `weighted` also rounds its whole sum twice between two samples, which limits a portion."""
    count = rule.samples(g)
    most = portion(count, max(rule.positions, FEW), norm_dtype(g.dtype))
    tile = _sum_tiles(rule, g)
    return cuda.Sums(power_of_two(count), most, *_sizes(rule), tile.rows, tile.columns)


def _sizes(rule: Imaged | OfPatches) -> tuple[int, int, int]:
    return rule.positions, rule.inputs, rule.outputs


def loaded_by_sum(rule: Rule, g: Tensor | Spec) -> float:
    """What tiles of a sum copy from the L2 cache for one sample, in bytes that are read from memory."""
    if not isinstance(rule, Imaged):
        return 0.0
    tile = _sum_tiles(rule, g)
    loaded = rule.positions * tiles.entries(rule.inputs, rule.outputs, tile.rows, tile.columns)
    return LOADED * g.element_size() * loaded


def _sum_tiles(rule: Imaged | OfPatches, g: Tensor | Spec) -> tiles.Tiles:
    return tiles.sum_tiles(*_sizes(rule), g.dtype, cuda.generation(rule.parameter), True, rule.geometry())
