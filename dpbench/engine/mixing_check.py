"""Check that a training loop keeps samples apart: rerun its step with other records.

If the loss function is known (`make_step`), the whole step is rerun. In the caller's own loop the forward passes are
rerun, and the operations on the loader's batch and the model's outputs that `trace` can follow. Where it cannot follow
them, and for batches of another size, only the model's outputs are compared.

A model may also store information about its records: in a persistent buffer or frozen parameter, which is published
without noise, or for a later step, whose gradient then depends on records that are not clipped with it. So if a forward
pass writes to the model, batches of different records must leave the same state_dict, and the same outputs of the next
batch. A rerun begins from the state before the step, so that it detects a layer that its first batch initialises. What
a known loss function holds (attributes of an object, variables of a closure, globals) is treated in the same way.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from clipping.backends.base import Backend
from clipping.backends.recording import Recording
from clipping.backends.tape import TapeBackend
from clipping.checks.rerun import (
    TOLERANCE,
    Change,
    Run,
    coarsest,
    differing,
    fewer,
    mixed,
    mixing,
    of_one,
    or_none,
    replaced,
    same,
)
from clipping.checks.sample_independence import Occasions, separating
from clipping.core.batches import map_tensors, same_values, tensors_of
from clipping.core.types import ClippedGradient, Problem, UnsupportedModel
from clipping.numerics.rng_replay import Draws
from dpbench.engine.trace import Trace, plain

KEPT = "it keeps a part of the records: {} with them, neither clipped nor noised"
KEEP_NOTHING = (
    "keep nothing of the records for a later step: pass it as an input, initialise from public data before the first "
    "step, or freeze the layer in eval mode; register a buffer that no step reads with persistent=False"
)
READS = "samples mix: what the model reads for sample {} changes with the other samples"
ALONE = "make what the model reads of each sample alone: normalise by constants, and mix no samples of the batch"
BY_SIZE = "samples mix: the loop multiplies or divides by their number, which all gradients then depend on"
DIVIDED = "step the losses as they are (reduction='none'): the engine divides their clipped sum by the expected size"
HIDDEN = "its output is {}, in which no tensors are found, so that operations on them cannot be followed"
SHOW = (
    "return tensors, or tuples, lists, mappings or dataclasses of them, and make an object of them in the loop; or "
    "take engine.make_step(loss_fn), which reruns the whole step"
)


class Looks:
    """Records one step, and reruns it. Created before the step's first forward pass.

    Args:
        backend: records the step.
        changes: of the batch; at least one.
        known: (loss function, targets) of `make_step`; None in the caller's own loop.
        trace: of the loader's batch, if it records.

    Attributes:
        begin: the model's state before the step.
    """

    def __init__(
        self, backend: Backend, changes: Sequence[Change], known: tuple[Any, Any] | None, trace: Trace | None
    ) -> None:
        self._backend, self._changes, self._known = backend, changes, known
        self._trace = trace or Trace(id(backend))
        self._draws, self.begin = Draws(), backend.moving.state()
        self._marks = backend.moving.marks()
        new = len(changes) > 1 or changes[0].size == 1  # else a random step, in which there may be no room for copies
        self._parameters = {p: p.detach().clone() for p in backend.model.parameters() if new and p.requires_grad}
        self._calls: list[tuple[Any, Any]] = []
        self._outputs: list[Tensor] = []
        self._losses: Tensor | None = None
        self._taped = isinstance(backend, TapeBackend)  # else each norm comes from a backward pass of its own loss
        self._recording: Recording | None = None

    def passed(self, args: Any, kwargs: Any, output: Any) -> Any:
        """Record a forward pass, and return its output for the caller.

        Args:
            args, kwargs: the model's inputs.
            output: the model's output.
        """
        self._calls.append((args, kwargs))
        if self._known is None:
            output = self._trace.passed(self._forward, args, kwargs, output)
            outputs = [x for x in tensors_of(output) if x.is_floating_point()]
            if not outputs:
                raise UnsupportedModel(
                    self._backend.name, [Problem("model", HIDDEN.format(type(output).__name__), SHOW)]
                )
            self._outputs += outputs
        return output

    def follow(self, losses: Tensor) -> None:
        """Stop recording operations at the losses. Parameters that were written to belong to the state."""
        written = self._backend.moving.saw(self._marks)
        self.begin.kept.extend((p, self._parameters[p]) for p in written if p in self._parameters)
        self._parameters.clear()
        self._losses = losses if self._trace.follows(losses) else None
        self._trace.pause()

    def judge(self, result: ClippedGradient, few: int, occasions: Occasions) -> None:
        """Raise UnsupportedModel if a sample's loss, norm or output depends on other samples.

        Args:
            result: of the step.
            few: the number of the data's own samples, which come first.
            occasions: of the checks.
        """
        if self._losses is not None:
            require_no_size(len(result.losses), self._backend.name, self._trace, self._losses, occasions)
        numbers = [x.clone() for x in (result.losses, result.norms) if x is not None][: 2 if self._taped else 1]
        for x in numbers:
            x[few:] = torch.nan  # padding is not compared
        comparable = [change for change in self._changes if change.own.any()]
        resized = [change for change in comparable if change.resized]
        others = [change for change in comparable if not change.resized]
        if others and self._losses is not None and or_none(self._numbers, same(others[0].size)) is None:
            self._losses = None  # what the caller computed cannot be rerun
        if self._known is not None or self._losses is not None:
            changes = comparable if self._known is not None else others
            moving = self._known is None and self._trace.is_computed
            if moving:
                self._compare("loss or the norm of the gradient", partial(self._numbers, late=True), numbers, changes)
            self._compare("loss or the norm of the gradient", self._numbers, numbers, changes, may_move=moving)
        if self._known is None:
            rows = self._rows() if others and self._losses is None else []
            wanted = [self._outputs[i] for i in rows]
            self._compare("output", lambda *how: [self._passes(*how)[i] for i in rows], wanted, others if rows else [])
            self._compare("output", self._passes, self._outputs, resized)
        if few and (self._changes[0].size == 1 or self._backend.moving.has_moved):
            self._require_nothing_kept(few)

    def close(self) -> None:
        """Free the record."""
        self._trace.close()
        self._calls.clear()
        self._outputs.clear()
        self._parameters.clear()
        self._losses = None

    def _compare(
        self, what: str, run: Run, before: Sequence[Tensor], changes: Sequence[Change], *, may_move: bool = False
    ) -> None:
        model = self._backend.model
        before = [plain(x).detach() for x in before]
        tolerance = coarsest([*before, *model.parameters()], TOLERANCE)
        sample = mixed(model, run, before, changes, tolerance, may_move=may_move)
        if sample is not None:
            if may_move:
                require_own_rows(self._backend.model, self._backend.name, self._trace, self._calls)
            raise UnsupportedModel(self._backend.name, [mixing(sample, what)])

    def _require_nothing_kept(self, few: int) -> None:
        """Raise UnsupportedModel if the state_dict or a later output depends on the records of this batch.

        Args:
            few: the number of the data's own samples, at least 1; a single one is compared with NaN.
        """
        model, size = self._backend.model, self._changes[0].size
        names, first = list(_published(model)), of_one(size, 0)
        second = of_one(size, few - 1) if few > 1 else first.spoiled
        longer = of_one(size, 0, copies=size + 1)  # a count of records would publish the sizes of Poisson samples
        one, again = (or_none(self._left_behind, first) or () for _ in range(2))
        others = [or_none(self._left_behind, each) or one for each in (second, longer, same(size))]
        tolerance = coarsest([*one, *model.parameters()], TOLERANCE)

        def agree(x: Tensor, y: Tensor) -> bool:
            return differing([x], [y], same(size), tolerance) is None

        for i, (x, y, *rest) in enumerate(zip(one, again, *others, strict=False)):
            is_published = i < len(names)
            alike = same_values if is_published else agree
            if alike(x, y) and not all(alike(x, each) for each in rest):
                what = f"{names[i]!r} changes" if is_published else "the next batch's output changes"
                raise UnsupportedModel(self._backend.name, [Problem("model", KEPT.format(what), KEEP_NOTHING)])

    def _left_behind(self, change: Change, _: bool) -> list[Tensor]:
        """Return the published tensors after a pass of the changed batch, and then the outputs of the original one."""
        with self._repeated(), torch.set_grad_enabled(self._known is not None):
            with change.making() as of:
                self._forwards(of)
            published = [x.clone() for x in _published(self._backend.model).values()]
            self.begin.restore_generators()  # a batch may draw more numbers than another: those are no records
            with self._draws.again():
                return published + self._forwards(same(change.size).of)

    def _rows(self) -> list[int]:
        """Indices of the outputs [B·k, ...] with rows of samples: those that shrink with the batch."""
        size = self._changes[0].size
        found = or_none(self._passes, fewer(size))
        if found is None:
            return [i for i, x in enumerate(self._outputs) if x.dim() and len(x) == size]
        return [i for i, (x, y) in enumerate(zip(self._outputs, found, strict=True)) if x.dim() and len(x) != len(y)]

    def _passes(self, change: Change, only_losses: bool) -> list[Tensor]:
        """Outputs of the forward passes on the changed batch."""
        with self._repeated(), change.making() as of, torch.no_grad():
            return self._forwards(of)

    def _repeated(self, draws: Draws | None = None) -> AbstractContextManager[Any]:
        return self._backend.moving.repeated(draws or self._draws, self.begin)

    def _forwards(self, of: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Outputs of the forward passes, and the losses last if the loss function is known."""
        outputs = [self._forward(*map_tensors(of, args), **map_tensors(of, kwargs)) for args, kwargs in self._calls]
        if self._known is not None:
            loss_fn, targets = self._known
            outputs.append(loss_fn(outputs[0], map_tensors(of, targets)))
        return [x for x in tensors_of(outputs) if x.is_floating_point()]

    def _numbers(self, change: Change, only_losses: bool, *, late: bool = False) -> list[Tensor]:
        """Losses and norms of the changed batch; with `late`, of the model's changed inputs."""
        only_losses = only_losses or not self._taped
        self._recording = None if only_losses else Recording(self._backend, (), len(change.take))
        with self._repeated(None if self._known is not None else self._trace.draws), change.making() as of:
            try:
                with torch.set_grad_enabled(not only_losses), self._recording or nullcontext():
                    losses = change.alone(self._computed(of, change, late))
                if self._recording is None:
                    return [losses]
                result = self._recording.finish(losses)
            finally:
                if self._recording is not None:
                    self._recording.close()
                self._recording = None
        assert result.norms is not None
        return [result.losses, result.norms]

    def _computed(self, of: Callable[[Tensor], Tensor], change: Change, late: bool) -> Tensor:
        if self._known is not None:
            return self._forwards(of)[-1]
        assert self._losses is not None
        return self._trace.again([self._losses], of, _fixed(self._trace, change), late=late)[0]

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._recording is not None:
            self._recording.again((args, kwargs))
        return self._backend.model(*args, **kwargs)


def require_own_rows(model: nn.Module, by: str, trace: Trace, batch: Any) -> None:
    """Require that each row of a step's batch was computed from that record of the loader's batch alone.

    Args:
        model: reads the batch.
        by: for messages.
        trace: of the loader's batch.
        batch: inputs and targets, with followed tensors among them.

    Raises:
        UnsupportedModel: a row changes with other records.
    """
    size = trace.size
    rows = [x for x in tensors_of(batch) if size > 1 and trace.knows(x) and x.dim() and not len(x) % size]
    if not rows:
        return

    def again(change: Change, _: bool) -> list[Tensor]:
        with trace.draws.again():
            return real(trace.again(rows, change.of, _fixed(trace, change)))

    def real(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [(torch.view_as_real(x) if x.is_complex() else x).double() for x in tensors]

    before = [plain(x).detach() for x in rows]
    tolerance = coarsest(before, TOLERANCE)
    changes = [replaced(half, poison=True) for half in separating(size)]
    sample = mixed(model, again, real(before), changes, tolerance, may_move=True)
    if sample is not None:
        raise UnsupportedModel(by, [Problem("batch", READS.format(sample), ALONE)])


def require_no_size(size: int, by: str, trace: Trace, found: Any, occasions: Occasions) -> None:
    """Require that nothing was scaled by the number of samples in two steps of unlike sizes.

    Args:
        size: the number of samples.
        by: for messages.
        trace: of the step.
        found: followed tensors: what the model or the step reads.
        occasions: of the checks.

    Raises:
        UnsupportedModel: it was.
    """
    if size > 1 and occasions.scales(size, trace.scaled_by(size, tensors_of(found))):
        raise UnsupportedModel(by, [Problem("batch", BY_SIZE, DIVIDED)])


def _fixed(trace: Trace, change: Change) -> Callable[[Tensor], Tensor]:
    """What a change does to tensors that are not the batch's: those kept from an earlier batch are of other records."""

    def fixed(x: Tensor) -> Tensor:
        if trace.is_kept(x):
            return change.of_kept(plain(x))
        return x.detach().double() if change.wide and x.is_floating_point() else x.detach()

    return fixed


def _published(model: nn.Module) -> dict[str, Tensor]:
    """The numbers of the model's state_dict that get no noise, by name: buffers, frozen parameters, extra state."""
    state = {name: tree_leaves(value) for name, value in model.state_dict(keep_vars=True).items()}
    return {
        name + f"[{i}]" * (len(leaves) > 1): x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64)
        for name, leaves in state.items()
        for i, x in enumerate(leaves)
        if (isinstance(x, Tensor) and not x.requires_grad) or isinstance(x, (int, float))
    }
