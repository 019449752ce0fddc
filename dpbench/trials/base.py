"""The base of every trial: a frozen dataclass with an identity, for records and other processes. No torch.

A trial is data. Its identity is the hash of its canonical JSON, so that equal declarations are one trial. `body` names
a function ``body(trial) -> dict``, which is imported and called in the trial's own process only (see
`dpbench.process.server`); the dict is the record's ``result``. `dpbench.trials.outcome` names the exceptions of a body.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Self

from dpbench.trials.reference import load_object, reference_to


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal texts.

    Raises:
        ValueError: a float that is not finite.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _as_text(value: Any) -> Any:
    """A field of a trial, with strings that every encoding supports."""
    if isinstance(value, list | tuple):
        return type(value)(map(_as_text, value))
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One measurement, in a process of its own.

    `alone`: whether a concurrent trial would change this measurement. `beside`: if so, true if the trial needs only its
    device, so that others that are not `alone` may run meanwhile. `timeout` (seconds) bounds the whole trial and is not
    part of its identity.
    """

    kind: ClassVar[str]
    body: ClassVar[str]
    sources: ClassVar[tuple[str, ...]] = ()
    alone: ClassVar[bool] = True
    beside: ClassVar[bool] = False
    timeout: float = 600.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if isinstance(value := getattr(self, field.name), list):  # as from JSON
                object.__setattr__(self, field.name, tuple(value))

    def describe(self) -> dict[str, Any]:
        """`kind` and all fields, as in a record; a path's byte that is not UTF-8 becomes its escape."""
        return {"kind": self.kind} | {f.name: _as_text(getattr(self, f.name)) for f in fields(self)}

    @cached_property
    def id(self) -> str:
        """16 hex digits: the hash of the canonical JSON of `kind` and all fields but `timeout`."""
        identity = {name: value for name, value in self.describe().items() if name != "timeout"}
        return hashlib.sha256(canonical_json(identity).encode()).hexdigest()[:16]

    def modules(self) -> tuple[str, ...]:
        """Third-party modules that the trial uses: imported before the fork, with their versions in the fingerprint."""
        return ()

    def label(self) -> str:
        """A few words for people: what is measured."""
        shown = ("model", "backend", "accountant", "batch_size")
        words = [str(getattr(self, name)) for name in shown if hasattr(self, name)]
        return " ".join([self.kind, *words])

    def to_wire(self) -> dict[str, Any]:
        """The message for the trial's process: the reference of the class, and its fields."""
        return {"class": reference_to(type(self)), "fields": {f.name: getattr(self, f.name) for f in fields(self)}}

    @staticmethod
    def from_wire(message: Mapping[str, Any]) -> Trial:
        """The inverse of `to_wire`.

        Args:
            message: from `to_wire`.
        """
        trial = load_object(message["class"])(**message["fields"])
        assert isinstance(trial, Trial)
        return trial

    def replace(self, **changes: Any) -> Self:
        """The same trial with some fields changed (as `dataclasses.replace`, without the cached id)."""
        return type(self)(**{f.name: getattr(self, f.name) for f in fields(self)} | changes)
