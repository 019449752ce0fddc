"""The interface of clipping backends: model and loss in, sum of clipped per-sample gradients out.

For sample i with loss ℓ_i, let g_i = ∂ℓ_i/∂θ over all trainable parameters θ together. A backend returns Σ_i c_i g_i
with c_i = clip(‖g_i‖). It adds no noise and does not divide. Any method is allowed that gives the exact sum;
`clipping.checks.verification` checks it.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields
from numbers import Real
from types import TracebackType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from clipping.checks.moving import Moving
from clipping.checks.rerun import TOLERANCE, Change, coarsest, mixed, mixing
from clipping.checks.sample_independence import Occasions
from clipping.checks.verification import says_something, verify
from clipping.core.autograd import hooks_of
from clipping.core.batches import forward, leading_dimension, losses_of, map_tensors
from clipping.core.clip_functions import ClipFunction, Flat
from clipping.core.dtypes import norm_dtype, wide_dtype
from clipping.core.types import ClippedGradient, LossFunction, Parameters, Problem, UnsupportedModel
from clipping.distributed import spread
from clipping.numerics.rng_replay import Draws
from clipping.program.capture import LossesOf
from clipping.program.graphs import Compile, Graphs
from clipping.program.step import Batch

NAMED = 8
"""The most records or parameters that an error names."""


class Backend(ABC):
    """Base class of the clipping backends; a context manager.

    A backend sets no attributes on parameters, leaves `requires_grad` and `.grad` alone, and leaves no hooks after
    `close()`. No result depends on an earlier call.

    Args:
        model: called as model(inputs), model(*inputs) or model(**inputs).
        loss_fn: loss_fn(outputs, targets) -> [B], one loss a sample (`reduction="none"`).
        clip: norms [B] -> factors [B].
        verify: compare two samples of the first batch with the microbatch oracle, and check that samples do not mix
            (`clipping.checks.sample_independence`): for new graphs and shapes, and in random steps.
        compile: from the third batch of a shape on, run the step as one program if that is faster
            (`clipping.program.graphs`). True raises if the step is not a graph; "auto" then runs it eagerly, and does
            not use TorchInductor on a CPU, where compiling takes a minute. By default "auto" for a model on a CUDA
            device, else False.
        timing: time several ways on this device and use the fastest; else use the same one everywhere.

    Methods take:
        inputs: a tensor, a tuple (positional) or a dict (keyword arguments); every tensor [B, ...].
        targets: passed to the loss; every tensor in it [B, ...].
        batch_size: B. An empty Poisson batch (B = 0) gives zeros.

    Raises:
        ValueError: `compile` is True and this backend's step is not a graph.
        UnsupportedModel: this backend cannot clip the model exactly. Raised here or at the first call.
    """

    name: ClassVar[str]
    private: ClassVar[bool] = True
    together: ClassVar[int] = 1
    """Samples whose mean gradient is clipped as one. More than 1 is not per-sample clipping."""
    trusted: ClassVar[bool] = False
    """Correct by definition, so not verified."""
    refuses_no_numbers = True
    """Raise for a record with a NaN or infinite gradient. Peers and tests set this to False."""
    book_kept: ClassVar[bool] = False
    """One backward pass leaves all that the sum needs. FSDP2 requires this."""
    compilable: ClassVar[bool] = False
    """A step branches on shapes alone and calls only torch, so it can be traced to a graph."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        *,
        clip: ClipFunction | None = None,
        verify: bool = True,
        compile: Compile = None,
        timing: bool = True,
    ) -> None:
        self.model = spread.unwrapped(model)
        self.replicated = self.model is not model
        """The model is a DistributedDataParallel: gradients are summed over all processes."""
        self.sharded = bool(spread.sharded_modules(self.model))
        """The model is sharded by FSDP2: parameters and gradients are DTensors."""
        spread.reshard(self.model)
        self.loss_fn = loss_fn
        self.clip: ClipFunction = Flat(max_grad_norm=1.0) if clip is None else clip
        self.coverage: dict[str, float] = {}
        self._verify = self._verifies = verify and not self.trusted and not self.sharded
        self._hooks = 0
        self.occasions = Occasions() if self._verify and self.private and self.together == 1 else None
        """When to check that samples do not mix; None for never."""
        self.chosen_for = self.expected = 0
        """The batch size that routes are chosen for, and the expected batch size; 0 if unknown."""
        self._named = tuple(self.model.named_parameters())
        self._closed = False
        self.moving = Moving(self.model, loss_fn)
        self.graphs: Graphs | None = None
        """The programs that run the steps; None to run them eagerly."""
        self._why_eager = ""
        self._ways: Mapping[str, str] = {}
        self.use_graphs(self._losses_of, compile, timing=timing)
        problems = [*self.problems(), *spread.problems(self.model, self.book_kept)]
        if problems:
            raise UnsupportedModel(self.name, problems)

    @classmethod
    def unavailable(cls) -> str | None:
        """Why this backend cannot run here (such as a missing package), or None if it can."""
        return None

    def problems(self) -> Iterable[Problem]:
        """Unsupported parts of the model that can be found before the first input."""
        for name, module in self.model.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and (
                module.training or not module.track_running_stats
            ):
                yield Problem(
                    name or type(module).__name__,
                    f"{type(module).__name__} mixes the samples of a batch, so there is no per-sample gradient",
                    "replace it by nn.GroupNorm, or put it in eval mode with frozen parameters",
                )
        for name, parameter in self.model.named_parameters():
            if is_lazy(parameter):
                yield Problem(name, "is lazy: it has no shape yet", "run the model once, on no records")
            elif parameter.requires_grad and parameter.is_complex():
                yield Problem(name, "is complex", "keep it as real numbers [..., 2], and use torch.view_as_complex")

    def __call__(self, inputs: Any, targets: Any) -> ClippedGradient:
        """Clip the gradients of one batch.

        Raises:
            ValueError: the tensors disagree about B, or the loss does not have shape [B].
            RuntimeError: the backend is closed.
            UnsupportedModel: this backend cannot treat an operation on a trainable parameter exactly, or samples mix.
            WrongGradient: the first batch differs from the oracle.
            FloatingPointError: a record's gradient is NaN or infinite (raised on a CPU only; elsewhere the sum shows
                it).
        """
        if self._closed:
            raise RuntimeError(f"expected an open backend, got {self.name} after close(); make a new one")
        verifies = self._verify
        # in inference mode autograd records nothing, and all gradients would be 0, in silence
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            found = self._of_this_process(inputs, targets)
        self._verify = self._verify or (verifies and not says_something(found))
        return spread.summed(found) if self.replicated else found

    def _of_this_process(self, inputs: Any, targets: Any) -> ClippedGradient:
        batch_size = leading_dimension(inputs, targets)
        inputs, targets = map_tensors(lambda x: x.detach(), (inputs, targets))
        self._named = tuple(self.members().items())  # a parameter may have been replaced
        parameters = {name: p for name, p in self._named if p.requires_grad}
        if batch_size == 0:
            with torch.enable_grad():
                return self._nothing(parameters, inputs, targets)
        before, self._hooks = self._hooks, hooks_of(parameters.values())
        self._verify |= self._verifies and self._hooks != before  # a hook that changes a gradient must be found
        if self._verify:
            verify(self._bare(self.loss_fn), inputs, targets)
            self._verify = batch_size <= self.together  # one sample cannot show whether samples mix
        with torch.enable_grad():
            found = None
            if self.occasions is None or not self.occasions.refused:
                found = self.graphs and self.graphs(Batch(parameters, inputs, targets, batch_size))
            found = found or self._eagerly(parameters, inputs, targets, batch_size)
        if self.private and self.together == 1 and self.refuses_no_numbers:
            _require_numbers(found)
        return found

    def _eagerly(self, parameters: Parameters, inputs: Any, targets: Any, batch_size: int) -> ClippedGradient:
        if self.occasions is None:
            return self._clipped(parameters, inputs, targets, batch_size)
        if self.graphs is not None and self.graphs.is_new:
            self.occasions.insist()
        changes = self.occasions.changes(batch_size, inputs, targets, self.model.training, len(parameters))
        with self.occasions.refusing():
            # vmap and peers take seconds a step: new shapes are checked with other records only
            if changes and batch_size > 1:
                some = changes[: 3 if self.compilable else 2]
                return self._twice(some, parameters, inputs, targets, batch_size)
            return self._clipped(parameters, inputs, targets, batch_size)

    def _bare(self, loss_fn: LossFunction) -> Self:
        """A copy without verification, checks and programs, for calls beside the caller's."""
        bare = copy.copy(self)
        bare._verify = bare._verifies = bare.replicated = False
        bare.occasions, bare.graphs, bare.loss_fn = None, None, loss_fn
        return bare

    def _twice(
        self, changes: Sequence[Change], parameters: Parameters, inputs: Any, targets: Any, batch_size: int
    ) -> ClippedGradient:
        """Clip the batch, and run the step again for each of `changes`.

        Raises:
            UnsupportedModel: a change to other records changed a loss or a norm.
        """
        draws, marks = Draws(), self.moving.marks()
        result = self._clipped(parameters, inputs, targets, batch_size)
        self.moving.saw(marks)

        def numbers(result: ClippedGradient) -> list[Tensor]:
            return [result.losses] if result.norms is None else [result.losses, result.norms]

        def run(change: Change, only_losses: bool) -> list[Tensor]:
            bare = self._bare(lambda outputs, targets: change.alone(self.loss_fn(outputs, targets)))
            with self.moving.repeated(draws), change.making() as of:
                few = map_tensors(of, inputs), map_tensors(of, targets)
                if only_losses:
                    return [bare.losses(*few, len(change.take))]
                return numbers(bare._clipped(parameters, *few, len(change.take)))

        tolerance = coarsest([result.losses, *parameters.values()], TOLERANCE)
        with self.moving.checking():
            sample = mixed(self.model, run, numbers(result), changes, tolerance)
        if sample is not None:
            raise UnsupportedModel(self.name, [mixing(sample, "loss or the norm of the gradient")])
        if self.occasions is not None:
            self.occasions.others_passed()
        return result

    def use_graphs(
        self, losses_of: LossesOf, compile: Compile, *, timing: bool = True, lends: bool = False
    ) -> Graphs | None:
        """Run steps as programs from now on. See `clipping.program.graphs`.

        Args:
            losses_of: (inputs, targets) -> ℓ [B]: forward pass and loss.
            compile: True raises for a step that is not a graph; "auto" runs it eagerly; False uses no graphs; None is
                "auto" on a CUDA device, else False.
            timing: run each graph in the fastest way; else in a way whose results do not depend on timings.
            lends: the next step may overwrite the sums that a step returns.

        Raises:
            ValueError: `compile` is True, but the step of this backend, or of a sharded model, is not a graph.
        """
        self.graphs, has_graphs = None, self.compilable and not self.sharded
        if compile is None and any(p.is_cuda for p in self.model.parameters()):
            compile = "auto"
        what = "a model sharded by FSDP2" if self.sharded else self.name
        self._why_eager = f": the step of {what} is no graph" if compile and not has_graphs else ""
        if not compile or (compile == "auto" and not has_graphs):
            return None
        if not has_graphs:
            raise ValueError(f"expected compile=False for {what}, whose step is no graph; bk_mixed's is one")
        self.graphs = Graphs(
            self.name,
            losses_of,
            self.of_losses,
            self.moving,
            version=self._decided,
            timing=timing,
            strict=compile is True,
            lends=lends,
        )
        if self._ways:
            self.graphs.resume(self._ways)
        return self.graphs

    def _losses_of(self, inputs: Any, targets: Any) -> Tensor:
        return self.loss_fn(forward(self.model, inputs), targets)

    @property
    def ways(self) -> dict[str, str]:
        """Maps shapes of a batch to how its steps run: "eager" (and why), "traced", "replayed" or "compiled"."""
        return {"all": f"eager{self._why_eager}"} if self.graphs is None else self.graphs.ways

    def _decided(self) -> tuple[int, str]:
        """The batch size that routes are chosen for, and the clipping: graphs are traced again if one changes.

        Raises:
            UnsupportedModel: the clipping function is mutable, so a change would go unnoticed.
        """
        clip: Any = self.clip
        own = vars(type(clip)).get("__dataclass_params__")  # a subclass inherits it, and may do anything
        frozen = own is not None and own.frozen
        values = [getattr(clip, field.name) for field in fields(clip)] if frozen else []
        if not frozen or not all(x is None or isinstance(x, (Real, str)) for x in values):
            reason = f"{type(clip).__name__} is no frozen dataclass of numbers: its factors may change where no graph "
            raise UnsupportedModel(self.name, [Problem("clip", reason + "sees it", "make it one, or compile=False")])
        return self.chosen_for, f"{type(clip).__qualname__}{values}"

    def of_losses(
        self, losses: Callable[[], Tensor], parameters: Parameters, batch: Sequence[Tensor], batch_size: int
    ) -> ClippedGradient:
        """Run a step from losses that the caller computes, without checking that samples stay apart.

        Args:
            losses: () -> ℓ [B], with their graph.
            parameters: name -> trainable parameter, as `losses` reads them.
            batch: the tensors of the samples that `losses` reads, [B, ...] each.
        """
        raise NotImplementedError(f"{type(self).__name__} is not compilable")

    def sensitivity_bound(self, batch_size: int, *, worst: bool = False) -> float:
        """C(1 + η): the most by which one record moves the *computed* sum (`numerics.rounding_bounds`).

        Args:
            worst: for the worst case of all roundings; else for random ones, with probability 1 - 1e-12.

        Returns:
            The bound, in units of the gradient, for the shapes seen so far; before the first call, for T = 1,024
            positions. Infinite for `nonprivate` and for peers, whose arithmetic is unknown. It holds if the batches
            with and without the record run in the same way (`ways`), because another program may round the other
            records' norms differently.
        """
        excess = self._rounding(batch_size)
        if excess is None:
            return math.inf
        return float(self.clip.sensitivity * (1 + excess[worst]))

    def members(self) -> dict[str, nn.Parameter]:
        """All parameters of the model by name. Reshards gathered parameters first, because gathering replaces them."""
        if self.sharded:
            spread.reshard(self.model)
        return dict(self.model.named_parameters())

    def _dtype(self) -> torch.dtype:
        """The dtype in which the least precise parameter is summed: float64 if all are, else float32."""
        found = {wide_dtype(p.dtype) for _, p in self._named if p.requires_grad}
        return torch.float64 if found == {torch.float64} else torch.float32

    def _rounding(self, batch_size: int) -> tuple[float, float] | None:
        """η for random rounding and in the worst case; None if unknown."""
        return None

    @abstractmethod
    def _clipped(self, parameters: Parameters, inputs: Any, targets: Any, batch_size: int) -> ClippedGradient:
        """Σ_i c_i g_i of a non-empty batch, called with gradients enabled; inputs do not require them."""

    def losses(self, inputs: Any, targets: Any, batch_size: int) -> Tensor:
        """`clipping.core.batches.losses_of` for this backend's model."""
        return losses_of(self.model, self.loss_fn, inputs, targets, batch_size)

    def blamed(self, error: Exception, reason: str, inputs: Any, targets: Any) -> Exception:
        """Return `UnsupportedModel` for an error of the underlying library, or the error itself if the model causes it.

        The model is at fault if it fails on the first sample without the library. An out-of-memory error is returned as
        it is.

        Args:
            error: raised for this batch.
            reason: what the library could not do, for the message.
        """
        if isinstance(error, (UnsupportedModel, torch.OutOfMemoryError)):
            return error
        try:
            sample, target = map_tensors(lambda x: x[:1], (inputs, targets))
            with torch.no_grad():
                self.losses(sample, target, batch_size=1)
        except Exception:
            return error
        said = " ".join(str(error).split())[:300]
        problem = Problem("model", f"{reason}: {type(error).__name__}: {said}", "use microbatch or a tape backend")
        return UnsupportedModel(self.name, [problem])

    def settle(self) -> dict[str, Any]:
        """Fix every choice that affects rounding, and return the choices as plain values for `resume`."""
        ways = self._ways if self.graphs is None else self.graphs.settle()
        return {"graphs": ways} if ways else {}

    def resume(self, settled: Mapping[str, Any]) -> None:
        """Take over another backend's choices: the same batches give the same bits on the same kind of machine.

        Args:
            settled: what `settle` of that backend returned.
        """
        self._ways = settled.get("graphs", {})
        if self.graphs is not None:
            self.graphs.resume(self._ways)

    def close(self) -> None:
        """Remove every hook from the model. Closing twice has no effect."""
        self._closed = True

    def __enter__(self) -> Backend:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _nothing(self, parameters: Parameters, inputs: Any, targets: Any) -> ClippedGradient:
        some = next((p for _, p in self._named), torch.empty(0, device="cpu"))
        empty = some.new_zeros(0, dtype=norm_dtype(some.dtype))
        return ClippedGradient({n: torch.zeros_like(p) for n, p in parameters.items()}, empty, empty.clone())


def _require_numbers(found: ClippedGradient) -> None:
    """Reject a sum that a record has made NaN or infinite. A norm that overflowed has factor 0, and is harmless.

    Only on a CPU: on other devices the check would wait for the device, and the sum itself shows NaN.

    Raises:
        FloatingPointError: naming the records by their positions in the batch.
    """
    norms = found.norms
    if norms is None or type(norms) is not torch.Tensor or norms.device.type != "cpu" or bool(norms.isfinite().all()):
        return
    if all(bool(grad.isfinite().all()) for grad in found.grads.values()):
        return
    wrong = norms.isfinite().logical_not().nonzero().flatten().tolist()
    named = ", ".join(map(str, wrong[:NAMED])) + (" ..." if len(wrong) > NAMED else "")
    raise FloatingPointError(
        f"expected gradients that are numbers, got NaN or infinity in that of record{'s' if len(wrong) > 1 else ''} "
        f"{named} of the batch of {len(norms)}: leave it out, or look for what overflows in the model"
    )
