"""A recorder in place of a CUDA graph, which runs the recorded operations in the same memory.

Tests that look at the operations of a step read `ran`.
"""

from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Recorder(TorchDispatchMode):
    """Of operations and their results. A replay runs them on the tensors of the recording, as a CUDA graph does."""

    count = 0
    pools: ClassVar[set[Any]] = set()

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[Any] = []
        Recorder.count += 1

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        self.ran.append((function, args, kwargs or {}, found))
        return found

    def replay(self) -> None:
        for function, args, kwargs, before in self.ran:
            with torch.no_grad():
                for was, now in zip(tree_leaves(before), tree_leaves(function(*args, **kwargs)), strict=True):
                    if isinstance(was, torch.Tensor) and was.data_ptr() != now.data_ptr():
                        was.copy_(now)


def recording(recorder: Recorder, pool: Any = None, **options: Any) -> Recorder:
    """As `torch.cuda.graph`."""
    Recorder.pools.add(pool)
    return recorder
