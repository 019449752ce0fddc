"""The parent's handle on the process that runs trials (`dpbench.process.server`). Imports no torch."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dpbench.trials import Trial
from dpbench.trials.outcome import Outcome

AnyTrial = TypeVar("AnyTrial", bound=Trial)
_PATIENCE = 5.0
#: Interval at which a wait for one trial checks the server (seconds).
_LOOK_UP = 1.0
_ROOT = Path(__file__).resolve().parents[2]


def our_path() -> str:
    """PYTHONPATH for the server: the running code first, not the working folder."""
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(_ROOT), *([given] if given else []), os.getcwd()])


@dataclass(frozen=True)
class Place:
    """Where a trial ran, if not here: a name for the node and its device, and the facts for its records."""

    name: str
    environment: Mapping[str, Any]
    fingerprint: str
    load: float


@dataclass(frozen=True)
class Answer:
    """How one trial ended, as in its record."""

    key: int
    outcome: Outcome
    evidence: str | None
    result: dict[str, Any] | None
    seconds: float
    place: Place | None = None
    stolen: float | None = None


class Isolation:
    """Runs trials, each in its own process. A context manager: at its exit no process is left.

    The first trial starts the server. If the server ends, its trials are answered as crashed, and the next trial starts
    another one.

    Args:
        environ: variables added to the server's environment.
    """

    def __init__(self, environ: dict[str, str] | None = None) -> None:
        self._environ = {**os.environ, "PYTHONPATH": our_path(), **(environ or {})}
        self._server: subprocess.Popen[bytes] | None = None
        self._in_flight: set[int] = set()
        self._unread: list[bytes] = []
        self._keys = 0

    def submit(self, trial: Trial | Mapping[str, Any], until: float | None = None) -> int:
        """Start `trial`; returns the key of its answer.

        Args:
            trial: the trial, or its `Trial.to_wire`.
            until: when to end it at the latest, by `time.monotonic`; None for its own time limit alone.
        """
        server = self._server or self._start()
        self._keys += 1
        self._in_flight.add(self._keys)
        wire = trial.to_wire() if isinstance(trial, Trial) else trial
        request = json.dumps({"key": self._keys, "trial": wire, "until": until}) + "\n"
        assert server.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the server has ended: `wait` reports it for every trial in flight
            server.stdin.write(request.encode())
            server.stdin.flush()
        return self._keys

    def pin(self, cpus: Collection[int] | None) -> None:
        """Restrict trials submitted from now on to these CPUs; None: all that this process has."""
        server = self._server or self._start()
        if hasattr(os, "sched_setaffinity"):
            with contextlib.suppress(ProcessLookupError):  # the server has ended: `wait` reports it
                os.sched_setaffinity(server.pid, os.sched_getaffinity(0) if cpus is None else cpus)

    def wait(self, timeout: float | None = None) -> list[Answer]:
        """The answers that arrive within `timeout` seconds; [] if none does."""
        server = self._server
        if server is None or not self._in_flight:
            return []
        assert server.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(server.stdout, selectors.EVENT_READ)
            if not selector.select(timeout):
                server.send_signal(signal.SIGCONT)  # a trial may have stopped it; a running server ignores this
                return []
        chunk = os.read(server.stdout.fileno(), 1 << 20)
        if not chunk:
            return self._server_is_gone(server)
        if b"\n" not in chunk:  # part of a large answer; do not search the earlier parts again
            self._unread.append(chunk)
            return []
        *lines, rest = b"".join([*self._unread, chunk]).split(b"\n")
        self._unread = [rest]
        return [self._answered(**json.loads(line)) for line in lines]

    def run(self, trial: Trial | Mapping[str, Any]) -> Answer:
        """Run one trial and wait for it."""
        key = self.submit(trial)
        while True:
            for answer in self.wait(_LOOK_UP):
                if answer.key == key:
                    return answer

    def close(self) -> None:
        """End the server and every trial of it."""
        server, self._server = self._server, None
        self._in_flight.clear()
        self._unread = []
        if server is None:
            return
        with contextlib.suppress(BrokenPipeError):
            if server.stdin is not None:
                server.stdin.close()
        server.send_signal(signal.SIGTERM)  # in case it is importing, and does not read
        server.send_signal(signal.SIGCONT)  # in case a trial has stopped it
        try:
            server.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            server.kill()  # the kernel then kills its trials, too
            server.wait()
        if server.stdout is not None:
            server.stdout.close()

    def __enter__(self) -> Isolation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> subprocess.Popen[bytes]:
        # In its own session, so that Ctrl-C in the terminal reaches only the parent, which then ends the server.
        self._server = subprocess.Popen(
            [sys.executable, "-P", "-m", "dpbench.process.server", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._environ,
            start_new_session=True,
        )
        return self._server

    def _answered(self, key: int, outcome: str, **rest: Any) -> Answer:
        self._in_flight.discard(key)
        return Answer(key, Outcome(outcome), **rest)

    def _server_is_gone(self, server: subprocess.Popen[bytes]) -> list[Answer]:
        lost = sorted(self._in_flight)
        status = server.wait()
        self.close()
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
        evidence = f"the process that forks the trials went away ({how})"
        return [Answer(key, Outcome.CRASH, evidence, None, 0.0) for key in lost]


def answered(
    isolation: Isolation,
    trials: Iterable[AnyTrial],
    at_once: int,
    until: float | None = None,
    look: float | None = None,
) -> Iterator[list[tuple[AnyTrial, Answer]]]:
    """Run trials, and yield the trials that have ended with their answers, several at a time.

    Args:
        isolation: runs them.
        trials: taken one by one, when there is room.
        at_once: how many run at a time.
        until: when to end them at the latest, by `time.monotonic`.
        look: seconds after which to yield even if none has ended; None: never.
    """
    waiting, running = iter(trials), dict[int, AnyTrial]()
    while True:
        for trial in itertools.islice(waiting, at_once - len(running)):
            running[isolation.submit(trial, until)] = trial
        if not running:
            return
        yield [(running.pop(answer.key), answer) for answer in isolation.wait(look)]
