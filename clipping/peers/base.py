"""The common part of the adapters of other libraries.

A library puts hooks, methods and `inplace` flags on modules, and norms, gradients and counters on parameters. An
adapter adds these before each call and removes them after it. So the model is unchanged between calls, several backends
may share it, and no state of a step reaches the next.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from clipping.backends.base import NAMED, Backend
from clipping.core.dtypes import norm_dtype
from clipping.core.reference import with_zeros
from clipping.core.types import ClippedGradient, Parameters, Problem, UnsupportedModel

NOISE = "Full backward hook is firing|Using a non-full backward hook|In CPU autocast"
"""Warnings about the libraries' internals, which a user cannot act on."""


class Step(NamedTuple):
    """The result of a library: gradients of the parameters that the loss depends on, norms [B], losses [B]."""

    grads: dict[str, Tensor]
    norms: Tensor
    losses: Tensor


class Peer(Backend):
    """A backend that wraps another library; only the clipping function may be ours."""

    refuses_no_numbers = False
    library: ClassVar[str]
    package: ClassVar[str]
    install: ClassVar[str]
    """How to make `package` importable, in a few words."""
    in_place: ClassVar[bool] = True
    """Supports modules that work in place; else their `inplace` flags are off during a call."""
    captured: ClassVar[tuple[str, ...]] = ("activations", "max_batch_len")
    """Attributes that it sets on a module in the forward pass, and keeps if no backward pass follows."""

    _engine: Any = None
    _engine_for: tuple[str, ...] | None = None
    _mounts: tuple[_Mount, ...] = ()

    @classmethod
    def unavailable(cls) -> str | None:
        try:
            spec = importlib.util.find_spec(cls.package)
        except ModuleNotFoundError:  # of the package around it
            spec = None
        if spec is None or spec.origin is None:  # a plain folder of that name has no origin
            return f"the package {cls.package} is not importable; {cls.install}"
        try:
            with quiet():
                importlib.import_module(cls.package)
        except Exception as error:
            return f"the package {cls.package} fails when imported: {type(error).__name__}: {error}"
        return None

    def problems(self) -> Iterable[Problem]:
        if (reason := self.unavailable()) is not None:
            what, _, remedy = reason.partition("; ")
            yield Problem(self.package, what, remedy or "mend its installation")
        yield from super().problems()

    @abstractmethod
    def _attach(self, parameters: Parameters) -> Any:
        """Pass the model to the library; returns the engine, kept while the same parameters are trained."""

    @abstractmethod
    def _step(self, parameters: Parameters, inputs: Any, targets: Any, batch_size: int) -> Step:
        """Run one step of `self._engine`; every `.grad` is None before it."""

    def _route(self, module: nn.Module, name: str) -> str:
        """How the norm of the module's own parameter `name` was found: "ghost", "instantiated" or "fallback"."""
        return "instantiated"

    def _clipped(self, parameters: Parameters, inputs: Any, targets: Any, batch_size: int) -> ClippedGradient:
        if not parameters:  # nothing for the library to train
            losses = self.losses(inputs, targets, batch_size).detach()
            return ClippedGradient({}, losses.new_zeros(batch_size, dtype=norm_dtype(losses.dtype)), losses)
        try:
            if self._engine_for != tuple(parameters):
                self._open(parameters)
            with self._mounted(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=NOISE)
                grads, norms, losses = self._step(parameters, inputs, targets, batch_size)
                self.coverage = self.coverage or self._shares(parameters)
        except Exception as error:
            blamed = self.blamed(error, f"{self.library} fails on it", inputs, targets)
            if blamed is error:
                raise
            raise blamed from error
        return ClippedGradient(with_zeros(grads, parameters), norms, losses)

    def _open(self, parameters: Parameters) -> None:
        self._engine = self._engine_for = None
        self._mounts, self.coverage = (), {}
        before = [_Before.of(x) for x in (*self.model.modules(), *self.model.parameters())]
        try:
            for module in self.model.modules():
                if not self.in_place and getattr(module, "inplace", False) is True:
                    module.inplace = False  # type: ignore[assignment]
            with quiet():
                self._engine = self._attach(parameters)
        finally:
            self._mounts = tuple(mount for one in before if (mount := one.restore()) is not None)
        self._engine_for = tuple(parameters)

    @contextlib.contextmanager
    def _mounted(self) -> Iterator[None]:
        """Mount the library's hooks and attributes, with every `.grad` None; restore the model afterwards."""
        before = [(p, p.grad, dict(vars(p))) for _, p in self._named]
        saved = [mount.put() for mount in self._mounts]
        for p, _, _ in before:
            p.grad = None
        try:
            yield
        finally:
            for mount, attributes in zip(self._mounts, saved, strict=True):
                mount.take(attributes)
            for module in self.model.modules():
                for name in self.captured:
                    vars(module).pop(name, None)
            for p, grad, attributes in before:
                p.grad = grad
                vars(p).clear()
                vars(p).update(attributes)

    def _owed(self, names: Iterable[str], what: str) -> None:
        """Refuse parameters for which the library left no result.

        Raises:
            UnsupportedModel: with the first few of their names.
        """
        names = list(names)
        if names:
            several = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
            remedy = "freeze, or use microbatch, vmap or a tape backend"
            raise UnsupportedModel(self.name, [Problem(several, f"{self.library} left no {what}", remedy)])

    def _shares(self, parameters: Parameters) -> dict[str, float]:
        shares = dict.fromkeys(("ghost", "instantiated", "fallback"), 0.0)
        sizes = {id(p): p.numel() for p in parameters.values()}
        total = sum(sizes.values())
        for module in self.model.modules():
            for name, p in module.named_parameters(recurse=False):
                shares[self._route(module, name)] += sizes.pop(id(p), 0) / total
        return shares

    def close(self) -> None:
        self._engine = self._engine_for = None
        self._mounts = ()
        super().close()


@dataclass
class _Mount:
    """The attributes and hooks that a library put on one module or parameter."""

    on: Any
    attributes: dict[str, Any]
    hooks: dict[str, dict[int, Any]]

    def put(self) -> dict[str, Any]:
        """Mount them; returns the attributes that they hide."""
        hidden = {name: value for name, value in vars(self.on).items() if name in self.attributes}
        vars(self.on).update(self.attributes)
        for table, hooks in self.hooks.items():
            vars(self.on)[table].update(hooks)
        return hidden

    def take(self, hidden: dict[str, Any]) -> None:
        """Remove them, and restore the hidden attributes."""
        for name in self.attributes:
            vars(self.on).pop(name, None)
        vars(self.on).update(hidden)
        for table, hooks in self.hooks.items():
            for key in hooks:
                vars(self.on)[table].pop(key, None)


@dataclass
class _Before:
    """The state of one module or parameter before the library changed it."""

    on: Any
    attributes: dict[str, Any]
    tables: dict[str, set[int]]

    @classmethod
    def of(cls, on: Any) -> _Before:
        tables = {name: set(t) for name, t in vars(on).items() if "_hooks" in name and isinstance(t, dict)}
        return cls(on, dict(vars(on)), tables)

    def restore(self) -> _Mount | None:
        """Restore the state, and return what the library added."""
        now = vars(self.on)
        new = {name: v for name, v in now.items() if name not in self.attributes or self.attributes[name] is not v}
        hooks = {t: {k: h for k, h in now[t].items() if k not in keys} for t, keys in self.tables.items()}
        mount = _Mount(self.on, new, {table: added for table, added in hooks.items() if added})
        mount.take({name: self.attributes[name] for name in new if name in self.attributes})
        return mount if mount.attributes or mount.hooks else None


def norms_of(samples: Iterable[Tensor], like: Tensor) -> Tensor:
    """[B] norms over all parameters together from each one's [B], in float32 or wider.

    Args:
        samples: norms of each parameter's gradients, [B] each.
        like: any tensor of the gradients' dtype.
    """
    return torch.linalg.vector_norm(torch.stack([n.to(norm_dtype(like.dtype)) for n in samples]), dim=0)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Discard standard output, which is for results; the libraries print greetings."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
