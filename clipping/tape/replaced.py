"""Find functions of torch that were replaced, as `F.linear` is by libraries that quantise or shard its operands.

A replacement often calls the original. Python's and the methods among torch's functions show a TorchFunctionMode what
their name holds now, so that the replacement would run once more. The handlers of the others call them by name, too.
"""

from types import BuiltinFunctionType, FunctionType, MethodDescriptorType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clipping.rules.base import Refused

_OWNERS = torch, F, Tensor, torch._C.TensorBase
_KINDS = FunctionType, BuiltinFunctionType, MethodDescriptorType
_NAMES = {x: (of, name) for of in _OWNERS for name, x in vars(of).items() if type(x) in _KINDS}
KNOWN = {x for x in _NAMES if type(x) is not FunctionType or x.__module__.partition(".")[0] == "torch"}
"""Functions that nobody has put into torch."""


def require_own(func: Any) -> None:
    """Require that a function of torch's is the one that its name holds, and that no other one took its place.

    Raises:
        Refused: it is not.
    """
    if func in KNOWN:
        owner, name = _NAMES[func]
        places = [] if vars(owner)[name] is func else [(owner, name)]
    else:
        places = [(owner, name) for owner in _OWNERS for name, x in vars(owner).items() if x is func]
    for owner, name in places[:1]:
        raise Refused(
            f"{owner.__name__}.{name} is not torch's own, and may run twice while it is recorded",
            "replace it in the model's code alone, or its layers",
        )
