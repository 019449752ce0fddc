"""What TorchDynamo does not guard in the objects that captured code has opened."""

import abc
import builtins
import operator
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any

from torch import Tensor, nn

from clipping.checks.moving import MANY, WRAPPERS, function_of, has_slots, is_foreign, slots

_CODE = {FunctionType, *WRAPPERS}
"""Types of values in a class that are functions or hold them."""


class Unguarded:
    """What TorchDynamo does not guard in objects that captured code has opened.

    It guards the values that code has read, but not always the functions of a class, that a name was absent
    (`try: self.cache`), the order of an `OrderedDict`, or what all code reads: attributes of a metaclass, builtins, the
    recursion limit, and classes registered with an ABC.

    Args:
        opened: any values. Those of libraries do not count.
    """

    def __init__(self, opened: Iterable[Any]) -> None:
        mine = {id(x): x for value in opened for x in (value, *_classes(value)) if not _is_of_library(x)}.values()
        self._with_names = [of for x in mine for of in _with_names(x)]
        self._classes = [x for x in mine if isinstance(x, type)]
        self._names, self._functions, self._changes = self._names_now(), self._functions_now(), Counter[int]()

    def functions_have_changed(self) -> bool:
        """Whether a class has other functions (`forward`), one of them other code, or a metaclass other attributes."""
        now = self._functions_now()
        return len(now) != len(self._functions) or any(map(operator.is_not, now, self._functions))

    def names_have_changed(self) -> bool:
        """Whether names (in modules and classes their number) or what all code reads differ from the last call.

        If a container's always do, calls 1, 2, 4, ... count.
        """
        before, self._names = self._names, self._names_now()
        changed = [i for i, (x, y) in enumerate(zip(before, self._names, strict=True)) if x != y]
        self._changes.update(changed)
        return any(self._changes[i].bit_count() == 1 for i in changed)

    def _names_now(self) -> list[Any]:
        every = [x if isinstance(x, (dict, MappingProxyType)) else slots(x) for x in self._with_names]
        names = [tuple(x) if isinstance(x, dict) and len(x) <= MANY else len(x) for x in every]
        self._builtins = list(vars(builtins).values())  # alive, so that no other value has their ids
        return [*names, tuple(map(id, self._builtins)), sys.getrecursionlimit(), abc.get_cache_token()]

    def _functions_now(self) -> list[object]:
        found = [x for kind in self._classes for x in vars(kind).values() if type(x) in _CODE or issubclass(kind, type)]
        return [*found, *(getattr(function_of(x), "__code__", None) for x in found)]


def _with_names(value: Any) -> Iterator[Any]:
    """Yield the dict, or the object with slots, that holds the value's names; a view for those of modules and classes.

    Dynamo guards the names of tensors.
    """
    if isinstance(value, Tensor):
        return
    attributes = getattr(value, "__dict__", None)
    if isinstance(value, dict):
        yield value
    if isinstance(attributes, dict):
        yield MappingProxyType(attributes) if isinstance(value, ModuleType) else attributes
    elif isinstance(attributes, MappingProxyType):
        yield attributes
    if has_slots(value):
        yield value


def _classes(value: Any) -> tuple[type, ...]:
    """The classes of a value, or a class with its bases and the classes of it."""
    return (*type(value).__mro__, *(value.__mro__ if isinstance(value, type) else ()))


def _is_of_library(value: Any) -> bool:
    """Whether it is foreign, and neither a module nor a class of modules other than `nn.Module`."""
    kind = value if isinstance(value, type) else type(value)
    return value is nn.Module if issubclass(kind, nn.Module) else is_foreign(value)
