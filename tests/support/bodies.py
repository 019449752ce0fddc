"""Trials that misbehave in every possible way, for tests of the code that runs them. Loaded by its path."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from dpbench.trials import Trial
from dpbench.trials.outcome import Mismatch, OverBudget

#: Seconds, longer than any test waits: the test ends a trial that sleeps this long.
FOREVER = 3600.0


@dataclass(frozen=True, kw_only=True)
class Act(Trial):
    """Run the function of `ACTIONS` named `action`."""

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


def act(trial: Act) -> dict[str, Any]:
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


def _cpus(trial: Act) -> dict[str, Any]:
    return {"cpus": sorted(os.sched_getaffinity(0))}


def _raise(trial: Act) -> dict[str, Any]:
    raise KeyError("no such thing")


def _out_of_memory(trial: Act) -> dict[str, Any]:
    raise MemoryError("no memory for 5 GiB")


def _over_budget(trial: Act) -> dict[str, Any]:
    raise OverBudget({"peak": 7}, "needs 7 bytes of 5")


def _mismatch(trial: Act) -> dict[str, Any]:
    raise Mismatch({"error": 0.5}, "norms differ by 0.5")


def _segfault(trial: Act) -> dict[str, Any]:
    print("last words", file=sys.stderr)
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


def _leave(trial: Act) -> dict[str, Any]:
    os._exit(3)


def _unrecordable(trial: Act) -> dict[str, Any]:
    return {"object": object()}


def _nothing(trial: Act) -> Any:
    return None


def _a_list(trial: Act) -> Any:
    return [1, 2]


def _deep(trial: Act) -> dict[str, Any]:
    value: Any = 0
    for _ in range(100):
        value = [value]
    return {"deep": value}


def _big(trial: Act) -> dict[str, Any]:
    return {"text": "x" * 3_000_000}


def _huge(trial: Act) -> dict[str, Any]:
    return {"text": "x" * 64_000_000}


def _no_text(trial: Act) -> dict[str, Any]:
    """Raise an error with half a surrogate pair, which cannot be encoded, and print another half."""
    print(os.fsdecode(b"\xff"), file=sys.stderr)
    raise ValueError("half \ud83d of a face, and \udcff of a path")


def _halves(trial: Act) -> dict[str, Any]:
    return {"half \ud83d": ["\udcff"]}


def _once(trial: Act) -> dict[str, Any]:
    """Fail the first time only."""
    failed = Path(trial.folder) / "failed"
    if failed.exists():
        return {}
    failed.touch()
    raise KeyError("no such thing")


def _files(trial: Act) -> dict[str, Any]:
    return {"files": [7, "x", {"a": 5}, {"a": "no base64"}, {"a": "\u20ac"}][trial.number]}


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


def _long(trial: Act) -> dict[str, Any]:
    raise ValueError("x" * 10_000_000 + "\x1b[2J the end\r")


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


def _infinite(trial: Act) -> dict[str, Any]:
    return {"epsilon": float("inf")}


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


ACTIONS = {
    "sleep": _sleep,
    "wait": _wait,
    "spin": _spin,
    "where": _where,
    "cpus": _cpus,
    "raise": _raise,
    "oom": _out_of_memory,
    "over_budget": _over_budget,
    "mismatch": _mismatch,
    "segfault": _segfault,
    "leave": _leave,
    "unrecordable": _unrecordable,
    "nothing": _nothing,
    "a list": _a_list,
    "deep": _deep,
    "big": _big,
    "huge": _huge,
    "no text": _no_text,
    "halves": _halves,
    "once": _once,
    "files": _files,
    "twins": _twins,
    "forge": _forge,
    "long": _long,
    "scribble": _scribble,
    "stop": _stop,
    "infinite": _infinite,
    "offspring": _offspring,
}
