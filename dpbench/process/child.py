"""Runs a trial in its own process, from the fork to its end, and returns one JSON object.

The object: ``{"outcome", "evidence", "result"}``. The body's printed output goes to a file; its last lines are the
evidence if the process ends without an answer.
"""

import faulthandler
import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from dpbench.process.linux import available_cpus, die_with_parent, offer_to_the_oom_killer
from dpbench.trials import Trial
from dpbench.trials.json_text import to_json
from dpbench.trials.line_shapes import flaw_of_result
from dpbench.trials.outcome import Outcome, classify
from dpbench.trials.reference import load_object

#: Sent to a trial shortly before its time limit kills it: it writes down its stack.
TELL_WHERE = signal.SIGUSR1


def run_in_child(trial: Trial, server: int, answer: int, log: int, inherited: Sequence[int]) -> NoReturn:
    """Run `trial` in this process, just forked from `server`; write its answer to `answer`, all output to `log`.

    Closes the `inherited` descriptors of the server. Never returns, since the server's code must not run twice.

    Args:
        trial: the trial.
        server: the process that forked this one.
        answer, log: descriptors to write to.
        inherited: descriptors to close.
    """
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for descriptor in inherited:
            os.close(descriptor)
        _begin(server, log)
        write_all(answer, _run(trial).encode())
        sys.stdout.flush()
        sys.stderr.flush()
        code = 0
    except BaseException:
        traceback.print_exc()  # to the log: the evidence of a crash
        sys.stderr.flush()
    finally:
        os._exit(code)


def _begin(server: int, log: int) -> None:
    os.setsid()
    for signum in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)
    die_with_parent(server, signal.SIGKILL)
    offer_to_the_oom_killer()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for inherited, ours in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(inherited, ours)
    faulthandler.enable(all_threads=False)
    faulthandler.register(TELL_WHERE, all_threads=False)


def _run(trial: Trial) -> str:
    """The answer, as JSON."""
    try:
        _set_threads(trial)
        result = load_object(trial.body)(trial)
        answer = to_json({"outcome": Outcome.OK, "evidence": None, "result": result})
        # a result that cannot be recorded or read again is an error of the body
        if (why := flaw_of_result(trial.kind, json.loads(answer)["result"])) is not None:
            raise TypeError(f"what {trial.body} returned is no result of kind {trial.kind!r}: {why}")
        return answer
    except BaseException as error:  # every error becomes a typed record
        outcome, evidence, kept = classify(error)
        return to_json({"outcome": outcome, "evidence": evidence, "result": kept})


def _set_threads(trial: Trial) -> None:
    """Fix the thread count of CPU operations: all CPUs for a trial alone on the machine, else one."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(getattr(trial, "threads", None) or (available_cpus() if trial.alone else 1))


def write_all(descriptor: int, data: bytes) -> None:
    """Write all data, even if a pipe takes little at a time.

    Args:
        descriptor: of a file or a pipe.
        data: bytes.
    """
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]
