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
        tolerant: a full disk loses only the record; else it ends the run.
    """

    folder: Path
    say: Callable[[str], None]
    here: Callable[[], Mapping[str, Any]]
    appeared: Callable[[Mapping[str, Any]], None] = lambda _: None
    tolerant: bool = False
    unrecorded: int = field(default=0, init=False)
    _shards: dict[str | None, _Shard] = field(default_factory=dict, init=False)
    _complained: set[str] = field(default_factory=set, init=False)

    def of(self, answer: Answer | None = None) -> _Shard:
        """The file for this answer's trial; without an answer, this machine's."""
        place = answer.place if answer is not None else None
        name = None if place is None else place.name
        if name not in self._shards:
            where = self.here() if place is None else place.environment
            self.appeared(where)
            store = Store(self.folder, where, host=where["host"])
            watch = Watch(where, lambda warning: self.say(f"dpbench: {warning}"))
            self._shards[name] = _Shard(store, watch, where)
        return self._shards[name]

    def append(self, record: Mapping[str, Any], answer: Answer) -> None:
        """Record an answer.

        Raises:
            RunEnded: the record cannot be written (unless tolerant), or earlier records were removed.
        """
        shard = self.of(answer)
        try:
            shard.store.append(record)
        except OSError as error:
            if not self.tolerant:
                raise RunEnded(f"a record cannot be written: {error}; {shard.store.save_again()}") from error
            self.unrecorded += 1
            shard.store.close()  # readers skip a torn last line; new records go to a new file
            shard.store = Store(self.folder, shard.environment, host=shard.environment["host"])
            why = f"{error.strerror} ({self.folder})"
            if why not in self._complained:
                self._complained.add(why)
                host = shard.environment["host"]
                self.say(
                    f"dpbench: a record of node {host} cannot be written: {why}; its trial is left for the next run"
                )

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
