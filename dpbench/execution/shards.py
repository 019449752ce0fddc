"""The record files of a run, one for each node; readers merge the files of a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


class Shards:
    """The files of a run: one for each node and device that its trials ran on.

    Args:
        folder: of the records.
        say: receives a line for the person.
        here: returns the environment of this machine; called once a trial has run here.
        appeared: receives the environment of a node with its first record.
        tolerant: a full disk loses only the record; else it ends the run.
    """

    def __init__(
        self,
        folder: Path,
        say: Callable[[str], None],
        here: Callable[[], Mapping[str, Any]],
        appeared: Callable[[Mapping[str, Any]], None] = lambda _: None,
        tolerant: bool = False,
    ) -> None:
        self._folder, self._say, self._here, self._appeared = folder, say, here, appeared
        self._shards: dict[str | None, _Shard] = {}
        self._tolerant = tolerant
        self.unrecorded = 0
        self._complained: set[str] = set()

    def of(self, answer: Answer | None = None) -> _Shard:
        """The file for this answer's trial; without an answer, this machine's."""
        place = answer.place if answer is not None else None
        name = None if place is None else place.name
        if name not in self._shards:
            where = self._here() if place is None else place.environment
            self._appeared(where)
            store = Store(self._folder, where, host=where["host"])
            watch = Watch(where, lambda warning: self._say(f"dpbench: {warning}"))
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
            if not self._tolerant:
                raise RunEnded(f"a record cannot be written: {error}; {shard.store.save_again()}") from error
            self.unrecorded += 1
            shard.store.close()  # readers skip a torn last line; new records go to a new file
            shard.store = Store(self._folder, shard.environment, host=shard.environment["host"])
            why = f"{error.strerror} ({self._folder})"
            if why not in self._complained:
                self._complained.add(why)
                host = shard.environment["host"]
                self._say(
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
