"""Detect code that hides operations from the tape: compiled modules and some kinds of checkpointing.

torch.compile passes its own graph to its compiler. While a TorchFunctionMode such as the tape is active, it either
runs the module uncompiled (torch 2.11) or fails with an internal error (torch 2.15). The first case is refused in
advance, because a benchmark would report the uncompiled model's time as compiled; the second is explained.
"""

import sys
from collections.abc import Iterator

from torch import nn

from clipping.core.types import Problem

CALL = "call the model itself, not what torch.compile made of it or of the function around it, or use microbatch"
REMEDY = "hand over the model as it was before torch.compile (its _orig_mod); compile=True compiles the private step"


def compiled_modules(model: nn.Module) -> Iterator[Problem]:
    """Yield a problem for each module compiled by torch.compile or Module.compile."""
    for name, module in model.named_modules():
        wrapped = any(f"{c.__module__}.{c.__name__}" == _WRAPPER for c in type(module).__mro__)
        if wrapped or module._compiled_call_impl is not None:
            inside = module._orig_mod if wrapped else module
            yield Problem(
                name or type(inside).__name__,
                "is compiled, and what reads its parameters inside of compiled code cannot be recorded",
                REMEDY if wrapped else "make the model without Module.compile, or use microbatch",
            )


def called_from_compiled_code() -> Problem | None:
    """Return the problem of a forward pass called from code compiled by torch.compile, or None.

    torch.compile rewrites all Python that runs there, the tape included.
    """
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        if caller.f_code.co_name == "compile_wrapper" and caller.f_globals.get("__name__") == _COMPILER:
            return Problem("model", "is called from compiled code, inside of which nothing can be recorded", CALL)
        frame = caller
    return None


def explained(error: Exception) -> Problem | None:
    """Return the problem behind an error of compiled or checkpointed code in a pass; None for other errors."""
    text = " ".join(str(error).split())
    if any(c.__name__ == "TorchDynamoException" for c in type(error).__mro__):
        said = f"{type(error).__name__}: {text[:200]}"
        return Problem("model", f"calls compiled code, which fails while its operations are recorded: {said}", REMEDY)
    if "use_reentrant=True" in text:
        reason = "with use_reentrant=True it reads parameters in the backward pass, where nothing is recorded"
        return Problem("model", f"checkpoint: {reason}", "use_reentrant=False")
    if "selective activation checkpoint" in text:
        reason = "what a context_fn keeps is for one backward pass over tensors as they were; here are more"
        return Problem("model", f"checkpoint: {reason}", "checkpoint without context_fn, or use microbatch")
    if "`fabric.backward(loss)`" in text:
        reason = "is what Fabric's setup made of it, which insists on fabric.backward()"
        return Problem("model", reason, "leave it out of fabric.setup, and compute the losses in fabric.autocast()")
    return None


# by name: importing torch._dynamo takes seconds, and only code that imports it can compile anything
_COMPILER = "torch._dynamo.eval_frame"
_WRAPPER = f"{_COMPILER}.OptimizedModule"
