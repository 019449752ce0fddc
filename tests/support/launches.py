"""Count launches: the operations that a step asks of a device, none of which may wait for it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

#: Tensors of a list that one launch of torch's takes: 64 pairs, 110 single ones, 128 that are put together.
AT_ONCE = 64
#: Entries that one launch on a list goes through: 320 blocks of 65,536.
ENTRIES = 320 * 65_536
NONE = {
    "promote_types",
    "view",
    "as_strided",
    "slice",
    "split_with_sizes",
    "split",
    "select",
    "detach",
    "alias",
    "unsqueeze",
    "expand",
    "permute",
    "transpose",
    "t",
    "squeeze",
    "unbind",
    "diagonal",
    "unfold",
    "_unsafe_view",
    "_reshape_alias",
}
WAITS = {"_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero"}


class Launches(TorchDispatchMode):
    """Counts launches, by operation, while it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.counting = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        kind, _, name = func._schema.name.partition("::")
        assert name not in WAITS, f"{name} waits for the device"
        if self.counting and kind == "aten" and name not in NONE and not name.startswith(("empty", "new_empty")):
            tensors = [x for x in args if isinstance(x, (list, tuple)) and x and isinstance(x[0], Tensor)]
            length = max((len(x) for x in tensors), default=1)
            entries = max((sum(y.numel() for y in x) for x in tensors), default=0)
            self.found[name] += max(-(-length // AT_ONCE), -(-entries // ENTRIES))
        return result

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        before, self.counting = self.counting, False
        try:
            yield
        finally:
            self.counting = before
