"""Rows of `dpbench check --sensitivity`, and their summaries. Needs no torch.

Functions take:
    row, rows: of `as_row`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dpbench.conformance.sensitivity import DTYPES, FAILURES, OUTCOMES

FURTHEST = "one record moves the sum by, "
"""Precedes the dtype."""
FIELDS = ("case", "backend", "dtype", "outcome", "excess", "limit", "batch_size", "record", "reason")


def as_row(backend: str, dtype: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """One case's fields (`dpbench.measure.sensitivity.Found`), with the backend and the dtype.

    Args:
        dtype: one of `DTYPES`.
        found: of the case.
    """
    row = {"backend": backend, "dtype": dtype} | dict(found)
    return {name: row.get(name) for name in FIELDS}


def failed(row: Mapping[str, Any]) -> bool:
    """True if a record moved the sum too far, made it no number, or caused an error that does not name it."""
    return row["outcome"] in FAILURES


def worst(rows: Iterable[Mapping[Any, Any]]) -> Mapping[Any, Any] | None:
    """The row with the largest move of the sum; None if none is a number."""
    known = [row for row in rows if row["excess"] is not None]
    return max(known, key=lambda row: float(row["excess"]), default=None)


def count(rows: Iterable[Mapping[str, Any]]) -> str:
    """ "3 exceeds, 20 within"."""
    counted = Counter(row["outcome"] for row in rows)
    return ", ".join(f"{counted[outcome]} {outcome}" for outcome in OUTCOMES if counted[outcome])


def in_units(excess: float | None) -> str:
    """'1.003 C', '11,000 C', '77 million C', '9.6e+13 C'; "-" for None.

    Args:
        excess: in units of C, or None.
    """
    if excess is None:
        return "-"
    value = float(f"{float(excess):.2g}") if excess >= 10 else float(excess)
    for size, word in ((1e12, ""), (1e9, " billion"), (1e6, " million")):
        if value >= size:
            return f"{value / size:.3g}{word} C" if word else f"{value:.1e} C"
    return f"{value:,.0f} C" if value >= 10 else f"{value:.3f} C"


def lines(rows: Iterable[Mapping[str, Any]], backends: Sequence[str]) -> list[list[str]]:
    """For a table with a column a backend: a line for each dtype, with the largest move of the sum.

    Args:
        backends: the columns.
    """
    rows = list(rows)
    dtypes = [dtype for dtype in DTYPES if any(row["dtype"] == dtype for row in rows)]
    found = []
    for dtype in dtypes:
        most = [worst(r for r in rows if (r["backend"], r["dtype"]) == (name, dtype)) for name in backends]
        found.append([f"{FURTHEST}{dtype}", *(in_units(row["excess"]) if row else "-" for row in most)])
    return found
