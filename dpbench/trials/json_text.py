"""Values as JSON text: strict, one line, for records and for what is sent between processes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

#: Half of a pair of code units, which no encoding of text has.
_HALF = re.compile("[\ud800-\udfff]")


def to_json(value: Any) -> str:
    """One line of strict JSON; floats that are not finite become the strings "inf", "-inf" and "nan".

    What is no character (half of a pair, or a byte of a path that is not UTF-8) becomes its escape, to be read.

    Args:
        value: of dicts, lists, texts, numbers, truth values and None.
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
