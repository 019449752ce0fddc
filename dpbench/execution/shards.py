"""The record files of a run, one for each node; readers merge the files of a folder."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpbench.errors import RunEnded
from dpbench.process.parent import Answer
from dpbench.records.conditions import Watch
from dpbench.records.store import Store


@dataclass
class _Shard:
    store: Store
    watch: Watch
    environment: Mapping[str, Any]

    @property
    def libraries(self) -> Mapping[str, str | None]:
        return self.environment.get("libraries") or {}


@dataclass
class Shards:
    """The files of a run: one for each node and device that its trials ran on.

    Args:
        folder: of the records.
        say: receives a line for the person.
        here: returns the environment of this machine; called once a trial has run here.
        appeared: receives the environment of a node with its first record.
    """

    folder: Path
    say: Callable[[str], None]
    here: Callable[[], Mapping[str, Any]]
    appeared: Callable[[Mapping[str, Any]], None] = lambda _: None
    _shards: dict[str | None, _Shard] = field(default_factory=dict, init=False)

    def of(self, answer: Answer | None = None) -> _Shard:
        """The file for this answer's trial; without an answer, this machine's."""
        place = answer.place if answer is not None else None
        name = None if place is None else place.name
        if name not in self._shards:
            where = self.here() if place is None else place.environment
            self.appeared(where)
            watch = Watch(where, lambda warning: self.say(f"dpbench: {warning}"))
            self._shards[name] = _Shard(Store(self.folder, where), watch, where)
        return self._shards[name]

    def append(self, record: Mapping[str, Any], answer: Answer) -> None:
        """Record an answer.

        Raises:
            RunEnded: the record cannot be written, or earlier records were removed.
        """
        store = self.of(answer).store
        try:
            store.append(record)
        except OSError as error:
            raise RunEnded(f"a record cannot be written: {error}; {store.save_again()}") from error

    def paths(self) -> list[Path]:
        """The existing files."""
        return [shard.store.path for shard in self._shards.values() if shard.store.path.exists()]

    def end(self) -> None:
        """Check at the end of the run that every file exists.

        Raises:
            RunEnded: one does not.
        """
        for shard in self._shards.values():
            shard.watch.end()
            shard.store.require_there()

    def close(self) -> None:
        """Close all files."""
        for shard in self._shards.values():
            shard.store.close()
