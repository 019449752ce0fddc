"""Select a part of an experiment by the fields of its trials: ``--only field=a,b``."""

import re
from collections.abc import Iterable, Mapping, Sequence

from dpbench.errors import UsageError, nearest, one_of
from dpbench.experiment import Cell, MaxBatch

Only = Mapping[str, Sequence[str]]
#: A comma between values, not within one: ``timm:convnext_atto?depths=(2,2,6,2)``.
_COMMA = re.compile(r",(?![^(\[]*[)\]])")
#: What people type -> how a trial's field is shown.
_TRUTH = {"true": "True", "false": "False"}


def parse_only(texts: Iterable[str]) -> dict[str, list[str]]:
    """Parse ``["model=a,b", "backend=c"]`` to a mapping; values of a repeated field are joined.

    Args:
        texts: each after an --only.
    """
    chosen: dict[str, list[str]] = {}
    for text in texts:
        field, equals, values = text.partition("=")
        if not (field and equals and values):
            raise UsageError("--only field=value or field=value,value", text)
        chosen.setdefault(field, []).extend(_TRUTH.get(value, value) for value in _COMMA.split(values))
    return chosen


def select(cells: Sequence[Cell], only: Only) -> list[Cell]:
    """The cells that have one of the values in every field."""
    fields = [_fields(cell) for cell in cells]
    known = sorted({name for described in fields for name in described})
    for field, values in only.items():
        one_of("a field of this experiment's trials for --only", field, known)
        present = sorted({described[field] for described in fields if field in described})
        for value in values:
            if value not in present:
                raise UsageError(f"a value for --only {field}=", value, nearest(value, present), present)
    chosen = [
        cell
        for cell, described in zip(cells, fields, strict=True)
        if all(described.get(field) in values for field, values in only.items())
    ]
    if only and not chosen:
        asked = " ".join(f"{field}={','.join(values)}" for field, values in only.items())
        raise UsageError("a selection that some trial of this experiment matches", asked)
    return chosen


def _fields(cell: Cell) -> dict[str, str]:
    """A trial's fields as text. A search has those of its probe and its follow-up, without the batch size."""
    if not isinstance(cell, MaxBatch):
        return {name: str(value) for name, value in cell.describe().items()}
    described = ({} if cell.then is None else cell.then.describe()) | cell.probe.describe()
    return {name: str(value) for name, value in described.items() if name != "batch_size"}
