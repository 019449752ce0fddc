"""Replay the random numbers of a forward pass, for the same batch or for each of its samples alone."""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

DROPPED = {
    F.scaled_dot_product_attention: (4,),
    F.multi_head_attention_forward: (10,),
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), (5, 6)),  # padded and packed
}
"""Operation with internal dropout -> positions of its dropout argument. Samples may not come first in its operands."""


class Draws:
    """A snapshot of all random generators: torch's on each device, numpy's and Python's."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._numpy: Any = _numpy() and _numpy().get_state()
        self._python = random.getstate()

    def restore(self) -> None:
        """Restore all generators to the snapshot."""
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        random.setstate(self._python)
        if self._numpy:
            _numpy().set_state(self._numpy)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Context that draws from the snapshot; restores the generators' present states on exit."""
        now = Draws()
        self.restore()
        try:
            yield
        finally:
            now.restore()

    def used(self) -> bool:
        """True if a generator has drawn anything since the snapshot."""
        now = Draws()
        pairs = zip([self._cpu, *self._cuda], [now._cpu, *now._cuda], strict=False)
        return self.used_outside_of_torch() or not all(torch.equal(x, y) for x, y in pairs)

    def used_outside_of_torch(self) -> bool:
        """True if numpy or Python has drawn anything since the snapshot."""
        same = not self._numpy or all(map(_equal, self._numpy, _numpy().get_state()))
        return not same or self._python != random.getstate()


class OwnGenerator:
    """A snapshot of a random generator that a model or a loss holds itself.

    Args:
        generator: one of torch's, numpy's or Python's.

    Attributes:
        generator: as given.
        restore: restores the generator to the snapshot.
    """

    def __init__(self, generator: Any) -> None:
        self.generator = generator
        of_numpy = getattr(generator, "bit_generator", None)
        if of_numpy is not None:
            state = of_numpy.state
            self.restore: Callable[[], Any] = lambda: setattr(of_numpy, "state", state)
        elif isinstance(generator, random.Random):
            self.restore = partial(generator.setstate, generator.getstate())
        else:
            self.restore = partial(generator.set_state, generator.get_state())

    @staticmethod
    def is_of(value: Any) -> bool:
        """Whether a value is such a generator.

        Args:
            value: any object.
        """
        numpy = _numpy()
        kinds = (numpy.Generator, numpy.RandomState) if numpy else ()
        return isinstance(value, (torch.Generator, random.Random, *kinds)) and not isinstance(
            value, random.SystemRandom
        )


class SameForEach(TorchDispatchMode):
    """Make each sample draw the same numbers in any batch, so that one sample can be compared alone and in a batch.

    Acts on the operations beneath autograd. A random operation runs for one sample after the other, each time from the
    same seed, which is one more than the last operation's. The seed is part of torch's generator state, which torch
    restores for checkpointed parts: so they draw the same numbers when they are recomputed.

    Args:
        batch_size: B; a tensor whose first dimension is a multiple of B has as many rows for each sample.
    """

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self._batch_size = batch_size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_random(func, args, kwargs):
            return func(*args, **kwargs)
        given, seed, samples = _named(func, args, kwargs), torch.initial_seed() + 1, self._batch_size
        if "generator" in given:
            given["generator"] = None
        rows = {k: x for k, x in given.items() if isinstance(x, Tensor) and x.dim() and x.shape[0] % samples == 0}
        size = given.get("size") or [1]
        if not rows and size[0] % samples:
            return _seeded(seed, func, given)
        if not rows:
            found = _seeded(seed, func, given | {"size": [size[0] // samples, *size[1:]]})
            return found.repeat(samples, *[1] * (found.dim() - 1))
        parts = []
        for i in range(samples):
            mine = {k: x[i * (len(x) // samples) : (i + 1) * (len(x) // samples)] for k, x in rows.items()}
            parts.append(_seeded(seed, func, given | mine))
        if func._schema.returns[0].alias_info is not None:  # an operation in place: the parts were views of this tensor
            return given["self"]
        if isinstance(parts[0], Tensor):
            return torch.cat(parts)
        return tuple(torch.cat(each) if isinstance(each[0], Tensor) else each[0] for each in zip(*parts, strict=True))


class Watched(TorchDispatchMode):
    """Notes whether operations of this thread draw random numbers.

    Attributes:
        drew: True once one has.
    """

    drew = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.drew = self.drew or is_random(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class WithoutDropping(TorchFunctionMode):
    """Disables dropout inside fused attention and recurrence."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = _without_dropping(func, args, kwargs or {})
        return func(*args, **kwargs)


def undropped(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of an operation as `WithoutDropping` changes them, if it is active beneath the caller's mode.

    For modes (`clipping.tape`) that replace the operation by others, whose dropout `WithoutDropping` does not know.
    """
    if func in DROPPED and any(isinstance(mode, WithoutDropping) for mode in _get_current_function_mode_stack()):
        return _without_dropping(func, args, kwargs)
    return args, kwargs


def _without_dropping(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    for at in DROPPED.get(func, ()):
        if at < len(args) and isinstance(args[at], float):
            args = (*args[:at], 0.0, *args[at + 1 :])
        if "dropout_p" in kwargs:
            kwargs = kwargs | {"dropout_p": 0.0}
    return args, kwargs


@contextmanager
def same_for_each(batch_size: int) -> Iterator[Draws]:
    """Run with `SameForEach` and fixed numpy and Python seeds; restores all generators on exit."""
    before = Draws()
    try:
        random.seed(0)
        _seed(0)
        if _numpy():
            _numpy().seed(0)
        seeded = Draws()
        with WithoutDropping(), SameForEach(batch_size):
            yield seeded
    finally:
        before.restore()


def _numpy() -> Any:
    """numpy.random if numpy is imported, else None."""
    return getattr(sys.modules.get("numpy"), "random", None)


def _equal(one: Any, other: Any) -> bool:
    return bool((one == other).all()) if hasattr(one, "all") else bool(one == other)


def is_random(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """True if an operation draws random numbers.

    Fused attention and recurrence with dropout 0 draw none. They must not run sample by sample: on a GPU some of their
    results, such as a generator's state, have no row for each sample.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    given = _named(func, args, kwargs)
    dropped = [argument for argument in func._schema.arguments if argument.name in ("dropout_p", "dropout")]
    return not any(given.get(argument.name, argument.default_value) == 0 for argument in dropped)


def _named(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _seed(number: int) -> None:
    """Seed torch's generators; `torch.manual_seed` formats the stack for each kind of device that is not in use."""
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)


def _seeded(seed: int, func: Any, given: dict[str, Any]) -> Any:
    _seed(seed)
    arguments: Sequence[Any] = func._schema.arguments
    places = [given[a.name] for a in arguments if not a.kwarg_only and a.name in given]
    return func(*places, **{a.name: given[a.name] for a in arguments if a.kwarg_only and a.name in given})
