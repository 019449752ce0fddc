"""Other machines: which of their records count here.

A fingerprint holds the machine that measured and the folder of results, which has a random name (`folder_name`); only
records with both count. Whoever clones a folder of results therefore measures again, even on a machine of the same
name, and never mistakes committed records for new ones. A machine named by DPBENCH_HOST counts as one with all machines
of that name, in any folder: each continues what another has recorded.

A sweep over a cluster is one measurement on many machines. There a record counts if a machine of the same sweep wrote
it (driven from here, or of the same cluster), with today's sources and the same library versions.
"""

import contextlib
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from dpbench.records.environment import device_name, libraries_of, seal, sources_of, version_of
from dpbench.records.host import VARIABLE, host_name, named_host
from dpbench.records.store import Run, content_of, make_folder, sync_folder, write_file
from dpbench.trials import Trial

Versions = Mapping[str, str | None]


@dataclass(frozen=True)
class Machine:
    """A machine as a fingerprint identifies it.

    `versions` are those of its libraries; missing ones are this machine's. `folder` is the name of the folder of
    results that it measured for; None in a sweep.
    """

    host: str
    device_name: str
    versions: tuple[tuple[str, str | None], ...] = ()
    folder: str | None = None

    @classmethod
    def of(cls, where: Mapping[str, Any]) -> Self:
        """The machine of a run's environment."""
        return cls(where["host"], where["device_name"], tuple(sorted((where.get("libraries") or {}).items())))

    def fingerprint(self, trial: Trial) -> str:
        """16 hex digits that identify a measurement of this trial, as on this machine.

        Covers the sources that it measures, the model's own file if any, the device, the machine (two may have the same
        CPU's name), the folder, and the versions of the libraries that it uses.
        """
        known = dict(self.versions)
        versions = {name: known[name] if name in known else version_of(name) for name in libraries_of(trial)}
        place = [self.host] if self.folder is None else [self.host, self.folder]
        return seal(sources_of(trial), versions, self.device_name, *place)


#: The file in a folder of results with the folder's random name. git ignores it, so that no clone has the name.
_FOLDER = ".folder"


def folder_name(results: Path) -> str:
    """The name of a folder of results; "" without one, so that no records count. DPBENCH_HOST takes its place."""
    named = named_host()
    if named is not None:
        return f"{VARIABLE}={named}"
    try:
        return content_of(results / _FOLDER).decode("ascii", errors="replace").strip()
    except FileNotFoundError:
        return ""


def name_folder(results: Path, name: str = "") -> None:
    """Name a folder of results, unless it has a name.

    Args:
        name: "" for a random one.

    Raises:
        OSError: the folder cannot be written to.
    """
    if folder_name(results):
        return
    make_folder(results)
    path, aside = results / _FOLDER, results / f"{_FOLDER}-{os.getpid()}"
    try:
        write_file(aside, f"{name or secrets.token_hex(8)}\n".encode())
        try:
            os.link(aside, path)  # if two runs begin at once, one of them names the folder
        except OSError as error:
            # no links on this file system, or an empty file after a power loss
            if not isinstance(error, FileExistsError) or not folder_name(results):
                os.replace(aside, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside)
    sync_folder(results)  # without its name, none of its records would count


class Machines:
    """The machines whose records count in a run on `device`."""

    def __init__(self, device: str, machines: Iterable[Machine] = (), folder: str | None = None) -> None:
        self._here = Machine(host_name(), device_name(device), folder=folder)
        self._machines = dict.fromkeys([self._here, *machines])
        self._known: dict[Trial, dict[str, str]] = {}

    def add(self, where: Mapping[str, Any]) -> None:
        """Count the records of another machine, too."""
        machine = Machine.of(where)
        if machine not in self._machines:
            self._machines[machine] = None
            self._known.clear()

    def others(self) -> list[str]:
        """The hosts of the other machines."""
        return sorted({machine.host for machine in self._machines} - {self._here.host})

    def fingerprint(self, trial: Trial) -> str:
        """The fingerprint on this machine."""
        return next(iter(self.accepted(trial)))

    def accepted(self, trial: Trial) -> Mapping[str, str]:
        """Every fingerprint of the trial that counts -> the name of the device."""
        known = self._known.get(trial)
        if known is None:
            known = {machine.fingerprint(trial): machine.device_name for machine in self._machines}
            self._known[trial] = known
        return known


def begin_sweep(name: str, cluster: str, trials: Iterable[Trial]) -> dict[str, Any]:
    """What the runs of a sweep that this machine drives share, as recorded in their environments (`executor`).

    Args:
        cluster: its kind and address, in words.
    """
    return {"name": name, "cluster": cluster, "driver": host_name(), "versions": _versions(trials)}


def machines_of(
    runs: Iterable[Run],
    device: str,
    trials: Iterable[Trial],
    sweep: Mapping[str, Any] | None = None,
    folder: str | None = None,
) -> Machines:
    """The machines whose records count: this one, and those of sweeps driven from here, or of `sweep`.

    Args:
        runs: of the results folder.
        folder: the name of the results folder, or None; its own records count in a sweep, too.
    """
    found = []
    if sweep is not None and folder:
        found.append(Machine(host_name(), device_name(device), folder=folder))
    versions: Versions | None = None
    for run in runs:
        where, theirs = run.environment, run.environment.get("executor")
        if not theirs or where.get("device") != device:
            continue
        ours = theirs["driver"] == host_name() or (sweep is not None and theirs["cluster"] == sweep["cluster"])
        versions = _versions(trials) if versions is None else versions
        today = sweep["versions"] if sweep is not None else versions
        if ours and all(theirs["versions"].get(name, version) == version for name, version in today.items()):
            found.append(Machine.of(where))
    return Machines(device, found, folder if sweep is None else None)


def _versions(trials: Iterable[Trial]) -> dict[str, str | None]:
    return {name: version_of(name) for name in sorted(set().union(*map(libraries_of, trials)) | {"torch"})}


def version_hash(trial: Trial, versions: Versions) -> str:
    """A hash of the trial's sources and libraries, equal on every machine that has them."""
    return seal(sources_of(trial), {name: versions.get(name, version_of(name)) for name in libraries_of(trial)})
