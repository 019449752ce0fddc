"""Predict the memory that a convolution allocates on a CPU.

oneDNN computes in its own layout, with channels in blocks of 16, or of 8 without AVX-512. It copies the operands to
that layout, frees these copies, and then copies the result back. With ' for a copy,

    forward           max(x' + w' + y', y' + y)
    input gradient    max(y' + w' + x', x' + x), but max(y' + w' + x', x' + 2x) with a stride
    weight gradient   max(y' + x' + w' + s', w' + w)

An operand that the kernel reads as it lies is not copied: an input of less than a block, or groups whose number of
channels does not fit the blocks. Weight gradients of such groups use the patches of one sample in each thread; without
AVX-512, so do the ones of kernels larger than their image. Where oneDNN is not used (one small sample, or float64), the
forward pass and the weight gradient use the patches of the whole batch. s' is one copy of the weight for each further
thread, where threads share the positions of an image: each reads a part of it, and the partial results are summed.

The rules were found by the profiler's memory timeline (torch 2.14 and 2.15, AVX-512 and AVX2, 1 or 2 threads). They
are meant to be right within a few percent of an operation. cuDNN's workspaces differ, and are not predicted.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

BLOCK = 8 if torch.backends.cpu.get_cpu_capability() == "AVX2" else 16
"""Channels in a block of the layout: as many as a vector register holds numbers."""
FEW = 16
"""Below this number of samples, one thread multiplies 1x1 kernels without oneDNN (ATen's `use_mkldnn`)."""
SMALL = 20480
"""Entries of a single sample above which the conversion pays (ATen's `use_mkldnn`)."""
SHARED, SHARED_1X1 = 5, 12
"""Threads share positions if the smaller image exceeds this many times the weights (3.6 to 7, and 8 to 16)."""


class Convolution(NamedTuple):
    """A convolution's shapes, stride, groups and dtype. Bytes count its temporaries and results together."""

    x: Sequence[int]
    weight: Sequence[int]
    y: Sequence[int]
    stride: Sequence[int]
    groups: int
    dtype: torch.dtype

    def forward(self) -> int:
        """Peak bytes of the forward pass."""
        if not self._is_blocked():
            return self._bytes(self.y) + self._patches()
        y, weight = self._copy(self.y), self._copy_of_weight()
        if self.groups == 1:
            x = self._copy(self.x) if self.x[1] >= BLOCK else 0
        else:
            x = self._copy(self.x) if self._fits(4) else 0
        return max(x + weight + y, y + self._bytes(self.y))

    def input_gradient(self) -> int:
        """Peak bytes of the input's gradient."""
        result = self._bytes(self.x)
        if not self._is_blocked():
            return result
        x, weight = self._copy(self.x), self._copy_of_weight()
        y = self._copy(self.y) if self.groups == 1 or self._fits(4) else 0
        each = self.weight[0] // self.groups
        strided = max(self.stride) > 1 and (self.groups == 1 or (self._fits(BLOCK) and each > BLOCK))
        return max(y + weight + x, x + (2 if strided else 1) * result)

    def weight_gradient(self) -> int:
        """Peak bytes of the weight's gradient."""
        result = self._bytes(self.weight)
        if not self._is_blocked():
            return result + self._patches()
        weight = self._copy_of_weight()
        depthwise = self.weight[1] == 1 and self.groups == self.weight[0]
        narrow = self.groups > 1 and not (self._fits(8) or (depthwise and max(self.weight[2:]) <= 3))
        if narrow or (BLOCK == 8 and self._has_larger_kernel()):
            return result + torch.get_num_threads() * (self._patches(samples=1) + 4 * result)
        x = self._copy(self.x, 8) if self.groups > 1 or self.x[1] > 3 else 0
        y = self._copy(self.y)
        shared = self.groups == 1 and min(x or y, y) > (SHARED if max(self.weight[2:]) > 1 else SHARED_1X1) * weight
        summed = (torch.get_num_threads() - 1) * weight if shared else 0
        return max(y + x + weight + summed, weight + result)

    def gradients(self, of_input: bool, of_weight: bool) -> int:
        """Peak bytes of one gradient after the other.

        Args:
            of_input, of_weight: which of them are formed.
        """
        first = self.input_gradient() if of_input else 0
        kept = self._bytes(self.x) if of_input else 0
        return max(first, kept + self.weight_gradient()) if of_weight else first

    def _is_blocked(self) -> bool:
        """True if ATen chooses oneDNN."""
        if self.dtype == torch.float64 or not torch.backends.mkldnn.is_available():
            return False
        sides = list(self.weight[2:])[-2:]
        few = self.x[0] < FEW and torch.get_num_threads() == 1
        if few and max(sides) == max(self.stride) == 1:
            return False
        return self.groups > 1 or min(sides) > 3 or self.x[0] > 1 or math.prod(self.x) > SMALL

    def _has_larger_kernel(self) -> bool:
        """True if the kernel has more rows than its image; AVX2's weight gradients do not support this."""
        return any(kernel > size for kernel, size in zip(self.weight[2:-1], self.x[2:-1], strict=True))

    def _fits(self, multiple: int) -> bool:
        """True if the channels of a group are multiples of `multiple`, or one each."""
        each, outputs = self.weight[1], self.weight[0] // self.groups
        return (each % multiple == 0 and outputs % multiple == 0) or (each == outputs == 1 and multiple == 4)

    def _copy(self, shape: Sequence[int], least: int = BLOCK) -> int:
        """Bytes in blocks of channels, the last one padded; or in one block of `least` if that holds them all."""
        block = least if shape[1] <= least else BLOCK
        return self._bytes([shape[0], -(-shape[1] // block) * block, *shape[2:]])

    def _copy_of_weight(self) -> int:
        if self.groups > 1:
            return self._bytes(self.weight)
        inputs = self.weight[1] if self.weight[1] < BLOCK else -(-self.weight[1] // BLOCK) * BLOCK
        return self._bytes([-(-self.weight[0] // BLOCK) * BLOCK, inputs, *self.weight[2:]])

    def _patches(self, samples: int | None = None) -> int:
        if max(self.weight[2:]) == 1 and max(self.stride) == 1:
            return 0
        each = [self.x[0] if samples is None else samples, math.prod(self.weight[1:]), *self.y[2:]]
        return self._bytes(each)

    def _bytes(self, shape: Sequence[int]) -> int:
        return math.prod(shape) * self.dtype.itemsize
