"""The whole step as one graph for each shape of batch: traced once, compared, and run in the way that is fastest here.

A step is some thousand operations of torch's, and between them the Python of autograd and of the tape, which is most of
what a small model pays. It decides by shapes alone. So it can run once on fake tensors, which have no numbers, under
`make_fx`, which writes down all operations: forward pass, gradients of activations, norms, factors and weighted sums.
What is left is a graph without autograd, without hooks, and with the kernels in it (`clipping.kernels.traced`):

    eager      the step as it was
    traced     the graph's operations, one after the other: the same ones, and so the same bits, but where a library
               lays a result out in another way than a fake tensor has it (attention: the last bit of a product)
    compiled   the graph by TorchInductor, which fuses what is between products; equal to rounding

Each is timed on the first batch of which there is a graph, and the fastest is taken: on a CPU Inductor makes a ViT
faster, and a ResNet slower, ordinary training's as well as ours.

**What a graph does not see** is Python: hooks run when it is traced, numbers that the model keeps and tensors that it
puts in others' places are what they were. Parameters, buffers and the random numbers of dropout are read anew in each
step. One in `COMPARED` is compared with the eager one, on the same batch.
"""

from __future__ import annotations

import importlib
import logging
import time
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import CodeGen

from clipping.batches import map_tensors, tensors_of
from clipping.draws import Draws
from clipping.formats import without_autocast
from clipping.kernels.traced import tracing
from clipping.second_look import Moving
from clipping.types import ClippedGradient, Parameters, Problem, UnsupportedModel
from clipping.verification import WrongGradient, compare, limit_of

_LOG = logging.getLogger(__name__)
BEFORE, MOST, TURNS, COMPARED = 2, 12, 5, 200
"""Steps of a shape before its graph, in which routes are planned and timed; graphs in all; turns of the timing; and
in how many steps one is compared with the eager one: the first, second, fourth, ... of a graph, too."""
SUMS = 61
"""A prime, so that no sum is over a dimension, along which a gradient may cancel."""
REMEDY = "compile=False"

Way = Literal["eager", "traced", "compiled"]
Key = tuple[str, int]
Run = Callable[[Parameters, Any, Any, int], ClippedGradient]
"""A step: of the trainable parameters by name, inputs, targets and B."""


class Graphs:
    """Those of one model and one loss.

    Args:
        name: of the backend.
        model: whose parameters and buffers the step reads.
        run: the eager step.
        moving: what a step of the model's writes to.
        version: told when what `run` decides may have changed: graphs are made anew.
        timing: take the fastest way; else what is `traced`, whose results do not depend on how long anything took.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        run: Run,
        moving: Moving,
        *,
        version: Callable[[], Hashable],
        timing: bool = True,
    ) -> None:
        self._name, self._model, self._run, self._version, self._timing = name, model, run, version, timing
        self._moving = moving
        self._modules = list(model.modules())
        self._graphs: dict[Key, Graph] = {}
        self._calls: Counter[Key] = Counter()
        self._resumed: dict[str, Way] = {}
        self._told = False
        self._unseen = self.steps = 0
        """That ran as graphs: since the last look, and in all."""

    def is_due(self) -> bool:
        """Is somebody to look at the next step as it was? After every so many that ran as graphs."""
        due = self._unseen >= COMPARED
        self._unseen = 0 if due else self._unseen
        return due

    @property
    def ways(self) -> list[Way]:
        """How steps are run, of each shape that has a graph."""
        return [graph.way for graph in self._graphs.values()]

    def settle(self) -> dict[str, str]:
        """Which way each shape takes, for `resume`; from now on nothing is timed."""
        self._timing = False
        return {**self._resumed, **{kind: graph.way for (kind, _), graph in self._graphs.items()}}

    def resume(self, settled: Mapping[str, Any]) -> None:
        """Take the ways of those that were settled.

        Args:
            settled: what `settle` gave.
        """
        self._timing, self._resumed = False, dict(settled)
        self._graphs.clear()

    def find(self, parameters: Parameters, inputs: Any, targets: Any, batch_size: int) -> Graph | None:
        """The graph for such a batch; None where the step is to be run as it is.

        Args:
            parameters: the trainable ones by name.
            inputs, targets: the batch.
            batch_size: B.

        Raises:
            UnsupportedModel: the step cannot be traced: it decides by numbers in tensors, for one.
            WrongGradient: what was traced is not the step.
        """
        key = self._key(parameters, (inputs, targets))
        graph = self._graphs.get(key)
        if graph is None:
            self._calls[key] += 1
            if self._calls[key] <= BEFORE or not self._has_room():
                return None
            graph = self._graphs[key] = self._made(key[0], parameters, inputs, targets, batch_size)
        if graph.way == "eager":
            return None
        self.steps += 1
        self._unseen += 1
        return graph

    def _has_room(self) -> bool:
        if len(self._graphs) < MOST:
            return True
        if not self._told:
            warnings.warn(
                f"expected batches of at most {MOST} shapes to compile graphs for, got more: the others run without; "
                "pad them to one shape (data_loader(..., max_physical_batch_size=B, pad=True))",
                RuntimeWarning,
                stacklevel=4,
            )
            self._told = True
        return False

    def _key(self, parameters: Parameters, batch: Any) -> Key:
        """What a checkpoint knows a kind of step by, and which tensors are trained in this process."""
        shapes = map_tensors(lambda x: (x.dtype, x.shape, x.stride(), x.device), batch)  # type: ignore[arg-type,return-value]
        casts = [
            torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
            for kind in sorted({x.device.type for x in tensors_of(batch)})
        ]
        modes = "".join("te"[not module.training] for module in self._modules)
        dtypes = {(p.dtype, p.device) for p in parameters.values()}
        identity = hash(tuple((name, id(p)) for name, p in parameters.items()))  # another one may take a place
        return repr((shapes, casts, modes, dtypes, self._version())), identity

    def _made(self, kind: str, parameters: Parameters, inputs: Any, targets: Any, batch_size: int) -> Graph:
        graph = Graph(self._name, self._model, self._run, self._moving, parameters, (inputs, targets), batch_size)
        known = self._resumed.get(kind)
        ways = [known] if known is not None else ["eager", "traced", "compiled"] if self._timing else ["traced"]
        graph.take_fastest(ways, parameters, inputs, targets)
        return graph


class Graph:
    """A step of one shape.

    Args:
        name, model, run, moving: as for `Graphs`.
        parameters: the trainable ones by name.
        batch: inputs and targets.
        batch_size: B.

    Attributes:
        way: how it is run.
    """

    way: Way = "traced"

    def __init__(
        self,
        name: str,
        model: nn.Module,
        run: Run,
        moving: Moving,
        parameters: Parameters,
        batch: Any,
        batch_size: int,
    ) -> None:
        self._moving = moving
        self._name, self._model, self._run, self._batch_size = name, model, run, batch_size
        self._names, self._steps, self._has_norms = list(parameters), 0, True
        places: list[tuple[dict[str, Any], str, int]] = [
            (held, key, id(x))
            for module in model.modules()
            for held in (module._parameters, module._buffers)
            for key, x in held.items()
            if x is not None
        ]
        at = {known: i for i, known in enumerate(dict.fromkeys(known for *_, known in places))}  # tied ones are one
        self._places = [(held, key, at[known]) for held, key, known in places]
        self._first = {i: (held, key) for held, key, i in reversed(self._places)}
        self._own = {name: at[id(p)] for name, p in parameters.items()}
        self._step: Callable[..., Iterable[Tensor]] = self._traced(batch)

    def __call__(self, parameters: Parameters, inputs: Any, targets: Any, batch_size: int) -> ClippedGradient:
        """The step, of a batch of the shape that it was traced with.

        Args:
            parameters, inputs, targets, batch_size: as for the eager one.

        Raises:
            WrongGradient: it is not the eager step any more.
        """
        self._steps += 1
        expected = None
        if self._steps % COMPARED == 0 or self._steps & (self._steps - 1) == 0:
            with self._moving.repeated(Draws()):
                expected = _sketched(self._run(parameters, inputs, targets, batch_size))
        found = self._by_graph(inputs, targets)
        if expected is not None:
            self._compare(_sketched(found), expected)
        return found

    def take_fastest(self, ways: Iterable[str], parameters: Parameters, inputs: Any, targets: Any) -> None:
        """Compare with the eager step those of `ways` that can be had, and take the fastest.

        Args:
            ways: at least one.
            parameters, inputs, targets: of a batch. Random numbers are not used up, and buffers stay as they are.
        """
        draws = Draws()

        def eager() -> ClippedGradient:
            return self._run(parameters, inputs, targets, self._batch_size)

        traced, steps = self._step, dict[Way, Callable[..., Iterable[Tensor]]]()
        with self._moving.repeated(draws):
            expected = _sketched(eager())
        for way in ways:
            self._step = traced
            try:
                if way == "compiled":
                    self._step = self._compiled(inputs, targets)
                if way != "eager":
                    with self._moving.repeated(draws):
                        self._compare(self._sketched_by_graph(inputs, targets), expected)
            except (UnsupportedModel, WrongGradient) as error:
                if way == "traced":
                    raise
                text = f"expected TorchInductor to compile the step, got {error}; its graph runs as it was traced"
                warnings.warn(text, RuntimeWarning, stacklevel=2)
            else:
                steps[way] = self._step  # type: ignore[index]
        if not steps:  # what a checkpoint was made with cannot be had here
            steps["traced"] = traced
        taken = {way: [0.0] * TURNS for way in steps}
        for turn in range(TURNS if len(steps) > 1 else 0):
            for way in steps:
                self._step = steps[way]
                with self._moving.repeated(draws):
                    start = time.perf_counter()
                    found = eager() if way == "eager" else self._by_graph(inputs, targets)
                    _wait_for(found.losses.device)
                    taken[way][turn] = time.perf_counter() - start
        self.way = min(taken, key=lambda way: sorted(taken[way])[TURNS // 2])
        self._step = steps[self.way]
        times = ", ".join(f"{way} in {1e3 * sorted(each)[TURNS // 2]:.1f} ms" for way, each in taken.items())
        _LOG.info("a step of %d samples runs %s (%s)", self._batch_size, self.way, times)

    def _sketched_by_graph(self, inputs: Any, targets: Any) -> ClippedGradient:
        """For the first time."""
        try:
            return _sketched(self._by_graph(inputs, targets))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise self._no_graph("what was traced does not run", error) from error

    def _no_graph(self, why: str, error: Exception) -> UnsupportedModel:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return UnsupportedModel(self._name, [Problem("model", f"its step is no graph, for {why}: {said}", REMEDY)])

    def _compare(self, found: ClippedGradient, expected: ClippedGradient) -> None:
        """Of two that are `_sketched`."""
        if not all(bool(x.isfinite().all()) for x in (expected.losses, *expected.grads.values())):
            return  # of what is not a number nothing can be told, and others refuse it
        dtypes = {x.dtype for x in (expected.losses, *self._held()) if x.is_floating_point()}
        limit, agreement = limit_of(dtypes), compare(found, expected)
        if not agreement.within(limit):
            raise WrongGradient(f"{self._name}, as a graph ({REMEDY} runs it without),", agreement, limit)

    def _held(self) -> list[Tensor]:
        """Parameters and buffers, as they are now; each once."""
        return [held[key] for held, key in (self._first[i] for i in range(len(self._first)))]

    def _given(self, inputs: Any, targets: Any) -> list[Tensor]:
        """What a graph takes: parameters and buffers, then the tensors of the batch."""
        return [x.detach() for x in (*self._held(), *tensors_of((inputs, targets)))]

    def _by_graph(self, inputs: Any, targets: Any) -> ClippedGradient:
        given = self._given(inputs, targets)
        with torch.no_grad(), without_autocast(given[-1].device):
            losses, *others = self._step(*given)
        norms = others.pop(0) if self._has_norms else None
        return ClippedGradient(dict(zip(self._names, others, strict=True)), norms, losses)

    def _traced(self, batch: Any) -> GraphModule:
        """The graph: (parameters and buffers, tensors of the batch) -> losses, norms, gradients."""
        held = self._held()

        def step(*tensors: Tensor) -> list[Tensor]:
            rest = iter(tensors[len(held) :])
            inputs, targets = map_tensors(lambda _: next(rest), batch)
            with self._in_their_places(tensors):
                mine: Any = {name: tensors[i] for name, i in self._own.items()}
                found = self._run(mine, inputs, targets, self._batch_size)
            self._has_norms = found.norms is not None
            norms = [found.norms] if found.norms is not None else []
            return [found.losses, *norms, *(found.grads[name] for name in self._names)]

        # gradients on a CUDA device are computed in another thread, which no tracer follows
        in_one_thread = torch.autograd.set_multithreading_enabled(False)
        try:
            with torch.enable_grad(), in_one_thread, tracing(), self._moving.repeated(Draws()):
                tracer: Any = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)
                graph: GraphModule = tracer(*held, *tensors_of(batch))
        except UnsupportedModel:
            raise
        except Exception as error:
            raise self._no_graph("something in it depends on more than shapes", error) from error
        for node in graph.graph.nodes:
            if node.target is torch.ops.aten.view.default:  # of a layout that is another one on this device
                node.target = torch.ops.aten.reshape.default
        graph.graph.eliminate_dead_code()
        graph.graph.set_codegen(CodeGen())
        graph.recompile()
        return graph

    @contextmanager
    def _in_their_places(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """The model's parameters and buffers are these within it."""
        before = [held[key] for held, key, _ in self._places]
        try:
            for held, key, i in self._places:
                held[key] = tensors[i]
            yield
        finally:
            for (held, key, _), x in zip(self._places, before, strict=True):
                held[key] = x

    def _compiled(self, inputs: Any, targets: Any) -> Callable[..., Iterable[Tensor]]:
        """What TorchInductor makes of the graph."""
        given = self._given(inputs, targets)
        inductor: Any = importlib.import_module("torch._inductor")  # takes a second
        try:
            with torch.no_grad(), without_autocast(given[-1].device):
                step: Callable[..., Iterable[Tensor]] = inductor.compile(
                    self._step,
                    given,
                    options={"fallback_random": True},  # dropout draws what it draws in an eager step
                )
                return step
        except Exception as error:
            raise self._no_graph("it does not compile", error) from error


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
