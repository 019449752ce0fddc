"""The whole step as one program: captured with guards, traced once, compared, and run in the way that is fastest here.

    captured   what the caller's Python does is a graph of torch's functions (`clipping.capture`), made anew where a
               guard of it fails, or what this library decides is another: the threshold, or the plan's batch size
    traced     the private step of that graph decides by shapes alone. So it runs once on fake tensors, which have no
               numbers, under `make_fx`, which writes down all operations: forward pass, gradients of activations,
               norms, factors and weighted sums, without autograd, without hooks, kernels in it (`clipping.kernels`)

A step is some thousand operations, and between them the Python of autograd and of the tape, which is most of what a
small model pays, or any on a GPU. What is traced runs in one of these ways:

    eager      the step as the caller wrote it
    traced     the graph's operations, one after the other: the same ones, and so the same bits, but where a library
               lays a result out in another way than a fake tensor has it (attention: the last bit of a product)
    replayed   these as a CUDA graph: one launch
    compiled   the graph by TorchInductor, which fuses what is between products; equal to rounding; on a GPU replayed

Each is compared with the eager step and timed when the graph is new, and the fastest is taken: on a CPU Inductor makes
a ViT faster, and a ResNet slower, ordinary training's as well as ours. A step that runs is not looked at again: it can
do nothing else. Parameters, buffers and the random numbers of dropout are read anew in each.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import CodeGen

from clipping.batches import tensors_of
from clipping.capture import Capture, Captured, LossesOf, NotCaptured, TooMany
from clipping.draws import Draws
from clipping.formats import without_autocast
from clipping.kernels.traced import tracing
from clipping.reference import with_zeros
from clipping.replay import Replayed
from clipping.second_look import Moving
from clipping.types import ClippedGradient, Parameters, Problem, UnsupportedModel
from clipping.verification import WrongGradient, compare, limit_of

_LOG = logging.getLogger(__name__)
BEFORE, MOST, TURNS = 2, 12, 5
"""Eager steps before a graph, in which routes are planned and timed; graphs in all; turns of the timing."""
SUMS = 61
"""A prime, so that no sum is over a dimension, along which a gradient may cancel."""
REMEDY = "compile=False"

Way = Literal["eager", "traced", "replayed", "compiled"]
StepOf = Callable[[Callable[[], Tensor], Parameters, Sequence[Tensor], int], ClippedGradient]
"""A step: of what gives the losses [B], the trainable parameters by name, the tensors of the batch, and B."""
Run = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True)
class Batch:
    """What a step is of.

    Attributes:
        parameters: the trainable ones by name.
        inputs, targets: of B samples.
        size: B.
    """

    parameters: Parameters
    inputs: Any
    targets: Any
    size: int


class _AsItIs(Exception):
    """The step is to run as the caller wrote it."""


class Graphs:
    """The programs of one model and one loss.

    Args:
        name: of the backend.
        losses_of: (inputs, targets) -> ℓ [B]: forward pass and loss, as the caller wrote them.
        step: what is made of the losses.
        moving: what a step of the model's writes to.
        version: told when what `step` decides may have changed: graphs are traced anew.
        timing: take the fastest way; else what is `traced`, whose results do not depend on how long anything took.
        strict: refuse what is no graph; else it runs eagerly, and nothing is compiled on a CPU, which takes a minute.

    Attributes:
        steps: that ran as graphs.
        is_new: the last step was of code that was captured for it.
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
    ) -> None:
        self._name, self._losses_of, self._step = name, losses_of, step
        self._version, self._timing, self._strict, self._moving = version, timing, strict, moving
        self._capture: Capture | None = None
        self._graphs: list[Graph] = []
        self._resumed: dict[str, Way] = {}
        self._why = ""  # steps run eagerly
        self._told = False
        self._batch: Batch | None = None
        self._found: ClippedGradient | None = None
        self.steps, self.is_new = 0, False

    @property
    def ways(self) -> dict[str, str]:
        """How each shape runs: shapes of its batch -> a way, or "eager" and why."""
        ways: dict[str, str] = {graph.shapes: graph.way for graph in self._graphs}
        return {**ways, "others": f"eager: {self._why}"} if self._why else ways

    @property
    def way(self) -> Way:
        """How the newest graph runs; "eager" if there is none."""
        return next((graph.way for graph in reversed(self._graphs)), "eager")

    def settle(self) -> dict[str, str]:
        """Which way each graph takes, for `resume`; from now on nothing is timed."""
        self._timing = False
        return {**self._resumed, **{graph.kind: graph.way for graph in self._graphs}}

    def resume(self, settled: Mapping[str, Any]) -> None:
        """Take the ways of those that were settled.

        Args:
            settled: what `settle` gave.
        """
        self._timing, self._resumed, self._capture = False, dict(settled), None
        self._graphs.clear()

    def __call__(self, batch: Batch) -> ClippedGradient | None:
        """Σ_i c_i g_i of a batch; None where the step is to run as the caller wrote it, of which nothing has run yet.

        Args:
            batch: of at least one sample.

        Raises:
            UnsupportedModel: if strict, the step is no graph: it decides by numbers in tensors, for one.
            WrongGradient: what was traced is not the step.
        """
        self.is_new, self._found, self._batch = False, None, batch
        if self._why:
            return None
        if self._capture is None:
            self._capture = Capture(self._losses_of, self._instead, MOST)
        try:
            self._capture(batch.inputs, batch.targets)
        except _AsItIs:
            return None
        except TooMany:
            self._tell()
            return None
        except (NotCaptured, UnsupportedModel) as error:
            self._refuse(error, batch)
        finally:
            self._batch = None
        return self._found

    def _refuse(self, error: Exception, batch: Batch) -> None:
        if not self._strict:
            self._why = str(error)
            _LOG.info("steps run eagerly: %s", self._why)
            return
        if isinstance(error, UnsupportedModel):
            raise error
        with torch.no_grad(), self._moving.repeated(Draws()):
            self._losses_of(batch.inputs, batch.targets)  # raises what the model itself raises
        raise no_graph(self._name, "it cannot be captured", error) from error

    def _tell(self) -> None:
        if not self._told:
            warnings.warn(
                f"expected at most {MOST} graphs of the step, got more: the others run without; pad batches to few "
                "shapes (data_loader(..., pad=True)), and let no number in Python change in each step",
                RuntimeWarning,
                stacklevel=5,
            )
        self._told = True

    def _instead(self, captured: Captured, given: Sequence[Any]) -> Sequence[Any]:
        """The private step in place of the captured graph; the outputs of that."""
        assert self._batch is not None
        self.is_new, version = not captured.notes, self._version()
        graph, calls = captured.notes.get(version, (None, 0))
        if graph is None and calls >= BEFORE:
            if len(self._graphs) < MOST:
                graph = self._made(captured, given, self._batch, version)
            else:
                self._tell()
        captured.notes[version] = graph, calls + 1
        if graph is None or graph.way == "eager":
            raise _AsItIs
        self.steps += 1
        self._found, outputs = graph(given, self._batch.parameters)
        return outputs

    def _made(self, captured: Captured, given: Sequence[Any], batch: Batch, version: Hashable) -> Graph:
        graph = Graph(self._name, captured, self._step, self._moving, given, batch, version)
        ways: list[Way] = ["traced"]
        if graph.kind in self._resumed:
            ways = [self._resumed[graph.kind]]
        elif self._timing:
            of_gpus: list[Way] = ["replayed"] if graph.device.type == "cuda" else []
            slow_to_make: list[Way] = ["compiled"] if self._strict or of_gpus else []
            ways = ["eager", "traced", *of_gpus, *slow_to_make]
        graph.take_fastest(ways, given, batch.parameters)
        self._graphs.append(graph)
        return graph


class Graph:
    """The step of one captured graph.

    Args:
        name, step, moving: as for `Graphs`.
        captured: forward pass and loss.
        given: its arguments.
        batch: which is among these, as parameters are.
        version: what this library has decided.

    Attributes:
        kind: the same for the same step in another process.
        way: how it is run.
        shapes: of the batch, in words.
        device: of the losses.
    """

    way: Way = "traced"

    def __init__(
        self,
        name: str,
        captured: Captured,
        step: StepOf,
        moving: Moving,
        given: Sequence[Any],
        batch: Batch,
        version: Hashable,
    ) -> None:
        if odd := next((x for x in given if not isinstance(x, Tensor)), None):
            raise no_graph(name, "it computes with a number of Python's", TypeError(f"{odd!r}"))
        self._name, self._captured, self._step_of, self._moving = name, captured, step, moving
        self._batch_size = batch.size
        at = {id(x): i for i, x in enumerate(given)}
        tensors = list(tensors_of((batch.inputs, batch.targets)))
        self._own = {name: at[id(p)] for name, p in batch.parameters.items() if id(p) in at}
        self._data = [at[id(x)] for x in tensors if id(x) in at]
        self.shapes = "; ".join(" x ".join(map(str, x.shape)) or "()" for x in tensors)
        self.device = tensors[0].device
        kinds = [(x.dtype, x.shape, x.stride(), x.device, x.requires_grad) for x in given]
        casts = torch.is_autocast_enabled(self.device.type) and torch.get_autocast_dtype(self.device.type)
        text = repr((captured.graph.code, kinds, casts, sorted(self._own), version))
        self.kind = hashlib.sha256(text.encode()).hexdigest()[:24]
        self._has_norms = True
        self._step: Run = self._traced(given)

    def __call__(self, given: Sequence[Tensor], parameters: Parameters) -> tuple[ClippedGradient, Sequence[Tensor]]:
        """The step, and the outputs of the captured graph.

        Args:
            given: arguments of the captured graph.
            parameters: the trainable ones by name; gradients of those that are not read are 0.
        """
        with torch.no_grad(), without_autocast(self.device):
            outputs, norms, grads = self._parted(self._step(*(x.detach() for x in given)))
        found = dict(zip(self._own, grads, strict=True))
        return ClippedGradient(with_zeros(found, parameters), norms, outputs[self._captured.losses]), outputs

    def take_fastest(self, ways: Iterable[Way], given: Sequence[Tensor], parameters: Parameters) -> None:
        """Compare with the eager step those of `ways` that can be had, and take the fastest.

        Args:
            ways: at least one.
            given: arguments of the captured graph. Random numbers are not used up, and buffers stay as they are.
            parameters: the trainable ones by name.
        """
        draws, traced, steps = Draws(), self._step, dict[Way, Run]()

        def eager() -> ClippedGradient:
            found, _ = self._eager(given)
            return ClippedGradient(with_zeros(found.grads, parameters), found.norms, found.losses)

        def by_graph() -> ClippedGradient:
            return self(given, parameters)[0]

        with self._moving.repeated(draws):
            expected = _sketched(eager())
        for way in ways:
            self._step = traced
            try:
                if way in ("replayed", "compiled"):
                    self._step = self._made(way, given, draws)
                if way != "eager":
                    with self._moving.repeated(draws):
                        self._compare(self._first_time(by_graph), expected, given)
            except (UnsupportedModel, WrongGradient) as error:
                if way == "traced":
                    raise
                text = f"expected the step to run {way}, got {error}; its graph runs as it was traced"
                warnings.warn(text, RuntimeWarning, stacklevel=2)
            else:
                steps[way] = self._step
        if not steps:  # what a checkpoint was made with cannot be had here
            steps["traced"] = traced
        taken = {way: [0.0] * TURNS for way in steps}
        for turn in range(TURNS if len(steps) > 1 else 0):
            for way, step in steps.items():
                self._step = step
                with self._moving.repeated(draws):
                    start = time.perf_counter()
                    eager() if way == "eager" else by_graph()
                    _wait_for(self.device)
                    taken[way][turn] = time.perf_counter() - start
        self.way = min(taken, key=lambda way: sorted(taken[way])[TURNS // 2])
        self._step = steps[self.way]
        times = ", ".join(f"{way} in {1e3 * sorted(each)[TURNS // 2]:.1f} ms" for way, each in taken.items())
        _LOG.info("a step of %d samples runs %s (%s)", self._batch_size, self.way, times)

    def _parted(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Tensor | None, list[Tensor]]:
        """Of what a traced step gives: outputs of the captured graph, norms, gradients."""
        grads = len(tensors) - len(self._own)
        outputs = grads - self._has_norms
        return list(tensors[:outputs]), tensors[outputs] if self._has_norms else None, list(tensors[grads:])

    def _eager(self, given: Sequence[Tensor]) -> tuple[ClippedGradient, list[Tensor]]:
        """The step of the captured graph under the tape, and the outputs of the graph."""
        outputs: list[Tensor] = []

        def losses() -> Tensor:
            outputs[:] = self._captured.graph(*given)
            return outputs[self._captured.losses]

        mine: Any = {name: given[i] for name, i in self._own.items()}
        return self._step_of(losses, mine, [given[i] for i in self._data], self._batch_size), outputs

    def _first_time(self, run: Callable[[], ClippedGradient]) -> ClippedGradient:
        try:
            return _sketched(run())
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise no_graph(self._name, "what was traced does not run", error) from error

    def _compare(self, found: ClippedGradient, expected: ClippedGradient, given: Sequence[Tensor]) -> None:
        """Of two that are `_sketched`."""
        if not all(bool(x.isfinite().all()) for x in (expected.losses, *expected.grads.values())):
            return  # of what is not a number nothing can be told, and others refuse it
        dtypes = {x.dtype for x in (expected.losses, *given) if x.is_floating_point()}
        limit, agreement = limit_of(dtypes), compare(found, expected)
        if not agreement.within(limit):
            raise WrongGradient(f"{self._name}, as a graph ({REMEDY} runs it without),", agreement, limit)

    def _traced(self, given: Sequence[Tensor]) -> GraphModule:
        """The graph: arguments of the captured one -> its outputs, norms, gradients."""

        def step(*tensors: Tensor) -> list[Tensor]:
            found, outputs = self._eager(tensors)
            self._has_norms = found.norms is not None
            norms = [found.norms] if found.norms is not None else []
            outputs = [x.detach() for x in outputs]
            return [*outputs, *norms, *(found.grads[name] for name in self._own)]

        # gradients on a CUDA device are computed in another thread, which no tracer follows
        in_one_thread = torch.autograd.set_multithreading_enabled(False)
        try:
            with torch.enable_grad(), in_one_thread, tracing(), self._moving.repeated(Draws()):
                tracer: Any = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)
                graph: GraphModule = tracer(*given)
        except UnsupportedModel:
            raise
        except Exception as error:
            raise no_graph(self._name, "something in it depends on more than shapes", error) from error
        for node in graph.graph.nodes:
            if node.target is torch.ops.aten.view.default:  # of a layout that is another one on this device
                node.target = torch.ops.aten.reshape.default
        graph.graph.eliminate_dead_code()
        graph.graph.set_codegen(CodeGen())
        graph.recompile()
        return graph

    def _made(self, way: Way, given: Sequence[Tensor], draws: Draws) -> Run:
        """The traced step by TorchInductor, or as a CUDA graph, or both."""
        step, given = self._step, [x.detach() for x in given]
        try:
            with torch.no_grad(), without_autocast(self.device):
                if way == "compiled":
                    inductor: Any = importlib.import_module("torch._inductor")  # takes a second
                    # dropout draws what it draws in an eager step
                    step = inductor.compile(step, given, options={"fallback_random": True})
                if self.device.type != "cuda":
                    return step
                with self._moving.repeated(draws):
                    return Replayed(step, given, moving=self._data)
        except Exception as error:
            raise no_graph(self._name, "it does not compile", error) from error


def no_graph(name: str, why: str, error: Exception) -> UnsupportedModel:
    """The refusal of a step that is no graph.

    Args:
        name: of the backend.
        why: in words.
        error: that says more.
    """
    said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return UnsupportedModel(name, [Problem("model", f"its step is no graph, for {why}: {said}", REMEDY)])


def _sketched(of: ClippedGradient) -> ClippedGradient:
    """The same with sums of each gradient, of every 61st entry: two whole ones are never in memory at once."""

    def sums(gradient: Tensor) -> Tensor:
        flat = gradient.flatten()
        whole = len(flat) // SUMS * SUMS
        found = flat[:whole].view(-1, SUMS).sum(0, dtype=torch.promote_types(flat.dtype, torch.float32))
        found[: len(flat) - whole] += flat[whole:]
        return found

    return ClippedGradient({name: sums(grad) for name, grad in of.grads.items()}, of.norms, of.losses)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
