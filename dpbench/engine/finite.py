"""What is not finite is not released: clipping does not bound what is not a number, and no noise would hide it.

**Where sums do not lie flat** (on a CPU) a piece is looked at when it is clipped, and refused: nothing of its logical
batch is released, and no parameter moves.

**On a GPU** the host would have to wait for the device to be told. So the device itself looks, at the sum of the whole
logical batch, and puts zeros in its place if anything in it is not finite, before the noise: what is released of this
step is that of a batch of no samples, noise alone. That is told to the host while the next step runs, and raised by the
next call that may raise: the next step, `privacy_spent`, `state_dict`, `detach`, the end of the loader's epoch. A
parameter is named in both cases.

**What this tells of the data.** A record that makes its gradient infinite turns the whole sum into zeros: between data
sets with and without it the sum moves by more than the sensitivity, as it does where a step is refused. So *that* a
step was not finite is not covered by ε, on either device; it is said aloud, and not accounted. What is released beside
that bit is covered: given that the step was not finite, the gradient is a function of the noise alone, and the rest of
the training is computed from it. The step counts, though it has spent nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from clipping.distributed.spread import is_sharded
from dpbench.engine.sharded import everywhere, here
from dpbench.engine.sums import Block, lies_flat

_OVERFLOWED = "a loss or an activation has overflowed"


def require_finite(grads: Mapping[str, Tensor]) -> None:
    """Raise a FloatingPointError that names a clipped sum that is not finite, of those that can be read at once.

    That an error was raised tells of the data, and is not accounted.

    Args:
        grads: parameter name -> clipped sum.
    """
    known = {name: g for name, g in grads.items() if not lies_flat(here(g).device)}
    if not known or bool(everywhere(_finite([here(g) for g in known.values()]), known).all()):
        return
    shards = "a shard of " if any(map(is_sharded, known.values())) else ""
    found = (name for name, g in known.items() if not here(g).isfinite().all())
    name = f"{shards}{next(found, 'another process')}"
    raise FloatingPointError(
        f"expected finite gradients, got NaN or inf in {name!r}: one record would decide the parameters whatever the "
        f"noise, so nothing of this batch is released; {_OVERFLOWED}"
    )


def require_finite_losses(losses: Tensor) -> None:
    """Raise a FloatingPointError that names the samples whose loss [B] is not finite.

    Args:
        losses: of the samples, in the batch's order.
    """
    wrong = losses.detach().isfinite().logical_not().nonzero().flatten().tolist()
    if wrong:
        named = ", ".join(map(str, wrong[:8])) + (" ..." if len(wrong) > 8 else "")
        raise FloatingPointError(
            f"expected finite losses, got NaN or inf for sample{'s' if len(wrong) > 1 else ''} {named} of the batch of "
            f"{len(losses)}: nothing of it is released; look at these records, or at what overflows in the model"
        )


def finite(blocks: Sequence[Block]) -> Tensor:
    """[parameters] bool: the sum of each, in the order of the blocks, on the first one's device. Nothing is awaited.

    Args:
        blocks: of the sums, at least one.
    """
    found = [_finite(list(block.parts().values())).to(blocks[0].data.device, non_blocking=True) for block in blocks]
    return torch.cat(found) if len(found) > 1 else found[0]


def empty(blocks: Sequence[Block], unless: Tensor) -> None:
    """Put zeros in the place of all these sums unless all of [parameters] bool are true. Nothing is awaited.

    Args:
        blocks: of the sums.
        unless: of each parameter, whether its sum is finite.
    """
    spoiled = unless.all().logical_not()
    for block in blocks:
        block.data.masked_fill_(spoiled.to(block.data.device, non_blocking=True), 0.0)


class Unread:
    """What a device has found of the last steps, and the host has not read yet."""

    def __init__(self) -> None:
        self._found: deque[tuple[int, list[str], Tensor, Any]] = deque()

    def add(self, step: int, names: list[str], flags: Tensor) -> None:
        """Send [parameters] bool on their way to the host.

        Args:
            step: the engine's count of logical batches.
            names: of the parameters.
            flags: is the sum of each finite?
        """
        self._found.append((step, names, *sent(flags)))

    def clear(self) -> None:
        """Of steps that were gone back behind nothing is told any more."""
        self._found.clear()

    def read(self, *, wait: bool = False) -> None:
        """Look at what has arrived; with `wait` at all.

        Args:
            wait: for what has not arrived yet.

        Raises:
            FloatingPointError: a step was not finite, and its release noise alone. It is raised once.
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
    """(the same on the host, the event after which it is there or None): the copy is begun, and not awaited.

    Args:
        flags: bools on any device.
    """
    if flags.device.type != "cuda":
        return flags.clone(), None
    host = torch.empty(flags.shape, dtype=flags.dtype, device="cpu", pin_memory=True)
    host.copy_(flags, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(flags.device))
    return host, arrived


def _finite(sums: list[Tensor]) -> Tensor:
    """[tensors] bool: one number of each tells, without a copy of it."""
    full = [x for x in sums if x.numel()]
    nothing = torch.zeros((), dtype=sums[0].dtype, device=sums[0].device)
    if not lies_flat(sums[0].device):  # a sum is 25 times as fast; it may overflow by itself
        found = torch.stack([x.sum() if x.numel() else nothing for x in sums]).isfinite()
        if bool(found.all()):
            return found
    largest = iter(torch._foreach_norm(full, math.inf) if full else ())
    return torch.stack([next(largest) if x.numel() else nothing for x in sums]).isfinite()
