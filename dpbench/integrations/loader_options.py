"""The options of a caller's DataLoader that a private loader of its data shares, and its batch size."""

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


def batch_size_of(source: DataLoader[Any]) -> int:
    """The chosen batch size, which is public.

    Args:
        source: the caller's loader.

    Raises:
        ValueError: it has none.
    """
    size = source.batch_size or getattr(source.batch_sampler, "batch_size", None)
    if not isinstance(size, int):
        raise ValueError(
            "expected a data_loader with a batch_size, which divides the noisy sum, got one without: hand in "
            "DataLoader(dataset, batch_size=...), as the engine draws the batches"
        )
    return size
