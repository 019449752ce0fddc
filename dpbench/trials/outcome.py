"""How a trial can end. Always typed, always with evidence, never a missing row.

==============  =======================================================================================  =====
outcome         meaning                                                                                  final
==============  =======================================================================================  =====
`ok`            measured, and the answer verified                                                        yes
`oom`           the device or the allocator had no memory left                                           yes
`over_budget`   it ran, and needed more than the budget; the result is kept                              yes
`unsupported`   the backend refuses this model, or the accountant has no answer, with the reason         yes
`mismatch`      it ran, and its answer differs from the oracle's; the result is kept, for no figure      no
`timeout`       still running at its time limit; killed, with its whole process group                    no
`crash`         the process ended by a signal or its own exit                                            no
`error`         it raised something else                                                                 no
==============  =======================================================================================  =====

All of them count as done when a run is continued; the ones that are not final can be run again (``--retry``).
"""

import contextlib
import sys
import traceback
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """How a trial ended; see the table above."""

    OK = "ok"
    OOM = "oom"
    OVER_BUDGET = "over_budget"
    UNSUPPORTED = "unsupported"
    MISMATCH = "mismatch"
    TIMEOUT = "timeout"
    CRASH = "crash"
    ERROR = "error"


FINAL = frozenset({Outcome.OK, Outcome.OOM, Outcome.OVER_BUDGET, Outcome.UNSUPPORTED})
DOES_NOT_FIT = frozenset({Outcome.OOM, Outcome.OVER_BUDGET})
RETRYABLE = frozenset(Outcome) - FINAL

#: Messages of failed allocations without an exception class of their own.
_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "ALLOC_FAILED", "NOT_ENOUGH_MEMORY")
_TRACEBACK_LINES = 12
_TRACEBACK_LENGTH = 4096


class TrialFailure(Exception):
    """A trial failed, with a `result` to keep."""

    outcome: Outcome

    def __init__(self, result: dict[str, Any], message: str) -> None:
        super().__init__(message)
        self.result = result


class OverBudget(TrialFailure):
    """The step ran, and needed more memory than its budget."""

    outcome = Outcome.OVER_BUDGET


class Mismatch(TrialFailure):
    """The step ran, and its norms or gradients differ from the oracle's."""

    outcome = Outcome.MISMATCH


class PartlyFailed(TrialFailure):
    """Some backends of a trial ended with an outcome that is not final; the others' results stand."""

    def __init__(self, outcome: Outcome, result: dict[str, Any], message: str) -> None:
        super().__init__(result, message)
        self.outcome = outcome


@contextlib.contextmanager
def noted(entry: dict[str, Any]) -> Iterator[None]:
    """Note an error raised in the body as the entry's `outcome` and `evidence`.

    Args:
        entry: of one backend.
    """
    try:
        yield
    except Exception as error:
        entry["outcome"], entry["evidence"], _ = classify(error)
        error.__traceback__ = None  # its frames keep tensors alive


def refuse_failed(entries: Mapping[str, Mapping[str, Any]], result: dict[str, Any]) -> None:
    """Raise `PartlyFailed` if an entry's outcome is not final, with the worst outcome.

    Args:
        entries: name of a backend -> its entry.
        result: of the trial.
    """
    failed = {name: entry["outcome"] for name, entry in entries.items() if entry["outcome"] not in FINAL}
    if failed:
        worst = max(failed.values(), key=list(Outcome).index)
        said = ", ".join(f"{name} ({outcome})" for name, outcome in failed.items())
        raise PartlyFailed(worst, result, f"{len(failed)} of {len(entries)} backends without a result: {said}")


def classify(error: BaseException) -> tuple[Outcome, str, dict[str, Any] | None]:
    """Name the exception of a trial's body: (outcome, evidence, result or None).

    Imports nothing, as the body has imported all exceptions that it can raise.

    Args:
        error: raised by the body.
    """
    if isinstance(error, TrialFailure):
        return error.outcome, str(error), error.result
    if _is_unsupported(error):
        return Outcome.UNSUPPORTED, str(error), None
    if _is_out_of_memory(error):
        first, *_ = str(error).strip().splitlines() or [type(error).__name__]
        return Outcome.OOM, f"{type(error).__name__}: {first}", None
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    return Outcome.ERROR, "\n".join(lines[-_TRACEBACK_LINES:])[-_TRACEBACK_LENGTH:], None


def _is_unsupported(error: BaseException) -> bool:
    # by the defining module, as `clipping` itself would import torch
    refusals = {"clipping.core.types": "UnsupportedModel", "accounting.mechanism": "NoAnswer"}
    loaded = ((sys.modules[module], name) for module, name in refusals.items() if module in sys.modules)
    return any(isinstance(error, getattr(module, name)) for module, name in loaded)


def _is_out_of_memory(error: BaseException) -> bool:
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)
