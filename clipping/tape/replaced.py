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
_PLACES = [(owner, name, x) for owner in _OWNERS for name, x in vars(owner).items() if type(x) in _KINDS]
KNOWN = {x for *_, x in _PLACES if type(x) is not FunctionType or x.__module__.partition(".")[0] == "torch"}
"""Functions that nobody has put into torch."""
_NAMES: dict[int, list[tuple[Any, str]]] = {}
for _owner, _name, _x in _PLACES:
    _NAMES.setdefault(id(_x), []).append((_owner, _name))


def require_own(func: Any) -> None:
    """Require that a function of torch's is the one that its name holds, and that no other one took its place.

    Raises:
        Refused: it is not.
    """
    if func in KNOWN:  # by identity: `torch.mm` equals `torch.spmm`
        places = [(owner, name) for owner, name in _NAMES.get(id(func), ()) if vars(owner)[name] is not func]
    else:
        places = [(owner, name) for owner in _OWNERS for name, x in vars(owner).items() if x is func]
    for owner, name in places[:1]:
        raise Refused(
            f"{owner.__name__}.{name} is not torch's own, and may run twice while it is recorded",
            "replace it in the model's code alone, or its layers",
        )
