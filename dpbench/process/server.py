"""The process that forks trials: ``python -m dpbench.process.server PARENT``, used by `dpbench.process.parent`.

A fresh ``import torch`` takes seconds, a fork some milliseconds. So this process imports what trials need, and forks
each trial into its own session. It never touches the device and never runs a tensor operation: a CUDA context or a pool
of OpenMP threads does not survive a fork.

JSON lines on standard input and output::

    -> {"key": 7, "trial": {"class": "dpbench.trials:StepTrial", "fields": {...}}, "until": null}
    <- {"key": 7, "outcome": "ok", "evidence": null, "result": {...}, "seconds": 1.25, "stolen": 0.02}

It ends, with every trial, when its standard input ends, on SIGTERM, and when its parent dies.
"""

import contextlib
import gc
import json
import math
import os
import selectors
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NoReturn

from dpbench.process.child import TELL_WHERE, run_in_child, write_all
from dpbench.process.linux import CpuTime, adopt_orphans, die_with_parent, kill, kill_group, kill_session
from dpbench.trials import Trial
from dpbench.trials.json_text import to_json
from dpbench.trials.line_shapes import ANSWER
from dpbench.trials.outcome import Outcome, classify
from dpbench.trials.reference import load_module
from dpbench.trials.shapes import flaw

#: Seconds that a trial has to write down its stack when its time is up.
GRACE = 0.3
#: (outcome, evidence, result).
_Verdict = tuple[str, str | None, Any]
_EVIDENCE_LINES = 30
_EVIDENCE_BYTES = 4096


@dataclass
class _Running:
    """A trial in flight."""

    key: int
    pid: int
    timeout: float
    started: float
    found: CpuTime
    deadline: float
    answer: BinaryIO
    log: BinaryIO
    received: bytearray = field(default_factory=bytearray)
    late: bool = False

    def receive(self) -> None:
        """Read the pipe's content, without waiting."""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.answer.fileno(), 1 << 16):
                self.received += chunk

    def log_tail(self) -> str:
        """The last lines that the trial wrote, without empty ones."""
        size = self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, size - _EVIDENCE_BYTES))
        lines = self.log.read().decode(errors="replace").splitlines()
        return "\n".join(line for line in lines if line.strip())[-_EVIDENCE_BYTES:]


class _Server:
    """The loop: requests in, forks, exits and deadlines, answers out."""

    def __init__(self, requests: int, answers: int) -> None:
        self._requests = requests
        self._answers = answers
        self._unread = b""
        self._running: dict[int, _Running] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ)
        # A trial ends with the exit of the child, not with the end of its pipe, which its descendants may hold open.
        # SIGCHLD wakes the selector through this descriptor.
        self._woken, self._wake = os.pipe()
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._selector.register(self._woken, selectors.EVENT_READ)

    def serve(self) -> None:
        """Serve until the requests end."""
        while True:
            for key, _ in self._selector.select(self._patience()):
                if key.fd == self._requests and not self._read_requests():
                    return
                if key.fd == self._woken:
                    os.read(self._woken, 4096)
                if isinstance(key.data, _Running):
                    key.data.receive()
            for running in list(self._running.values()):
                self._look_after(running)

    def _patience(self) -> float | None:
        """Seconds until the next deadline; None if there is none."""
        deadlines = [r.deadline for r in self._running.values() if math.isfinite(r.deadline)]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _read_requests(self) -> bool:
        chunk = os.read(self._requests, 1 << 16)
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        for line in lines:
            self._start(json.loads(line))
        return bool(chunk)

    def _start(self, request: dict[str, Any]) -> None:
        try:
            trial = Trial.from_wire(request["trial"])
            _preload(trial)
        except Exception as error:  # a class that cannot be imported is the trial's failure, not the server's
            self._send(request["key"], classify(error))
            return
        read, write = os.pipe()
        log = tempfile.TemporaryFile()  # noqa: SIM115  closed when the trial has ended
        started, found = time.monotonic(), CpuTime.now()
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            run_in_child(trial, server, write, log.fileno(), inherited=[read, *self._descriptors()])
        os.close(write)
        os.set_blocking(read, False)
        answer = os.fdopen(read, "rb", buffering=0)
        # the parent's clock is the same in all processes of a machine
        until = math.inf if request.get("until") is None else request["until"]
        timeout = max(0.0, min(trial.timeout, until - started))
        running = _Running(request["key"], pid, timeout, started, found, started + timeout, answer, log)
        self._running[pid] = running
        self._selector.register(answer, selectors.EVENT_READ, running)

    def _descriptors(self) -> Iterator[int]:
        """Descriptors of this process and of other trials, which a trial must not write to."""
        yield from (self._answers, self._woken, self._wake)
        for running in self._running.values():
            yield from (running.answer.fileno(), running.log.fileno())

    def _look_after(self, running: _Running) -> None:
        if os.waitid(os.P_PID, running.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            self._finish(running)
        elif time.monotonic() >= running.deadline:
            if running.late:
                kill_group(running.pid)
                running.deadline = math.inf
            else:
                running.late = True
                running.deadline += GRACE
                kill(running.pid, TELL_WHERE)

    def _finish(self, running: _Running) -> None:
        seconds, stolen = time.monotonic() - running.started, CpuTime.now().stolen_since(running.found)
        self._selector.unregister(running.answer)
        running.receive()
        others = set(self._running) - {running.pid}
        # While another trial is in flight, an adopted orphan may belong to it: then sweep only this trial's session.
        kill_session(running.pid, and_adopted_except=None if others else {running.pid})
        status = os.waitstatus_to_exitcode(os.waitpid(running.pid, 0)[1])
        del self._running[running.pid]
        self._send(running.key, _verdict(running, status), seconds, stolen)
        running.answer.close()
        running.log.close()

    def _send(self, key: int, verdict: _Verdict, seconds: float = 0.0, stolen: float | None = None) -> None:
        told = dict(zip(("outcome", "evidence", "result"), verdict, strict=True))
        message = {"key": key, **told, "seconds": seconds, "stolen": stolen}
        write_all(self._answers, (to_json(message) + "\n").encode())

    def end(self) -> None:
        """Leave no process behind."""
        for pid in self._running:
            kill_group(pid)
        for pid in self._running:
            kill_session(pid, and_adopted_except=set(self._running))


def _verdict(running: _Running, status: int) -> _Verdict:
    """The answer of a trial that ended with exit `status` (negative: a signal)."""
    if status == 0 and running.received:
        with contextlib.suppress(ValueError, RecursionError):
            answer = json.loads(running.received)
            if flaw(answer, ANSWER) is None:
                return answer["outcome"], answer["evidence"], answer["result"]
        return Outcome.ERROR, "what came back is no answer: the trial wrote to a descriptor that is not its own", None
    said = running.log_tail()
    last = "\n".join(said.splitlines()[-_EVIDENCE_LINES:])
    if running.late:
        how = f"still running after its limit of {running.timeout:g} s; killed"
        return Outcome.TIMEOUT, f"{how}\n{last}".rstrip(), None
    return Outcome.CRASH, f"{_exit_in_words(status)}\n{last}".rstrip(), None


def _exit_in_words(status: int) -> str:
    if status >= 0:
        return f"the process left with exit code {status} before it had an answer"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = " (by the kernel, most often, for want of memory)" if -status == signal.SIGKILL else ""
    return f"the process was killed by {name}{hint}"


def _preload(trial: Trial) -> None:
    """Import the modules of the trial, so that later trials have them at once."""
    for module in (*trial.modules(), trial.body.rpartition(":")[0]):
        with contextlib.suppress(Exception):  # the trial imports it again, and records the error
            load_module(module)
    gc.freeze()  # trials' garbage collections skip inherited objects


def _end(server: _Server) -> NoReturn:
    """End every trial and exit.

    When the parent dies, its end of the pipe closes just before the kernel signals its death, so a SIGTERM may arrive
    here. Its handler calls this function again and completes it.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        server.end()
    finally:
        os._exit(0)  # skips exit handlers of imported libraries


def main(parent: int) -> None:
    """Serve until the parent ends: fork a trial for each request on standard input, and answer on standard output."""
    answers = os.dup(1)
    os.dup2(2, 1)  # output of an imported library must not mix with the answers
    server = _Server(0, answers)
    signal.signal(signal.SIGTERM, lambda *_: _end(server))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent, signal.SIGTERM)
    adopt_orphans()
    try:
        with contextlib.suppress(BrokenPipeError):  # no reader is left
            server.serve()
    except BaseException:
        traceback.print_exc()
    finally:
        _end(server)


if __name__ == "__main__":
    main(int(sys.argv[1]))
