"""Values as JSON text: strict, one line, for records and messages between processes."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

#: A lone surrogate, which no text encoding supports.
_HALF = re.compile("[\ud800-\udfff]")


def to_json(value: Any) -> str:
    """One line of strict JSON; floats that are not finite become the strings "inf", "-inf" and "nan".

    A lone surrogate, as of a path's byte that is not UTF-8, becomes a readable escape.
    """
    text = json.dumps(_finite(value), allow_nan=False, ensure_ascii=False)
    return text if text.isascii() else _HALF.sub(lambda half: f"\\\\u{ord(half[0]):04x}", text)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
