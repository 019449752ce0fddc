"""The operations of a `NormsTrial`: their sizes, the rule that handles each, and torch's reference function.

The rule's handler gives the ways to compute a norm; torch's own function, in float64, gives the right one. Sizes are
those of models in common use; for `small`, the same shapes in miniature, which a CPU computes in milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clipping.rules.contraction import einsum
from clipping.rules.convolution import convolution
from clipping.rules.embedding import embedding, embedding_bag
from clipping.rules.handlers import Handler
from clipping.rules.linear import linear, matmul
from clipping.rules.norm import layer_norm, rms_norm
from clipping.rules.transposed import transposed_convolution


@dataclass(frozen=True)
class Case:
    """One operation on one batch.

    Attributes:
        operation: its name.
        sizes: for people: "32×128, 384 to 1536".
        inputs: the shape of the input, samples first; the shape of ids if `rows` is not 0.
        parameters: the shape of each parameter.
        handler: (input, *parameters) -> (output, gradients), as `clipping.rules` runs it.
        function: (input, *parameters) -> output, by torch.
        rows: of an embedding.
    """

    operation: str
    sizes: str
    inputs: Sequence[int]
    parameters: Sequence[Sequence[int]]
    handler: Handler
    function: Callable[..., Tensor]
    rows: int = 0

    def tensors(self, generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        """The input and the parameters, from N(0, 1), rounded to `dtype`; parameters scaled to keep outputs small.

        Args:
            generator: of random numbers.
            device: of the result.
            dtype: of the result.
        """

        def draw(shape: Sequence[int], scale: float = 1.0) -> Tensor:
            return (torch.randn(tuple(shape), generator=generator) * scale).to(device, dtype)

        if self.rows:
            ids = torch.randint(0, self.rows, tuple(self.inputs), generator=generator)
            ids[:, -1] = ids[:, 0]  # every sample reads one row twice
            return [ids.to(device), *(draw(shape) for shape in self.parameters)]
        return [draw(self.inputs), *(draw(shape, 0.05 if len(shape) > 1 else 1.0) for shape in self.parameters)]


def cases(family: str, small: bool) -> list[Case]:
    """The cases of a family; the same operations for `small` sizes.

    Args:
        family: one of `dpbench.trials.evidence.FAMILIES`, but "group_norm".
        small: in miniature.
    """
    return {
        "linear": _linear,
        "convolution": _convolutions,
        "embedding": _embeddings,
        "normalisation": _normalisations,
    }[family](small)


def _linear(small: bool) -> list[Case]:
    sizes = (
        [(3, 17, 20, 33), (2, 1, 5, 7)] if small else [(32, 128, 384, 1536), (4, 1024, 768, 768), (16, 197, 192, 577)]
    )
    found = []
    for n, t, d, p in sizes:
        said = f"{n}×{t}, {d} to {p}"
        found.append(Case("linear", said, (n, t, d), ((p, d), (p,)), linear, F.linear))
        found.append(Case("matmul", said, (n, t, d), ((d, p),), matmul, torch.matmul))
    n, t, d, p = sizes[0]
    letters = "btd,dp->btp"
    run: Handler = lambda x, w: einsum(letters, x, w)  # noqa: E731
    found.append(
        Case("einsum", f"{n}×{t}, {d} to {p}", (n, t, d), ((d, p),), run, lambda x, w: torch.einsum(letters, x, w))
    )
    return found


def _convolutions(small: bool) -> list[Case]:
    # n, channels, size, outputs, kernel, stride, padding, groups
    sizes: dict[str, list[tuple[int, int, tuple[int, ...], int, int, int, int, int]]] = {
        "convolution": [(32, 64, (32, 32), 64, 3, 1, 1, 1), (32, 512, (4, 4), 512, 3, 1, 1, 1)],
        "convolution, stride": [(32, 64, (32, 32), 128, 3, 2, 1, 1)],
        "convolution, patches": [(4, 3, (224, 224), 768, 16, 16, 0, 1)],
        "convolution, groups": [(16, 128, (16, 16), 128, 3, 1, 1, 32)],
        "convolution, depthwise": [(16, 96, (28, 28), 96, 7, 1, 3, 96)],
        "convolution, pointwise": [(32, 256, (16, 16), 64, 1, 1, 0, 1)],
        "convolution, one dimension": [(8, 64, (400,), 128, 3, 2, 1, 1)],
        "convolution, transposed": [(8, 64, (16, 16), 32, 4, 2, 1, 1)],
    }
    if small:
        sizes = {
            "convolution": [(2, 4, (8, 8), 6, 3, 1, 1, 1), (3, 20, (2, 2), 17, 3, 1, 1, 1)],
            "convolution, stride": [(2, 4, (9, 7), 6, 3, 2, 1, 1)],
            "convolution, patches": [(2, 3, (16, 16), 12, 4, 4, 0, 1)],
            "convolution, groups": [(2, 8, (6, 6), 8, 3, 1, 1, 4)],
            "convolution, depthwise": [(2, 6, (9, 9), 6, 5, 1, 2, 6)],
            "convolution, pointwise": [(2, 20, (5, 5), 9, 1, 1, 0, 1)],
            "convolution, one dimension": [(2, 6, (21,), 9, 3, 2, 1, 1)],
            "convolution, transposed": [(2, 6, (5, 5), 4, 4, 2, 1, 1)],
        }
    return [_convolution(name, *size) for name, each in sizes.items() for size in each]


def _convolution(
    name: str,
    n: int,
    channels: int,
    size: tuple[int, ...],
    outputs: int,
    kernel: int,
    stride: int,
    padding: int,
    groups: int,
) -> Case:
    spatial, options = len(size), {"stride": stride, "padding": padding, "groups": groups}
    plain, turned = (F.conv1d, F.conv2d)[spatial - 1], (F.conv_transpose1d, F.conv_transpose2d)[spatial - 1]
    transposed = name.endswith("transposed")
    own: Any = transposed_convolution if transposed else convolution
    theirs: Any = turned if transposed else plain
    weight = (channels, outputs // groups) if transposed else (outputs, channels // groups)
    return Case(
        name,
        f"{n}×{channels}×{'×'.join(map(str, size))} to {outputs}, kernel {kernel}",
        (n, channels, *size),
        ((*weight, *[kernel] * spatial), (outputs,)),
        lambda x, w, b: own(x, w, b, **options),
        lambda x, w, b: theirs(x, w, b, **options),
    )


def _embeddings(small: bool) -> list[Case]:
    n, t, rows, p = (3, 9, 11, 6) if small else (8, 1024, 50257, 768)
    said = f"{n}×{t}, {rows} rows of {p}"
    few, short = (n, t, rows, p), (n, min(t, 128))
    return [
        Case("embedding", said, (n, t), ((rows, p),), embedding, F.embedding, rows),
        Case(
            "embedding bag",
            f"{short[0]}×{short[1]}, {few[2]} rows of {p}",
            short,
            ((rows, p),),
            lambda ids, w: embedding_bag(ids, w, mode="sum"),
            lambda ids, w: F.embedding_bag(ids, w, mode="sum"),
            rows,
        ),
    ]


def _normalisations(small: bool) -> list[Case]:
    n, t, d = (3, 5, 12) if small else (16, 512, 768)
    said = f"{n}×{t}×{d}"
    return [
        Case(
            "layer norm",
            said,
            (n, t, d),
            ((d,), (d,)),
            lambda x, w, b: layer_norm(x, [d], w, b),
            lambda x, w, b: F.layer_norm(x, [d], w, b),
        ),
        Case(
            "rms norm",
            said,
            (n, t, d),
            ((d,),),
            lambda x, w: rms_norm(x, [d], w, 1e-5),
            lambda x, w: F.rms_norm(x, [d], w, 1e-5),
        ),
    ]
