"""Select a backend that the engine can use: one that clips each sample's gradient, given the losses."""

from __future__ import annotations

from clipping import BACKENDS, FAMILIES, load_backend
from clipping.backends.base import Backend
from clipping.backends.recording import recordable


def usable_backend(name: str) -> type[Backend]:
    """Return a backend's class.

    Args:
        name: as in `clipping.load_backend`.

    Raises:
        ValueError: the engine cannot use the backend.
    """
    cls = load_backend(name)
    if name.partition(":")[0] in FAMILIES:
        raise ValueError(
            f"expected a backend that clips each sample's gradient, got {name!r}: it clips the mean of several, "
            "where a sample can move the sum by 2 max_grad_norm and more, and the accounting is for max_grad_norm"
        )
    if not recordable(cls):
        usable = ", ".join(known for known in BACKENDS if recordable_name(known))
        raise ValueError(f"expected a backend that works from losses, one of {usable}, got {name!r}")
    return cls


def recordable_name(name: str) -> bool:
    """Returns whether a backend is ours and recordable. Loading a peer's backend may need its package.

    Args:
        name: a key of `clipping.BACKENDS`.
    """
    return not BACKENDS[name].peer and recordable(load_backend(name))
