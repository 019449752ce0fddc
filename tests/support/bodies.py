"""Trials that misbehave in every possible way, for tests of the code that runs them. Loaded by its path."""

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from dpbench.trials import Trial
from dpbench.trials.outcome import Mismatch, OverBudget

#: Seconds, longer than any test waits: the test ends a trial that sleeps this long.
FOREVER = 3600.0


@dataclass(frozen=True, kw_only=True)
class Act(Trial):
    """Run the function of `ACTIONS` named `action`, or raise that of `ERRORS`."""

    kind: ClassVar[str] = "act"
    body: ClassVar[str] = f"{__name__}:act"
    action: str
    seconds: float = 0.0
    number: int = 0
    folder: str = ""
    timeout: float = FOREVER


@dataclass(frozen=True, kw_only=True)
class Beside(Act):
    """The same, as a trial that may run beside others."""

    kind: ClassVar[str] = "beside"

    @property
    def alone(self) -> bool:
        return False


@dataclass(frozen=True, kw_only=True)
class WithTorch(Act):
    """A trial that uses torch: the environment of its run names torch's version."""

    kind: ClassVar[str] = "with_torch"
    action: str = "sleep"

    def modules(self) -> tuple[str, ...]:
        return ("torch", "torchvision", "scipy.linalg", "dpbench.measure.step")


def act(trial: Act) -> Any:
    if trial.action in ERRORS:
        raise ERRORS[trial.action]()
    return ACTIONS[trial.action](trial)


@contextlib.contextmanager
def _traced(trial: Act) -> Iterator[None]:
    """Append to the files "begun" and "ended" of the folder, if there is one."""
    if trial.folder:
        with (Path(trial.folder) / "begun").open("a") as file:
            file.write(f"{trial.number} {os.getpid()}\n")
    yield
    if trial.folder:
        with (Path(trial.folder) / "ended").open("a") as file:
            file.write(f"{trial.number}\n")


def _sleep(trial: Act) -> dict[str, Any]:
    with _traced(trial):
        time.sleep(trial.seconds)
    return {"number": trial.number}


def _wait(trial: Act) -> dict[str, Any]:
    """Wait until a file lets this trial, or all, go on."""
    with _traced(trial):
        while not any((Path(trial.folder) / name).exists() for name in ("go", f"go {trial.number}")):
            time.sleep(0.01)
    return {"number": trial.number}


def _spin(trial: Act) -> dict[str, Any]:
    """Use that many seconds of processor time."""
    until = time.process_time() + trial.seconds
    while time.process_time() < until:
        pass
    return {}


def _where(trial: Act) -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "session": os.getsid(0),
        "threads_of_parent": len(os.listdir(f"/proc/{os.getppid()}/task")),
        "torch": "torch" in sys.modules,
        "oom_score_adj": int(Path("/proc/self/oom_score_adj").read_text()),
    }


def _segfault(trial: Act) -> dict[str, Any]:
    print("last words", file=sys.stderr)
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


def _leave(trial: Act) -> dict[str, Any]:
    os._exit(3)


def _no_text(trial: Act) -> dict[str, Any]:
    """Raise an error with half a surrogate pair, which cannot be encoded, and print another half."""
    print(os.fsdecode(b"\xff"), file=sys.stderr)
    raise ValueError("half \ud83d of a face, and \udcff of a path")


def _once(trial: Act) -> dict[str, Any]:
    """Fail the first time only."""
    failed = Path(trial.folder) / "failed"
    if failed.exists():
        return {}
    failed.touch()
    raise KeyError("no such thing")


def _twins(trial: Act) -> dict[str, Any]:
    """Return files with names that become equal when cleaned, and one with a name like a record file's."""
    content = {"a b": b"1", "A-B": b"2", "../a b": b"3", "x.jsonl": b"4"}
    return {"files": {name: base64.b64encode(data).decode() for name, data in content.items()}}


def _forge(trial: Act) -> dict[str, Any]:
    """Write a forged answer to every descriptor, with a result that no reader of records accepts."""
    for descriptor in range(3, 300):
        with contextlib.suppress(OSError):
            os.write(descriptor, b'{"outcome": "ok", "evidence": null, "result": {"files": 7}}')
    os._exit(0)


def _scribble(trial: Act) -> dict[str, Any]:
    """Write to every descriptor."""
    for descriptor in range(3, 300):
        with contextlib.suppress(OSError):
            os.write(descriptor, b'{"key": 1, "outcome": "fine"}\n')
    return {"number": trial.number}


def _stop(trial: Act) -> dict[str, Any]:
    """Stop the process that forked this one, as Ctrl-Z would."""
    os.kill(os.getppid(), signal.SIGSTOP)
    return {"number": trial.number}


def _offspring(trial: Act) -> dict[str, Any]:
    """Start three descendants: in this process group, in a new group, and orphaned in a new session."""
    code = f"import os, sys, time; print(os.getpid(), flush=True); time.sleep({FOREVER})"
    orphan = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {code!r}], start_new_session=True)"
    with (Path(trial.folder) / "pids").open("a") as file:
        print(os.getpid(), file=file, flush=True)
        subprocess.Popen([sys.executable, "-c", code], stdout=file)
        subprocess.Popen([sys.executable, "-c", code], stdout=file, process_group=0)
        subprocess.run([sys.executable, "-c", orphan], stdout=file, check=True)
    while len((Path(trial.folder) / "pids").read_text().split()) < 4:
        time.sleep(0.01)
    time.sleep(trial.seconds)
    return {}


ERRORS: dict[str, Callable[[], Exception]] = {
    "raise": lambda: KeyError("no such thing"),
    "oom": lambda: MemoryError("no memory for 5 GiB"),
    "over_budget": lambda: OverBudget({"peak": 7}, "needs 7 bytes of 5"),
    "mismatch": lambda: Mismatch({"error": 0.5}, "norms differ by 0.5"),
    "long": lambda: ValueError("x" * 10_000_000 + "\x1b[2J the end\r"),
}
ACTIONS: dict[str, Callable[[Act], Any]] = {
    "sleep": _sleep,
    "wait": _wait,
    "spin": _spin,
    "where": _where,
    "cpus": lambda trial: {"cpus": sorted(os.sched_getaffinity(0))},
    "segfault": _segfault,
    "leave": _leave,
    "unrecordable": lambda trial: {"object": object()},
    "nothing": lambda trial: None,
    "a list": lambda trial: [1, 2],
    "deep": lambda trial: {"deep": json.loads("[" * 100 + "]" * 100)},
    "big": lambda trial: {"text": "x" * 3_000_000},
    "huge": lambda trial: {"text": "x" * 64_000_000},
    "no text": _no_text,
    "halves": lambda trial: {"half \ud83d": ["\udcff"]},
    "once": _once,
    "files": lambda trial: {"files": [7, "x", {"a": 5}, {"a": "no base64"}, {"a": "\u20ac"}][trial.number]},
    "twins": _twins,
    "forge": _forge,
    "scribble": _scribble,
    "stop": _stop,
    "infinite": lambda trial: {"epsilon": float("inf")},
    "offspring": _offspring,
}
