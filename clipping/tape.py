"""The tape: every use of a trainable parameter in a forward pass, found at the level of operations.

Modules are the wrong unit: one weight may be used twice, by a function, or outside the module that owns it. A
TorchFunctionMode sees each operation, whoever calls it, and sorts it by what it reads:

    nothing of parameters               runs as it is; the result depends on data if an operand does
    parameters, and nothing of data     runs as it is; the result is a `Source`: a slice, a cast, an expanded token
    both                                a *use*: run by its handler, which gives the rule of its gradient

A use gets a tensor hook on its output, which is handed the gradient of the output as it was before any in-place change:
there module hooks and custom functions fail on an in-place ReLU.

A backward pass for activation gradients alone must have something to differentiate by. Where an operation's own input
needs no gradient (the first layer, an embedding), its output is tied to a zero scalar, the anchor: the gradient with
respect to the anchors runs through every use and computes no weight gradient. (autograd asks each node only for the
inputs that lie on the way.) What is made of parameters alone, a copy for each sample, is asked for itself.

What is assumed, and verified on the first batch: an output with B·k rows has k consecutive ones to a sample. Refused,
with the reason: an output without such rows, and a parameter read behind the tape's back (a custom autograd function,
a compiled module).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from clipping.interface import Parameters, Problem, map_tensors, without_autocast
from clipping.orientation import MOVABLE, dimension_after, samples_dimension, samples_first
from clipping.rules import (
    COMPOSITES,
    HANDLERS,
    PER_SAMPLE,
    Broadcast,
    Copies,
    EmbeddingWeight,
    Refused,
    Rule,
    Spec,
    fallback,
)
from clipping.sources import CONSTANTS, Source, depends_on_data, derive, forget_data, mark_data

Arrival = Callable[["Use", Tensor], None]


@dataclass(eq=False)
class Use:
    """One operation on sources.

    Attributes:
        operation: its name, or that of the function that it is a part of.
        rules: for each source the rule of its gradient.
        output: shape and dtype of its output, and so of g.
        node: the number of the output's node in the order in which the forward pass made them.
    """

    operation: str
    rules: list[tuple[Source, Rule]]
    output: Spec
    node: int = 0


class Tape(TorchFunctionMode):
    """Records the uses of `parameters` while it is active.

    Args:
        parameters: the trainable parameters by name.
        batch: inputs and targets; what is computed from them depends on data.
        batch_size: B.
        stand_in: the name of the parameter whose place a tensor takes (see `clipping.spread`); None where none does.

    Attributes:
        uses: in the order of the forward pass.
        counts: parameter name -> number of uses.
        problems: what has no exact rule; the forward pass goes on, so that all of it is listed.
        by_hand: called when a gradient arrives in a backward pass that is not the tape's own.
    """

    def __init__(
        self,
        parameters: Parameters,
        batch: Any,
        batch_size: int,
        stand_in: Callable[[Tensor], str | None] | None = None,
    ) -> None:
        super().__init__()
        self.uses: list[Use] = []
        self.counts: Counter[str] = Counter()
        self.problems: list[Problem] = []
        self.by_hand: Callable[[], None] | None = None
        self._batch_size = batch_size
        self._stand_in = stand_in
        self._sources = {id(p): Source(p, {name: p}, rearranged=True) for name, p in parameters.items()}
        self._anchors: dict[torch.device, Tensor] = {}
        self._copies: list[Tensor] = []
        self._hooks: list[Any] = []
        self._marked: list[weakref.ref[Tensor]] = []
        self._arrival: Arrival | None = None
        self._composite: Any = None
        map_tensors(mark_data, batch)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        sources, data = [], []
        for operand in _tensors(args, kwargs):
            source = self._sources.get(id(operand))
            if source is None and self._stand_in is not None:
                source = self._stood_in(operand)
            if source is not None:
                sources.append(source)
            elif depends_on_data(operand):
                data.append(operand)
        if not sources or not torch.is_grad_enabled():
            return self._mark(func, args, kwargs, func(*args, **kwargs), data)
        if not data:
            return self._derive(func, func(*args, **kwargs), sources, args, kwargs)
        if func in COMPOSITES or func in PER_SAMPLE:
            outer, self._composite = self._composite, self._composite or func
            try:
                output = self._composed(func, args, kwargs)
                if output is not NotImplemented:
                    return self._mark(func, args, kwargs, output, data)
            except Refused as refused:
                self._refuse(func, sources, refused)
                return self._mark(func, args, kwargs, func(*args, **kwargs), data)
            finally:
                self._composite = outer
        at = max(samples_dimension(x) for x in data)
        if at and func in MOVABLE:
            with self:
                args, kwargs = samples_first(func, args, kwargs, at, max(x.dim() for x in data))
                return func(*args, **kwargs).transpose(0, at).contiguous()
        return self._mark(func, args, kwargs, self._use(func, args, kwargs, sources, data), data)

    def each(self, tensor: Tensor, rows: int) -> Tensor:
        """[rows, *shape]: a tensor made of parameters, for each row of the batch a copy whose gradient is its own."""
        copies = tensor.expand(rows, *tensor.shape)
        source = self._sources.get(id(tensor))
        if source is None:
            return copies
        self._copies.append(copies)
        return self._recorded(self._composite, copies, self._rules(copies, [Copies(tensor)], [source]))

    def backward(self, losses: Tensor, arrival: Arrival, *, retain_graph: bool) -> None:
        """Backward of Σ_i ℓ_i for activation gradients only: `arrival(use, g)` for each use that the loss depends on.

        The hooks are gone when this returns; the graph too, unless `retain_graph` keeps it for a second pass.
        """
        self._arrival = arrival
        self._sources.clear()  # what no use refers to (rows read from an embedding, say) need not last any longer
        try:
            wanted = [*self._anchors.values(), *self._copies]
            if wanted and losses.requires_grad:
                torch.autograd.grad(losses.sum(), wanted, retain_graph=retain_graph, allow_unused=True)
        finally:
            self.close()

    def sources(self) -> list[Source]:
        """Every tensor made of parameters alone, the parameters among them."""
        return list(self._sources.values())

    def name_of(self, leaf: Any) -> str:
        """Of a parameter of a sharded model that was read when the tape did not see it; "" for all else."""
        if self._stand_in is None or not isinstance(leaf, torch.nn.Parameter):
            return ""
        return self._stand_in(leaf) or "a parameter of the sharded model"

    def close(self) -> None:
        """Take the hooks off, and the marks from what outlives the forward pass (a buffer that it updated)."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._copies.clear()
        self._arrival = None
        for reference in self._marked:
            forget_data(reference())
        self._marked.clear()

    def _stood_in(self, operand: Tensor) -> Source | None:
        assert self._stand_in is not None
        name = self._stand_in(operand)
        if name is not None:
            self._sources[id(operand)] = Source(operand, {name: operand}, rearranged=True)
        return self._sources.get(id(operand))

    def _use(self, func: Any, args: Any, kwargs: Any, sources: list[Source], data: list[Tensor]) -> Any:
        differentiable = any(x.requires_grad for x in data)
        try:
            if func in HANDLERS:
                output, rules = HANDLERS[func](*args, **kwargs)
            else:
                output, rules = self._fallback(func, args, kwargs, sources, data)
            mine = self._rules(output, rules, sources)
        except Refused as refused:
            output = func(*args, **kwargs)
            if any(x.requires_grad for x in _tensors((output,), {})):
                self._refuse(func, sources, refused)
            return output
        if not mine:
            return output
        if not differentiable:
            output = _Anchor.apply(output, self._anchor(output.device))
        return self._recorded(self._composite or func, output, mine)

    def _recorded(self, func: Any, output: Tensor, rules: list[tuple[Source, Rule]]) -> Tensor:
        use = Use(_name(func), rules, Spec(output.shape, output.dtype))
        self.uses.append(use)
        for source, _ in rules:
            for name in source.parameters:
                self.counts[name] += 1
        use.node = output.grad_fn._sequence_nr()  # type: ignore[union-attr]
        self._hooks.append(output.register_hook(partial(self._arrived, use)))
        return output

    def _composed(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in PER_SAMPLE:
            return PER_SAMPLE[func](self.each, *args, **kwargs)
        with self:
            return COMPOSITES[func](*args, **kwargs)

    def _fallback(
        self, func: Any, args: Any, kwargs: Any, sources: list[Source], data: list[Tensor]
    ) -> tuple[Any, list[Rule]]:
        output = func(*args, **kwargs)
        if not any(x.requires_grad for x in _tensors((output,), {})):
            return output, []  # nothing differentiable: a shape, a comparison
        return fallback(func, args, kwargs, output, [source.tensor for source in sources], data)

    def _rules(self, output: Any, rules: list[Rule], sources: list[Source]) -> list[tuple[Source, Rule]]:
        """The rules of what is ours, per sample.

        Raises:
            Refused: a source without a rule (it was the input and not the weight), or rows that are not the batch's.
        """
        if not rules:
            return []
        mine = [(self._sources[id(rule.parameter)], rule) for rule in rules if id(rule.parameter) in self._sources]
        if {id(source) for source, _ in mine} != set(map(id, sources)):
            raise Refused("a parameter is the input of the operation, not its weight", "use microbatch or vmap")
        rows = output.shape[0] if output.dim() else 0
        if rows == 0 or rows % self._batch_size:
            reason = f"its output {list(output.shape)} does not have the batch, {self._batch_size}, as first dimension"
            raise Refused(reason, "give it one row a sample (batch first), or use microbatch or vmap")
        fold = rows // self._batch_size
        found = []
        for source, rule in mine:
            if isinstance(rule, Broadcast):
                source, rule = self._by_row(source, rule, output)
            found.append((source, rule if fold == 1 else rule.regroup(fold)))
        return found

    def _by_row(self, source: Source, rule: Broadcast, output: Tensor) -> tuple[Source, Rule]:
        """A source that was made of rows, traced back to what they were made of.

        A row for each row of the output (an expanded token), or rows read from an embedding, for each sample or for all
        of them alike (positions).
        """
        shape = source.tensor.shape
        if rule.aligned and source.row is not None:
            return source.row, rule.row(source.row.tensor)
        if source.lookup is not None and rule.is_sum and shape.numel() and shape[-1] == output.shape[-1]:
            ids, weight, padding_idx = source.lookup
            if shape == output.shape:
                return self._sources[id(weight)], EmbeddingWeight(weight, ids, padding_idx)
            if shape[-output.dim() + 1 :] == output.shape[1:] and shape.numel() == output[0].numel():
                ids = ids.reshape(1, *output.shape[1:-1]).expand(output.shape[:-1])
                return self._sources[id(weight)], EmbeddingWeight(weight, ids, padding_idx)
        return source, rule

    def _derive(self, func: Any, output: Any, sources: list[Source], args: Any, kwargs: Any) -> Any:
        for made in _tensors((output,), {}):
            if made.requires_grad and id(made) not in self._sources:  # `to` may give back what it was given
                source = derive(func, args, kwargs, made, sources)
                if func is F.embedding and id(args[1]) in self._sources:
                    source.lookup = (args[0], args[1], kwargs.get("padding_idx"))
                self._sources[id(made)] = source
        return output

    def _mark(self, func: Any, args: Any, kwargs: Any, output: Any, data: list[Tensor]) -> Any:
        if data and func not in CONSTANTS:
            for made in (output,) if isinstance(output, Tensor) else _tensors((output,), None):
                if not hasattr(made, "_depends_on_data"):
                    at = dimension_after(func, args, kwargs, data, made, self._batch_size)
                    self._marked.append(weakref.ref(mark_data(made, at)))
        return output

    def _arrived(self, use: Use, g: Tensor) -> None:
        if self._arrival is not None:
            with without_autocast(g.device):
                self._arrival(use, g)
            for _, rule in use.rules:
                if rule.share is not None:
                    rule.share.input_only = True
            use.rules = []  # and with them the operation's input, unless somebody keeps it
        elif self.by_hand is not None:
            self.by_hand()

    def _anchor(self, device: torch.device) -> Tensor:
        if device not in self._anchors:
            self._anchors[device] = torch.zeros((), device=device, requires_grad=True)
        return self._anchors[device]

    def _refuse(self, func: Any, sources: list[Source], refused: Refused) -> None:
        for name in dict.fromkeys(name for source in sources for name in source.parameters):
            self.problems.append(Problem(name, f"{_name(func)}: {refused.reason}", refused.remedy))


class _Anchor(torch.autograd.Function):
    """Identity on its first argument, in place, so that it costs nothing; the zero scalar's gradient is none at all."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def unrecorded(losses: Tensor, tape: Tape, parameters: Parameters) -> list[Problem]:
    """Parameters that the loss's graph reads and the tape did not see used at all, or less often than the graph does.

    An edge of the graph into a parameter's gradient accumulator is one read. Reads on the way to a source are the
    source's own; each other one must be a recorded use, or its share would be missing from the norm. A use that is not
    in this graph (of a forward pass that came to nothing) stands for no read in it.
    """
    names = {id(s.tensor): name for s in tape.sources() if s.is_parameter for name in s.parameters}
    names |= {id(p): name for name, p in parameters.items()}
    made = [source.tensor.grad_fn for source in tape.sources() if not source.is_parameter]
    inside = set(nodes(made))
    edges: Counter[str] = Counter()
    there = set()
    for node in nodes([losses.grad_fn]):
        there.add(node._sequence_nr())
        if node not in inside:
            leaves = [getattr(child, "variable", None) for child, _ in node.next_functions]
            edges.update(names.get(id(leaf), "") or tape.name_of(leaf) for leaf in leaves)
    edges.pop("", None)
    uses = [use for use in tape.uses if use.node in there]
    counted = Counter(
        name for use in uses for source, rule in use.rules if not rule.is_fallback for name in source.parameters
    )
    loose = {name for use in uses for source, rule in use.rules if rule.is_fallback for name in source.parameters}
    return [
        Problem(
            name,
            f"is read {count} times, of which the tape saw {counted[name]}: a custom function or compiled code",
            "take the parameter out of it, freeze it, or use microbatch or vmap",
        )
        for name, count in edges.items()
        if count > counted[name] and name not in loose
    ]


def nodes(roots: list[Any]) -> Iterator[Any]:
    """The nodes of the graph below some roots, each once."""
    stack, seen = list(roots), set()
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            stack.extend(child for child, _ in node.next_functions)


def _tensors(args: Any, kwargs: Any) -> list[Tensor]:
    """Tensors among the arguments, and in tuples and lists among them."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _tensors(value, None)
    return found


def _name(func: Any) -> str:
    return getattr(func, "__name__", str(func))
