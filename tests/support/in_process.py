"""Run a command's trials in this process, so that tests of its output do not wait for a server to import torch.

Timeouts, output and crashes need a separate process: tests/process covers them. Each command also has a test that
starts it as a user does.
"""

import contextlib
import io
import json
import sys
from collections.abc import Iterator

import pytest

from dpbench.process import child
from dpbench.process.parent import Answer, Isolation
from dpbench.trials import Trial


@contextlib.contextmanager
def answered_here() -> Iterator[None]:
    """Context in which `Isolation` runs each submitted trial at once; its outcome becomes the answer."""
    found: list[Answer] = []

    def submit(self: Isolation, trial: Trial, until: float | None = None) -> int:
        self._keys += 1
        sent = Trial.from_wire(json.loads(json.dumps(trial.to_wire())))
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            told = json.loads(child._run(sent))
        found.append(self._answered(self._keys, seconds=0.0, **told))
        return self._keys

    def wait(self: Isolation, timeout: float | None = None) -> list[Answer]:
        answers = found[:]
        found.clear()
        return answers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", sys.path[:])
        patch.setattr(child, "_set_threads", lambda trial: None)
        patch.setattr(Isolation, "submit", submit)
        patch.setattr(Isolation, "wait", wait)
        yield
