"""Run the whole step as one graph: capture it with guards, trace it once, compare it, and take the fastest way.

    captured   forward pass and loss are a graph of torch's functions (`clipping.program.capture`), captured again if a
               guard fails, a class has other functions, or a decision of this library changes: the threshold, or the
               batch size
    traced     the private step of that graph depends on shapes only. So it runs once on fake tensors under `make_fx`,
               which records all operations: forward pass, gradients of activations, norms, factors and weighted sums,
               with the kernels of `clipping.accel`, without autograd and hooks. A step that depends on values (rows
               sorted by expert, a mask that selects rows) is traced on one batch's values. The decisions made from
               them become conditions; the step of a batch that does not meet them runs eagerly

A step has about a thousand operations. The Python of autograd and of the tape between them takes most of the time of a
small model, or of any model on a GPU. A graph runs in one of these ways:

    eager      the step as the caller wrote it
    traced     the graph's operations one by one: the same bits, unless a library's result has another layout than the
               fake tensor's (attention: the last bit of a product)
    replayed   these operations as a CUDA graph: one launch
    compiled   the graph by TorchInductor, which fuses operations between products; equal to rounding; replayed on a GPU

A new graph is compared with the eager step and timed in each way, and the fastest is taken: on a CPU Inductor makes a
ViT faster and a ResNet slower, also without privacy. Each step reads parameters, buffers and the random numbers of
dropout. The caller's Python may depend on things that TorchDynamo does not guard. So it also runs when a graph is made,
in the graph's second step, and when attributes or keys have come or gone in an object that captured code has opened;
losses and gradients are compared. In one of 200 later steps it runs, too, and only losses are compared. One step of 400
runs eagerly and checks that samples do not mix, but not beside a CUDA graph, whose memory may leave no room for it.

Capturing, tracing and comparing take some seconds, which a short training on a CPU does not win back. There "auto"
begins when the training has run for `WARM_UP`.
"""

import logging
import random
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import torch
from torch.nn.modules import module as modules

from clipping.checks import sample_independence
from clipping.checks.moving import Moving
from clipping.core.autograd import hooks_of
from clipping.core.types import ClippedGradient, UnsupportedModel
from clipping.numerics.products import full_precision_on_cpu
from clipping.numerics.rng_replay import Draws
from clipping.program.capture import Capture, Captured, LossesOf, NotCaptured, OtherValues, TooMany
from clipping.program.cuda_graph import Pool
from clipping.program.step import Batch, Graph, StepOf, Way, no_graph, places_of

_LOG = logging.getLogger(__name__)
Compile = bool | Literal["auto"] | None
"""True: refuse a step that has no graph. "auto": run it eagerly. None: "auto" on a CUDA device, else False."""
GLOBAL_HOOKS = (
    modules._global_forward_hooks,
    modules._global_forward_pre_hooks,
    modules._global_backward_hooks,
    modules._global_backward_pre_hooks,
)
"""Hooks of all modules, which Dynamo does not guard."""
BEFORE, MOST = 2, 12
"""Number of eager steps before a graph, in which routes are planned and timed; largest number of graphs."""
WARM_UP = 20.0
"""Seconds that a training runs eagerly on a CPU, unless each step has to be a graph."""
TOO_MANY = "there are more than {} graphs"
RATE = 1 / 200
"""Share of a graph's steps, besides its second one, in which the caller's code also computes the losses."""
_ALONE = threading.RLock()
"""Held by the thread whose step is captured, traced or run: torch's tracer replaces functions of `nn.Module` for all
threads, and restores those that it found."""
LOOKS = sample_independence.RATE
"""Share of steps that run eagerly to check that samples do not mix, because values may decide whether they do."""


class _AsItIs(Exception):
    """Raised to run the step as the caller wrote it."""


class Graphs:
    """The graphs of one model and one loss.

    Args:
        name: of the backend.
        losses_of: (inputs, targets) -> ℓ [B]: forward pass and loss, as the caller wrote them.
        step: computes the clipped gradient from the losses.
        moving: state that a forward pass of the model changes.
        version: returns another value if decisions of `step` may have changed; graphs are then traced again.
        timing: take the fastest way; else `replayed` on a CUDA device and `traced` on a CPU, so that results do not
            depend on timings.
        strict: refuse a step that has no graph; else run it eagerly, begin later on a CPU (see `WARM_UP`), and do not
            compile there, which takes a minute.
        lends: the next step may overwrite the sums that a step returns, as the caller copies them anyway.

    Attributes:
        only: the one way to run in, for measurements; None to choose one.
        steps: number of steps that ran as graphs.
        is_new: True if the last step captured new code, or is due for a check of the samples.
    """

    def __init__(
        self,
        name: str,
        losses_of: LossesOf,
        step: StepOf,
        moving: Moving,
        *,
        version: Callable[[], Hashable],
        timing: bool = True,
        strict: bool = True,
        lends: bool = False,
    ) -> None:
        self._name, self._losses_of, self._step = name, losses_of, step
        self._version, self._timing, self._strict, self._moving = version, timing, strict, moving
        self._capture: Capture | None = None
        self._unguarded: object = None
        self._captures = 0
        self._graphs: list[Graph] = []
        self._resumed: dict[str, Way] = {}
        self._why = ""  # why steps run eagerly
        self._begin: float | None = None  # when steps become graphs
        self._warned, self._missed = False, 0
        self._pool = Pool(lends=lends)
        self._random, self._looks, self._was_used = random.Random(0), random.Random(2), False
        self._batch: Batch | None = None
        self._found: ClippedGradient | None = None
        self.only: Way | None = None
        self.steps, self.is_new = 0, False

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy or a pickle, without programs: those refer to the tensors of this model."""
        left: dict[str, Any] = dict.fromkeys(("_capture", "_unguarded", "_begin", "_batch", "_found"))
        return {**vars(self), **left, "_graphs": [], "_pool": Pool(lends=self._pool.lends)}

    @property
    def ways(self) -> dict[str, str]:
        """How each shape runs: shapes of its batch -> a way, or "eager" and why."""
        ways: dict[str, str] = {graph.shapes: f"{graph.way}{graph.said}" for graph in self._graphs}
        at_first = self._waits() and f"the first {WARM_UP:g} s"
        why = self._why or (self._warned and TOO_MANY.format(MOST)) or at_first
        return {**ways, "others": f"eager: {why}"} if why else ways

    @property
    def way(self) -> Way:
        """How the newest graph runs; "eager" if there is none."""
        return next((graph.way for graph in reversed(self._graphs)), "eager")

    def settle(self) -> dict[str, str]:
        """Return each graph's way, for `resume`, and stop timing."""
        self._timing = False
        return {**self._resumed, **{graph.kind: graph.way for graph in self._graphs}}

    def resume(self, settled: Mapping[str, Any]) -> None:
        """Adopt settled ways, such as those of a checkpoint.

        Args:
            settled: result of `settle`.
        """
        self._timing, self._resumed, self._capture = False, dict(settled), None
        self._graphs.clear()

    def __call__(self, batch: Batch) -> ClippedGradient | None:
        """Return Σ_i c_i g_i of a batch, or None if the caller must run the step eagerly (nothing has run yet).

        Args:
            batch: of at least one sample.

        Raises:
            UnsupportedModel: if strict, the step has no graph, for example because it branches on a tensor's values.
            WrongGradient: the traced step computes another gradient.
        """
        with _ALONE:
            return self._result(batch)

    def _result(self, batch: Batch) -> ClippedGradient | None:
        self.is_new, self._was_used, self._found, self._batch = False, False, None, batch
        if self._begin is None:
            waits = self._timing and not self._strict and all(p.is_cpu for p in batch.parameters.values())
            self._begin = time.monotonic() + waits * WARM_UP
        # Dynamo captures nothing under a dispatch mode; anomaly mode is for the caller's own operations
        if self._why or self._waits() or torch._C._len_torch_dispatch_stack() or torch.is_anomaly_enabled():
            return None
        unguarded = self._read_unguarded()
        if self._capture is None or unguarded != self._unguarded:
            if self._captures == MOST:
                self._warn()
                return None
            self._capture, self._unguarded = Capture(self._losses_of, self._instead, MOST), unguarded
            self._captures += 1
        try:
            with full_precision_on_cpu():  # a graph multiplies norms and sums in its own step
                self._capture(batch.inputs, batch.targets)
        except _AsItIs:
            return None
        except TooMany:
            self._warn()
            self._missed += 1
            if self._missed > max(MOST, self.steps):  # asking takes longer than a step of a small model
                self._why = TOO_MANY.format(MOST)
            return None
        except (NotCaptured, UnsupportedModel) as error:
            self._refuse(error, batch)
        finally:
            self._batch = None
        return self._found

    def _waits(self) -> bool:
        """Whether a CPU's graphs are still to begin."""
        return self._begin is not None and time.monotonic() < self._begin

    def _refuse(self, error: Exception, batch: Batch) -> None:
        if not self._strict and not self._was_used:
            self._why = str(error)
            _LOG.info("steps run eagerly: %s", self._why)
            return
        if isinstance(error, UnsupportedModel):
            raise error
        with torch.enable_grad(), self._moving.repeated(Draws()):  # the model may differentiate
            self._losses_of(batch.inputs, batch.targets)  # raises the model's own error, if any
        raise no_graph(self._name, "it cannot be captured", error) from error

    def _warn(self) -> None:
        if not self._warned:
            warnings.warn(
                f"expected at most {MOST} graphs of the step, got more: the others run without; pad batches to few "
                "shapes (data_loader(..., pad=True)), and let no number in Python change in each step",
                RuntimeWarning,
                stacklevel=5,
            )
        self._warned = True

    def _read_unguarded(self) -> object:
        """Read what TorchDynamo does not guard and code need not open: hooks, cuDNN's precision."""
        switches: Any = torch.backends
        assert self._batch is not None
        hooks = (*map(tuple, GLOBAL_HOOKS), hooks_of(self._batch.parameters.values()))
        return hooks, switches.cudnn.conv.fp32_precision

    def _instead(self, captured: Captured, given: Sequence[Any]) -> Sequence[Any]:
        """Run the private step in place of the captured graph, and return that graph's outputs."""
        assert self._batch is not None
        self.is_new = not captured.notes
        if captured.unguarded.functions_have_changed():
            self._capture = None
            raise _AsItIs
        version = self._version(), places_of(self._batch.parameters, given)
        if version not in captured.notes and len(captured.notes) >= MOST:
            self._warn()
            raise _AsItIs
        graph, calls = captured.notes.get(version, (None, 0))
        if graph is None and calls >= BEFORE:
            if len(self._graphs) < MOST:
                with suppress(OtherValues):  # then on a later batch
                    graph = self._made(captured, given, self._batch, version)
            else:
                self._warn()
        captured.notes[version] = graph, calls + 1
        if graph is None or graph.way == "eager":
            raise _AsItIs
        has_memory = graph.device.type == "cpu" or graph.is_conditional  # an eager step may not fit beside a CUDA graph
        if has_memory and self._looks.random() < LOOKS:
            self.is_new = True
            raise _AsItIs
        is_renamed = captured.unguarded.names_have_changed()
        is_suspect = is_renamed or graph.steps == 1
        try:
            if is_suspect or self._random.random() < RATE:
                self._was_used = not is_suspect
                with suppress(torch.OutOfMemoryError):  # beside the graph's memory there may be none
                    graph.require_same_step(given, self._batch, only_losses=not is_suspect)
                self._was_used = False
            self._found, outputs = graph(given, self._batch.parameters)
        except OtherValues as error:
            graph.missed, self._was_used = graph.missed + 1, False
            if graph.missed > max(MOST, graph.steps):
                graph.way = "eager"
            raise _AsItIs from error
        except UnsupportedModel as error:
            if not is_renamed:
                raise
            self._capture = None  # the code read the new names
            raise _AsItIs from error
        self.steps += 1
        graph.steps += 1
        return outputs

    def _made(self, captured: Captured, given: Sequence[Any], batch: Batch, version: Hashable) -> Graph:
        graph = Graph(
            self._name, captured, self._step, self._moving, given, batch, version, self._losses_of, self._pool
        )
        on_gpu = graph.device.type == "cuda"
        ways: list[Way] = ["replayed" if on_gpu else "traced"]
        if graph.kind in self._resumed:
            ways = [self._resumed[graph.kind]]
        elif self.only is not None:
            ways = [self.only]
        elif self._timing:
            ways = ["eager", "traced", *(ways if on_gpu else [])]
            if self._strict or on_gpu:
                ways.append("compiled")
        if graph.is_conditional or graph.needs_host:  # its operations may read values, or not all be kernels
            ways = [way for way in ways if way in ("eager", "traced")] or ["traced"]
        with self._moving.checking():
            graph.take_fastest(ways, given, batch.parameters)
        self._graphs.append(graph)
        return graph
