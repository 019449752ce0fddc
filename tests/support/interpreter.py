"""Patches Triton's interpreter to run with newer versions of numpy.

Triton 3.6 (of torch 2.11) reads the bound of a loop by `int` of a one-dimensional array. numpy 2.5 accepts only arrays
without dimensions; Triton 3.7 accounts for that. The patch reads the bound by `item`, which works in all versions.
"""

from __future__ import annotations

from typing import Any


def mend() -> None:
    """Patch the interpreter, before a program first runs in it."""
    from triton.runtime import interpreter  # may be missing if no program runs

    own = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        own(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
