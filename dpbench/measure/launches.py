"""Run a `LaunchesTrial`: count launches, bytes and operations of a GPU's step, and predict its time, without a GPU.

The step runs under fake tensors on the device "meta". (For a fake tensor on CUDA autograd would call the driver.) The
backend sees a GPU of 80 GiB on which Triton programs run, so it takes the same path as there, in float32 or all in
bfloat16: autocast does not support meta tensors. Routes are chosen by formula. Attention is torch's memory-efficient
kernel, which CUDA uses for float32.

**A launch** is a torch operation that computes or copies, or a Triton program; an operation on a list of tensors counts
as many launches as torch's list kernels take. A GPU launches several kernels for some operations, so a profiler counts
more, for ordinary training too.

**Bytes** count each operand and each result once: the least an operation moves, with no cache between two of them.
One kernel computes a convolution's input gradient, another its weight gradient. Both read the output's gradient.
**Operations** are those of matrix products, convolutions and attention, by `torch.utils.flop_counter`, and of the
products in Triton programs, without what fills up their tiles.

**Predicted seconds** are a floor: each operation takes as long as its bytes or its operations, by the rates that copies
and large products reached on an H100 (`RATES`, `BANDWIDTH`). Products in Triton take as long as the busiest
multiprocessor multiplies whole tiles, at its share of that rate, or copies operands from the L2 cache to its shared
memory, if that is longer. `CACHE` and `START` are chosen so that this is 0.7 to 1.1 of the times of ten norms on an
H200. A step replayed as a CUDA graph takes the sum; an eager
one waits for Python.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from clipping import Backend
from clipping.accel import cuda, fused, tiles
from clipping.core.batches import tensors_of
from clipping.core.dtypes import HALF
from clipping.numerics.products import ALIGNED
from clipping.rules import base
from dpbench.measure.bench import parameter_count
from dpbench.measure.flops import FORMULAS
from dpbench.models.loading import load_workload
from dpbench.trials.backend_classes import backend_class
from dpbench.trials.evidence import LaunchesTrial
from dpbench.trials.outcome import Outcome, noted, refuse_failed

#: Tensors of a list per launch by torch: 64 for pairs (110 for single tensors, 128 for concatenation).
AT_ONCE = 64
#: Entries per launch on a list: 320 blocks of 65,536.
ENTRIES = 320 * 65_536
#: Bytes a second of a copy, and operations a second of products of 8,192³: an H100's (`results/evidence`, `device`).
BANDWIDTH = 3.0e12
RATES = {"half": 767e12, "tf32": 400e12, "float32": 52e12}
#: Shares of these, assumed: a product of half precision whose rows are not aligned; one of float32 in Triton.
UNALIGNED, TRITON = 0.2, 0.5
#: Columns of ones by which each tile of a sum multiplies to find a bias.
BIAS = 16
#: Bytes a second from the L2 cache to the shared memory of all multiprocessors; seconds in which one starts a program.
CACHE, START = 8.0e12, 0.9e-6
#: Operations that make the host wait for the device.
WAITS = {"_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero"}
#: Operations that do not read their first argument: they overwrite it, or take its shape.
_OVERWRITES = ("copy_", "fill_", "zero_", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
#: Operations that read as many bytes of their first argument as they return.
_GATHERS = ("embedding", "index", "gather", "index_select")
#: Operations that read and write as many bytes of their first argument as their last tensor has.
_SCATTERS = ("index_put_", "index_add_", "scatter_", "scatter_add_", "_index_put_impl_")
_MEMORY = 80 * 2**30


def run(trial: LaunchesTrial) -> dict[str, Any]:
    """{"parameters", "backends": {name: entry}}; an entry is `counted`'s result, or a failure's "outcome", "evidence".

    Raises:
        PartlyFailed: a backend's entry is an `error`; with the whole result.
    """
    sizes = {name: getattr(trial, name) for name in ("image_size", "num_classes") if getattr(trial, name) is not None}
    found: dict[str, dict[str, Any]] = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        workload = load_workload(trial.model, data="synthetic", device="meta", dtype=trial.dtype, **sizes)
        batch = workload.batch(trial.batch_size)
        for name in trial.backends:
            found[name] = {}
            with noted(found[name]), backend_class(name)(workload.model, workload.loss_fn, verify=False) as backend:
                found[name] |= counted(backend, *batch)
        result = {"parameters": parameter_count(workload.model), "backends": found}
    refuse_failed(found, result)
    return result


def counted(backend: Backend, inputs: Any, targets: Any) -> dict[str, Any]:
    """{"outcome": "ok", "launches", "bytes_read", "bytes_written", "flops", "seconds" (predicted), "operations": {name:
    launches}} of a step.

    Counts the second step: the first includes one-time checks.

    Args:
        backend: of a model with fake parameters on "meta".
    """
    for _ in range(2):
        with as_on_a_gpu(Launches()) as launches:
            backend(inputs, targets)
    counts = {name: getattr(launches, name) for name in ("bytes_read", "bytes_written", "flops", "seconds")}
    operations = dict(launches.found.most_common())
    return {"outcome": Outcome.OK, "launches": launches.found.total(), **counts, "operations": operations}


class Launches(TorchDispatchMode):
    """Counts the launches, bytes and operations of a step; fails if an operation waits for the device.

    Attributes:
        found: operation -> launches.
        bytes_read, bytes_written: of operands and results.
        flops: of products; a multiplication and an addition are 2.
        seconds: predicted, of kernels one after the other.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.bytes_read = self.bytes_written = self.flops = 0
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        kind, _, name = func._schema.name.partition("::")
        assert name not in WAITS, f"{name} waits for the device"
        if kind == "aten" and not name.startswith(("empty", "new_empty")):
            self._count(func, name, args, kwargs, result)
        return result

    def _count(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        given, results = tensors_of((args, kwargs)), tensors_of(result)
        memory = {x.untyped_storage()._cdata for x in given}
        new = [x for x in results if x.untyped_storage()._cdata not in memory]
        if not new and not func._schema.is_mutable:
            return  # a view
        lists = [tensors for x in args if isinstance(x, (list, tuple)) and (tensors := tensors_of(x))]
        length = max(map(len, lists), default=1)
        entries = max((sum(x.numel() for x in tensors) for tensors in lists), default=0)
        self.found[name] += max(-(-length // AT_ONCE), -(-entries // ENTRIES))
        written = [
            x
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for x in tensors_of(value)
        ]
        if name in _SCATTERS:
            written, given = [given[-1]], [*given[1:], given[-1]]
        elif name in _GATHERS:
            given = [*given[1:], *new]
        elif name in _OVERWRITES:
            given = given[1:]
        packet, flops = func._overloadpacket, 0
        if packet in FORMULAS:
            shaped = [x for x in args if not isinstance(x, torch.dtype)]  # torch 2.11 takes a dtype for the shape
            flops = int(FORMULAS[packet](*shaped, **kwargs, out_val=result))
        kernels = [(given, [*new, *written])]
        if name == "convolution_backward":  # each gradient has its kernel, which reads g
            g, x, weight, *_, (of_input, of_weight, _) = args
            kernels = [([g, weight], new[:1])] * of_input + [([g, x], new[of_input:])] * of_weight or kernels
        for operands, found in kernels:
            with self._timed(_rate(name, tensors_of(args))):
                self.flops += flops // len(kernels)
                self._move(operands, found)

    def program(
        self, name: str, given: Sequence[Tensor], results: Sequence[Tensor], flops: int = 0, least: float = 0.0
    ) -> None:
        """Count a Triton program.

        Args:
            name: of the program.
            given: tensors that it reads.
            results: tensors that it writes.
            flops: operations of its products.
            least: seconds that it takes at least.
        """
        with self._timed(_rate_in_triton(name, given), least):
            self.found[name] += 1
            self.flops += flops
            self._move(given, results)

    def _move(self, given: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        views: Counter[int] = Counter()
        for x in {id(x): x for x in given}.values():
            views[x.untyped_storage()._cdata] += _bytes(x)
        whole = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in given}
        self.bytes_read += sum(min(count, whole[key]) for key, count in views.items())  # shared memory once
        self.bytes_written += sum(map(_bytes, results))

    @contextmanager
    def _timed(self, rate: float, least: float = 0.0) -> Iterator[None]:
        """Within it one launch is counted, whose products run at this rate."""
        flops, moved = self.flops, self.bytes_read + self.bytes_written
        yield
        moved = self.bytes_read + self.bytes_written - moved
        self.seconds += max((self.flops - flops) / rate, moved / BANDWIDTH, least)


def _rate(name: str, given: Sequence[Tensor]) -> float:
    """Operations a second of products: float32 takes TF32 in convolutions, as torch allows by default."""
    operands = [x for x in given if x.is_floating_point() and x.dim() > 1]
    if operands and operands[0].dtype in HALF:
        unaligned = name in ("mm", "bmm") and any(max(x.stride()[-2:]) % ALIGNED for x in operands)
        return RATES["half"] * (UNALIGNED if unaligned else 1)
    return RATES["tf32" if name.startswith("convolution_") or name == "convolution" else "float32"]


def _rate_in_triton(name: str, given: Sequence[Tensor]) -> float:
    rate = _rate(name, given)
    return rate if rate == RATES["half"] else TRITON * rate


def _bytes(x: Tensor) -> int:
    """Bytes in memory; an expanded dimension counts once."""
    return math.prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride) * x.element_size()


@contextmanager
def as_on_a_gpu(launches: Launches, *, triton: bool = True) -> Iterator[Launches]:
    """Run steps on "meta" as on a GPU of 80 GiB, and count them.

    Args:
        launches: counts.
        triton: whether Triton programs run there; else torch's operations replace them.
    """

    def launched(
        program: str,
        each: int,
        tensors: Sequence[Any],
        numbers: Any,
        results: int = 1,
        *,
        count: int = 1,
        **constants: Any,
    ) -> None:
        if each * count:
            read, flops, least = tensors[:-results], 0, 0.0
            if program in _FLOPS:
                flops, gs = _FLOPS[program](*read, numbers, constants), tensors_of(read[1])  # of several layers
                rate = _rate_in_triton(program, tensors_of(read))
                least = _on_the_busiest(program, each * count, gs, numbers, constants, rate)
            launches.program(program, tensors_of(read), tensors[-results:], flops, least)

    known = (*cuda.DTYPES, *cuda.IDS)
    with ExitStack() as stack:
        library = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        library.impl("scaled_dot_product_attention", _attention, "AutogradMeta")
        for owner, name, value in (
            (cuda, "supported", lambda *given: triton and all(x.is_meta and x.dtype in known for x in given)),
            (cuda, "launch", launched),
            (cuda, "generation", lambda x: 9),
            (fused, "runs", lambda *given: cuda.supported(*given)),
            (base.Rule, "room", lambda rule: _MEMORY // base.SHARE),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield stack.enter_context(launches)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The attention kernel that CUDA uses for float32."""
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    if mask is not None:
        mask = torch.where(mask, 0.0, -math.inf) if mask.dtype == torch.bool else mask
        mask = mask.to(q.dtype).expand(*q.shape[:-1], k.shape[-2])
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    attention = torch.ops.aten._scaled_dot_product_efficient_attention
    return attention(q, k, v, mask, trains, dropout, causal, scale=scale)[0]


def _of_gradient(channels: int, g: Tensor, constants: Any) -> int:
    return 2 * g.numel() * channels * int(constants["KERNEL_H"] * constants["KERNEL_W"])


def _features(numbers: Sequence[int], constants: Any) -> int:
    """Features of all groups of a Gram program, of the gradients beside g too."""
    groups, channels, outputs, *_ = numbers
    inputs = channels * int(constants["KERNEL_H"] * constants["KERNEL_W"])
    return groups * (inputs + outputs * (1 + constants["BESIDE"]))


def _of_patches(xs: Any, gs: Sequence[Tensor], more: Any, most: Any, numbers: Sequence[int], constants: Any) -> int:
    return sum(len(g) * math.prod(g.shape[2:]) ** 2 * _features(numbers, constants) for g in gs)


#: Program of `clipping.accel` -> a function that returns the operations of its products.
_FLOPS: dict[str, Callable[..., int]] = {  # Gram matrices are symmetric: count half
    "gram": _of_patches,
    "embedding_gram": lambda ids, g, *_: len(g) * g.shape[1] ** 2 * g.shape[2],
    "gradient": lambda x, g, numbers, constants: _of_gradient(numbers[0], g, constants),
    "weighted": lambda xs, gs, factors, numbers, constants: sum(
        _of_gradient(numbers[0], g, constants)
        + constants["BIAS"] * 2 * g.numel() * BIAS * -(-numbers[0] // constants["BLOCK_D"])
        for g in gs
    ),
}


def _on_the_busiest(
    program: str, programs: int, gs: Sequence[Tensor], numbers: Sequence[int], constants: Any, rate: float
) -> float:
    """Seconds of the multiprocessor that loads and multiplies the most."""
    g = gs[0]
    rounds = math.ceil(programs / tiles.MULTIPROCESSORS)
    most, of_all = rounds, programs  # tiles of the busiest, and of all
    if program in ("weighted", "gradient"):  # portions are of two sizes: count tiles of one sample
        samples, size = numbers[6:8]
        of_portion = programs // -(-samples // size)
        most, of_all = tiles.busiest(samples, size, of_portion), samples * of_portion
    loaded = len(gs) * _LOADED[program](g, numbers, constants) * g.element_size()
    loading, multiplying = most * loaded / of_all / CACHE, most * _OF_TILE[program](g, numbers, constants) / rate
    return tiles.MULTIPROCESSORS * max(loading, multiplying) + rounds * START


def _by_gram_tiles(positions: int, entries: int, constants: Any) -> int:
    return entries * tiles.meetings(positions, constants["BLOCK"], once=constants.get("ALONE") == 2)


def _by_gradient_tiles(channels: int, outputs: int, rows: int, constants: Any) -> int:
    inputs = channels * int(constants["KERNEL_H"] * constants["KERNEL_W"])
    return rows * tiles.entries(inputs, outputs, constants["BLOCK_P"], constants["BLOCK_D"])


def _by_gradient_norms(g: Tensor, numbers: Sequence[int], constants: Any) -> int:
    """Pixels and rows of g are read once more, for their norms, unless gradients are kept."""
    channels, outputs, height, width, positions, _, _, _, groups, *_ = numbers
    once = 0 if constants["KEPT"] else height * width * channels + positions * outputs
    return len(g) * groups * (_by_gradient_tiles(channels, outputs, positions, constants) + once)


def _of_gradient_tile(g: Tensor, constants: Any) -> int:
    columns = constants["BLOCK_D"] + BIAS * constants.get("BIAS", 0)
    return 2 * -(-g.shape[2] // constants["BLOCK_T"]) * constants["BLOCK_T"] * constants["BLOCK_P"] * columns


#: Program -> a function that returns the operations of one tile, of one sample, with what fills it up.
_OF_TILE: dict[str, Callable[..., int]] = {
    "gram": lambda g, numbers, constants: 2 * constants["BLOCK"] ** 2 * _features(numbers, constants) // numbers[0],
    "embedding_gram": lambda g, numbers, constants: 2 * constants["BLOCK"] ** 2 * g.shape[2],
    "gradient": lambda g, numbers, constants: _of_gradient_tile(g, constants),
    "weighted": lambda g, numbers, constants: _of_gradient_tile(g, constants),
}
#: Program -> a function that returns the entries of operands that all of them copy to shared memory.
_LOADED: dict[str, Callable[..., int]] = {
    "gram": lambda g, numbers, constants: _by_gram_tiles(
        g.shape[2], len(g) * g.shape[2] * _features(numbers, constants), constants
    ),
    "embedding_gram": lambda g, numbers, constants: _by_gram_tiles(g.shape[1], g.numel(), constants),
    "gradient": _by_gradient_norms,
    "weighted": lambda g, numbers, constants: _by_gradient_tiles(
        numbers[0], numbers[1], len(g) * g.shape[2], constants
    ),
}
