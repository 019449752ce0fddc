"""Turn the clipped sums of a logical batch into gradients: check them, add noise once, divide by b.

**One flat tensor** holds the sums of many parameters, as each launch costs a GPU's host some microseconds, and each
message between processes more. Adding pieces, drawing noise and dividing take one launch each. `.grad` of each
parameter is a slice of it, and no two slices overlap. One process on a CPU keeps each large sum where the backend has
left it: the copy would be 6 % of a small step (ViT-tiny, 16 images of 32 pixels).

**Several processes.** Each sum crosses once to the first process and once back, after the backward pass. If parameters
are DTensors, each process has the sum of its shard and adds the noise of its shard. Independent draws of N(0, σ²S²) for
the shards equal one draw for the whole. Each process draws at a place of its own (its rank), which makes the draws
independent even under one key, from one checkpoint. If shards have replicas (HSDP), the first replica draws, and
broadcasts its result. The caller's generator draws the whole parameter in every process, which keeps its shard: any
number of processes then repeats the training.

**NaN and infinity** are rejected: clipping does not bound them, and no noise hides them. On a CPU each piece is checked
when it is clipped. If it is not finite, nothing of its logical batch is released and no parameter moves. On a GPU the
host would have to wait for the result. So the device checks the sum of the whole logical batch, and sets it to zero if
any entry is not finite, before the noise: the step releases noise alone, as for a batch of no samples. The host learns
of it while the next step runs. The next call that may raise does so: the next step, `privacy_spent`, `state_dict`,
`detach`, the end of the loader's epoch. The error names a parameter in both cases.

A record with an infinite gradient zeros the whole sum, or stops the step, so the sum moves by more than the
sensitivity. So ε does not cover *whether* a step was finite, on either device. It covers everything else: such a step
releases only noise, and later steps use nothing but that. The step counts, though it spends nothing.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clipping.backends.base import Backend
from clipping.core.microbatching import sum_dtype
from clipping.distributed.spread import any_sharded, as_sharded, here, is_sharded
from clipping.noise.chacha import Segments
from dpbench.engine.distributed import place
from dpbench.engine.errors import Misuse
from dpbench.engine.noise import At, Noise, emptied_and_divided

LATER = {"cuda"}
"""Types of devices that check the sums themselves, and whose flags the host reads one step later."""
WORST = 1e-2
"""Largest η for which noise covers the worst case of all roundings; beyond it, random roundings."""
DEVIATIONS = 12
"""Deviations above the expected batch size: larger Poisson batches have probability below 1e-30."""
SMALL = 2**14
"""Most entries of a sum that one process on a CPU copies into the flat tensor, which costs less than its own draw."""
_OVERFLOWED = "a loss or an activation has overflowed"


class Sensitivity(NamedTuple):
    """S, a bound on how far one record can move the computed sum, and in words the roundings that it holds for."""

    bound: float
    words: str


def sensitivity(backend: Backend, batch_size: int) -> Sensitivity:
    """C(1 + η) for a logical batch.

    Args:
        backend: clips; η depends on the shapes that it has seen.
        batch_size: b. Batches larger by 12 standard deviations of Poisson samples are covered.
    """
    clip = backend.clip.sensitivity
    most = math.ceil(batch_size + DEVIATIONS * (math.sqrt(batch_size) + 1))
    bound, words = backend.sensitivity_bound(most, worst=True), "in the worst case"
    if bound > clip * (1 + WORST):
        bound, words = backend.sensitivity_bound(most), "if roundings are random"
    excess = bound / clip - 1 if clip else 0.0
    return Sensitivity(bound, f"C (1 + {excess:.1e}) in floating point, {words}")


@dataclass(eq=False)
class Block:
    """The sums of parameters of one device and dtype, in one flat tensor.

    Attributes:
        names, shapes: of the parameters; the shapes of their shards in this process.
        data: [segments.length], or without the last gap, in this process.
        segments: where each sum lies; its labels are the parameters' indices in the model's `named_parameters()`.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    data: Tensor
    segments: Segments
    _parts: list[Tensor] | None = None

    def parts(self) -> list[Tensor]:
        """Each parameter's view of `data` in this process, in its shape."""
        if self._parts is None:
            self._parts = list(map(Tensor.view, self.segments.parts(self.data), self.shapes))
        return self._parts

    def replace(self, data: Tensor) -> None:
        """Hold other sums in place of `data`.

        Args:
            data: of the same length, perhaps of another dtype.
        """
        if data is not self.data:
            self.data, self._parts = data, None

    def finite(self) -> Tensor:
        """Whether each sum is finite, [parameters] bool, without synchronising or copying them."""
        parts = self.parts()
        largest = iter(torch._foreach_norm([x for x in parts if x.numel()] or [self.data.new_zeros(1)], math.inf))
        return torch.stack([next(largest) if x.numel() else self.data.new_zeros(()) for x in parts]).isfinite()


@dataclass(eq=False)
class Sums(Mapping[str, Tensor]):
    """Parameter's name -> the sum of its clipped gradients, float32 or wider; a DTensor if the parameter is one.

    Attributes:
        blocks: hold the sums.
        parameters: all of the model.
        sharded: whether one of them is a DTensor.
        counted: the sum of `Recorder.count` over their records.
        clipped_to: the sensitivity of the clipping function before it clipped them.
    """

    blocks: list[Block] = field(default_factory=list)
    parameters: Mapping[str, nn.Parameter] = field(default_factory=dict)
    sharded: bool = False
    counted: float = 0.0
    clipped_to: float = 0.0

    def __getitem__(self, name: str) -> Tensor:
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return itertools.chain.from_iterable([block.names for block in self.blocks])

    def __len__(self) -> int:
        return sum(len(block.names) for block in self.blocks)

    @functools.cached_property
    def _parts(self) -> dict[str, Tensor]:
        return {
            name: as_sharded(part, self.parameters[name])
            for block in self.blocks
            for name, part in zip(block.names, block.parts(), strict=True)
        }

    @torch.no_grad()
    def add(self, older: Sums) -> None:
        """Add another piece's sums of the same parameters, in float64; `older` is not changed.

        In float64 the number and order of the pieces do not matter.

        Args:
            older: of the pieces before.
        """
        self.counted += older.counted
        if [block.names for block in self.blocks] == [block.names for block in older.blocks]:
            for mine, theirs in zip(self.blocks, older.blocks, strict=True):
                mine.replace(theirs.data.to(sum_dtype(theirs.data), copy=True).add_(mine.data))
        else:  # of other dtypes, or shared memory
            both = {name: total.to(sum_dtype(total)) + self[name] for name, total in older.items()}
            self.blocks = gathered(both, self.parameters).blocks
            vars(self).pop("_parts", None)

    def require_clipped_to(self, sensitivity: float) -> None:
        """Raise Misuse if the sums were clipped to another sensitivity: the noise would not be theirs."""
        if self.blocks and self.clipped_to != sensitivity:
            raise Misuse(
                f"expected a clipping function of one sensitivity in all of a logical batch, got {sensitivity:g} after "
                f"{self.clipped_to:g}: change it between steps, and not in factors()"
            )

    def require_finite(self) -> None:
        """Raise a FloatingPointError, itself not accounted, that names a sum on a CPU that is not finite."""
        known = [block for block in self.blocks if block.data.device.type not in LATER]
        # a sum is faster than each part's norm, but may itself overflow
        if not known or (not self.sharded and math.isfinite(sum([block.data.sum() for block in known]))):
            return
        flags = torch.cat([block.finite() for block in known])
        if bool((everywhere(flags) if self.sharded else flags).all()):
            return
        names = itertools.chain.from_iterable([block.names for block in known])
        name = next(itertools.compress(names, (~flags).tolist()), "another process")
        raise FloatingPointError(
            f"expected finite gradients, got NaN or inf in {'a shard of ' * self.sharded + name!r}: one record would "
            f"decide the parameters whatever the noise, so nothing of this batch is released; {_OVERFLOWED}"
        )


@torch.no_grad()
def gathered(
    grads: Mapping[str, Tensor],
    parameters: Mapping[str, nn.Parameter],
    names: Iterable[str] | None = None,
    counted: float = 0.0,
    clipped_to: float = 0.0,
) -> Sums:
    """The sums of some parameters: those in `grads`, and zeros for others. They are copied, or taken over on a CPU.

    Args:
        grads: of each parameter's shape; a DTensor if it is one.
        parameters: all of the model, in its own order.
        names: of the wanted parameters; None for those in `grads`.
        counted, clipped_to: as in `Sums`.
    """
    wanted = set(grads if names is None else names)
    sharded = any_sharded(parameters.values())
    sums = Sums(parameters=parameters, sharded=sharded, counted=counted, clipped_to=clipped_to)
    kinds: dict[tuple[Any, ...], list[tuple[str, torch.Size, int]]] = {}
    given: dict[str, Tensor] = {}
    seen = set[int]()
    alone = place()[1] == 1 and not sharded
    for number, (name, p) in enumerate(parameters.items()):
        if name not in wanted:
            continue
        like: Tensor = grads[name].detach() if name in grads else p
        like = here(like) if sharded else like
        if name in grads:
            given[name] = like
        dtype = torch.promote_types(like.dtype, torch.float32)
        kind = like.device, dtype, p.dtype, *(replicas(p) if sharded else ())
        if alone and like.numel() > SMALL and like.device.type not in LATER:
            storage = like.untyped_storage()
            owned = name in grads and like.dtype == dtype and like.is_contiguous() and storage.nbytes() == like.nbytes
            if owned and storage._cdata not in seen:
                seen.add(storage._cdata)
                sums.blocks.append(Block((name,), (like.shape,), like.view(-1), _segments((like.numel(),), (number,))))
                continue
        kinds.setdefault(kind, []).append((name, like.shape, number))
    for (device, dtype, *_), members in kinds.items():
        together, shapes, indices = zip(*members, strict=True)
        segments = _segments(tuple(map(torch.Size.numel, shapes)), indices)
        block = Block(together, shapes, torch.zeros(segments.length, dtype=dtype, device=device), segments)
        parts = dict(zip(together, block.parts(), strict=True))
        straight = [name for name in together if name in given and given[name].is_contiguous()]
        if straight:
            torch._foreach_copy_([parts[name] for name in straight], [given[name] for name in straight])
        for name in parts.keys() & given.keys() - set(straight):
            parts[name].copy_(given[name])
        sums.blocks.append(block)
    return sums


def resumed(state: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]) -> Sums:
    """The sums in a state of the engine, copied to the devices of the parameters.

    Args:
        state: of `PrivacyEngine.state_dict`.
        parameters: all of the model, in its own order.

    Raises:
        ValueError: they are another process's, whose records would enter the sum twice, or another model's.
    """
    sums: Mapping[str, Tensor] = state["sums"]
    if sums and state["place"] != list(place()):
        raise ValueError(
            "expected the checkpoint of process {} of {} in the middle of a logical batch, got that of {} of {}: "
            "save each process's own, or between logical batches".format(*place(), *state["place"])
        )
    for name, total in sums.items():
        shape = parameters[name].shape if name in parameters else None
        if total.shape != shape:
            raise ValueError(
                f"expected a checkpoint of this model in the middle of a logical batch, got one with {name!r} of shape "
                f"{list(total.shape)} for {'no such parameter' if shape is None else list(shape)}"
            )
    copied = {name: total.to(parameters[name].device, copy=True) for name, total in sums.items()}
    return gathered(copied, parameters, counted=state.get("counted", 0.0), clipped_to=state["sensitivity"])


@functools.lru_cache(maxsize=2048)
def _segments(counts: tuple[int, ...], labels: tuple[int, ...]) -> Segments:
    """Cached, so that a model has its tables on a device, and its arrays for C, made once."""
    return Segments(counts, labels)


@torch.no_grad()
def release_gradients(
    members: Mapping[str, nn.Parameter], sums: Sums, noise: Noise, deviation: float, batch_size: int, step: int
) -> tuple[list[str], Tensor] | None:
    """Set `.grad` of each trainable parameter to (sum over all processes + N(0, deviation²)) / batch_size.

    Args:
        members: all parameters of the model, resharded, in its own order.
        sums: clipped sums of this process, for the parameters that a loss depended on; overwritten. The sum of a
            sharded parameter is over all processes.
        noise: added by the first process, or by the one that has the shard.
        deviation: σ times the sensitivity.
        batch_size: b.
        step: number of the logical batch, unique among the releases with this noise.

    Returns:
        The flags that the host has not read: (names, [names] bool), whether each sum on a GPU was finite. If one was
            not, all these gradients are noise alone. None without a parameter on a GPU.
    """
    parameters = {name: p for name, p in members.items() if p.requires_grad}
    for name in members.keys() - parameters.keys():
        members[name].grad = None  # from before it was frozen; the optimizer would apply it
    if set(sums) != parameters.keys():
        sums = gathered(sums, members, parameters)
    blocks, sums.blocks = sums.blocks, []
    for block in blocks:  # the noise's precision is float32, or the parameters' if wider
        block.replace(block.data.to(torch.promote_types(parameters[block.names[0]].dtype, torch.float32)))
    rank, processes = place()
    sharded = sums.sharded
    crossing = processes > 1 and not sharded
    if crossing:
        _wait(dist.reduce(block.data, dst=0, async_op=True) for block in blocks)
    unread = spoiled = None
    if later := [block for block in blocks if block.data.device.type in LATER]:
        first = later[0].data.device
        flags = torch.cat([block.finite().to(first, non_blocking=True) for block in later])
        if sharded:
            flags = everywhere(flags)
        elif crossing:
            dist.broadcast(flags, src=0)
        spoiled = flags.all().logical_not()
        unread = [name for block in later for name in block.names], flags
    for block in blocks:
        flag = spoiled.to(block.data.device, non_blocking=True) if spoiled is not None and block in later else None
        if deviation and (rank == 0 or sharded) and not (sharded and noise.repeatable):
            noise.add_to_flat(block.data, block.segments, deviation, step, rank, spoiled=flag, divisor=batch_size)
            continue
        with emptied_and_divided(block.data, flag, batch_size):
            if deviation and sharded:
                _add_shards(block, noise, deviation, step, parameters)
    if sharded:
        _from_first_replica(blocks, parameters)
    elif crossing:
        _wait(dist.broadcast(block.data, src=0, async_op=True) for block in blocks)
    _hand_over(blocks, parameters, sharded)
    return unread


def _hand_over(blocks: Iterable[Block], parameters: Mapping[str, nn.Parameter], sharded: bool) -> None:
    """Point each `.grad` at its slice of the block, laid out as autograd would.

    A fused optimizer pairs entries by memory position, without a check.
    """
    for block in blocks:
        block.replace(block.data.to(parameters[block.names[0]].dtype))
        for name, grad in zip(block.names, block.parts(), strict=True):
            p = parameters[name]
            mine = here(p) if sharded else p
            if not mine.is_contiguous():
                like = torch.empty_like(mine, dtype=grad.dtype)
                grad = grad if like.stride() == grad.stride() else like.copy_(grad)
            p.grad = as_sharded(grad, p) if sharded else grad


class Unread:
    """The devices' finiteness flags of the last steps that the host has not read yet."""

    def __init__(self) -> None:
        self._found: deque[tuple[int, list[str], Tensor, Any]] = deque()

    def add(self, step: int, names: list[str], flags: Tensor) -> None:
        """Start copying [parameters] bool to the host.

        Args:
            step: the engine's count of logical batches.
            names: of the parameters.
            flags: whether each sum is finite.
        """
        self._found.append((step, names, *sent(flags)))

    def clear(self) -> None:
        """Forget the flags, as the engine loads a checkpoint."""
        self._found.clear()

    def read(self, *, wait: bool = False) -> None:
        """Check the flags that have arrived.

        Args:
            wait: also wait for the others.

        Raises:
            FloatingPointError: a step was not finite and released noise alone. Raised once a step.
        """
        while self._found:
            step, names, flags, arrived = self._found[0]
            if arrived is not None and not arrived.query():
                if not wait:
                    return
                arrived.synchronize()
            self._found.popleft()
            if not bool(flags.all()):
                name = names[flags.tolist().index(False)]
                raise FloatingPointError(
                    f"expected finite gradients, got NaN or inf in {name!r} at step {step}: one record would decide "
                    "the parameters whatever the noise, so noise alone was released in its place, by which they have "
                    f"moved; {_OVERFLOWED}; go on, or from a checkpoint before"
                )


def sent(flags: Tensor) -> tuple[Tensor, Any]:
    """Start a copy of flags to the host; return it and the event that marks its arrival, None if it is there."""
    if flags.device.type != "cuda":
        return flags.clone(), None
    host = torch.empty(flags.shape, dtype=flags.dtype, device="cpu", pin_memory=True)
    host.copy_(flags, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(flags.device))
    return host, arrived


def only_real(losses: Tensor, real: Tensor) -> Tensor:
    """Set the losses of padding to 0, without a gradient.

    Args:
        losses: [B].
        real: [B] bool, True for the data's own samples.
    """
    return torch.where(real, losses, torch.zeros_like(losses))


def masked(losses: Tensor, real: int, handed: int) -> Tensor:
    """Set the losses of padding to 0, without a gradient.

    Args:
        losses: [B].
        real, handed: the number of the data's samples, which come first, and of all samples.

    Raises:
        Misuse: the number of losses is not `handed`.
    """
    if len(losses) != handed:
        raise Misuse(
            f"expected one loss for each of the {handed} samples that data_loader handed out, got {len(losses)}: "
            "several views of a record are one record, so average their losses; none may be left out (weigh it by 0)"
        )
    if real == handed:
        return losses
    return only_real(losses, torch.arange(handed, device=losses.device) < real)


def require_finite_losses(losses: Tensor) -> None:
    """Raise a FloatingPointError that names the samples with losses that are not finite."""
    wrong = losses.detach().isfinite().logical_not().nonzero().flatten().tolist()
    if wrong:
        named = ", ".join(map(str, wrong[:8])) + (" ..." if len(wrong) > 8 else "")
        raise FloatingPointError(
            f"expected finite losses, got NaN or inf for sample{'s' if len(wrong) > 1 else ''} {named} of the batch of "
            f"{len(losses)}: nothing of it is released; look at these records, or at what overflows in the model"
        )


# Several processes


def replicas(p: Any) -> tuple[Any, ...]:
    """The process groups of this process's replicas of a parameter; none for an ordinary one."""
    if not is_sharded(p):
        return ()
    return tuple(p.device_mesh.get_group(dim) for dim, x in enumerate(p.placements) if x.is_replicate())


def everywhere(true: Tensor) -> Tensor:
    """Combine bools by `and` over all processes, so that all continue or all raise."""
    agreed = true.to(torch.uint8)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    return agreed.bool()


def _add_shards(
    block: Block, noise: Noise, deviation: float, step: int, parameters: Mapping[str, nn.Parameter]
) -> None:
    """Add this process's shards of the noise that every process draws of the whole parameters."""
    from torch.distributed.tensor import DTensor, Replicate

    for name, part, i in zip(block.names, block.parts(), block.segments.labels, strict=True):
        like: Any = parameters[name]
        zeros, mesh = torch.zeros(like.shape, dtype=part.dtype, device=part.device), like.device_mesh
        drawn = noise.added(zeros, deviation, At(step, place()[0], i))
        whole = DTensor.from_local(drawn, mesh, [Replicate()] * mesh.ndim, run_check=False)
        part.add_(whole.redistribute(placements=like.placements).to_local())


def _from_first_replica(blocks: Iterable[Block], parameters: Mapping[str, nn.Parameter]) -> None:
    """Broadcast each shard from its first replica, as noise is drawn once."""
    for block in blocks:
        for group in replicas(parameters[block.names[0]]):
            dist.broadcast(block.data, src=dist.get_global_rank(group, 0), group=group)


def _wait(works: Iterable[Any]) -> None:
    """Start all communication before waiting for it."""
    for work in list(works):
        if work is not None:  # None if this process is not in the group
            work.wait()
