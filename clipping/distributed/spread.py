"""Find out how a model is spread over processes, and which ways are unsupported. See `distributed.fsdp` for clipping.

Does not import torch.distributed for a model that is not distributed.

Functions take:
    model: any module, without its DistributedDataParallel wrapper.
"""

import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree

from clipping.core.batches import map_tensors
from clipping.core.types import ClippedGradient, Problem

_PLAIN = {Tensor, nn.Parameter}
_BOOKS = "use bk_mixed or bk_ghost"
_WAIT_TOGETHER = "under FSDP2 every process must run the same number of passes"


def is_sharded(x: Tensor) -> bool:
    """Whether this parameter is a DTensor, so that each process holds a part."""
    return type(x) not in _PLAIN and hasattr(x, "placements")


def any_sharded(tensors: Collection[Tensor]) -> bool:
    """Whether any of these is a DTensor.

    Args:
        tensors: parameters or their gradients.
    """
    return not _PLAIN.issuperset(map(type, tensors)) and any(map(is_sharded, tensors))


def here(x: Tensor) -> Tensor:
    """This process's shard of a tensor; all of an ordinary tensor."""
    return x if type(x) in _PLAIN or not is_sharded(x) else x.to_local()  # type: ignore[attr-defined]


def as_sharded(mine: Tensor, p: Tensor) -> Any:
    """Wrap this process's shard as a DTensor if `p` is one.

    Args:
        mine: of the shape of this process's part of `p`.
        p: a parameter.
    """
    if type(p) in _PLAIN or not is_sharded(p):
        return mine
    from torch.distributed.tensor import DTensor

    whole: Any = p
    return DTensor.from_local(
        mine, whole.device_mesh, whole.placements, run_check=False, shape=p.shape, stride=p.stride()
    )


def sharded_modules(model: nn.Module) -> list[Any]:
    """The modules that ``fully_shard`` was called on."""
    library = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(library, "FSDPModule", None)
    return [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside a DistributedDataParallel, whose parameters have their original names; else the model itself."""
    library = sys.modules.get("torch.nn.parallel.distributed")
    kind = getattr(library, "DistributedDataParallel", None)
    return model.module if kind is not None and isinstance(model, kind) else model


def reshard(model: nn.Module) -> None:
    """Free parameters that a forward pass without a backward left gathered (the root's)."""
    for module in sharded_modules(model):
        module.reshard()


def problems(model: nn.Module, book_kept: bool) -> Iterable[Problem]:
    """The unsupported parts of a model's sharding.

    Args:
        book_kept: the backend forms the sum after one backward pass.
    """
    if type(model).__name__ == "FullyShardedDataParallel":
        yield Problem("model", "FullyShardedDataParallel makes one flat parameter of many", "use fully_shard")
        return
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    dtensors = {name: p for name, p in parameters.items() if is_sharded(p)}
    if not dtensors:
        return
    name, p = next(iter(dtensors.items()))
    if not book_kept:
        yield Problem(name, f"is sharded, and {_WAIT_TOGETHER}, with one backward pass", _BOOKS)
    if not sharded_modules(model):
        yield Problem(name, "is a DTensor that fully_shard did not make", "shard the model by fully_shard alone")
    for name, p in parameters.items():
        if not is_sharded(p):
            yield Problem(name, "is not sharded where others are", "call fully_shard on the whole model, too, last")
        elif not _is_data_parallel(p):
            reason = f"is placed {[str(x) for x in p.placements]}: more than data parallelism"  # type: ignore[attr-defined]
            yield Problem(name, reason, "shard the model by fully_shard alone")
        elif p.to_local().device.type != p.device_mesh.device_type:  # type: ignore[attr-defined]
            yield Problem(name, "is offloaded to the CPU", "leave out CPUOffloadPolicy")


def _is_data_parallel(p: Any) -> bool:
    """Whether there is one shard dimension, and before it at most one of replicas (HSDP)."""
    *replicas, last = p.placements
    return bool(last.is_shard()) and len(replicas) < 2 and all(x.is_replicate() for x in replicas)


def stand_ins(model: nn.Module) -> Callable[[Tensor], str | None] | None:
    """Map the plain tensor that stands in for a sharded parameter while its module runs to the parameter's name.

    Returns:
        tensor -> name, or None for any other tensor; None for a model that is not sharded.
    """
    known: dict[int, tuple[Tensor, str]] = {}

    def name_of(tensor: Tensor) -> str | None:
        if not isinstance(tensor, nn.Parameter) or not tensor.requires_grad or is_sharded(tensor):
            return None
        if id(tensor) not in known:  # FSDP reads it before it is in the model: keep the known ones
            known.update({id(p): (p, name) for name, p in model.named_parameters() if not is_sharded(p)})
        return known[id(tensor)][1] if id(tensor) in known else None

    return name_of if sharded_modules(model) else None


def summed(result: ClippedGradient) -> ClippedGradient:
    """Add up the gradients over all processes. Norms and losses stay those of this process."""
    import torch.distributed as dist

    grads = {name: grad.contiguous() for name, grad in result.grads.items()}
    for work in [dist.all_reduce(grad, async_op=True) for grad in grads.values()]:
        work.wait()
    return ClippedGradient(grads, result.norms, result.losses)


def row_of_zeros(tree: Any) -> Any:
    """A batch of one zero sample, for a process without samples.

    Args:
        tree: the batch's tensors [0, ...] in nested tuples, lists and dicts.
    """
    return map_tensors(lambda x: x.new_zeros(1, *x.shape[1:]), tree)


def no_rows(outputs: Any) -> Any:
    """Drop the row from the outputs but keep their graph, so that its gradient is zero.

    Args:
        outputs: of the model, for one row.
    """
    return _pytree.tree_map_only(Tensor, lambda x: x[:0] if x.dim() else x, outputs)
