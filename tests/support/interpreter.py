"""Triton's interpreter made to run where numpy is newer than what it was written for.

Triton 3.6, which belongs to torch 2.11, reads the bound of a loop by `int` of an array of one dimension. numpy 2.5
takes only those of none; Triton 3.7 does. So the bound is read by `item` here, which means the same in all of them.
"""

from __future__ import annotations

from typing import Any


def mend() -> None:
    """Before a program is first run in the interpreter."""
    from triton.runtime import interpreter  # may be missing where nothing is run

    own = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        own(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
