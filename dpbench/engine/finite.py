"""Reject NaN or infinite gradients: clipping does not bound them, and no noise hides them.

**On a CPU** each piece is checked when it is clipped. If it is not finite, nothing of its logical batch is released and
no parameter moves.

**On a GPU** the host would have to wait for the result. So the device checks the sum of the whole logical batch, and
sets it to zero if any entry is not finite, before the noise: the step releases noise alone, as for a batch of no
samples. The host learns of it while the next step runs. The next call that may raise does so: the next step,
`privacy_spent`, `state_dict`, `detach`, the end of the loader's epoch. The error names a parameter in both cases.

**What this reveals.** A record with an infinite gradient zeros the whole sum, or stops the step. The sum then moves by
more than the sensitivity. So *whether* a step was finite is not covered by ε, on either device. Everything else is: a
step that was not finite releases only noise, and the rest of the training is computed from that. The step counts,
though it spends nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from clipping.distributed.spread import any_sharded, here
from dpbench.engine.sums import Block, everywhere

_OVERFLOWED = "a loss or an activation has overflowed"


def _is_later(device: torch.device) -> bool:
    """Whether the host reads the flags of sums on this device one step later."""
    return device.type == "cuda"


def later(blocks: Iterable[Block]) -> list[Block]:
    """The blocks whose sums the device checks, and whose flags the host reads one step later."""
    return [block for block in blocks if _is_later(block.data.device)]


def require_finite(grads: Mapping[str, Tensor]) -> None:
    """Raise a FloatingPointError, itself not accounted, that names a clipped sum on a CPU that is not finite."""
    sharded = any_sharded(grads.values())
    mine = {name: here(g) for name, g in grads.items()} if sharded else grads
    known = {name: g for name, g in mine.items() if not _is_later(g.device)}
    if not known:
        return
    flags = _finite(list(known.values()))
    if bool((everywhere(flags) if sharded else flags).all()):
        return
    found = (name for name, g in known.items() if not g.isfinite().all())
    name = f"{'a shard of ' if sharded else ''}{next(found, 'another process')}"
    raise FloatingPointError(
        f"expected finite gradients, got NaN or inf in {name!r}: one record would decide the parameters whatever the "
        f"noise, so nothing of this batch is released; {_OVERFLOWED}"
    )


def require_finite_losses(losses: Tensor) -> None:
    """Raise a FloatingPointError that names the samples with losses that are not finite."""
    wrong = losses.detach().isfinite().logical_not().nonzero().flatten().tolist()
    if wrong:
        named = ", ".join(map(str, wrong[:8])) + (" ..." if len(wrong) > 8 else "")
        raise FloatingPointError(
            f"expected finite losses, got NaN or inf for sample{'s' if len(wrong) > 1 else ''} {named} of the batch of "
            f"{len(losses)}: nothing of it is released; look at these records, or at what overflows in the model"
        )


def finite(blocks: Sequence[Block]) -> Tensor:
    """Check each sum without synchronising: [parameters] bool, in the blocks' order, on the first one's device."""
    found = [_finite(block.parts()).to(blocks[0].data.device, non_blocking=True) for block in blocks]
    return torch.cat(found) if len(found) > 1 else found[0]


def empty(blocks: Sequence[Block], unless: Tensor) -> None:
    """Set all these sums to zero unless all flags are true, without synchronising."""
    spoiled = unless.all().logical_not()
    for block in blocks:
        block.data.masked_fill_(spoiled.to(block.data.device, non_blocking=True), 0.0)


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


def _finite(sums: list[Tensor]) -> Tensor:
    """[tensors] bool, from one number of each, without copying them."""
    full = [x for x in sums if x.numel()]
    nothing = torch.zeros((), dtype=sums[0].dtype, device=sums[0].device)
    if not _is_later(sums[0].device):  # a sum is faster, but may itself overflow
        found = torch.stack([x.sum() if x.numel() else nothing for x in sums]).isfinite()
        if bool(found.all()):
            return found
    largest = iter(torch._foreach_norm(full, math.inf) if full else ())
    return torch.stack([next(largest) if x.numel() else nothing for x in sums]).isfinite()
