"""Capture the caller's forward pass and loss as a guarded graph of torch's operations, with TorchDynamo.

Parameters, buffers and the batch are arguments of the graph. Guards check everything else that it depends on: Python
numbers and modules, closures, replaced buffers and parameters, hooks, modes, dtypes, shapes. If a guard fails, the code
is captured again. Dynamo applies Python side effects (a counter, a reassigned buffer) after the graph has run.
"""

import logging
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from clipping.numerics.per_thread import PerThread
from clipping.numerics.rng_replay import is_random
from clipping.program.dynamo_patches import (
    CTC,
    activations_may_require_gradients,
    cached_properties_take_no_lock,
    ctc_loss_has_shapes,
    globals_are_guarded,
    noting,
    tensors_stay_unmarked,
)
from clipping.program.unguarded import Unguarded

LossesOf = Callable[[Any, Any], Tensor]
"""(inputs, targets) -> ℓ [B]: forward pass and loss."""


@dataclass(eq=False)
class Captured:
    """A graph that Dynamo has captured.

    Attributes:
        graph: torch functions: arguments -> outputs, which include the losses and new values for Python variables.
        losses: index of the losses among the outputs.
        unguarded: state of what the code has opened that no guard checks.
        dtypes: floating dtypes of its values: autocast, or a model, may compute in others than the arguments'.
        notes: storage for the user of the graph; `clipping.program.graphs` keeps its traced steps there.
    """

    graph: GraphModule
    losses: int
    unguarded: Unguarded
    dtypes: frozenset[torch.dtype] = frozenset()
    notes: dict[Any, Any] = field(default_factory=dict)


DRAWS = "it draws random numbers of Python's or NumPy's"
ASSERT = torch.ops.aten._assert_scalar.default
"""Checks what TorchDynamo assumed of a shape that depends on values, such as that it does not broadcast."""
Instead = Callable[[Captured, Sequence[Any]], Sequence[Any]]


class NotCaptured(Exception):
    """Raised if Dynamo cannot capture the code as one graph; the message says why."""


class OtherValues(Exception):
    """Raised if a batch does not meet the conditions of a captured graph, or of a step traced on one batch's values."""


class TooMany(Exception):
    """Raised if another graph is needed beyond the limit."""


class Capture:
    """A function (inputs, targets) -> losses that runs `instead` in place of its graph.

    Args:
        losses_of: function to capture.
        instead: (captured, arguments) -> outputs, in place of the graph.
        most: maximum number of graphs.
    """

    def __init__(self, losses_of: LossesOf, instead: Instead, most: int) -> None:
        import torch._dynamo as dynamo  # takes a second

        logging.getLogger(dynamo.convert_frame.__name__).addFilter(_is_of_others)
        self._full = dynamo.exc.FailOnRecompileLimitHit
        self._failed, self._drawn = dynamo.exc.BackendCompilerFailed, dynamo.source.RandomValueSource
        self._patched = dynamo.config.patch(
            recompile_limit=most,
            accumulated_recompile_limit=1024,
            skip_nnmodule_hook_guards=False,
            allow_rnn=True,
            capture_dynamic_output_shape_ops=True,
            use_numpy_random_stream=True,  # else torch's random functions, with another stream, replace NumPy's
        )
        self._instead = instead
        self._graphs: list[Captured] = []
        self._opened: dict[int, Any] = {}
        self._raised: Exception | None = None
        self._checkpoint = torch.ops.higher_order.tag_activation_checkpoint
        marked = dynamo.allow_in_graph(_marked)

        def losses(inputs: Any, targets: Any) -> Tensor:
            if not torch.compiler.is_dynamo_compiling():  # before any of the caller's code has run
                raise NotCaptured("torch.compile is disabled, or its stance is eager")
            found: Tensor = marked(losses_of(inputs, targets))
            return found

        # Dynamo stores graphs by code object: with a shared one it would count other captures' graphs, too
        own: Any = types.FunctionType(losses.__code__.replace(), losses.__globals__, closure=losses.__closure__)
        backend = partial(_called, weakref.WeakMethod(self._captured))
        self._losses = torch.compile(own, backend=backend, fullgraph=True, dynamic=False)

    def __call__(self, inputs: Any, targets: Any) -> Tensor:
        """Return the losses ℓ [B] that `instead` computed.

        Raises:
            NotCaptured: the code cannot be captured.
            TooMany: another graph is needed. Existing graphs still run.
        """
        try:
            return self._run(inputs, targets)
        except NotCaptured as error:
            if CTC not in str(error.__cause__):
                raise
        with ctc_loss_has_shapes():
            return self._run(inputs, targets)

    def _run(self, inputs: Any, targets: Any) -> Tensor:
        with (
            _CAPTURES.set(True),
            self._patched,
            activations_may_require_gradients(),
            cached_properties_take_no_lock(),
            tensors_stay_unmarked(),
            globals_are_guarded(),
            noting(self._opened),
        ):
            try:
                return self._losses(inputs, targets)
            except self._full as error:
                raise TooMany from error
            except self._failed as error:  # raised in `_captured`
                raise NotCaptured(str(error.inner_exception)) from error
            except NotCaptured:
                raise
            except Exception as error:  # Dynamo raises errors of any type
                if error is self._raised:  # by `instead`
                    raise
                raise NotCaptured(_reason(error)) from error
            finally:
                self._raised = None  # its traceback holds the step's tensors
                self._opened.clear()

    def _captured(self, graph: GraphModule, example: Sequence[Any]) -> Callable[..., Sequence[Any]]:
        sources = (getattr(node.meta.get("grapharg"), "source", None) for node in graph.graph.nodes)
        if any(isinstance(source, self._drawn) for source in sources):  # Dynamo draws even if the graph does not run
            raise NotCaptured(DRAWS)
        for part in [x for x in graph.modules() if isinstance(x, GraphModule)]:  # checkpoints nest
            for node in part.graph.nodes:
                if node.target is self._checkpoint and _SELECTIVE not in getattr(part, node.args[0].target).meta:
                    node.target, node.kwargs = computed_again, {}
                elif node.target is ASSERT:
                    node.target = required
            part.recompile()
        (outputs,) = (node.args[0] for node in graph.graph.nodes if node.op == "output")
        place = next(i for i, node in enumerate(outputs) if getattr(node, "target", None) is _marked)
        self._graphs.append(Captured(graph, place, Unguarded(self._opened.values()), _dtypes_in(graph)))
        return partial(_called, weakref.WeakMethod(self._ran), len(self._graphs) - 1)

    def _ran(self, number: int, *given: Any) -> Sequence[Any]:
        try:
            return self._instead(self._graphs[number], given)
        except Exception as error:
            self._raised = error
            raise


def _called(method: weakref.WeakMethod[Callable[..., Any]], *given: Any) -> Any:
    """Call a method of an object that TorchDynamo must not keep alive.

    Dynamo never frees a backend or a function that replaces a graph. With them it would keep the model, the backend
    and the memory of its CUDA graphs.
    """
    found = method()
    assert found is not None
    return found(*given)


def _dtypes_in(graph: GraphModule) -> frozenset[torch.dtype]:
    nodes = [node for part in graph.modules() if isinstance(part, GraphModule) for node in part.graph.nodes]
    values = tree_leaves([node.meta.get("example_value") for node in nodes])
    return frozenset(x.dtype for x in values if isinstance(x, Tensor) and x.is_floating_point())


_SELECTIVE = "_checkpoint_context_fn"
"""In the meta of a checkpointed part that keeps some of its activations."""


_CAPTURES = PerThread(False)


def is_captured() -> bool:
    """True within a step that runs as a graph. Hooks that record a model's forward pass do nothing then."""
    return _CAPTURES.value


def computed_again(part: GraphModule, *args: Any) -> Any:
    """Run a checkpointed part of a captured graph so that a traced step recomputes it, too.

    torch's own operator keeps all activations while it is traced.

    Args:
        part: the checkpointed graph.

    Raises:
        NotCaptured: it draws random numbers while it is traced; recomputing it would draw others.
    """

    def run(*args: Any) -> Any:
        with modes_kept():  # recomputing ends early
            return part(*args)

    mode = get_proxy_mode()
    if mode is None:
        return checkpoint(run, *args, use_reentrant=False)
    nodes = mode.tracer.graph.nodes
    before = len(nodes)
    found = checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)
    mine: Any = islice(reversed(nodes), len(nodes) - before)
    if any(is_random(node.target, node.args, node.kwargs) for node in mine):
        raise NotCaptured("a checkpointed part draws random numbers")
    return found


@contextmanager
def modes_kept() -> Iterator[None]:
    """Context around a captured graph: an exception in it leaves autocast as it was before.

    A graph enters and leaves autocast by calls. If the last of them is skipped, later code runs in another dtype, or
    reads weights from autocast's cache that have changed since.
    """
    nesting, modes = _nesting(), {kind: _autocast(kind) for kind in ("cpu", "cuda")}
    try:
        yield
    except BaseException:
        while _nesting() > nesting:
            torch.autocast_decrement_nesting()
        if not nesting:
            torch.clear_autocast_cache()
        for kind, (enabled, dtype) in modes.items():
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        raise


def _nesting() -> int:
    """Number of autocast contexts around this call."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _autocast(kind: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def required(condition: Any, message: str) -> None:
    """Check an assumption of a captured graph, in place of `ASSERT`.

    Args:
        message: in words.
        condition: a boolean; symbolic while a step is traced on shapes, which then keeps the check.

    Raises:
        OtherValues: it does not hold.
    """
    if isinstance(condition, torch.SymBool):
        ASSERT(condition, message)
    elif not condition:
        raise OtherValues(message)


class _Shown(TorchDispatchMode):
    """Records whether an operation reads values to decide a shape or a number."""

    now = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.now |= not _READERS.isdisjoint(func.tags)
        return func(*args, **(kwargs or {}))


_READERS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


class Readers(Interpreter):
    """Runs a captured graph, and refuses functions that read values where a tracer sees no operation.

    Some of torch's functions (`tensor_split` at the indices in a tensor) read values from memory. TorchDynamo knows
    that their shapes depend on values. A trace would keep one batch's values as constants.

    Raises:
        NotCaptured: there is such a function.
    """

    def run_node(self, n: Node) -> Any:
        """Run a node."""
        if n.target is computed_again:
            part, *args = self.fetch_args_kwargs_from_env(n)[0]
            return Readers(part).run(*args)
        with _Shown() as shown:
            found = super().run_node(n)
        if n.meta.get("unbacked_bindings") and not shown.now:
            raise NotCaptured(f"{n.target} reads values without an operation")
        return found


def _is_of_others(record: logging.LogRecord) -> bool:
    """Whether a warning of Dynamo's is not about the limit of our graphs, which `Graphs` says once, in a line."""
    return "hit config" not in record.msg or __file__ not in str(record.args)


def _marked(losses: Tensor) -> Tensor:
    """Return the losses by a call that marks their output in the graph."""
    return losses.view_as(losses)


def _reason(error: Exception) -> str:
    """The error's type and message, with the first line of Dynamo's explanation."""
    said, _, explanation = str(error).split("from user code")[0].partition("\n  Explanation: ")
    said, why = (" ".join(text.split()) for text in (said, explanation.partition("\n")[0]))
    if why:
        said = f"{said}: {why}"
    return f"{type(error).__name__}: {said[:280]}"
