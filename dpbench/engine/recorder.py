"""Record the model's forward passes, and check the losses before clipping.

The hooks are on the model, not on its modules. A forward pass in training mode with gradients enabled runs under a
recording's tape. Other passes (evaluation, no_grad, a deep copy) are not changed. A pass with the batch size of the
last one extends its recording, so that losses may depend on several passes (two views of one sample). A pass of another
batch size, or on another batch of the loader, starts a fresh recording; so does the first pass of a step.
"""

from __future__ import annotations

import copy
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from clipping.backends.base import Backend
from clipping.backends.recording import Recording
from clipping.backends.tape import TapeBackend
from clipping.checks.sample_independence import Occasions
from clipping.checks.verification import says_something
from clipping.core.autograd import hooks_of, named_versions
from clipping.core.batches import leading_dimension, map_tensors, tensors_of
from clipping.core.types import ClippedGradient, LossFunction, UnsupportedModel
from clipping.distributed.spread import no_rows, row_of_zeros
from clipping.program.capture import is_captured
from clipping.tape.compiled import called_from_compiled_code
from clipping.tape.record import in_transform
from dpbench.engine.distributed import quieten
from dpbench.engine.errors import Misuse, PrivacyWarning
from dpbench.engine.mixing_check import Looks, require_no_size, require_own_rows
from dpbench.engine.release import masked, require_finite_losses
from dpbench.engine.settings import batch_norm_problem, batch_norms
from dpbench.engine.trace import Trace, plain

AHEAD = 2
"""Batches that are followed at once, for loops that take a batch before they have stepped the last one."""
MANY_PASSES = 16
"""Forward passes without a step before a warning that each of them is held in memory."""
BACKWARD = "expected no backward(): {}, since gradients that were not clipped are not private"
OF_ANOTHER = "; if another engine's step took these losses, make one engine of a module that holds both models"
STEP = (
    "optimizer.step(loss=losses) runs it (freeze this model in the step of another one, requires_grad_(False); find "
    "adversarial inputs in eval mode; a gradient within the losses takes backend='microbatch')"
)
BUFFER = (
    "buffer {!r} changed in {}: data in it are neither clipped nor noised, and not accounted; do not "
    "release it, or do without it"
)
SEVERAL = (
    "expected losses that pass through the trained model of one engine, got some that pass through another one's, {}, "
    "too: make one engine of a module that holds both, or freeze that model (requires_grad_(False)) before its forward "
    "pass in the step of the other"
)
_SECOND_TIME = "backward through the graph a second time"
_CLIPPING: list[Recorder] = []
"""The recorder whose losses are in a backward pass now."""


class Recorder:
    """Records `model` for `backend` between `open` and `close`.

    Each pass calls `reads(inputs, B, whether passes of B samples are being recorded)`, which returns whether the pass
    belongs to that recording.
    """

    def __init__(self, model: nn.Module, backend: Backend, reads: Callable[[Any, int, bool], bool]) -> None:
        self._model, self.backend, self._reads = model, backend, reads
        self._norms = batch_norms(model)
        self._recording: Recording | None = None
        self._passes: dict[int, list[bool]] = {}  # thread -> its passes that have begun, and whether each is recorded
        self._handles: list[Any] = []
        self._owner: Any = None
        self._dropped, self._skipped = 0, False  # number of the node after a dropped recording; 0 for none
        self._verify, self._leaf_hooks = True, 0
        self._occasions = None if backend.sharded else Occasions()
        self._watches = backend.sharded  # buffers, as no check reruns a step
        self._buffers: dict[str, tuple[int, int]] = {}
        self._looks: Looks | None = None
        self._followed: list[Trace] = []  # of batches that the model has not read yet
        self._called: tuple[Any, Any] = (), {}
        self._known: tuple[LossFunction, Any] | None = None
        self._quiet: list[nn.Module] = []
        self._paused = False
        self._given: tuple[Tensor, ClippedGradient | Exception] | None = None  # result of a step that was not recorded
        self.follows_batches = True
        """Whether what is computed of the loader's batches is checked; else the caller's loop does so."""
        self.remedy = STEP
        """What to do instead of backward()."""
        self.call = "call the model itself, not its parts alone"
        """What to do if no forward pass was recorded."""
        self.count: Callable[[Tensor], float] | None = None
        """Computes a number from the norms of the data's own samples, before clipping: neither private nor accounted.

        It is summed over the pieces of a logical batch, and dropped, retried and saved with their sums.
        """
        self.counted = 0.0

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle is closed, has recorded nothing, and lacks the caller's loss, which may hold a Trainer."""
        backend, moving = copy.copy(self.backend), copy.copy(self.backend.moving)
        backend.moving, moving.loss_fn = moving, None
        state = {**vars(self), **dict.fromkeys(("_recording", "_looks", "_given", "_known", "_owner"))}
        state |= {"_called": ((), {}), "_passes": {}, "_handles": [], "_followed": [], "_quiet": []}
        return {**state, "backend": backend}

    @property
    def _entered(self) -> list[bool]:
        return self._passes.setdefault(threading.get_ident(), [])  # another thread may evaluate the model

    def open(self, owner: Any) -> None:
        """Hook the model: before any other pre-hook, and after the forward pass even if it raises.

        Args:
            owner: kept alive by the model until `close`, so that its steps are not forgotten.
        """
        self._owner = owner
        before, after = Hook(torch.compiler.disable(self._before)), Hook(torch.compiler.disable(self._after))
        self._handles = [
            self._model.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            self._model.register_forward_hook(after, always_call=True),
        ]

    def close(self) -> None:
        """Remove the hooks, and free the recording."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._owner = None
        while self._quiet:
            quieten(self._quiet.pop(), False)
        self._follow_none()
        self.drop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context whose forward passes are not recorded."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @contextmanager
    def knowing(self, loss_fn: LossFunction, targets: Any) -> Iterator[None]:
        """Context with one forward pass, whose losses loss_fn(outputs, targets) may be recomputed."""
        self._known = loss_fn, targets
        try:
            yield
        finally:
            self._known = None

    def of_loss(self, targets: Any) -> AbstractContextManager[Any]:
        """Context that records a loss of the last forward pass, which may read parameters.

        Args:
            targets: of the loss function.
        """
        if self._recording is None:
            return nullcontext()
        self._recording.again(targets)
        return self._recording

    def hand_over(self, losses: Tensor, gradient: ClippedGradient | Exception) -> None:
        """Make the next `finish` with these losses return or raise `gradient`; the forward pass ran within a graph.

        Args:
            losses: [B].
            gradient: the backend's result or error.
        """
        self.drop()
        self._given = losses, gradient

    def follow(self, batch: Any) -> Any:
        """Return the loader's next batch; in some steps its tensors record the operations on them.

        Args:
            batch: nested containers of tensors.
        """
        if self._occasions is None or not self.follows_batches or not self._occasions.follows():
            return batch
        self._followed.append(Trace(id(self.backend)))
        if len(self._followed) > AHEAD:
            self._followed.pop(0).close()
        return self._followed[-1].batch(batch)

    def own(self, batch: Any) -> Any:
        """Return the caller's batch, computed from the loader's, as ordinary tensors.

        Args:
            batch: inputs and targets of a step.

        Raises:
            UnsupportedModel: a sample's rows were computed from other samples.
        """
        trace = self._trace_of(batch)
        if trace is not None:
            assert self._occasions is not None
            with self._occasions.refusing(), closing(trace):
                require_own_rows(self._model, self.backend.name, trace, batch)
                require_no_size(trace.size, self.backend.name, trace, batch, self._occasions)
        return map_tensors(plain, batch)

    def _new_looks(self, occasions: Occasions, size: int, trained: int) -> Looks | None:
        """The check of this step, on `size` samples and `trained` parameters; None for most steps."""
        trace = self._trace_of(self._called)
        if trace is not None and trace.size != size:  # its rows are not the model's
            trace.close()
            trace = None
        if trace is not None:
            occasions.insist()
        changes = occasions.changes(size, *self._called, trained)
        if changes and trace is None:
            self._follow_none()
        return Looks(self.backend, changes, self._known, trace) if changes else None

    def _trace_of(self, batch: Any) -> Trace | None:
        """The trace of the loader's batch from which this one was computed; earlier traces are dropped."""
        for i, trace in enumerate(self._followed):
            if any(map(trace.knows, tensors_of(batch))):
                del self._followed[: i + 1]
                return trace
        return None

    def _follow_none(self) -> None:
        while self._followed:
            self._followed.pop().close()

    def insist(self) -> None:
        """Check in the next recorded step that samples stay apart."""
        if self._occasions is not None:
            self._occasions.insist()

    @property
    def is_refused(self) -> bool:
        """Whether the last step that was recorded was refused."""
        return self._occasions is not None and self._occasions.refused

    def drop(self) -> None:
        """Free the recording since the last step."""
        self._given = None
        if self._recording is not None:
            self._recording.close()
        self._recording = None
        if self._looks is not None:
            self._looks.close()
        self._looks = None

    def finish(self, losses: Any, drawn: tuple[int, int] | None = None) -> ClippedGradient | None:
        """Return Σ_i c_i g_i of the recorded batch, and free the recording; None for a batch of no samples.

        Args:
            losses: [B].
            drawn: (r, B): the loader's r records, padded to B samples; padding gets weight 0.

        Raises:
            Misuse: the losses or the recording do not fit.
        """
        given, self._given = self._given, None
        if self._entered and not _running(self._model):
            self._unwind()
        if given is not None and losses is given[0]:
            if isinstance(given[1], Exception):
                raise given[1]
            return self._with_count(given[1], len(losses) if drawn is None else drawn[0])
        noted, losses = losses, plain(losses)
        self._check(losses)
        if drawn is not None:
            losses = masked(losses, *drawn)
        recording, self._recording = self._recording, None
        looks, self._looks = self._looks, None
        dropped, self._dropped = self._dropped, 0
        if recording is None:
            return None
        _CLIPPING.append(self)
        try:
            if looks is not None:
                looks.follow(noted)
            with nullcontext() if self._occasions is None else self._occasions.refusing():
                return self._clipped(recording, losses, dropped, looks, drawn)
        finally:
            _CLIPPING.pop()
            recording.close()
            if looks is not None:
                looks.close()

    def _clipped(
        self, recording: Recording, losses: Tensor, dropped: int, looks: Looks | None, drawn: tuple[int, int] | None
    ) -> ClippedGradient:
        own = self._trainable()
        if other := recording.parameters.keys() ^ own.keys():
            raise Misuse(
                f"expected the trainable parameters of the forward pass, got {min(other)!r} frozen or unfrozen since: "
                "do so before the forward pass"
            )
        swapped = [name for name, p in recording.parameters.items() if p is not own[name]]
        if swapped and not self.backend.sharded:
            raise Misuse(
                f"expected a forward pass of the model's own parameters, got another tensor for {swapped[0]!r}, as by "
                "functional_call: make it within the model, by torch.nn.utils.parametrize or functional_call in forward"
            )
        hooks = hooks_of(recording.parameters.values())
        if hooks != self._leaf_hooks:
            self._verify, self._leaf_hooks = True, hooks  # a hook that changes a gradient must be found
            for name in [name for name, p in recording.parameters.items() if p._post_accumulate_grad_hooks]:
                raise Misuse(
                    f"expected no register_post_accumulate_grad_hook on {name!r}, got one, which would never run: a "
                    "gradient reaches .grad once a step, with its noise; let the attached optimizer step"
                )
        few = recording.batch_size if drawn is None else drawn[0]
        verify = self._verify and (drawn is None or few > 1)
        if verify:
            require_finite_losses(losses)  # else the error would blame the model for its data
        try:
            result = recording.finish(losses, verify=verify)
        except UnsupportedModel as error:
            if dropped:
                raise Misuse(
                    "expected losses of the last forward pass, got some of an earlier one, of another batch; "
                    "step, or evaluate under torch.no_grad(), in between; take one loader of pairs for a zip of two"
                ) from error
            raise
        except RuntimeError as error:
            if _SECOND_TIME in str(error):
                raise Misuse(BACKWARD.format(self.remedy) + OF_ANOTHER) from error
            raise
        # one sample cannot show that samples stay apart
        self._verify = self._verify and not (verify and few > 1 and says_something(result))
        if looks is not None and self._occasions is not None:
            with self.paused(), self.backend.moving.checking(looks.begin):
                looks.judge(result, few, self._occasions)
            self._occasions.others_passed()
        return self._with_count(result, few)

    def _by_hand(self) -> None:
        if _CLIPPING:
            raise Misuse(SEVERAL.format(type(self._model).__name__))
        raise Misuse(BACKWARD.format(self.remedy))

    def _trainable(self) -> dict[str, Tensor]:
        return {name: p for name, p in self._model.named_parameters() if p.requires_grad}

    def _with_count(self, result: ClippedGradient, few: int) -> ClippedGradient:
        """Count the first `few` norms, those of the data's own samples, and return the result."""
        if self.count is not None:
            assert result.norms is not None
            self.counted = self.count(result.norms[:few])
        return result

    def _check(self, losses: Any) -> None:
        step = "optimizer.step(loss=losses)"
        if not isinstance(losses, Tensor):
            raise Misuse(f"expected {step} with one loss a sample, a tensor [B], got {type(losses).__name__}")
        recorded = self._recording.batch_size if self._recording is not None else None
        wanted = "[B]" if recorded is None else f"[{recorded}]"
        if losses.dim() == 0:
            raise Misuse(
                f"expected {step} with one loss a sample, shape {wanted}, got a scalar: use reduction='none'; "
                "the engine averages after clipping"
            )
        if recorded is None and losses.shape == (0,):
            return
        if recorded is None:
            why = "the model was in eval mode" if self._skipped else f"none was run since the last step: {self.call}"
            raise Misuse(f"expected a forward pass of the model in training mode before {step}, but {why}")
        if tuple(losses.shape) != (recorded,):
            raise Misuse(
                f"expected one loss a sample, shape [{recorded}] as the first dimension of the model's inputs says, "
                f"got {list(losses.shape)}: samples must come first, and none may be left out (weigh it by 0 instead)"
            )
        if not losses.requires_grad:
            raise Misuse(
                "expected losses with their graph, got some that require no gradient: detached, or of no_grad, or of a "
                "pass that read no trainable parameter (call unmerge_adapter() if LoRA weights are merged)"
            )

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if module is not self._model:  # a deep copy, which shares the hooks
            return None
        if self._entered and _running(module) < 2:  # ctrl-C interrupted the last one without calling the hooks
            self._unwind()
        self._entered.append(False)
        if self._paused or any(self._entered) or not torch.is_grad_enabled():
            return None
        if not module.training:
            self._skipped = True
            return None
        trainable = self._trainable().keys()
        if not trainable:  # frozen while another model takes its gradient through this one
            return None
        if in_transform() is not None:
            raise Misuse(
                "expected a model outside of torch.func.grad and vmap, got one inside: use them in forward or eval mode"
            )
        if isinstance(self.backend, TapeBackend) and (problem := called_from_compiled_code()) is not None:
            raise UnsupportedModel(self.backend.name, [problem])
        if (problem := batch_norm_problem(self._norms)) is not None:
            raise UnsupportedModel("PrivacyEngine", [problem])
        self._quieten_caller()
        batch_size = leading_dimension(args, kwargs)
        open_ = self._recording
        recording = open_ is not None and open_.batch_size == batch_size and open_.parameters.keys() == trainable
        with torch._C.DisableTorchFunctionSubclass():  # records no operation
            goes_on = self._reads((args, kwargs), batch_size, recording)
        if not goes_on and self._recording is not None:
            self._dropped = self._recording.ended
            self.drop()
        if batch_size == 0 and not self.backend.sharded:
            self.drop()
            return None
        if batch_size == 0:
            args, kwargs = row_of_zeros((args, kwargs))
        self._called = args, kwargs
        # other tensors of the same storage, for the tape to mark
        args, kwargs = map_tensors(lambda x: plain(x) if x.requires_grad else plain(x).detach(), (args, kwargs))
        if self._recording is None:
            if self._occasions is not None:  # before the recording, as memory for copies may be missing
                self._looks = self._new_looks(self._occasions, batch_size, len(trainable))
            self._recording = Recording(
                self.backend, (args, kwargs), batch_size, self._by_hand, self._occasions, self._dropped
            )
        else:
            self._recording.again((args, kwargs))
            if self._recording.passes == MANY_PASSES:
                warnings.warn(
                    f"{MANY_PASSES} forward passes in training mode without a step: each is kept; evaluate in eval "
                    "mode or under torch.no_grad()",
                    PrivacyWarning,
                    stacklevel=2,
                )
        if self._watches:
            self._buffers = named_versions(dict(module.named_buffers()))
        self._recording.__enter__()
        self._entered[-1] = True
        return args, kwargs

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if module is self._model and self._entered and self._entered.pop():
            assert self._recording is not None
            try:
                output = self._recording.given(output)
            finally:
                self._recording.__exit__(None, None, None)
            now = named_versions(dict(module.named_buffers())) if self._watches else {}
            if written := now.items() - self._buffers.items():
                self._watches = False
                warnings.warn(BUFFER.format(min(written)[0], "the forward pass"), PrivacyWarning, stacklevel=2)
            if self._looks is not None and output is not None:
                try:
                    return self._looks.passed(*self._called, output)
                except BaseException:  # ctrl-C leaves a part of its outputs
                    self.drop()
                    raise
            return no_rows(output) if self._recording.batch_size == 0 else output
        return None

    def _unwind(self) -> None:
        if any(self._entered) and self._recording is not None:
            self._recording.__exit__(None, None, None)
        self._entered.clear()
        self.drop()

    def _quieten_caller(self) -> None:
        """Switch off the communication of a DistributedDataParallel that wrapped the model after this was created."""
        caller = DistributedDataParallel._get_active_ddp_module()
        if caller is not None and caller.module is self._model and caller not in self._quiet:
            self._quiet.append(caller)
            quieten(caller, True)


class Hook:
    """A hook that acts on one model only: copies of the model share it and skip it. A pickle of it does nothing."""

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return None if self._function is None or is_captured() else self._function(*args)

    def __deepcopy__(self, memo: Any) -> Hook:
        return self

    def __reduce__(self) -> Any:
        return Hook, ()


def _running(model: nn.Module) -> int:
    """Count the calls of `model` on this thread's stack."""
    frame, found = sys._getframe(1), 0
    while frame is not None:
        found += frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is model
        frame = frame.f_back  # type: ignore[assignment]
    return found
