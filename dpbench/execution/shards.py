"""The files of one run: one for each node that its trials ran on. They merge by lying side by side."""

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
    """The files of a run: one for each node, and device of it, that its trials ran on.

    Args:
        folder: of the records.
        say: takes a line for the person.
        here: gives the environment of this machine; asked for once a trial has run here.
        appeared: takes the environment of a node that trials have run on, when its first record comes.
        tolerant: a disk that is full costs that record, and no other; else it ends the run.
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
        """Where the trial of this answer is recorded; this machine's own without one.

        Args:
            answer: from some machine, or None.
        """
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

        Args:
            record: a trial's line.
            answer: that it was made of.

        Raises:
            RunEnded: it cannot be written, and that is not tolerated; or somebody has removed what was written before.
        """
        shard = self.of(answer)
        try:
            shard.store.append(record)
        except OSError as error:
            if not self._tolerant:
                raise RunEnded(f"a record cannot be written: {error}; {shard.store.save_again()}") from error
            self.unrecorded += 1
            shard.store.close()  # a torn last line is passed over by the reader; what comes after goes to a new file
            shard.store = Store(self._folder, shard.environment, host=shard.environment["host"])
            why = f"{error.strerror} ({self._folder})"
            if why not in self._complained:
                self._complained.add(why)
                host = shard.environment["host"]
                self._say(
                    f"dpbench: a record of node {host} cannot be written: {why}; its trial is left for the next run"
                )

    def paths(self) -> list[Path]:
        """The files that there are."""
        return [shard.store.path for shard in self._shards.values() if shard.store.path.exists()]

    def end(self) -> None:
        """The run is over: every file is there.

        Raises:
            RunEnded: one is not.
        """
        for shard in self._shards.values():
            shard.watch.end()
            shard.store.require_there()

    def close(self) -> None:
        """Close them all."""
        for shard in self._shards.values():
            shard.store.close()
