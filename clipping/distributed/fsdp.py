"""Clip a model spread over processes: each process clips its own samples, and only sums are communicated.

A per-sample gradient belongs to one sample, and a sample to one process. Norms and factors are therefore local, even if
parameters are sharded; only Σ_i c_i g_i runs over all processes.

*DistributedDataParallel*: every process has the whole model, and all-reduce adds the local sums. The wrapper's own
communication, which averages gradients that were not clipped, is bypassed.

*FSDP2* (``fully_shard``): a parameter is a DTensor, and each process holds a shard. While a module runs, a plain tensor
stands in for it, gathered before and freed after; FSDP's hooks gather it again for the module's backward, even in a
backward pass of activation gradients alone. So

    norms            from (a, g) or the instantiated gradient when g arrives, while the stand-in exists
    Σ_i c_i g_i      from (a, g) alone: nothing is gathered again, and each parameter's sum is reduce-scattered before
                     the next is formed

A process holds its shards, one module's parameters, and one parameter's gradient beside ordinary activations. Every
process must take part in every collective, in the same order: one without samples runs a row of zeros.

Refused: two passes (the second would hold all weight gradients at once), one sample at a time (processes with different
numbers of samples would wait for each other), and other ways of sharding. The first batch is not verified under FSDP2:
check the model before sharding it.
"""

import torch
from torch import Tensor

from clipping.distributed.spread import as_sharded
from clipping.norms.collection import Book, Kept, LayerByLayer, Norms, Term
from clipping.numerics.per_sample import weighted_sum
from clipping.tape.uses import Use


def reduced(local: Tensor | None, p: Tensor) -> Tensor:
    """Sum over all processes, with the placement of `p`.

    Args:
        local: this process's part, of the parameter's whole shape; None for zeros.
        p: a DTensor of floating point.
    """
    from torch.distributed.tensor import DTensor, Partial

    assert isinstance(p, DTensor)
    wide = torch.promote_types(p.dtype, torch.float32)
    mine = torch.zeros(p.shape, dtype=wide, device=p.device) if local is None else local.to(wide)
    whole = DTensor.from_local(mine.contiguous(), p.device_mesh, [Partial()] * p.device_mesh.ndim, run_check=False)
    shard = whole.redistribute(placements=p.placements).to_local()
    if hasattr(shard, "wait"):  # frees the whole tensor now, not when the shard is read
        shard = shard.wait()
    return as_sharded(shard, p)


class _Sharded(Norms):
    """Uses the values of a stand-in while it exists; later only its shape is available."""

    def arrived(self, use: Use, g: Tensor) -> None:
        super().arrived(use, g)
        for _, rule in use.rules:
            if not rule.is_fallback:  # a fallback is instantiated by now; others need the shape alone
                rule.parameter = rule.parameter.new_empty(()).expand(rule.parameter.shape)


class ShardedBook(_Sharded, Book):
    """Book-keeping that forms and reduces the sum of one parameter after the other."""

    joins = False

    def _single(self, term: Term) -> None:
        if term.source.rearranged and not term.rule.is_fallback:
            super()._single(term)
        else:
            self._several(term)

    def finish(self) -> tuple[Tensor, dict[str, Tensor]]:
        with torch.no_grad():
            total, bound = self._total()
            factors = self._clip.factors(bound)
            parts: dict[str, list[Term | Kept]] = dict(self._pairs)  # type: ignore[arg-type]
            for entry in reversed(self._entries):
                parts.setdefault(next(iter(entry.source.parameters)), []).append(entry)
            self._pairs.clear()
            self._entries.clear()
            return total, {
                name: reduced(self._formed(name, parts.pop(name, []), factors), p)
                for name, p in self._parameters.items()
            }

    def _formed(self, name: str, parts: list[Term | Kept], factors: Tensor) -> Tensor | None:
        """This process's Σ_i c_i g_i of one parameter; None if its loss does not depend on it."""
        grads = {name: weighted_sum(factors, self._sums.pop(name))} if name in self._sums else {}
        for entry in parts:
            entry.add_sum(grads, factors)
        return grads.get(name)


class ShardedLayers(_Sharded, LayerByLayer):
    """Per-layer clipping: local sums are complete after the backward pass, and are reduced in order."""

    def finish(self) -> tuple[Tensor, dict[str, Tensor]]:
        total, grads = super().finish()
        return total, {name: reduced(grads.pop(name, None), p) for name, p in self._parameters.items()}


class Nothing(Norms):
    """For a process without samples, which runs the passes only for the other processes."""

    def arrived(self, use: Use, g: Tensor) -> None:
        pass

    def _single(self, term: Term) -> None:
        pass

    def finish(self) -> tuple[Tensor, dict[str, Tensor]]:
        return self._squares, {name: reduced(None, p) for name, p in self._parameters.items()}


def norms_of(kind: type[Norms], losses: Tensor) -> type[Norms]:
    """The class that replaces `kind` in a sharded model.

    Args:
        kind: of a model that is not sharded.
    """
    if losses.shape[0] == 0:
        return Nothing
    return ShardedLayers if kind is LayerByLayer else ShardedBook
