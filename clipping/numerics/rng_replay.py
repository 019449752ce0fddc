"""The random numbers of a forward pass, the same once more: for the same batch, or for each of its samples alone."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

DROPPED = {
    F.scaled_dot_product_attention: (4,),
    F.multi_head_attention_forward: (10,),
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), (5, 6)),  # padded and packed
}
"""Operations that drop inside, where samples may not come first, and which argument, a float, says how much."""


class Draws:
    """The state of all random generators (torch's on each device, numpy's, Python's) when this was made."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._numpy: Any = _numpy() and _numpy().get_state()
        self._python = random.getstate()

    def restore(self) -> None:
        """Give all generators the state that they had when this was made."""
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        random.setstate(self._python)
        if self._numpy:
            _numpy().set_state(self._numpy)

    @contextmanager
    def again(self) -> Iterator[None]:
        """What is run inside draws from this state on; afterwards the generators are as they were before."""
        now = Draws()
        self.restore()
        try:
            yield
        finally:
            now.restore()

    def used_outside_of_torch(self) -> bool:
        """Has anything been drawn by numpy or Python since?"""
        same = not self._numpy or all(map(_equal, self._numpy, _numpy().get_state()))
        return not same or self._python != random.getstate()


class SameForEach(TorchDispatchMode):
    """Each sample draws the same numbers, in whatever batch it is: so that one alone can be compared with two.

    Seen are the operations beneath autograd, whoever calls them. One that draws runs for one sample after the other,
    each time from the same seed, which is the number of the operation in this run.

    Args:
        batch_size: B; tensors whose first dimension it divides have as many rows for each sample.
    """

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self._batch_size = batch_size
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        if torch.Tag.nondeterministic_seeded not in func.tags or _drops_nothing(func, given):
            return func(*args, **(kwargs or {}))
        self._count += 1
        return self._drawn(func, given | ({"generator": None} if "generator" in given else {}))

    def _drawn(self, func: Any, given: dict[str, Any]) -> Any:
        samples = self._batch_size
        rows = {k: x for k, x in given.items() if isinstance(x, Tensor) and x.dim() and x.shape[0] % samples == 0}
        size = given.get("size") or [1]
        if not rows and size[0] % samples:
            return self._seeded(func, given)
        if not rows:
            found = self._seeded(func, given | {"size": [size[0] // samples, *size[1:]]})
            return found.repeat(samples, *[1] * (found.dim() - 1))
        parts = []
        for i in range(samples):
            mine = {k: x[i * (len(x) // samples) : (i + 1) * (len(x) // samples)] for k, x in rows.items()}
            parts.append(self._seeded(func, given | mine))
        if func._schema.returns[0].alias_info is not None:  # parts of a tensor that is there
            return given["self"]
        if isinstance(parts[0], Tensor):
            return torch.cat(parts)
        return tuple(torch.cat(each) if isinstance(each[0], Tensor) else each[0] for each in zip(*parts, strict=True))

    def _seeded(self, func: Any, given: dict[str, Any]) -> Any:
        torch.manual_seed(self._count)
        return _call(func, given)


class WithoutDropping(TorchFunctionMode):
    """Fused attention and recurrence drop nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for at in DROPPED.get(func, ()):
            if at < len(args) and isinstance(args[at], float):
                args = (*args[:at], 0.0, *args[at + 1 :])
            if "dropout_p" in kwargs:
                kwargs = kwargs | {"dropout_p": 0.0}
        return func(*args, **kwargs)


@contextmanager
def same_for_each(batch_size: int) -> Iterator[Draws]:
    """`SameForEach`, and the seeds of numpy and Python set for a run; all generators are as before afterwards.

    Args:
        batch_size: B.
    """
    before = Draws()
    try:
        random.seed(0)
        if _numpy():
            _numpy().seed(0)
        seeded = Draws()
        with WithoutDropping(), SameForEach(batch_size):
            yield seeded
    finally:
        before.restore()


def _numpy() -> Any:
    """numpy.random, if anybody has imported it."""
    return getattr(sys.modules.get("numpy"), "random", None)


def _equal(one: Any, other: Any) -> bool:
    return bool((one == other).all()) if hasattr(one, "all") else bool(one == other)


def _drops_nothing(func: Any, given: dict[str, Any]) -> bool:
    """Of fused attention and recurrence: what drops nothing draws nothing, and runs as it is.

    On a GPU some of its results have no row for each sample, the state of a generator among them.
    """
    dropped = [argument for argument in func._schema.arguments if argument.name in ("dropout_p", "dropout")]
    return any(given.get(argument.name, argument.default_value) == 0 for argument in dropped)


def _call(func: Any, given: dict[str, Any]) -> Any:
    arguments: Sequence[Any] = func._schema.arguments
    places = [given[a.name] for a in arguments if not a.kwarg_only and a.name in given]
    return func(*places, **{a.name: given[a.name] for a in arguments if a.kwarg_only and a.name in given})
