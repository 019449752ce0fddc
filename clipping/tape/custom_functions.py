"""Show calls of custom `torch.autograd.Function`s to the tape.

torch shows a TorchFunctionMode its own operations, but not these. While a tape records in some thread, `Function.apply`
shows them to the tape of the calling thread as if they were operations of torch.
"""

import threading
from typing import Any

import torch
from torch.overrides import handle_torch_function

_LOCK = threading.Lock()
_count = 0
"""The tapes that record, in all threads."""
_plain: Any = None
"""`Function.apply` as it was before the first of them."""
_PLUMBING = "torch", "clipping"
"""Packages whose functions save, move or communicate tensors."""


def show() -> None:
    """Show calls from now on, until `hide` is called as often."""
    global _count, _plain
    with _LOCK:
        if not _count:
            _plain = torch.autograd.Function.__dict__["apply"]
            torch.autograd.Function.apply = classmethod(_apply)
        _count += 1


def hide() -> None:
    """End a `show`."""
    global _count
    with _LOCK:
        _count -= 1
        if not _count:
            torch.autograd.Function.apply = _plain


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    if _innermost_sees_functions() and cls.__module__.partition(".")[0] not in _PLUMBING:
        return handle_torch_function(cls.apply, (), *args, **kwargs)
    return _plain.__get__(None, cls)(*args, **kwargs)


def _innermost_sees_functions() -> bool:
    if not torch._C._is_torch_function_mode_enabled():
        return False
    mode = torch._C._get_function_stack_at(torch._C._len_torch_function_stack() - 1)
    return getattr(mode, "sees_functions", False)
