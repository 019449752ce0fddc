"""Restore what a step that runs once more has written to the model and to the caller's loss.

Restored are attributes, containers, variables and class attributes that the model's code and the loss can reach, the
tensors, arrays and random generators among them, and parameters that the forward pass writes to. Not restored are
iterators, clocks and files: a step that reads them differs from one run to the next, and a warning says so.

Functions take:
    kept: list of (tensor, its copy).
    of, entries: a container, globals, a cell of a closure, a class, or an object with slots; its entries.
    value, values: any objects.
"""

from __future__ import annotations

import dis
import functools
import operator
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode

from clipping.core.autograd import versions_of
from clipping.core.batches import same_values
from clipping.numerics.rng_replay import Draws, OwnGenerator

LEVELS, MANY = 3, 1000
"""Levels of containers and objects, counted from the model, that are searched for state; most entries of a container to
search."""
LARGEST = 2**26
"""Bytes of the largest tensor or array outside of modules that is copied. A dataset that a loss can reach is larger."""
_CONTAINERS = list, deque, set, dict
"""Types of values that hold others."""
_WHOLE = int, float, str, bytes, ModuleType
"""Types of values that are not looked into."""
_OF_EVERY_MODULE = vars(nn.Module()).keys() - {"_buffers"}
_HOOKS = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
_OF_THREADS = "threading", "queue", "logging", "concurrent", "multiprocessing", "asyncio"
"""Packages whose objects are not looked into, as other threads write to them."""
_LIBRARIES = {"torch", *sys.stdlib_module_names}
"""Packages whose functions and classes are not looked into."""
WRAPPERS = staticmethod, classmethod, property
"""Types of values in a class that hold functions of it."""
_WRITABLE = 1 << 9
"""Flag of a class that was made by Python code; attributes of others cannot be written to."""
BYTES = 4096
"""About how many bytes of a parameter are read to find whether it was written to."""
Marks = Mapping[nn.Parameter, tuple[int, ...]]
"""Parameter -> numbers that change if its values do."""


class Moving:
    """The state that a step may write to: attributes of modules and what they hold, buffers, parameters.

    Frozen parameters are copied once they have been written to, and trainable ones once a forward pass was seen to
    write to them (`saw`).

    Args:
        model: before its first step.
        loss_fn: the caller's loss; what it holds or reads from outside of it is part of the state.

    Attributes:
        has_moved: True if a repeated pass wrote to it.
    """

    def __init__(self, model: nn.Module, loss_fn: Any = None) -> None:
        self._model, self.loss_fn, self.has_moved = model, loss_fn, False
        self._check: list[State] | None = None  # within `checking`: the present state, once it was found
        self._written: set[nn.Parameter] = set()
        self._marks = marks(p for p in model.parameters() if not p.requires_grad)

    def state(self, also: Iterable[Tensor] = (), last: State | None = None) -> State:
        """The present state; tensors are copied.

        Args:
            also: other tensors of it.
            last: a state that was restored; it is the present one unless modules have other members.
        """
        found = _state_of(self._model, self.loss_fn) if last is None or last.members_have_changed() else last
        every = dict.fromkeys(p for module, _ in found.modules for p in module._parameters.values() if p is not None)
        copied = dict.fromkeys(also)
        self._note_frozen(every, copied.keys())
        more = {*self._written.intersection(every), *copied}.difference(x for x, _ in found.kept)
        return found._replace(kept=[*found.kept, *_copies(more)])

    def of_hooks(self, hooks: Sequence[Mapping[int, Any]]) -> State:
        """The present state of hooks, and of modules with backward hooks, with what they hold.

        Args:
            hooks: of activations, by number.
        """
        modules = (x for x in self._model.modules() if x._backward_hooks or x._backward_pre_hooks)
        return _state_of(*modules, *hooks, *(hook for of in hooks for hook in of.values()))

    def marks(self) -> Marks:
        """The marks of the trainable parameters, for `saw`."""
        return marks(p for p in self._model.parameters() if p.requires_grad)

    def saw(self, before: Marks) -> list[nn.Parameter]:
        """Return the parameters that were written to since `before`; they are part of the state from now on.

        Args:
            before: result of `marks`.
        """
        now = marks(before)
        written = [p for p in before if now[p] != before[p]]
        self._written.update(written)
        return written

    def _note_frozen(self, every: Iterable[nn.Parameter], copied: Collection[Tensor]) -> None:
        """Find frozen parameters that were written to. Their first values are those of the model's first step.

        Args:
            every: all parameters.
            copied: those to copy in any case; they may be cast meanwhile, which is no write.
        """
        mine = set(self._model.parameters())
        frozen = [p for p in every if not (p.requires_grad or p.is_inference())]
        now = marks(p for p in frozen if p not in copied)
        known = {p: self._marks[p] for p in frozen if p in self._marks}  # frees replaced ones
        new = {p: () if p in mine else now[p] for p in now}  # one that replaces another may be written to already
        self._marks = {**new, **known}
        self._written = {p for p in every if p in self._written or (p in now and self._marks[p] != now[p])}

    @contextmanager
    def checking(self, begin: State | None = None) -> Iterator[None]:
        """Context in which the caller's code runs within `repeated` alone, so that its state is searched for once.

        Args:
            begin: an earlier state, to search not even once if its containers are the present ones still.
        """
        present = begin and begin.renewed()
        outer, self._check = self._check, [present] if present else []
        try:
            yield
        finally:
            self._check = outer

    @contextmanager
    def repeated(self, draws: Draws, begin: State | None = None, also: Iterable[Tensor] = ()) -> Iterator[State]:
        """Draw the random numbers that followed `draws`, and restore the model on exit. Yields the present state.

        Args:
            draws: the state of the generators to begin from.
            begin: the state of the model to begin from; None for the present one.
            also: other tensors of the state.
        """
        check, self._check = self._check, None
        present = self.state(also if begin is None else (x for x, _ in begin.kept), *check or ())
        try:
            with draws.again():
                if begin is not None:
                    modes = [(module, module.training) for module in self._model.modules()]
                    begin.restore()
                    for module, mode in modes:  # a check may run in eval mode
                        module.training = mode
                yield present
        finally:
            self.has_moved |= present.restore()
            if check is not None:
                check[:] = [present]
            self._check = check


class Globals(NamedTuple):
    """The globals of a module that functions name."""

    outside: dict[str, Any]
    names: set[str]


class State(NamedTuple):
    """A copy of the state of `Moving`.

    Attributes:
        held: (container, its entries): attributes of a module or of an object, or a list, set or dict among them.
        kept: as for `put_back`.
        generators: random generators that the model or the loss holds.
        modules: (module, its mode, parameters, buffers and submodules).
    """

    held: list[tuple[Any, list[Any]]]
    kept: list[tuple[Tensor, Tensor]]
    generators: list[OwnGenerator]
    modules: list[tuple[nn.Module, list[Any]]]

    def members_have_changed(self) -> bool:
        """Whether a module has another mode, parameter, buffer or submodule."""
        return any(_differ(_members(module), before) for module, before in self.modules)

    def renewed(self) -> State | None:
        """Return the present state if no container holds a new object, beyond numbers and text; else None."""
        held = [(of, _entries(of)) for of, _ in self.held]
        new = [x for (_, now), (_, before) in zip(held, self.held, strict=True) for x in _added(now, before)]
        if self.members_have_changed() or not all(x is None or isinstance(x, _WHOLE) for x in new):
            return None
        generators = [OwnGenerator(x.generator) for x in self.generators]
        return State(held, _copies(x for x, _ in self.kept), generators, self.modules)

    def restore(self) -> bool:
        """Restore the state, and return whether anything but random generators had changed."""
        moved = False
        for of, before in self.held:
            if _differ(_entries(of), before):
                moved = True
                _refill(of, before)
        self.restore_generators()
        return put_back(self.kept) or moved

    def restore_generators(self) -> None:
        """Restore the random generators alone."""
        for generator in self.generators:
            generator.restore()


def _state_of(*values: Any) -> State:
    """The present state of what the values hold, without parameters."""
    opened, containers = dict[int, Any](), dict[int, Any]()
    of_level: Iterable[Any] = values
    for level in range(LEVELS):
        inner: list[Any] = []
        for of, entries in _opened(of_level, opened, ours=level == 0):
            if id(of) not in containers:
                containers[id(of)] = of
                inner += entries if len(entries) <= MANY else ()
        of_level = inner
    modules = [(x, _members(x)) for x in opened.values() if isinstance(x, nn.Module)]
    held = [(of, _entries(of)) for of in _with_variables(containers.values())]
    of_modules = {id(x) for module, _ in modules for of in (vars(module), module._buffers) for x in of.values()}
    flat = (x for _, entries in held if len(entries) <= MANY for x in _flat(entries))
    found = {id(x): x for x in flat if not isinstance(x, _WHOLE)}.values()  # many functions name the same globals
    tensors = [x for x in map(_as_tensor, found) if x is not None and not isinstance(x, nn.Parameter)]
    buffers = dict.fromkeys(x for x in tensors if id(x) in of_modules or _nbytes(x) <= LARGEST)
    return State(held, _copies(buffers), [OwnGenerator(x) for x in found if OwnGenerator.is_of(x)], modules)


def _members(module: nn.Module) -> list[Any]:
    of = module._parameters, module._buffers, module._modules
    return [module.training, *(x for members in of for x in members.values())]


def _differ(now: Sequence[Any], before: Sequence[Any]) -> bool:
    """Whether these are other objects."""
    return len(now) != len(before) or any(map(operator.is_not, now, before))


def _added(now: Sequence[Any], before: Sequence[Any]) -> list[Any]:
    """The objects that were not there before."""
    if not _differ(now, before):
        return []
    known = set(map(id, before))
    return [x for x in now if id(x) not in known]


def _copies(tensors: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return [(x, x.detach().clone()) for x in tensors if not x.is_inference()]


def marks(parameters: Iterable[nn.Parameter]) -> Marks:
    """Return marks of parameters: version, address, and the sum of some bytes, as writes to `.data` have no version.

    Args:
        parameters: on any devices.
    """
    parameters = list(parameters)
    versions = dict(zip(parameters, versions_of(parameters), strict=True))
    has_memory = active_fake_mode() is None
    plain = [p for p in versions if has_memory and type(p) is nn.Parameter and not p.is_meta]  # no shard
    sums = [_some_bytes(p) for p in plain]
    numbers = torch.stack([x.to(sums[0].device) for x in sums]).tolist() if sums else []  # a GPU is waited for once
    read = {p: (p.data_ptr(), number) for p, number in zip(plain, numbers, strict=True)}
    return {p: (version, *read.get(p, ())) for p, version in versions.items()}


def _some_bytes(p: Tensor) -> Tensor:
    """The sum of about `BYTES` bytes of a tensor, evenly spaced."""
    memory = torch.empty(0, dtype=torch.uint8, device=p.device).set_(p.detach().untyped_storage())
    every = len(memory) // BYTES | 1  # odd, for all bytes of a number
    return memory[::every].sum()


def _opened(values: Iterable[Any], opened: dict[int, Any], *, ours: bool) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Yield the containers of each value, and the entries to open next.

    Args:
        opened: modules, classes, functions and objects that were opened, by identity; updated. A hook may be a method
            of a module that holds it.
        ours: open objects of this library, too.
    """
    for value in values:
        if isinstance(value, _WHOLE) or id(value) in opened:
            continue
        if isinstance(value, nn.Module):
            new = {id(module): module for module in value.modules() if id(module) not in opened}
            opened.update(new)
            for module in new.values():
                attributes = vars(module)
                yield module._buffers, ()
                yield attributes, [x for name, x in attributes.items() if name not in _OF_EVERY_MODULE]
                yield from ((attributes[name], ()) for name in _HOOKS)
                yield from ((vars(p), ()) for p in module._parameters.values() if p is not None)
                hooks = [each for name, x in attributes.items() if name in _HOOKS for each in x.values()]
                yield from _opened(hooks, opened, ours=False)
            kinds = dict.fromkeys(kind for module in new.values() for kind in type(module).__mro__)
            yield from _opened(kinds, opened, ours=False)
        elif isinstance(value, tuple):
            yield from _opened(value, opened, ours=ours)
        elif isinstance(value, MethodType):
            yield from _opened((value.__func__, value.__self__), opened, ours=ours)
        elif isinstance(value, functools.partial):
            yield from _opened((value.func, value.args, value.keywords), opened, ours=ours)
        elif isinstance(value, WRAPPERS):
            yield from _opened((function_of(value),), opened, ours=ours)
        elif is_foreign(value) and not ours:
            continue
        elif isinstance(value, type):
            opened[id(value)] = value
            inner = [*vars(value).values()]
            yield value, inner
            functions = [x for x in inner if isinstance(x, (FunctionType, *WRAPPERS))]
            yield from _opened(functions, opened, ours=ours)
        elif isinstance(value, FunctionType):
            opened[id(value)] = value
            cells = [entry for cell in value.__closure__ or () for entry in _entries(cell)]
            inner = [value.__globals__.get(name) for name in _globals(value.__code__)]
            yield value, [*inner, *cells, *(value.__defaults__ or ())]
            yield from ((of, _entries(of)) for of in (vars(value), value.__kwdefaults__) if of is not None)
        else:
            opened[id(value)] = value
            of = value if isinstance(value, _CONTAINERS) else getattr(value, "__dict__", None)
            if isinstance(of, _CONTAINERS):
                yield of, _entries(of)
            if has_slots(value):
                yield value, _entries(value)
            if not isinstance(value, _CONTAINERS):
                yield from _opened(type(value).__mro__, opened, ours=False)


def is_foreign(value: Any) -> bool:
    """Whether it is of this library, code of torch's or Python's, or an object of Python's threads."""
    is_code = isinstance(value, (FunctionType, type, ModuleType))
    home = value.__name__ if isinstance(value, ModuleType) else (value if is_code else type(value)).__module__
    package = str(home).partition(".")[0]
    is_fixed = isinstance(value, type) and not value.__flags__ & _WRITABLE
    return is_fixed or package in ("clipping", "dpbench", *_OF_THREADS) or (is_code and package in _LIBRARIES)


def function_of(value: Any) -> Any:
    """The function that a value of a class holds, or is."""
    return value.fget if isinstance(value, property) else getattr(value, "__func__", value)


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    """Yield each value, and those in tuples."""
    for value in values:
        if isinstance(value, tuple):
            yield from _flat(value)
        else:
            yield value


def _as_tensor(value: Any) -> Tensor | None:
    """Return a tensor itself, or one in the memory of an array of numpy's that can be written to; None for others."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray) and value.flags.writeable:
        with suppress(TypeError, ValueError):  # an array of objects, or of negative strides
            return torch.from_numpy(value)
    return value if isinstance(value, Tensor) else None


def _nbytes(x: Tensor) -> int:
    return x.nbytes if x.layout == torch.strided else 0  # a sparse tensor does not say


def _with_variables(containers: Iterable[Any]) -> Iterator[Any]:
    """Yield containers, and in place of functions what they read from outside, each once: globals and cells."""
    globals_, cells = dict[int, Globals](), dict[int, CellType]()
    for of in containers:
        if isinstance(of, FunctionType):
            outside = of.__globals__
            globals_.setdefault(id(outside), Globals(outside, set())).names.update(_globals(of.__code__))
            cells.update((id(cell), cell) for cell in of.__closure__ or ())
        else:
            yield of
    yield from globals_.values()
    yield from cells.values()


def _entries(of: Any) -> list[Any]:
    of = of if isinstance(of, _CONTAINERS) else _named(of)
    return [*of, *of.values()] if isinstance(of, dict) else [*of]


def _named(of: Any) -> dict[str, Any]:
    """The class's attributes, the globals or the cell that have a value, or the object's slots."""
    if isinstance(of, type):
        return dict(vars(of))
    if isinstance(of, Globals):
        return {name: of.outside[name] for name in of.names if name in of.outside}
    if isinstance(of, CellType):
        return {"cell_contents": of.cell_contents} if hasattr(of, "cell_contents") else {}
    return slots(of)


def has_slots(value: Any) -> bool:
    """Whether a class of the value declares slots."""
    return any("__slots__" in vars(kind) for kind in type(value).__mro__)


def slots(value: Any) -> dict[str, Any]:
    """The attributes of an object that lie in slots."""
    if not has_slots(value):
        return {}
    state = object.__getstate__(value)
    found: dict[str, Any] = state[1] if isinstance(state, tuple) else {}
    return found


@functools.lru_cache(10_000)
def _globals(code: CodeType) -> tuple[str, ...]:
    """Names of the globals that code and the functions within it read or write; its other names are of attributes."""
    mine = [x.argval for x in dis.get_instructions(code) if x.opname.endswith("_GLOBAL")]
    inner = [name for x in code.co_consts if isinstance(x, CodeType) for name in _globals(x)]
    return tuple(dict.fromkeys([*mine, *inner]))


def _refill(of: Any, entries: Sequence[Any]) -> None:
    """Restore the entries of a container."""
    pairs = zip(entries[: len(entries) // 2], entries[len(entries) // 2 :], strict=False)
    if isinstance(of, Globals):
        before = dict(pairs)
        for name in of.names - before.keys():
            of.outside.pop(name, None)
        of.outside.update(before)
    elif isinstance(of, dict):
        of.clear()
        for name, value in pairs:
            of[name] = value
    elif isinstance(of, (list, deque, set)):
        of.clear()
        (of.update if isinstance(of, set) else of.extend)(entries)
    else:
        before, now = dict(pairs), _named(of)
        for name in now.keys() - before.keys():
            delattr(of, name)
        for name in [name for name, value in before.items() if now.get(name) is not value]:
            setattr(of, name, before[name])


def put_back(kept: Iterable[tuple[Tensor, Tensor]]) -> bool:
    """Restore the values of tensors that were written to, and return whether any was."""
    written = [(x, copy) for x, copy in kept if not same_values(x, copy)]
    with torch.no_grad():
        for x, copy in written:
            x.copy_(copy)
    return bool(written)
