"""Record every use of a trainable parameter in a forward pass, at the level of operations.

Modules are the wrong unit: a weight may be used twice, by a function, or outside the module that owns it. A
TorchFunctionMode sees each operation, whoever calls it, and sorts it by its operands:

    nothing of parameters               runs as it is; the result depends on data if an operand does
    parameters, and nothing of data     runs as it is; the result is a `Source`: a slice, a cast, an expanded token
    both                                a *use*: run by its handler, which gives the rule of its gradient

The forward pass records only the arguments of each use's rules. The rules of all uses are made together when the tape
exits, as Python code that runs once between two large operations finds cold caches and costs several times as much.

`clipping.tape.arrivals` runs the backward pass in which the gradients of the uses arrive.

An output with B·k rows is assumed to have k consecutive rows a sample; `clipping.checks.sample_independence` verifies
this. The tape refuses, with the reason, an output without such rows, a parameter read that the tape does not see (by a
compiled module: see `clipping.tape.graph`), and a use whose gradient does not arrive exactly once. Custom autograd
functions are shown to it by `clipping.tape.custom_functions`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import FunctionType, TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from clipping.core.batches import map_tensors, tensors_of
from clipping.core.types import Parameters, Problem
from clipping.numerics import kernels
from clipping.numerics.rng_replay import undropped
from clipping.provenance.derived_parameters import (
    Source,
    depends_on_data,
    derive,
    is_marked,
    mark_data,
    parameter_source,
    remade,
    samples_of,
    saved_as_they_are,
)
from clipping.rules.base import Gradient, Refused, Spec, as_refused, title
from clipping.rules.fallback import fallback
from clipping.rules.handlers import COMPOSITES, OF_DATA, PER_SAMPLE, handler_of
from clipping.tape import custom_functions
from clipping.tape.arrivals import Anchored, Arrival, Arrivals
from clipping.tape.batch_dimension import (
    BROADCAST,
    MOVABLE,
    as_rows,
    new_dimensions,
    samples_first,
    whose,
)
from clipping.tape.checkpointing import LetGo, Replay, hooks_of_saving
from clipping.tape.marks import Marks, tensors
from clipping.tape.replaced import KNOWN, require_own
from clipping.tape.rewritten import REWRITTEN
from clipping.tape.uses import Activations, Use, given, mark_alone

_next_number = torch.autograd._get_sequence_nr
"""Returns the number of the next node that this thread makes."""
in_transform: Callable[[], int | None] = torch._C._functorch.maybe_current_level
"""Returns None outside of vmap, grad, jvp and similar transforms; inside them a row may belong to no sample."""
Naming = Callable[[Tensor], str | None]


class Tape(TorchFunctionMode):
    """Records the uses of `parameters` while active.

    Args:
        batch: inputs and targets; tensors computed from them depend on data.
        stand_in: maps a tensor to the name of the parameter that it replaces (`clipping.distributed.spread`), or to
            None. None if no parameter is replaced.
        lets_go: free inputs of uses within checkpoints until they are recomputed.

    Attributes:
        uses: in the order of the forward pass; complete when the tape has exited.
        problems: operations without an exact rule; the forward pass goes on, so that all are listed.
        arrivals, let_go: the gradients of the uses; the freed inputs.
        began, ended: the numbers that autograd gives to the next node before and after the forward passes.
        hooked: True if an operation on parameters ran under hooks for saved tensors, as a checkpoint sets them.
    """

    sees_functions = True
    """It handles custom `torch.autograd.Function`s: see `clipping.tape.custom_functions`."""

    def __init__(
        self, parameters: Parameters, batch: Any, batch_size: int, stand_in: Naming | None = None, lets_go: bool = False
    ) -> None:
        super().__init__()
        self.uses: list[Use] = []
        self.problems: list[Problem] = []
        self.arrivals = Arrivals()
        self._batch_size, self._stand_in = batch_size, stand_in
        self._sources = {id(p): parameter_source(name, p) for name, p in parameters.items()}
        self._depth = self.began = self.ended = 0
        self.hooked = self._replays = False
        self.let_go = LetGo(lets_go)
        self._noted: list[Use] = []
        me = weakref.proxy(self)  # no reference cycle: a tape's memory is freed with it, at once
        self._marks = Marks(batch_size, lambda *called: me._mixes(*called))
        self._mark = self._marks.mark
        self._composite: Any = None
        self._activations = Activations(self._sources, lambda *use: me._note(*use), self._marks.placed)
        for x in tensors_of(batch):
            mark_data(x)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if type(func) is FunctionType and func not in KNOWN:
            self._require_own(func)
        args, kwargs = undropped(func, args, kwargs or {})
        sources, data = [], []
        for operand in tensors(args, kwargs):
            source = self._sources.get(id(operand))
            if source is None and self._stand_in is not None:
                source = self._stood_in(operand)
            if source is not None and operand._version != source.version:
                source = self._renewed(operand)
            if source is not None:
                sources.append(source)
            elif depends_on_data(operand):
                data.append(operand)
        if not torch.is_grad_enabled():  # views of parameters require a gradient there, and are no sources
            data = [x for x in data if is_marked(x) or id(x._base) not in self._sources]
        if not sources or not torch.is_grad_enabled():
            output = kernels.overwriting.run(func, args, kwargs)
            if func is Tensor.register_hook:
                self.arrivals.hooks.append(args[0]._backward_hooks)
            return self._mark(func, args, kwargs, output, data)
        if func is torch.autograd.grad and self.arrivals.by_hand is not None:  # it cannot find the copies of uses
            self.arrivals.by_hand()
        hooked = hooks_of_saving(True) is not None
        self.hooked = self.hooked or hooked
        if in_transform() is not None:
            self._refuse(func, sources, Refused("is called inside of a torch.func transform", "use microbatch or vmap"))
            return self._mark(func, args, kwargs, func(*args, **kwargs), data)
        if not data:
            with saved_as_they_are() if hooked else nullcontext():  # a pull-back must not recompute a checkpoint
                output = func(*args, **kwargs)
            return self._derive(func, output, sources, args, kwargs)
        outer = self._composite
        try:
            output = self._as_others(func, args, kwargs, data)
        except Refused as refused:
            self._refuse(func, sources, refused)
            return self._mark(func, args, kwargs, func(*args, **kwargs), data)
        finally:
            self._composite = outer
        if output is not NotImplemented:
            return output
        return self._mark(func, args, kwargs, self._use(func, args, kwargs, sources, data), data)

    def __enter__(self) -> Tape:
        if not self._depth:
            self.began = self.began or _next_number()
            custom_functions.show()
        self._depth += 1
        super().__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        super().__exit__(kind, error, tb)
        self._depth -= 1
        if not self._depth:
            self.ended = _next_number()
            custom_functions.hide()
            if error is None:
                self._settle()

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Context in which backward passes recompute checkpoints by handlers, and record nothing again."""
        if not self.hooked:
            yield
            return
        known = dict(self._sources)
        self._replays, self._depth = True, self._depth + 1
        custom_functions.show()
        try:
            with Replay(self.__torch_function__):
                yield
        finally:
            custom_functions.hide()
            self._replays, self._depth = False, self._depth - 1
            self._sources.clear()
            self._sources.update(known)

    def _settle(self) -> None:
        """Make the rules of the recorded uses, and hook the uses."""
        noted, self._noted = self._noted, []
        for use in noted:
            try:
                use.settle(self._batch_size)
            except Exception as error:
                self._refuse(use.operation, [source for source, _ in use.gradients], as_refused(error))
                continue
            self.uses.append(use)
            self.arrivals.hook(use)
        mark_alone(self.uses, by_parts=self._stand_in is None)

    def backward(self, losses: Tensor, arrival: Arrival, *, retain_graph: bool, last: bool = True) -> None:
        """Backpropagate Σ_i ℓ_i to activations only, and call `arrival(use, g)` for each use in the graph.

        The last backward pass frees the hooks and rules, and the graph unless `retain_graph` keeps it for a second
        pass.

        Args:
            last: no other backward pass follows.

        Raises:
            Refused: the gradient of an expected use has not arrived, or has arrived twice.
        """

        def arrived(use: Use, g: Tensor) -> None:
            planned = use.rules
            if use.again is not None:
                use.rules = use.restored(self._batch_size)
            for _, rule in planned:
                if rule.share is not None:
                    rule.share.input_only = True
            arrival(use, g)
            use.rules = planned
            if last:
                use.rules = []  # frees the operation's input, unless something else refers to it

        if not self._replays:
            self._sources.clear()  # frees sources without a use, such as rows read from an embedding
        try:
            with self.let_go.asked() if self.let_go.count else nullcontext():
                self.arrivals.run(losses, arrived, retain_graph=retain_graph)
        finally:
            if last:
                self.arrivals.close()
        self.arrivals.require_complete()

    def sources(self) -> list[Source]:
        """All tensors made of parameters alone, including the parameters."""
        return list(self._sources.values())

    def is_source(self, x: Tensor) -> bool:
        """Return whether a tensor is made of parameters alone."""
        return id(x) in self._sources

    def given(self, x: Tensor) -> Tensor:
        """Return an output of the model, or an activation if the output is a parameter copied for each sample."""
        source = self._sources.get(id(x))
        if source is None or x.shape[:1] != (self._batch_size,) or (source.row is None and self._batch_size > 1):
            return x
        self._composite = torch.Tensor.expand
        try:
            return self._activations.own(source)
        finally:
            self._composite = None

    def name_of(self, leaf: Any) -> str:
        """Return the name of a sharded model's parameter whose read the tape did not see; "" for other leaves.

        Args:
            leaf: leaf of the losses' graph.
        """
        if self._stand_in is None or not isinstance(leaf, torch.nn.Parameter):
            return ""
        return self._stand_in(leaf) or "a parameter of the sharded model"

    def close(self) -> None:
        """Remove the hooks, and the marks of tensors that outlive the forward pass (a buffer that it updated)."""
        self.arrivals.close()
        self._noted.clear()
        self._marks.forget()

    def _stood_in(self, operand: Tensor) -> Source | None:
        assert self._stand_in is not None
        name = self._stand_in(operand)
        if name is not None:
            self._sources[id(operand)] = parameter_source(name, operand)
        return self._sources.get(id(operand))

    def _use(self, func: Any, args: Any, kwargs: Any, sources: list[Source], data: list[Tensor]) -> Any:
        for x in data:
            _ = x.grad_fn  # a view that was changed in place makes its node when read: here, not within the use
        first, is_first = _next_number(), not any(x.requires_grad for x in data)
        try:
            for x in (*data, *(source.tensor for source in sources)):
                if x.layout is not torch.strided or x.is_nested:
                    raise Refused("sparse and nested tensors have no rule", "make them dense, or use microbatch")
            handler = handler_of(func)
            if handler is not None:
                require_own(func)
                output, gradients = handler(*args, **kwargs)
                if output.is_complex():  # the formulas lack conjugations
                    output, gradients = fallback(
                        func, args, kwargs, output, [source.tensor for source in sources], data
                    )
            else:
                output, gradients = self._fallback(func, args, kwargs, sources, data)
            mine = self._mine(gradients, sources)
        except Exception as error:
            if self._replays:
                raise  # a checkpoint has all tensors that it needs
            output = func(*args, **kwargs)  # raises the model's own error, if any
            refused = as_refused(error)
            if refused is not error or any(x.requires_grad for x in tensors((output,), {})):
                self._refuse(func, sources, refused)
            return output
        if not mine:
            return output
        mine, again = self.let_go.taken(mine) if self.hooked else (mine, None)
        if self._replays:
            return output
        last = _next_number()
        if is_first:
            # must not change what the operation may have saved, nor tensors that share memory with others
            in_place = handler is not None and not output._is_view()
            output = Anchored.apply(output, self.arrivals.anchor(output.device), in_place)
        spec = Spec(output.shape, output.dtype)
        whole, operation = given(output, first), self._composite or func
        node, view = whole.grad_fn, output.grad_fn
        assert node is not None and view is not None
        at, numbers = (node, whole.output_nr), (node._sequence_nr(), view._sequence_nr())
        self._noted.append(Use(operation, spec, at, *numbers, mine, first, last, None, self._marks.order, again))
        return output

    def _as_others(self, func: Any, args: Any, kwargs: Any, data: list[Tensor]) -> Any:
        """Run a use as operations that have rules; return NotImplemented if it has to run unchanged.

        Raises:
            Refused: it has no exact rule.
        """
        at, order = whose(func, args, data, self._batch_size)
        if order is not None and order.owners.dim() != 1:
            with self:
                output = as_rows(func, args, kwargs, order, data)
            return self._marks.put(output, order)
        self._marks.order = order
        outer, composite = self._composite, self._composite or func
        if func in REWRITTEN:
            self._composite = composite
            instead = REWRITTEN[func](self._activations, func, *args, **kwargs)
            if instead is not None:
                with self:
                    return instead()
        if (func in COMPOSITES or func in PER_SAMPLE) and self._reads_data(func, args, kwargs):
            self._composite = composite
            if func in PER_SAMPLE:
                output = PER_SAMPLE[func](self._activations.each, *args, **kwargs)
            else:
                with self:
                    output = COMPOSITES[func](*args, **kwargs)
            if output is not NotImplemented:
                return self._mark(func, args, kwargs, output, data)
        self._composite = outer
        if func in BROADCAST and (aligned := new_dimensions(args, kwargs, data)):
            with self:
                args, kwargs = map_tensors(lambda x: x[aligned] if any(x is y for y in data) else x, (args, kwargs))
                return func(*args, **kwargs)
        if at and func in MOVABLE:
            with self:
                args, kwargs = samples_first(func, args, kwargs, at, data)
                return func(*args, **kwargs).transpose(0, at).contiguous()
        return NotImplemented

    def _reads_data(self, func: Any, args: Any, kwargs: Any) -> bool:
        """True if each operand that the composite needs as an activation is one; else it is not handled here."""
        names = OF_DATA.get(func, ())
        operands = [*args[: len(names)], *(kwargs[name] for name in names if name in kwargs)]
        return all(depends_on_data(x) and id(x) not in self._sources for x in operands)

    def _fallback(
        self, func: Any, args: Any, kwargs: Any, sources: list[Source], data: list[Tensor]
    ) -> tuple[Any, Sequence[Gradient]]:
        dims, count = max(x.dim() for x in data), len(data[0]) if data[0].dim() else 0
        of_rows = [x for x in sources if x.row is not None and x.tensor.dim() == dims and len(x.tensor) == count]
        if of_rows:  # copies of one row, each beside a row of the data
            own = {id(x.tensor): self._activations.own(x) for x in of_rows}
            args, kwargs = map_tensors(lambda x: own.get(id(x), x), (args, kwargs))
            with self:
                return func(*args, **kwargs), []
        output = func(*args, **kwargs)
        if not any(x.requires_grad for x in tensors((output,), {})):
            return output, []  # not differentiable: a shape, a comparison
        if any(isinstance(place := samples_of(x), int) and place for x in data):
            raise Refused("no exact rule for it where samples are not in the first dimension", "transpose its operands")
        if isinstance(output, Tensor) and output._is_view():  # a view changed in place would get another node
            output = output.clone()
        return fallback(func, args, kwargs, output, [source.tensor for source in sources], data)

    def _mine(self, gradients: Sequence[Gradient], sources: list[Source]) -> list[tuple[Source, Gradient]]:
        """Return the gradients of this tape's sources, and drop the others.

        Raises:
            Refused: a source has no gradient, as it was the input and not the weight.
        """
        known = self._sources
        mine = [(known[id(gradient[0])], gradient) for gradient in gradients if id(gradient[0]) in known]
        if gradients and {id(source) for source, _ in mine} != set(map(id, sources)):
            raise Refused("a parameter is the input of the operation, not its weight", "use microbatch or vmap")
        return mine

    def _derive(self, func: Any, output: Any, sources: list[Source], args: Any, kwargs: Any) -> Any:
        for made in tensors((output,), {}):
            if made.requires_grad and id(made) not in self._sources:  # `to` may return its operand
                source = derive(func, args, kwargs, made, sources)
                if func is F.embedding and id(args[1]) in self._sources:
                    source.lookup = (args[0], self._sources[id(args[1])], kwargs.get("padding_idx"))
                self._sources[id(made)] = source
        target = args[0] if args else None
        if output is None or output is target:  # perhaps changed in place, together with its base
            for changed in (target, target._base) if isinstance(target, Tensor) else ():
                if changed is not None and changed.requires_grad:
                    self._renewed(changed)
        return output

    def _renewed(self, tensor: Tensor) -> Source | None:
        """Return the source of a tensor changed in place, or None if it now depends on data."""
        source = self._sources.pop(id(tensor), None)
        if source is not None and (source.version == tensor._version or source.is_parameter):
            source.version = tensor._version
        else:
            source = remade(tensor, self._sources, {use.arrives[0] for use in self._noted})
        if source is not None:
            self._sources[id(tensor)] = source
        return source

    def _note(self, source: Source, gradient: Gradient, output: Spec, copies: Tensor) -> None:
        """Record a use whose output's gradient is requested directly."""
        if self._replays:
            return
        node = copies.grad_fn
        assert node is not None
        number, mine = node._sequence_nr(), [(source, gradient)]
        made = number, number + 1
        order = self._marks.order
        self._noted.append(Use(self._composite, output, (node, 0), number, number, mine, *made, copies, order))

    def _mixes(self, func: Any, args: Any, kwargs: Any) -> None:
        """Refuse an operation that mixes samples, unless this call is harmless."""
        try:
            if self._batch_size > 1:
                REWRITTEN[func](self._activations, func, *args, **kwargs)
        except Refused as refused:
            self.problems.append(Problem("model", f"{title(func)}: {refused.reason}", refused.remedy))

    def _require_own(self, func: Any) -> None:
        try:
            require_own(func)
        except Refused as refused:
            self.problems.append(Problem("model", refused.reason, refused.remedy))

    def _refuse(self, func: Any, sources: list[Source], refused: Refused) -> None:
        if self._replays:
            return
        for name in dict.fromkeys(name for source in sources for name in source.parameters):
            self.problems.append(Problem(name, f"{title(func)}: {refused.reason}", refused.remedy))
