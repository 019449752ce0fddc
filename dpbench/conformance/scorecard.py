"""The scorecard, case × backend: exact, refuses or wrong, as lists of texts. Needs neither torch nor pandas."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]

#: status of a row of `dpbench check` -> the scorecard's word
RESULTS = {"ok": "exact", "unsupported": "refuses", "mismatch": "wrong", "error": "wrong"}
_STATUS = {"exact": "ok", "refuses": "unsupported", "wrong": "mismatch"}


def as_row(backend: str, verdict: Row) -> dict[str, Any]:
    """The fields of a `Verdict` as a row of `dpbench check`: `model` is the name of the case.

    Args:
        verdict: of one case.
    """
    return {
        "model": verdict["case"],
        "backend": backend,
        "status": "error" if verdict["raised"] else _STATUS[verdict["result"]],
        "max_norm_error": verdict["norm_error"],
        "max_grad_error": verdict["grad_error"],
        "coverage": verdict["coverage"] or None,
        "reason": verdict["reason"],
    }


def scorecard(rows: Iterable[Row]) -> list[list[str]]:
    """A header (case, then the backends), a line for each case, and a last line with counts.

    Args:
        rows: of `dpbench check --conformance`. Cases and backends are in order of first appearance; "-" marks a case
            that did not run on a backend.
    """
    results = {(row["model"], row["backend"]): RESULTS[row["status"]] for row in rows}
    cases = list(dict.fromkeys(case for case, _ in results))
    backends = list(dict.fromkeys(backend for _, backend in results))
    lines = [[case, *(results.get((case, backend), "-") for backend in backends)] for case in cases]
    totals = [count(result for (_, of), result in results.items() if of == backend) for backend in backends]
    return [["case", *backends], *lines, ["in all", *totals]]


def count(results: Iterable[str]) -> str:
    """ "3 exact, 1 refuses, 0 wrong".

    Args:
        results: "exact", "refuses" or "wrong" each.
    """
    counted = Counter(results)
    return ", ".join(f"{counted[result]} {result}" for result in ("exact", "refuses", "wrong"))
