"""The tape: every use of a trainable parameter in a forward pass, found at the level of operations.

Modules are the wrong unit: one weight may be used twice, by a function, or outside the module that owns it. A
TorchFunctionMode sees each operation, whoever calls it, and sorts it by what it reads:

    nothing of parameters               runs as it is; the result depends on data if an operand does
    parameters, and nothing of data     runs as it is; the result is a `Source`: a slice, a cast, an expanded token
    both                                a *use*: run by its handler, which gives the rule of its gradient

Of a use the forward pass notes only what its rules will be made of; those of all uses are made in one go when the tape
is left. (Python that runs once between two large operations finds its caches taken, and costs several times what it
does in a row.)

A use gets a hook before the node of the graph that its output comes from, which is handed the gradient of the output as
it was before any in-place change: there module hooks and custom functions fail on an in-place ReLU.

A backward pass for activation gradients alone must have something to differentiate by. Where an operation's own input
needs no gradient (the first layer, an embedding), its output is tied to a zero scalar, the anchor: the gradient with
respect to the anchors runs through every use and computes no weight gradient. (autograd asks each node only for the
inputs that lie on the way.) What is made of parameters alone, a copy for each sample, is asked for itself; so is a
leaf that the model made, a hidden state that it said requires a gradient.

What is assumed, and looked at by `clipping.apart`: an output with B·k rows has k consecutive ones to a sample. Refused,
with the reason: an output without such rows, a parameter read behind the tape's back (a custom autograd function, a
compiled module: see `clipping.graph`), and a use whose gradient does not arrive exactly once.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from clipping.anchors import Anchored, AnchoredCopy, Repeated
from clipping.interface import Parameters, Problem, map_tensors, without_autocast
from clipping.orientation import MOVABLE, dimension_after, samples_dimension, samples_first
from clipping.rules import (
    COMPOSITES,
    HANDLERS,
    OF_DATA,
    PER_SAMPLE,
    Copies,
    Gradient,
    Refused,
    Spec,
    fallback,
)
from clipping.sources import CONSTANTS, Source, depends_on_data, derive, forget_data, is_marked, mark_data
from clipping.uses import Noted, Use, title

Arrival = Callable[[Use, Tensor], None]
_next_number = torch.autograd._get_sequence_nr
"""Of the next node that this thread makes."""


class Tape(TorchFunctionMode):
    """Records the uses of `parameters` while it is active.

    Args:
        parameters: the trainable parameters by name.
        batch: inputs and targets; what is computed from them depends on data.
        batch_size: B.
        stand_in: the name of the parameter whose place a tensor takes (see `clipping.spread`); None where none does.

    Attributes:
        uses: in the order of the forward pass; complete when the tape is no longer active.
        counts: parameter name -> number of uses.
        problems: what has no exact rule; the forward pass goes on, so that all of it is listed.
        by_hand: called when a gradient arrives in a backward pass that is not the tape's own.
        graph: the number of the losses' graph; see `clipping.graph`.
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
        self.graph = 0
        self._batch_size = batch_size
        self._stand_in = stand_in
        self._sources = {id(p): Source(p, {name: p}, rearranged=True) for name, p in parameters.items()}
        self._anchors: dict[torch.device, Tensor] = {}
        self._depth = 0
        self._noted: list[Noted] = []
        self._copies: list[tuple[Use, Tensor]] = []
        self._hooks: list[Any] = []
        self._leaves: list[Tensor] = []
        self._marked: list[weakref.ref[Tensor]] = []
        self._arrival: Arrival | None = None
        self._expected: set[Use] | None = None
        self._arrived: Counter[Use] = Counter()
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
        if (func in COMPOSITES or func in PER_SAMPLE) and self._reads_data(func, args, kwargs):
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
                args, kwargs = samples_first(func, args, kwargs, at, data)
                return func(*args, **kwargs).transpose(0, at).contiguous()
        return self._mark(func, args, kwargs, self._use(func, args, kwargs, sources, data), data)

    def each(self, tensor: Tensor, rows: int) -> Tensor:
        """[rows · n]: a vector made of parameters, for each row of the batch a copy whose gradient is its own."""
        first = _next_number()
        copies = Repeated.apply(tensor, rows)
        source = self._sources.get(id(tensor))
        if source is not None:
            output = Spec(torch.Size((rows, *tensor.shape)), copies.dtype)
            gradients = [(source, (tensor, Copies))]
            made = first, _next_number()
            self._noted.append(Noted(self._composite, output, copies.grad_fn, 0, gradients, made, copies))
        return copies

    def __enter__(self) -> Tape:
        self._depth += 1
        super().__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        super().__exit__(kind, error, tb)
        self._depth -= 1
        if not self._depth and error is None:
            self._settle()

    def _settle(self) -> None:
        """Make the rules of what a forward pass noted, and hook its uses."""
        noted, self._noted = self._noted, []
        for each in noted:
            try:
                use = each.settled(self._batch_size)
            except Refused as refused:
                self._refuse(each.operation, [source for source, _ in each.gradients], refused)
                continue
            self.uses.append(use)
            for source, _ in use.rules:
                for name in source.parameters:
                    self.counts[name] += 1
            if each.copies is not None:
                self._copies.append((use, each.copies))
            if each.copies is None or self.by_hand is not None:
                self._hooks.append(each.node.register_prehook(partial(self._hooked, use, each.at)))

    def expect(self, uses: set[Use], leaves: list[Tensor], graph: int) -> None:
        """What the graph of the losses has: uses, the gradient of each of which must arrive exactly once; leaves that
        are no parameters, and which uses may be led to by alone; and its number.
        """
        self.graph = graph
        anchors = {id(anchor) for anchor in self._anchors.values()}
        self._expected, self._leaves = uses, [leaf for leaf in leaves if id(leaf) not in anchors]

    def backward(self, losses: Tensor, arrival: Arrival, *, retain_graph: bool) -> None:
        """Backward of Σ_i ℓ_i for activation gradients only: `arrival(use, g)` for each use that the loss depends on.

        The hooks are gone when this returns; the graph too, unless `retain_graph` keeps it for a second pass.

        Raises:
            Refused: a use that was expected and whose gradient has not arrived, or one that has arrived twice.
        """

        def last(use: Use, g: Tensor) -> None:
            arrival(use, g)
            for _, rule in use.rules:
                if rule.share is not None:
                    rule.share.input_only = True
            use.rules = []  # and with them the operation's input, unless somebody keeps it

        self._sources.clear()  # what no use refers to (rows read from an embedding, say) need not last any longer
        names = {use: [name for source, _ in use.rules for name in source.parameters] for use in self._expected or ()}
        try:
            self.look(losses, last, retain_graph=retain_graph)
        finally:
            self.close()
        if self._expected is not None and (self._arrived != Counter(self._expected)):
            several = [use for use, count in self._arrived.items() if count > 1 or use not in self._expected]
            use = next(iter(several), None) or next(use for use in self._expected if not self._arrived[use])
            raise Refused(
                f"the gradient of {use.operation} with {', '.join(names.get(use, []))} arrived {self._arrived[use]} "
                "times, expected once",
                "use microbatch or vmap, and please report the model",
            )

    def look(self, losses: Tensor, arrival: Arrival, *, retain_graph: bool = True) -> None:
        """The same for a look at the gradients: hooks, rules and graph stay for `backward`."""
        self._arrival = arrival
        self._arrived.clear()
        try:
            uses = [use for use, _ in self._copies]
            wanted = [*(copies for _, copies in self._copies), *self._anchors.values(), *self._leaves]
            if wanted and losses.requires_grad:
                found = torch.autograd.grad(losses.sum(), wanted, retain_graph=retain_graph, allow_unused=True)
                with torch.no_grad():
                    for use, g in zip(uses, found, strict=False):
                        self._arrive(use, None if g is None else g.reshape(use.output.shape))
        finally:
            self._arrival = None

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
        self._noted.clear()
        self._copies.clear()
        self._leaves.clear()
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
        first = _next_number()
        try:
            if func in HANDLERS:
                output, gradients = HANDLERS[func](*args, **kwargs)
            else:
                output, gradients = self._fallback(func, args, kwargs, sources, data)
            mine = self._mine(gradients, sources)
        except Refused as refused:
            output = func(*args, **kwargs)
            if any(x.requires_grad for x in _tensors((output,), {})):
                self._refuse(func, sources, refused)
            return output
        if not mine:
            return output
        made = first, _next_number()
        if not any(x.requires_grad for x in data):
            # what the operation itself may have saved is not to be touched, nor what shares its memory with others
            anchored = Anchored if func in HANDLERS and not output._is_view() else AnchoredCopy
            output = anchored.apply(output, self._anchor(output.device))
        spec = Spec(output.shape, output.dtype)
        self._noted.append(Noted(self._composite or func, spec, output.grad_fn, output.output_nr, mine, made))
        return output

    def _reads_data(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether those operands of a composite are activations that must be; if not, it is not for us."""
        names = OF_DATA.get(func, ())
        operands = [*args[: len(names)], *(kwargs[name] for name in names if name in kwargs)]
        return all(depends_on_data(x) and id(x) not in self._sources for x in operands)

    def _composed(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in PER_SAMPLE:
            return PER_SAMPLE[func](self.each, *args, **kwargs)
        with self:
            return COMPOSITES[func](*args, **kwargs)

    def _fallback(
        self, func: Any, args: Any, kwargs: Any, sources: list[Source], data: list[Tensor]
    ) -> tuple[Any, Sequence[Gradient]]:
        output = func(*args, **kwargs)
        if not any(x.requires_grad for x in _tensors((output,), {})):
            return output, []  # nothing differentiable: a shape, a comparison
        return fallback(func, args, kwargs, output, [source.tensor for source in sources], data)

    def _mine(self, gradients: Sequence[Gradient], sources: list[Source]) -> list[tuple[Source, Gradient]]:
        """The gradients of what is ours; what the others hold on to is let go of.

        Raises:
            Refused: a source without one: it was the input and not the weight.
        """
        known = self._sources
        mine = [(known[id(gradient[0])], gradient) for gradient in gradients if id(gradient[0]) in known]
        if gradients and {id(source) for source, _ in mine} != set(map(id, sources)):
            raise Refused("a parameter is the input of the operation, not its weight", "use microbatch or vmap")
        return mine

    def _derive(self, func: Any, output: Any, sources: list[Source], args: Any, kwargs: Any) -> Any:
        for made in _tensors((output,), {}):
            if made.requires_grad and id(made) not in self._sources:  # `to` may give back what it was given
                source = derive(func, args, kwargs, made, sources)
                if func is F.embedding and id(args[1]) in self._sources:
                    source.lookup = (args[0], self._sources[id(args[1])], kwargs.get("padding_idx"))
                self._sources[id(made)] = source
        return output

    def _mark(self, func: Any, args: Any, kwargs: Any, output: Any, data: list[Tensor]) -> Any:
        if data and func not in CONSTANTS:
            for made in (output,) if isinstance(output, Tensor) else _tensors((output,), None):
                at = dimension_after(func, args, kwargs, data, made, self._batch_size)
                if (at or not made.requires_grad) and not is_marked(made):  # else its gradient is mark enough
                    self._marked.append(weakref.ref(mark_data(made, at)))
        return output

    def _hooked(self, use: Use, at: int, gradients: tuple[Tensor | None, ...]) -> None:
        self._arrive(use, gradients[at])

    def _arrive(self, use: Use, g: Tensor | None) -> None:
        """None: a gradient that is zero, or none."""
        if self._arrival is not None:
            self._arrived[use] += 1
            if g is not None:
                with without_autocast(g.device):
                    self._arrival(use, g)
        elif g is not None and self.by_hand is not None:
            self.by_hand()

    def _anchor(self, device: torch.device) -> Tensor:
        if device not in self._anchors:
            self._anchors[device] = torch.zeros((), device=device, requires_grad=True)
        return self._anchors[device]

    def _refuse(self, func: Any, sources: list[Source], refused: Refused) -> None:
        for name in dict.fromkeys(name for source in sources for name in source.parameters):
            self.problems.append(Problem(name, f"{title(func)}: {refused.reason}", refused.remedy))


def _tensors(args: Any, kwargs: Any) -> list[Tensor]:
    """Tensors among the arguments, and in tuples and lists among them."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _tensors(value, None)
    return found
