"""Trace the step of one captured graph, compare it with the eager step, and run it in the fastest way.

`clipping.program.graphs` describes the ways.
"""

import hashlib
import importlib
import logging
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import CodeGen
from torch.utils._pytree import tree_map

from clipping.checks.moving import Moving, put_back
from clipping.checks.rerun import differing, of_other_kernels, same, tolerance_of
from clipping.checks.verification import WrongGradient, compare, limit_of
from clipping.core.autograd import versions_of
from clipping.core.batches import tensors_of
from clipping.core.dtypes import without_autocast
from clipping.core.reference import with_zeros
from clipping.core.types import ClippedGradient, Parameters, Problem, UnsupportedModel
from clipping.numerics.rng_replay import Draws
from clipping.numerics.traced_operations import tracing
from clipping.program.capture import (
    ASSERT,
    DRAWS,
    Captured,
    LossesOf,
    NotCaptured,
    OtherValues,
    Readers,
    modes_kept,
    required,
)
from clipping.program.cuda_graph import Pool, Replayed, needs_host
from clipping.provenance.static_values import assuming

_LOG = logging.getLogger(__name__)
TURNS = 5
"""Rounds of timing."""
SUMS = 61
"""Stride of the sums in `_sketched`: a prime, so that none runs along a dimension, where a gradient may cancel."""
REMEDY = "compile=False"

Way = Literal["eager", "traced", "replayed", "compiled"]
StepOf = Callable[[Callable[[], Tensor], Parameters, Sequence[Tensor], int], ClippedGradient]
"""(function that returns the losses [B], trainable parameters by name, tensors of the batch, B) -> result."""
Run = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True)
class Batch:
    """The arguments of a step.

    Attributes:
        parameters: trainable parameters by name.
        inputs, targets: of B samples.
        size: B.
    """

    parameters: Parameters
    inputs: Any
    targets: Any
    size: int


class Graph:
    """The step of one captured graph.

    It is traced on shapes alone, if possible. Else it is traced on this batch's values, for example because the order
    of rows depends on them. What was decided from values, and shapes that depend on values, are then conditions that
    each run checks.

    Args:
        name, step, moving, losses_of: as for `Graphs`.
        captured: graph of forward pass and loss.
        given: its arguments, which include the batch and the parameters.
        batch: the batch.
        version: decisions of this library, and `places_of` the parameters.
        pool: device memory of its CUDA graphs, shared with other graphs.

    Attributes:
        kind: a hash, equal for the same step in another process.
        way: how the step runs.
        shapes: of the batch, as text.
        device: of the batch.
        is_conditional: True if runs check conditions.
        needs_host: True if the host computes a part of the step, which a CUDA graph would not repeat.

    Methods take:
        given: arguments of the captured graph.
        parameters: trainable parameters by name; unused ones get a gradient of 0.
    """

    way: Way = "traced"
    steps = 0
    """Number of steps run so far."""
    missed = 0
    """Number of batches that did not meet its conditions."""

    def __init__(
        self,
        name: str,
        captured: Captured,
        step: StepOf,
        moving: Moving,
        given: Sequence[Any],
        batch: Batch,
        version: Hashable,
        losses_of: LossesOf,
        pool: Pool,
    ) -> None:
        if odd := [x for x in given if not isinstance(x, Tensor)]:
            raise no_graph(name, "it computes with a number of Python's", TypeError(repr(odd[0])))
        self._name, self._captured, self._step_of, self._moving = name, captured, step, moving
        self._batch_size, self._pool = batch.size, pool
        at = {id(x): i for i, x in enumerate(given)}
        tensors = tensors_of((batch.inputs, batch.targets))
        self._own = {name: at[id(p)] for name, p in batch.parameters.items() if id(p) in at}
        self._parameters = batch.parameters  # all, as per-layer clipping also counts layers without a gradient
        self._data = [at[id(x)] for x in tensors if id(x) in at]
        self.shapes = "; ".join(" x ".join(map(str, x.shape)) or "()" for x in tensors)
        self.device = tensors[0].device
        kinds = [(x.dtype, x.shape, x.stride(), x.device, x.requires_grad) for x in given]
        casts = torch.is_autocast_enabled(self.device.type) and torch.get_autocast_dtype(self.device.type)
        text = repr((captured.graph.code, kinds, casts, sorted(self._own), version))
        self.kind = hashlib.sha256(text.encode()).hexdigest()[:24]
        self._has_norms, self.is_conditional, self._has_flag, self.needs_host = True, False, False, False
        self._written: list[int] = []  # arguments that a conditional step writes to
        self._losses_of = losses_of
        self._dtypes = captured.dtypes.union(x.dtype for x in given if x.is_floating_point())
        self.require_same_step(given, batch, is_traced=False)
        self._step: Run = self._traced(given)

    def __call__(self, given: Sequence[Tensor], parameters: Parameters) -> tuple[ClippedGradient, Sequence[Tensor]]:
        """Run the step; return its result and the outputs of the captured graph.

        Raises:
            OtherValues: a condition does not hold. Nothing has changed.
        """
        if not self.is_conditional:
            return self._run(given, parameters)
        draws, kept = Draws(), [(given[i], given[i].detach().clone()) for i in self._written]
        try:
            return self._run(given, parameters)
        except OtherValues:
            draws.restore()
            put_back(kept)
            raise

    def _run(self, given: Sequence[Tensor], parameters: Parameters) -> tuple[ClippedGradient, Sequence[Tensor]]:
        with torch.no_grad(), without_autocast():
            tensors = self._step(*(x.detach() for x in given))
        if self._has_flag:
            *tensors, holds = tensors
            if not bool(holds):
                raise OtherValues
        outputs, norms, grads = self._parted(tensors)
        names = {id(p): name for name, p in parameters.items()}
        found = {names[id(given[i])]: grad for i, grad in zip(self._own.values(), grads, strict=True)}
        return ClippedGradient(with_zeros(found, parameters), norms, outputs[self._captured.losses]), outputs

    @property
    def said(self) -> str:
        """How many batches ran eagerly; "" if none did."""
        return f", eager in {self.missed} batches that did not meet its conditions" if self.missed else ""

    def take_fastest(self, ways: Iterable[Way], given: Sequence[Tensor], parameters: Parameters) -> None:
        """Compare each available way with the eager step, and take the fastest.

        The state of the random number generators and buffers is restored.

        Args:
            ways: at least one.
        """
        draws, traced, steps = Draws(), self._step, dict[Way, Run]()

        with self._repeated(given, draws) as state:
            expected, left = _sketched(self._eager(given)[0], parameters), _copies(state)
        for way in ways:
            self._step = traced
            try:
                if way in ("replayed", "compiled"):
                    self._step = self._made(way, given, draws)
                if way != "eager":
                    with self._repeated(given, draws) as state:
                        self._compare_traced(given, parameters, expected)
                        self._require_same_state(state, left, expected.losses)
            except (UnsupportedModel, WrongGradient) as error:
                if way == "traced":
                    raise
                text = f"expected the step to run {way}, got {error}; its graph runs as it was traced"
                warnings.warn(text, RuntimeWarning, stacklevel=2)
            else:
                steps[way] = self._step
        if not steps:  # the only way is not available here
            self._step = steps["traced"] = traced
            with self._repeated(given, draws) as state:
                self._compare_traced(given, parameters, expected)
                self._require_same_state(state, left, expected.losses)
        taken = {way: [0.0] * TURNS for way in steps}
        for turn in range(TURNS if len(steps) > 1 else 0):
            for way, step in steps.items():
                self._step = step
                with self._repeated(given, draws):
                    start = time.perf_counter()
                    self._eager(given) if way == "eager" else self(given, parameters)
                    _wait_for(self.device)
                    taken[way][turn] = time.perf_counter() - start
        self.way = min(taken, key=lambda way: sorted(taken[way])[TURNS // 2])
        self._step = steps[self.way]
        times = ", ".join(f"{way} in {1e3 * sorted(each)[TURNS // 2]:.1f} ms" for way, each in taken.items())
        _LOG.info("a step of %d samples runs %s (%s)", self._batch_size, self.way, times)

    @contextmanager
    def _repeated(self, given: Sequence[Tensor], draws: Draws) -> Iterator[list[Tensor]]:
        """Context that starts from the random state `draws`, and restores the model and `given` afterwards.

        Yields the tensors of the model and of `given` that a step may write to.
        """
        free = [x for x in given if not isinstance(x, nn.Parameter) and not x.is_inference()]
        kept = [(x, x.detach().clone()) for x in free]
        with self._moving.repeated(draws) as present:
            try:
                yield [x for x, _ in (*kept, *present.kept)]
            finally:
                put_back(kept)

    def require_same_step(
        self, given: Sequence[Tensor], batch: Batch, *, is_traced: bool = True, only_losses: bool = False
    ) -> None:
        """Compare a step with the caller's code, which runs once more.

        TorchDynamo computes some things once (`random.shuffle`, `sys.getrecursionlimit`), and captures some custom
        functions with another gradient. Code may also check whether it is being compiled. A step traced on another
        batch may hold its values.

        Args:
            batch: the caller's batch.
            is_traced: compare the traced step; else the step of the captured graph under the tape.
            only_losses: run no backward pass of the caller's code.

        Raises:
            UnsupportedModel: the steps differ, or the code draws random numbers outside torch.
            OtherValues: a condition does not hold.
        """
        draws, tensors = Draws(), tensors_of((batch.inputs, batch.targets))

        def losses() -> Tensor:
            return self._losses_of(batch.inputs, batch.targets)

        with self._repeated(given, draws) as state:
            if only_losses:
                expected = ClippedGradient({}, None, losses().detach())
            else:
                found = self._step_of(losses, batch.parameters, tensors, batch.size)
                expected = _sketched(found, batch.parameters)
            if draws.used_outside_of_torch():
                raise no_graph(self._name, "it cannot be captured", NotCaptured(DRAWS))
            left = _copies(state)
        with self._repeated(given, draws) as state:
            if is_traced:
                found = _sketched(self(given, batch.parameters)[0], batch.parameters)
            else:
                found = self._first_time(lambda: self._eager(given)[0], batch.parameters, RuntimeError)
            self._require_same_state(state, left, expected.losses)
        limit = of_other_kernels(expected.losses, tolerance_of(self._dtypes))
        limit *= float(expected.losses.abs().max())
        finite = bool(expected.losses.isfinite().all())  # other checks reject NaN and infinity
        odd = ""
        if finite and not torch.allclose(found.losses, expected.losses, rtol=0, atol=limit):
            odd = "losses are not the captured graph's: they depend on what TorchDynamo cannot guard"
        elif not only_losses:
            try:
                self._compare(found, expected)
            except WrongGradient:
                odd = "gradient is not the captured graph's, as with set_materialize_grads(False)"
        if odd:
            raise no_graph(self._name, "it cannot be captured", NotCaptured(f"its {odd}"))

    def _require_same_state(self, state: Sequence[Tensor], left: Sequence[Tensor], losses: Tensor) -> None:
        """Raise UnsupportedModel if a step has not left in these tensors what another run of it did.

        Args:
            state: as `_repeated` yields it, after the step.
            left: copies of the same tensors after the other run, with these losses [B].
        """
        if not bool(losses.isfinite().all()):
            return  # other checks reject NaN and infinity
        limit = of_other_kernels(losses, tolerance_of(self._dtypes))
        for x, y in zip(state, left, strict=True):
            if differing([y[None]], [x[None]], same(1), limit) is not None:
                odd = "buffers or parameters are not what the graph leaves, as where p.data is replaced"
                raise no_graph(self._name, "it cannot be captured", NotCaptured(f"its {odd}"))

    def _parted(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Tensor | None, list[Tensor]]:
        """Split a traced step's results into the captured graph's outputs, norms and gradients."""
        grads = len(tensors) - len(self._own)
        outputs = grads - self._has_norms
        return list(tensors[:outputs]), tensors[outputs] if self._has_norms else None, list(tensors[grads:])

    def _eager(self, given: Sequence[Tensor]) -> tuple[ClippedGradient, list[Tensor]]:
        """Run the captured graph's step under the tape; return its result and the graph's outputs."""
        outputs: list[Tensor] = []

        def losses() -> Tensor:
            with modes_kept():
                outputs[:] = self._captured.graph(*given)
            return outputs[self._captured.losses]

        mine: Any = {**self._parameters, **{name: given[i] for name, i in self._own.items()}}
        return self._step_of(losses, mine, [given[i] for i in self._data], self._batch_size), outputs

    def _first_time(
        self, run: Callable[[], ClippedGradient], parameters: Parameters, *refusals: type[Exception]
    ) -> ClippedGradient:
        """Run a step. `refusals` say that the captured graph cannot be used."""
        try:
            return _sketched(run(), parameters)
        except torch.OutOfMemoryError:
            raise
        except refusals as error:
            raise no_graph(self._name, "what was captured does not run", error) from error

    def _compare_traced(self, given: Sequence[Tensor], parameters: Parameters, expected: ClippedGradient) -> None:
        found = self._first_time(lambda: self(given, parameters)[0], parameters, RuntimeError, OtherValues)
        self._compare(found, expected)

    def _compare(self, found: ClippedGradient, expected: ClippedGradient) -> None:
        """Raise WrongGradient if two `_sketched` results differ."""
        if not all(bool(x.isfinite().all()) for x in (expected.losses, *expected.grads.values())):
            return  # NaN and infinity cannot be compared; other checks reject them
        limit, agreement = limit_of(self._dtypes), compare(found, expected)
        if not agreement.within(limit):
            raise WrongGradient(f"{self._name}, as a graph ({REMEDY} runs it without),", agreement, limit)

    def _traced(self, given: Sequence[Tensor]) -> GraphModule:
        """Trace the step: arguments of the captured graph -> its outputs, norms, gradients, and perhaps a condition."""
        try:
            graph = self._traced_as("fake", given)
        except UnsupportedModel:
            raise
        except Exception as error:
            _LOG.debug("a step depends on more than shapes: %s", error)
            try:
                with self._repeated(given, Draws()), modes_kept():
                    Readers(self._captured.graph).run(*given)
                with assuming() as conditions:
                    graph = self._traced_as("real", given, conditions)
            except Exception as second:  # an eager step is supported
                raise no_graph(self._name, "something in it depends on the batch's values", second) from second
            self.is_conditional, self._has_flag = True, bool(conditions)
            _require_shapes(graph)
        for node in graph.graph.nodes:
            if node.target is torch.ops.aten.view.default:  # the layout may differ on this device
                node.target = torch.ops.aten.reshape.default
        if self.device.type == "cuda":
            self.needs_host = needs_host(graph, self.device)
        graph.graph.eliminate_dead_code()
        for node in graph.graph.find_nodes(op="call_function", target=ASSERT):
            node.target, self.is_conditional = required, True
        graph.graph.set_codegen(CodeGen())
        graph.recompile()
        return graph

    def _traced_as(
        self,
        mode: Literal["fake", "real"],
        given: Sequence[Tensor],
        conditions: Sequence[Tensor] = (),
    ) -> GraphModule:
        """Trace the step by make_fx.

        Args:
            mode: "fake" for tensors without values, or "real".
            conditions: filled by the step; they become its last output.
        """

        def step(*tensors: Tensor) -> list[Tensor]:
            before = versions_of(tensors)
            found, outputs = self._eager(tensors)
            self._written = [i for i, version in enumerate(versions_of(tensors)) if version != before[i]]
            self._has_norms = found.norms is not None
            norms = [found.norms] if found.norms is not None else []
            outputs = [x.detach() for x in outputs]
            flag = [torch.stack([x.reshape(()) for x in conditions]).all()] if conditions else []
            return [*outputs, *norms, *(found.grads[name] for name in self._own), *flag]

        # autograd uses another thread for a CUDA device, which a tracer does not follow
        in_one_thread = torch.autograd.set_multithreading_enabled(False)
        with torch.enable_grad(), in_one_thread, tracing(), self._repeated(given, Draws()):
            tracer: Any = make_fx(step, tracing_mode=mode, _allow_non_fake_inputs=True)
            graph: GraphModule = tracer(*given)
        return graph

    def _made(self, way: Way, given: Sequence[Tensor], draws: Draws) -> Run:
        """Compile the traced step by TorchInductor, or record it as a CUDA graph, or both."""
        step, given = self._step, [x.detach() for x in given]
        try:
            with torch.no_grad(), without_autocast():
                if way == "compiled":
                    inductor: Any = importlib.import_module("torch._inductor")  # takes a second
                    # dropout must draw the same numbers as in an eager step
                    step = inductor.compile(step, given, options={"fallback_random": True})
                if self.device.type != "cuda":
                    return step
                with self._repeated(given, draws):
                    lent = len(self._own) if self._pool.lends else 0
                    return Replayed(step, given, self._data, self._pool, lent)
        except Exception as error:
            raise no_graph(self._name, "it does not compile", error) from error


def _require_shapes(graph: GraphModule) -> None:
    """Let a traced step check each result with a shape that may depend on values."""
    for node in list(graph.graph.nodes):
        tags, library = getattr(node.target, "tags", ()), getattr(node.target, "namespace", "aten")
        if torch.Tag.dynamic_output_shape not in tags and library in ("aten", "prims", "dpbench"):
            continue
        with graph.graph.inserting_after(node):
            shapes = tree_map(lambda x: tuple(x.shape) if isinstance(x, Tensor) else None, node.meta.get("val"))
            checked = graph.graph.call_function(of_shapes, (node, shapes))
        node.replace_all_uses_with(checked, delete_user_cb=lambda user, mine=checked: user is not mine)


def of_shapes(found: Any, shapes: Any) -> Any:
    """Return a result, whose tensors must have these shapes.

    Args:
        found: a tensor, or several.
        shapes: of each tensor.

    Raises:
        OtherValues: another shape.
    """
    several = isinstance(found, (tuple, list))
    for x, shape in zip(found, shapes, strict=True) if several else ((found, shapes),):
        if isinstance(x, Tensor) and tuple(x.shape) != tuple(shape):
            raise OtherValues
    return found


def places_of(parameters: Parameters, given: Sequence[Any]) -> tuple[int | None, ...]:
    """Index of each parameter among a captured graph's arguments; it changes if a list of layers is reordered.

    Args:
        given: the arguments.
    """
    at = {id(x): i for i, x in enumerate(given)}
    return tuple(at.get(id(p)) for p in parameters.values())


def no_graph(name: str, why: str, error: Exception) -> UnsupportedModel:
    """Return the error for a step that has no graph.

    Args:
        name: of the backend.
        why: in words.
    """
    said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return UnsupportedModel(name, [Problem("model", f"its step is no graph, for {why}: {said}", REMEDY)])


def _sketched(of: ClippedGradient, parameters: Parameters) -> ClippedGradient:
    """Replace each gradient by 61 sums of every 61st entry, so that two whole gradients are never in memory at once."""

    def sums(gradient: Tensor) -> Tensor:
        flat = gradient.flatten()
        whole = len(flat) // SUMS * SUMS
        found = flat[:whole].view(-1, SUMS).sum(0, dtype=torch.promote_types(flat.dtype, torch.float32))
        found[: len(flat) - whole] += flat[whole:]
        return found

    grads = with_zeros(of.grads, parameters)
    return ClippedGradient({name: sums(grad) for name, grad in grads.items()}, of.norms, of.losses)


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach().clone() for x in tensors]


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
