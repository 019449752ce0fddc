"""Run a step again with other records in the batch: the losses and norms of the rest must not change.

others   Records outside S get NaN for floating numbers, and a record of S for integers; the outputs of embeddings are
         poisoned where the batch's own integers are looked up. A number of S that changes depends on other records,
         even through gates that are 0, scripts and detached numbers. Models that refuse NaN, and norms whose sums
         multiply other records by 0, are checked with real records instead.
number   The batch has one record more, or an eighth less. This shows a division by the batch size.

A difference counts if it recurs, in float64 too where the model can be cast, and if the same batch gives the same
numbers twice: experts may be chosen by numbers within a rounding of each other, and an iterator that the model reads
changes every run. NaN always counts.

Functions take:
    size: B.
    run: (change, return only the losses) -> tensors [B'·k, ...] of a step on the changed batch.
    change, changes: a `Change` of the batch, or several.
    tolerance: the largest difference that rounding explains, relative to the largest number in each tensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from clipping.checks.verification import CAST_TOLERANCE, in_eval, reading_float64
from clipping.core.dtypes import formats, is_autocast, without_autocast
from clipping.core.types import Problem
from clipping.numerics.rng_replay import same_for_each
from clipping.numerics.rounding_bounds import rounds_operands

REMEDY = (
    "let no sample's loss depend on another one, of this batch or an earlier one, or on their number: statistics, "
    "sorting and attention within a sample (GroupNorm for BatchNorm); if only the order of rows differs from that of "
    "the samples, use microbatch or vmap"
)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Relative tolerance of a rerun of the same shapes, and so of the same kernels, by the dtype of the computation."""
OF_OTHER_SHAPES, OF_ROUNDED_OPERANDS = 10, 2e-2
"""For a batch of another size, whose kernels round differently: the factor on `TOLERANCE`, and the least tolerance
where operands are rounded (TF32)."""
ITSELF = (
    "the model's results for one batch differ from run to run (it reads an iterator, a clock or something deep within "
    "other objects): that samples do not mix was checked by NaN alone, and the check's own runs have advanced what it "
    "reads"
)
_CHECKED = {F.binary_cross_entropy, torch.bernoulli, Tensor.bernoulli, Tensor.bernoulli_}
_CHECKED |= {torch.multinomial, Tensor.multinomial, torch.poisson}
"""Functions that refuse NaN; on a GPU they end the process."""
_CASTS = {Tensor.long, Tensor.int, Tensor.short, Tensor.char, Tensor.byte, Tensor.to, Tensor.type}
Run = Callable[["Change", bool], Sequence[Tensor]]


def coarsest(tensors: Iterable[Tensor], tolerances: Mapping[torch.dtype, float]) -> float:
    """Return the largest tolerance among the dtypes of `tensors`, and of autocast if it is enabled.

    Args:
        tensors: results, with their graphs if any.
        tolerances: relative tolerance by dtype; a missing dtype has the tolerance of float32.
    """
    given = list(tensors)
    autocast = {torch.get_autocast_dtype(x.device.type) for x in given if is_autocast(x.device)}
    return tolerance_of(formats(*given) | autocast, tolerances)


def tolerance_of(dtypes: Iterable[torch.dtype], tolerances: Mapping[torch.dtype, float] = TOLERANCE) -> float:
    """Return the largest tolerance of some dtypes.

    Args:
        dtypes: floating dtypes; if there are none, that of float32 counts.
        tolerances: as of `coarsest`.
    """
    other = tolerances[torch.float32]
    return max((tolerances.get(dtype, other) for dtype in dtypes), default=other)


class Change(NamedTuple):
    """A batch with other records in it.

    Attributes:
        size: B of the original batch.
        take: [B'], the index of the record at each place.
        own: [B'] bool: the results of this record must not change.
        poison, wide: set the floating numbers of the others to NaN; cast floating numbers to float64.
        alike: each record draws the same random numbers in every batch.
        whole: the losses of all records stay.
    """

    size: int
    take: Tensor
    own: Tensor
    poison: bool = False
    wide: bool = False
    alike: bool = False
    whole: bool = False

    def of(self, x: Tensor) -> Tensor:
        """Apply the change to a tensor of the batch: [B·k, ...] -> [B'·k, ...]. Copies any other tensor."""
        x = x.detach()
        if x.layout != torch.strided or not x.dim() or not len(x) or len(x) % self.size:
            return x.clone()
        rows = x.unflatten(0, (self.size, -1))[self.take.to(x.device)].flatten(0, 1)
        if self.wide and rows.is_floating_point():
            rows = rows.double()
        return self._poisoned(rows)

    def of_kept(self, x: Tensor) -> Tensor:
        """Apply the change to a tensor kept from an earlier batch, of the same records if it has [B·k, ...]."""
        x = x.detach()
        if self.wide and x.is_floating_point():
            x = x.double()
        if not x.dim() or not len(x) or len(x) % self.size:
            poisoned = self.poison and (x.is_floating_point() or x.is_complex())
            return torch.full_like(x, float("nan")) if poisoned else x
        return self.of(x)

    def _poisoned(self, x: Tensor) -> Tensor:
        if self.poison and (x.is_floating_point() or x.is_complex()):
            x.unflatten(0, (len(self.take), -1))[~self.own.to(x.device)] = float("nan")
        return x

    def alone(self, losses: Tensor) -> Tensor:
        """Set the losses of the other records to 0, so that they have no gradient; if `whole`, change nothing.

        Args:
            losses: [B'].
        """
        if self.whole:
            return losses
        return torch.where(self.own.to(losses.device), losses, torch.zeros_like(losses))

    @property
    def resized(self) -> bool:
        """Whether B' differs from B."""
        return len(self.take) != self.size

    @property
    def spoiled(self) -> Change:
        """The same batch with NaN for the floating numbers of all its records."""
        return self._replace(own=torch.zeros_like(self.own), poison=True)

    @contextmanager
    def making(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """Yield `of`. With `poison`, embeddings of integers made by it return NaN for the other records."""
        words = set[int]()

        def of(x: Tensor) -> Tensor:
            made = self.of(x)
            if not made.is_floating_point():
                words.add(_memory(made))
            return made

        drawing = same_for_each(len(self.take)) if self.alike else nullcontext()
        with _Embeddings(self, words) if self.poison else nullcontext(), drawing:
            yield of


class _Embeddings(TorchFunctionMode):
    """Writes NaN to the other records' rows of an embedding whose indices lie at an address in `words`."""

    def __init__(self, change: Change, words: set[int]) -> None:
        super().__init__()
        self._change, self._words = change, words

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _CHECKED or _is_extension(func):
            args = tuple(x.nan_to_num(0.5) if isinstance(x, Tensor) and x.is_floating_point() else x for x in args)
        found = func(*args, **kwargs)
        if func is F.embedding and args and _memory(args[0]) in self._words - {0}:
            if len(found) and len(found) % len(self._change.take) == 0:
                self._change._poisoned(found.data)  # without autograd noticing: its graph stays
        elif func in _CASTS and args[0].is_floating_point() and not found.is_floating_point():
            return func(args[0].nan_to_num(), *args[1:], **kwargs)  # NaN is no index
        return found


def _is_extension(func: Any) -> bool:
    """Whether it is another library's operator: deform_conv2d and roi_align read memory at NaN, and end the process."""
    packet = getattr(func, "overloadpacket", func)
    return not getattr(packet, "_qualified_op_name", "aten::").startswith("aten::")


def _memory(x: Tensor) -> int:
    """The address of a tensor's memory; 0 if it has none."""
    with suppress(RuntimeError, NotImplementedError):
        return x.untyped_storage().data_ptr()
    return 0


def replaced(half: Tensor, *, poison: bool = False) -> Change:
    """Replace all records outside `half` by copies of the last kept one before them, so that sorted input stays sorted.

    Args:
        half: [B] bool, true of at least one.
        poison: as of `Change`.
    """
    half = half.cpu()
    places = torch.arange(len(half), device="cpu")
    first = int(half.nonzero()[0])
    take = torch.where(half, places, -1).cummax(0).values
    return Change(len(half), torch.where(take < 0, first, take), half, poison)


def fewer(size: int) -> Change:
    """Leave out an eighth of the records, at least one: a division by their number changes by 12 % or more."""
    take = torch.arange(max(1, size // 8), size, device="cpu")
    return Change(size, take, torch.ones_like(take, dtype=torch.bool))


def more(size: int) -> Change:
    """Add one record, a copy of the first. Only one, because memory may be full."""
    take = (torch.arange(size + 1, device="cpu") - 1).clamp(min=0)
    return Change(size, take, torch.arange(size + 1, device="cpu") > 0)


def same(size: int) -> Change:
    """The unchanged batch."""
    take = torch.arange(size, device="cpu")
    return Change(size, take, torch.ones_like(take, dtype=torch.bool))


def differing(before: Sequence[Tensor], after: Sequence[Tensor], change: Change, tolerance: float) -> int | None:
    """Find a sample whose numbers changed, relative to the largest in each tensor; None if there is none.

    Args:
        before, after: the tensors of both steps, [B·k, ...] and [B'·k, ...]. The batch may be another dimension if B'
            is not B. Other tensors are skipped.
    """
    take, own = change.take, change.own
    for one, other in zip(before, after, strict=True):
        at = [i for i in range(one.dim()) if other.dim() != one.dim() or one.shape[i] != other.shape[i]] or [0]
        if not one.dim() or not one.is_floating_point() or len(at) > 1:
            continue
        one, other = one.movedim(at[0], 0), other.movedim(at[0], 0)  # the dimension of the batch
        if len(one) % change.size or len(one) // change.size * len(take) != len(other):
            continue
        rows = one.detach().double().reshape(change.size, -1)[take[own].to(one.device)]
        now = other.detach().double().reshape(len(take), -1)[own.to(one.device)]
        scale = torch.where(rows.isfinite(), rows.abs(), 0).amax() if rows.numel() else rows.new_zeros(())
        wrong = (rows.isfinite() & ~((rows - now).abs() <= tolerance * scale)).any(1)
        if bool(wrong.any()):
            return int(take[own][int(wrong.nonzero()[0])])
    return None


def mixed(
    model: nn.Module,
    run: Run,
    before: Sequence[Tensor],
    changes: Sequence[Change],
    tolerance: float,
    *,
    may_move: bool = False,
) -> int | None:
    """Find a sample whose numbers change when other records do; None if there is none.

    Args:
        run: (change, only losses?) -> tensors [B'·k, ...], with the random numbers of the first run. Returns only the
            losses, its first tensor, where the model reads float64.
        before: the result of the first run, [B·k, ...] each.
        may_move: samples may trade places, as where they are sorted.
    """
    for change in changes:
        limit = of_other_kernels(before[0], tolerance) if change.resized else tolerance
        after = or_none(run, change)
        if change.poison and (after is None or _only_norms(before, after, change, limit)):
            change = change._replace(poison=False)
            after = or_none(run, change)
        sample = None if after is None else differing(before, after, change, limit)
        if sample is None or after is None or (may_move and _only_moved(model, run, change, limit)):
            continue
        if _has_nan(before, after, change) or not _explained(model, run, before, change, limit):
            return sample
    return None


def _only_norms(before: Sequence[Tensor], after: Sequence[Tensor], change: Change, limit: float) -> bool:
    """Whether the losses agree but not the norms: our sums multiply others by 0, and 0 times NaN is NaN."""
    alike = differing(before[:1], after[:1], change, limit) is None
    return alike and differing(before[1:], after[1:], change, limit) is not None


def _only_moved(model: nn.Module, run: Run, change: Change, limit: float) -> bool:
    """Whether the samples only traded places: each has the numbers of one of the first run, and NaN stays with NaN."""
    change = change._replace(whole=True)
    if change.poison:
        spoiled = or_none(run, change)
        if spoiled is None or int((~_rows(spoiled[:1], len(change.take)).isnan().any(1)).sum()) < int(change.own.sum()):
            return False
    with in_eval(model):  # dropout depends on the place
        was, now = or_none(run, same(change.size)), or_none(run, change._replace(poison=False))
    if was is None or now is None or [x.shape for x in was] != [x.shape for x in now]:
        return False
    scales = [x.detach().double().abs().amax().clamp(min=1e-30) for x in was]
    one, other = (_rows([x / scale for x, scale in zip(of, scales, strict=True)], change.size) for of in (was, now))
    return bool((torch.cdist(other, one, p=torch.inf).amin(1) <= limit).all())


def _rows(of: Sequence[Tensor], size: int) -> Tensor:
    """[B, ...]: the numbers of each sample, in all tensors [B·k, ...]."""
    return torch.cat([x.detach().double().reshape(size, -1) for x in of], 1)


def _explained(model: nn.Module, run: Run, before: Sequence[Tensor], change: Change, limit: float) -> bool:
    """Whether rounding or random numbers explain a difference, or it occurs without a change."""
    change, unchanged = change._replace(alike=True), same(change.size)._replace(alike=True)
    was, now = or_none(run, unchanged), or_none(run, change)
    if was is None or now is None or differing(was, now, change, limit) is None:
        return True
    if change.resized and differing(before, was, unchanged, limit) is not None:  # random numbers drawn for the batch
        with in_eval(model):
            calm, other = or_none(run, unchanged), or_none(run, change)
        if calm is None or other is None or differing(calm, other, change, limit) is None:
            return True
    for one, one_change in ((was, unchanged), (now, change)):
        again = or_none(run, one_change)
        places = torch.arange(len(one_change.take), device="cpu")
        if again is None or differing(one, again, Change(len(places), places, one_change.own), limit) is not None:
            warnings.warn(ITSELF, UserWarning, stacklevel=2)
            return True
    if limit <= CAST_TOLERANCE or differing(was[:1], now[:1], change, limit) is None:
        return False
    with suppress(RuntimeError, TypeError, NotImplementedError), reading_float64(model), torch.no_grad():
        with without_autocast():
            was, now = (run(each._replace(wide=True), True) for each in (unchanged, change))
        return differing(was, now, change, OF_OTHER_SHAPES * CAST_TOLERANCE) is None
    return False


def of_other_kernels(of: Tensor, tolerance: float) -> float:
    """The tolerance where other kernels may compute the same result.

    Args:
        of: a result.
    """
    rounded = any(rounds_operands(of, library) for library in ("cublas", "cudnn"))
    return max(OF_OTHER_SHAPES * tolerance, OF_ROUNDED_OPERANDS if rounded else 0.0)


def or_none(run: Run, change: Change) -> Sequence[Tensor] | None:
    """Run a change; None if such a batch cannot be computed."""
    try:
        return run(change, False)
    except torch.OutOfMemoryError:
        if len(change.take) <= change.size:
            raise
        return None
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError):
        return None


def _has_nan(before: Sequence[Tensor], after: Sequence[Tensor], change: Change) -> bool:
    """Whether a number became NaN."""
    was = [torch.where(x.detach().isnan(), torch.nan, 0.0).double() for x in before]
    return differing(was, [x.detach().isnan().double() for x in after], change, 0.0) is not None


def of_one(size: int, record: int, *, copies: int | None = None) -> Change:
    """A batch of copies of one record.

    Args:
        record: its position in the original batch.
        copies: their number; B if None.
    """
    places = torch.full((size if copies is None else copies,), record, device="cpu")
    return Change(size, places, torch.ones_like(places, dtype=torch.bool))


def mixing(sample: int, what: str) -> Problem:
    """The problem to report for a sample that depends on others.

    Args:
        sample: its position in the batch.
        what: what changed, such as "gradient".
    """
    return Problem("model", f"samples mix: the {what} of sample {sample} changes with the other samples", REMEDY)
