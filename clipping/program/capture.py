"""What a caller's Python does with a batch becomes a graph of torch's operations, with guards: TorchDynamo's work.

The guards hold all that the graph depends on and does not read: numbers and modules in Python, closures, buffers and
parameters that are put in others' places, hooks, modes, dtypes, shapes. Where one fails, the code is captured anew.
Parameters, buffers and the batch are arguments of the graph, and what Python changes (a counter, a buffer that is bound
anew) is changed by Dynamo after the graph has run.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import checkpoint

from clipping.numerics.rng_replay import is_random

LossesOf = Callable[[Any, Any], Tensor]
"""(inputs, targets) -> ℓ [B]: forward pass and loss."""


@dataclass(eq=False)
class Captured:
    """A graph that Dynamo has captured.

    Attributes:
        graph: of torch's functions: arguments -> outputs. The losses are among these, and what Python is to change.
        losses: which of the outputs are the losses.
        notes: the owner's.
    """

    graph: GraphModule
    losses: int
    notes: dict[Any, Any] = field(default_factory=dict)


DRAWS = "it draws random numbers of Python's or NumPy's"
Instead = Callable[[Captured, Sequence[Any]], Sequence[Any]]


class NotCaptured(Exception):
    """Dynamo cannot capture the code whole, in words."""


class TooMany(Exception):
    """Another graph is needed, and there are as many as are kept."""


class Capture:
    """A function (inputs, targets) -> losses that runs `instead` where its graph would.

    Args:
        losses_of: what is captured.
        instead: (captured, arguments) -> outputs, in place of the graph.
        most: graphs at most.
    """

    def __init__(self, losses_of: LossesOf, instead: Instead, most: int) -> None:
        import torch._dynamo as dynamo  # takes a second

        self._errors, self._full = dynamo.exc.TorchDynamoException, dynamo.exc.FailOnRecompileLimitHit
        self._failed, self._drawn = dynamo.exc.BackendCompilerFailed, dynamo.source.RandomValueSource
        self._patched = dynamo.config.patch(
            recompile_limit=most,
            accumulated_recompile_limit=1024,
            skip_nnmodule_hook_guards=False,
            allow_rnn=True,
            use_numpy_random_stream=True,  # else NumPy's random functions become torch's, of another stream
        )
        self._instead = instead
        self._checkpoint = torch.ops.higher_order.tag_activation_checkpoint
        marked = dynamo.allow_in_graph(_marked)

        def losses(inputs: Any, targets: Any) -> Tensor:
            if not torch.compiler.is_dynamo_compiling():  # before anything of the caller's has run
                raise NotCaptured("torch.compile is disabled, or its stance is eager")
            found: Tensor = marked(losses_of(inputs, targets))
            return found

        # Dynamo keeps graphs by code object, and would count those of other captures among this one's
        own: Any = types.FunctionType(losses.__code__.replace(), losses.__globals__, closure=losses.__closure__)
        self._losses = torch.compile(own, backend=self._captured, fullgraph=True, dynamic=False)

    def __call__(self, inputs: Any, targets: Any) -> Tensor:
        """ℓ [B], as `instead` gave them.

        Args:
            inputs, targets: the batch.

        Raises:
            NotCaptured: the code has no graph.
            TooMany: a further graph is needed. The graphs that are kept still run.
        """
        with ExitStack() as stack:
            stack.enter_context(_capturing)
            stack.enter_context(self._patched)
            try:
                return self._losses(inputs, targets)
            except self._full as error:
                raise TooMany from error
            except self._failed as error:  # in `_captured`
                raise NotCaptured(str(error.inner_exception)) from error
            except self._errors as error:
                raise NotCaptured(_first_line(error)) from error

    def _captured(self, graph: GraphModule, example: Sequence[Any]) -> Callable[..., Sequence[Any]]:
        sources = (getattr(node.meta.get("grapharg"), "source", None) for node in graph.graph.nodes)
        if any(isinstance(source, self._drawn) for source in sources):  # drawn even where the graph does not run then
            raise NotCaptured(DRAWS)
        for node in graph.graph.nodes:
            if node.target is self._checkpoint and _SELECTIVE not in getattr(graph, node.args[0].target).meta:
                node.target, node.kwargs = computed_again, {}
        graph.recompile()
        (outputs,) = (node.args[0] for node in graph.graph.nodes if node.op == "output")
        place = next(i for i, node in enumerate(outputs) if getattr(node, "target", None) is _marked)
        captured = Captured(graph, place)
        return lambda *given: self._instead(captured, given)


_SELECTIVE = "_checkpoint_context_fn"
"""In the meta of a checkpointed part: it keeps some of what it computes."""


class _Capturing:
    """Whether code runs, or is traced, for a graph of its own."""

    now = False

    def __enter__(self) -> None:
        self._before, self.now = self.now, True

    def __exit__(self, *_: object) -> None:
        self.now = self._before


_capturing = _Capturing()


def is_captured() -> bool:
    """Is this call part of a step that runs as a graph? Hooks that record a model's forward pass do nothing then."""
    return _capturing.now


def computed_again(part: GraphModule, *args: Any) -> Any:
    """A checkpointed part of a captured graph, which a traced step computes again, too.

    torch's own operator keeps everything while it is traced.

    Args:
        part: what is checkpointed.
        args: its arguments.

    Raises:
        NotCaptured: it draws random numbers while it is traced, and would draw others when it is computed again.
    """
    mode = get_proxy_mode()
    if mode is None:
        return checkpoint(part, *args, use_reentrant=False)
    nodes = mode.tracer.graph.nodes
    before = len(nodes)
    found = checkpoint(part, *args, use_reentrant=False, preserve_rng_state=False)
    mine: Any = islice(reversed(nodes), len(nodes) - before)
    if any(is_random(node.target, node.args, node.kwargs) for node in mine):
        raise NotCaptured("a checkpointed part draws random numbers")
    return found


def _marked(losses: Tensor) -> Tensor:
    """The losses, for their output to be found by."""
    return losses.view_as(losses)


def _first_line(error: Exception) -> str:
    said = " ".join(str(error).split("\n  Explanation")[0].split("from user code")[0].split())
    return f"{type(error).__name__}: {said[:200]}"
