"""The options of a caller's DataLoader that a private loader of its data shares."""

from typing import Any

from torch.utils.data import DataLoader

SHARED = (
    *("collate_fn", "num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context"),
    *("pin_memory", "timeout", "worker_init_fn"),
)


def shared_options(source: DataLoader[Any]) -> dict[str, Any]:
    """The options, by name.

    Args:
        source: the caller's loader.
    """
    return {name: getattr(source, name) for name in SHARED}
