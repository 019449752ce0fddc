"""Collects the gradients of a backward pass into norms and the clipped sum.

    TwoPasses     norms only; a second backward pass forms the sum once the factors are known
    Book          norms; keeps what the sum needs until the factors are known
    LayerByLayer  per-layer clipping: forms each parameter's factors and sum at once

Gradients of several uses of one parameter add up *before* the norm: ‖Σ_k u_k‖² = Σ_k ‖u_k‖² + 2 Σ_{k<l} <u_k, u_l>.
Gram matrices give this where each pair has them (tied embedding and head, a linear layer called twice); else the
gradients are instantiated and added.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from clipping.core.clip_functions import ClipFunction
from clipping.core.dtypes import HALF, norm_dtype, wide_dtype
from clipping.core.microbatching import added, blocks, concatenated, each, sum_dtype
from clipping.core.types import Parameters
from clipping.numerics import kernels
from clipping.numerics.per_sample import at_once, part, sum_of_squares, weighted_sum
from clipping.numerics.rounding_bounds import UNKNOWN, Doubt, Reach, rounds_operands
from clipping.provenance.derived_parameters import Source
from clipping.rules.base import Route, Rule
from clipping.rules.elementwise import Broadcast, Copies
from clipping.tape.arrivals import Arrival
from clipping.tape.uses import Use

SMALL = 64
"""A gradient is small if the workspace holds a batch of it this many times. Small gradients are always kept."""


def _unknown(squares: Tensor) -> Reach:
    """The reach of a use for which only the squared norms [B] are known."""
    terms = squares.clamp(min=0).sqrt() * UNKNOWN
    return Reach(terms, torch.zeros_like(terms), terms.square())


class Term(NamedTuple):
    """One rule of a use: the tensor that it reads, the route of its norm, and the gradient g of the use's output.

    If the tensor does more than rearrange parameters, each gradient is pulled back to them, for the norm and again for
    the sum. Pulling back the sum would round differently: where it cancels (the mean, in weight standardisation) only
    rounding may be left.
    """

    source: Source
    rule: Rule
    route: Route
    g: Tensor

    def squared_norms(self, doubt: Doubt, found: tuple[Tensor, Reach] | None = None) -> Tensor:
        """Squared norms [B].

        Args:
            doubt: gets their rounding errors, as the sum is formed from other tensors.
            found: the squared norms and their reach, if they are known.
        """
        source, rule, route, g = self
        if source.rearranged:
            squares, reach = found or rule.squares_and_reach(g, route)
            reach = reach or rule.reach(g)
        else:
            squares, reach = concatenated(self._pulled_back_squares, self._blocks()), None
        features, positions = rule.features(route), rule.positions
        doubt.add(reach or _unknown(squares), features, positions, gram=route.ghost, of=g, library=rule.library)
        return squares

    def _pulled_back_squares(self, samples: slice) -> Tensor:
        found = self.source.pull_back(self.rule.instantiate(self.g, samples))
        return torch.stack([sum_of_squares(gradient) for gradient in found.values()]).sum(0)

    def add_sum(self, grads: dict[str, Tensor], factors: Tensor) -> None:
        """Add Σ_i c_i g_i to the sums of the parameters.

        Args:
            grads: name -> the sum of that parameter so far; updated.
        """
        source, rule, _, g = self
        if source.rearranged:
            return self.add_found(grads, rule.weighted(g, factors))
        names: list[str] = []

        def weighed(samples: slice) -> Tensor:
            found = source.pull_back(rule.instantiate(g, samples))
            names[:] = found
            of_block = part(factors, samples)
            return torch.cat([weighted_sum(of_block, gradient).flatten() for gradient in found.values()])

        total = added(weighed, self._blocks())
        shapes = [source.parameters[name].shape for name in names]
        for name, shape, found in zip(names, shapes, total.split([shape.numel() for shape in shapes]), strict=True):
            grads[name] = found.view(shape) + grads[name] if name in grads else found.view(shape)

    def add_found(self, grads: dict[str, Tensor], found: Tensor) -> None:
        """Add a sum, with that of a bias, to those of the parameters, which the tensor rearranges.

        Args:
            grads: name -> the sum of that parameter so far; updated.
            found: the sum, of the rule's parameter.
        """
        source, rule, *_ = self
        if rule.bias is not None:
            found, of_bias = found.split((source.tensor.numel(), rule.outputs))
            rule.bias.add_to(grads, of_bias)
        source.add_to(grads, found)

    def _blocks(self) -> list[slice]:
        """Blocks of samples whose gradients are pulled back at once."""
        rule, g = self.rule, self.g
        entries = sum(p.numel() for p in self.source.parameters.values())
        return blocks(rule.samples(g), rule.instantiated_bytes(g) + entries * g.element_size(), rule.workspace(g))

    def is_small_pulled_back(self, count: int) -> bool:
        """Whether the parameters' per-sample gradients are no larger than g, and fit into the workspace.

        Args:
            count: the number of samples to decide for.
        """
        rule, each = self.rule, self.rule.bytes_of_each(self.g)
        pulled_back = sum(p.numel() for p in self.source.parameters.values()) * self.g.element_size()
        made = pulled_back + rule.instantiated_bytes(self.g)
        return pulled_back <= each and count * made <= max(rule.room(), count * each // 4)


class Kept(NamedTuple):
    """The per-sample gradients of a source, in blocks of samples."""

    source: Source
    parts: list[Tensor]

    def add_sum(self, grads: dict[str, Tensor], factors: Tensor) -> None:
        """As `Term.add_sum`. Frees each block once it is added."""
        source, parts = self
        if len(parts) == 1:
            return source.add_to(grads, weighted_sum(factors, parts.pop()))
        total, stop, wide = None, len(factors), wide_dtype(parts[0].dtype)
        while parts:
            gradients = parts.pop()
            start = stop - len(gradients)
            found = weighted_sum(part(factors, slice(start, stop)), gradients)
            total = found.to(sum_dtype(found)) if total is None else total.add_(found)
            stop = start
        assert total is not None
        source.add_to(grads, total.to(wide))


BY_SIZE = attrgetter("source.tensor.nbytes", "source.tensor.shape")
"""Sort key: equal layers are neighbours."""


class Norms(ABC):
    """Adds up squared norms [B] and combines the uses that share a parameter.

    Rounding may make a product of Gram matrices negative; each squared norm is clamped at zero before it is added, or
    it would lower the total.

    Args:
        planned_for: the number of samples that routes were chosen for.
    """

    second_pass: ClassVar[bool] = False

    def __init__(
        self,
        losses: Tensor,
        parameters: Parameters,
        clip: ClipFunction,
        planned_for: int,
    ) -> None:
        self._parameters, self._clip, self._planned_for = parameters, clip, planned_for
        self._squares = torch.zeros(losses.shape, dtype=norm_dtype(losses.dtype), device=losses.device)
        self._entries_of_all = sum(map(Tensor.numel, parameters.values()))
        self._doubt = Doubt(self._squares, self._entries_of_all, second_pass=self.second_pass)
        self._sums: dict[str, Tensor] = {}
        self._kinds: dict[str, str] = {}
        self.bounds: Tensor | None = None
        """n̂ [B], which the factors were computed from; None with factors of each layer."""

    def arrived(self, use: Use, g: Tensor) -> None:
        """Receive the gradient of a use's output, [B·k, ...]."""
        for (source, rule), route in zip(use.rules, use.routes, strict=True):
            by_ghost = "ghost" if route.ghost else "instantiated"
            for name in source.parameters:
                if self._kinds.get(name) != "fallback":
                    self._kinds[name] = "fallback" if rule.is_fallback else by_ghost
            term = Term(source, rule, route, g if g.is_cpu else rule.laid_out(g, ghost=route.ghost))
            (self._single if source.alone else self._several)(term)

    def _is_small(self, rule: Rule, g: Tensor) -> bool:
        """True if a batch's gradients of one parameter are small: see `SMALL`."""
        return SMALL * self._planned_for * rule.instantiated_bytes(g) <= rule.room()

    @abstractmethod
    def finish(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return ‖g_i‖ [B], and name -> Σ_i c_i g_i for the parameters that the loss depends on."""

    def coverage(self) -> dict[str, float]:
        """Share of the parameters by route of their norm. Parameters without a gradient count as instantiated."""
        shares = dict.fromkeys(("ghost", "instantiated", "fallback"), 0.0)
        for name, p in self._parameters.items():
            shares[self._kinds.get(name, "instantiated")] += p.numel() / max(1, self._entries_of_all)
        return shares

    @abstractmethod
    def _single(self, term: Term) -> None:
        """Handle the only use of its parameters."""

    def _several(self, term: Term) -> None:
        """Handle one of several uses of a parameter."""
        for name, gradient in term.source.pull_back(term.rule.instantiate_all(term.g, term.route)).items():
            self._add(name, gradient)

    def _add(self, name: str, gradient: Tensor) -> None:
        self._kinds[name] = "instantiated" if self._kinds[name] == "ghost" else self._kinds[name]
        self._sums[name] = gradient + self._sums[name] if name in self._sums else gradient


class _WholeNorms(Norms):
    """The norm of the whole gradient. Uses that share a parameter are kept until the end."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._pairs: dict[str, list[Term]] = {}
        self._found: list[Tensor] = []
        self._small = Joined()

    def _several(self, term: Term) -> None:
        if term.route.ghost and term.source.is_parameter:
            self._pairs.setdefault(next(iter(term.source.parameters)), []).append(term)
        else:
            super()._several(term)

    def _total(self) -> tuple[Tensor, Tensor]:
        """‖g_i‖ [B], and n̂ [B], to clip by. Keeps paired uses in `_pairs` and instantiated gradients in `_sums`."""
        if self._found:
            self._squares += torch.stack(self._found).clamp_(min=0).sum(0)
        self._squares += self._small.squares(self._squares)
        for name in list(self._pairs):
            found = self._pairwise(self._pairs[name]) if name not in self._sums else None
            if found is not None:
                self._squares += found[0].clamp_(min=0)
                self._doubt_all(self._pairs[name], *found)
                continue
            for _, rule, route, g in self._pairs.pop(name):
                self._add(name, rule.instantiate_all(g, route))
        for gradient in self._sums.values():
            self._squares += sum_of_squares(gradient)
        self.bounds = self._doubt.bound(self._squares)
        return self._squares.clamp(min=0).sqrt(), self.bounds

    def _kept_sums(self, factors: Tensor) -> dict[str, Tensor]:
        """Σ_i c_i g_i of the gradients that were kept, by parameter. Call once; frees them."""
        grads = {name: weighted_sum(factors, self._sums.pop(name)) for name in list(self._sums)}
        for source, gradient in self._small.sums(factors):
            source.add_to(grads, gradient)
        return grads

    def _doubt_all(self, uses: list[Term], squares: Tensor, reaches: list[Reach | None]) -> None:
        unknown = _unknown(squares)
        found = [known or use.rule.reach(use.g) or unknown for use, known in zip(uses, reaches, strict=True)]
        reach = Reach(*(torch.stack(each).sum(0) for each in zip(*found, strict=True)))
        features = max(use.rule.features(use.route) for use in uses)
        positions = sum(use.rule.positions for use in uses)
        libraries = (use.rule.library for use in uses if use.rule.library and rounds_operands(use.g, use.rule.library))
        library = next(libraries, "")
        self._doubt.add(reach, features, positions, gram=True, of=uses[0].g, library=library)

    def _pairwise(self, uses: list[Term]) -> tuple[Tensor, list[Reach | None]] | None:
        """Squared norms of the sum of the uses' gradients, and each one's reach if it is found along with them."""
        squares, reaches = torch.zeros_like(self._squares), list[Reach | None]()
        for i, (_, rule, route, g) in enumerate(uses):
            own, reach = rule.squares_and_reach(g, route)
            squares += own.to(squares)
            reaches.append(reach)
            for _, other, _, other_g in uses[:i]:
                product = rule.inner(g, other, other_g)
                product = other.inner(other_g, rule, g) if product is None else product
                if product is None:
                    return None
                squares += 2 * product.to(squares)
        return squares, reaches


class Joined:
    """Small gradients of many parameters, batched into one matrix at the end of the backward pass to save launches.

    Methods take:
        gradients, like: of one source, [B, *shape]; any tensor [B].
    """

    def __init__(self) -> None:
        self._sources: list[Source] = []
        self._waiting: list[Tensor] = []

    def add(self, source: Source, gradients: Tensor) -> None:
        """Add gradients of one source."""
        self._sources.append(source)
        self._waiting.append(gradients if gradients.dim() == 2 else gradients.reshape(len(gradients), -1))

    def squares(self, like: Tensor) -> Tensor:
        """‖·‖² [B] over all gradients. Concatenates them into one matrix."""
        waiting, self._waiting = self._waiting, []
        self._waiting = [torch.cat(waiting, 1) if waiting else like.new_zeros(len(like), 0)]
        del waiting
        return sum_of_squares(self._waiting[0])

    def sums(self, factors: Tensor) -> Iterable[tuple[Source, Tensor]]:
        """Σ_i c_i g_i of each source. Call once, after `squares`; frees the gradients."""
        sizes = [source.tensor.numel() for source in self._sources]
        total = weighted_sum(factors, self._waiting.pop())
        return zip(self._sources, torch.ops.aten.split_with_sizes_copy.default(total, sizes), strict=True)


class TwoPasses(_WholeNorms):
    """Finds the norms, then repeats the same backward pass to form the sums.

    The second pass is not one of Σ_i c_i ℓ_i, which would round differently: where terms cancel (in the softmax of
    attention), its g would differ from the g of the norm. Small gradients, and those of several uses, are kept.

    Attributes:
        again: runs the second pass.
    """

    second_pass = True
    again: Callable[[Arrival], None]

    def _single(self, term: Term) -> None:
        source, rule, route, g = term
        keeps = self._is_small(rule, g) or isinstance(rule, Copies)
        if source.is_parameter and not route.ghost and keeps:
            gradient = rule.instantiate_all(g, route)
            if at_once(g):
                return self._small.add(source, gradient)
            return self._add(next(iter(source.parameters)), gradient)
        self._found.append(term.squared_norms(self._doubt))

    def finish(self) -> tuple[Tensor, dict[str, Tensor]]:
        with torch.no_grad():
            total, bound = self._total()
            factors = self._clip.factors(bound)
            grads = self._kept_sums(factors)
        self._pairs.clear()
        others = self._parameters.keys() - grads.keys()
        found: dict[str, Tensor] = {}

        def arrived(use: Use, g: Tensor) -> None:
            for source, rule in use.rules:
                if not others.isdisjoint(source.parameters):
                    Term(source, rule, Route(), g).add_sum(found, factors)

        if others:
            self.again(arrived)
        return total, found | grads


class Book(_WholeNorms):
    """Book-keeping: finds the norms, and keeps an entry for each use to form Σ_i c_i g_i.

    An entry holds the per-sample gradients if the route keeps them, else input and output gradient (a, g). Norms from
    (a, g) are computed after the backward pass has freed its memory. Small gradients (biases, scales) are batched.
    """

    joins: ClassVar[bool] = True
    """Whether small gradients are batched."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._entries: list[Term | Kept] = []
        self._waiting: list[Term] = []

    def _single(self, term: Term) -> None:
        source, rule, route, g = term
        if g.dtype in HALF and self._waiting and self._joined_to_weight(term):
            return None
        if not source.rearranged and term.is_small_pulled_back(self._planned_for):
            return self._several(term)
        if self.joins and route.kept and not route.way and self._is_small(rule, g):
            return self._small.add(source, rule.instantiate(g, slice(0, len(self._squares))))
        if not route.kept:
            self._waiting.append(term)
            return self._entries.append(term)
        way = rule.named(route.way or rule.best_way(g, ghost=False))
        found = each(partial(way.kept, rule, g), rule.blocks(g, way.name, route.block))
        parts, squares = map(list, zip(*found, strict=True))
        self._squares += torch.cat(squares) if len(squares) > 1 else squares[0]
        self._entries.append(Kept(source, parts))

    def _joined_to_weight(self, bias: Term) -> bool:
        """Let a linear layer's weight, the term before it, find norm and sum of the bias too; return whether it can."""
        source, rule, _, g = bias
        weight = self._waiting[-1]
        if type(rule) is not Broadcast or g is not weight.g or weight is not self._entries[-1] or not self.joins:
            return False
        alike = rule.is_sum and rule.parameter.shape == (weight.rule.outputs,)
        free = source.is_parameter and weight.source.rearranged and weight.rule.bias is None
        if not (alike and free and kernels.ways.takes_bias(weight.rule, g, weight.route)):
            return False
        self._waiting[-1] = self._entries[-1] = weight._replace(rule=weight.rule.with_bias(source))
        return True

    def _total(self) -> tuple[Tensor, Tensor]:
        for term in self._waiting:
            if term.route.ghost and not term.g.is_cpu:
                term.rule.lay_out_input(term.g)
        terms = self._of_inputs()
        self._waiting.clear()
        several = {i: term[1:] for i, term in enumerate(terms) if term.source.rearranged and term.g.dtype in HALF}
        known = kernels.ways.normed_together(several) if several else {}
        self._found += [term.squared_norms(self._doubt, known.get(i)) for i, term in enumerate(terms)]
        return super()._total()

    def _of_inputs(self) -> list[Term]:
        """The waiting terms, one for all linear layers in a row that share an input and its Gram matrix."""
        found: list[Term] = []
        for term in self._waiting:
            last = found[-1] if found and self.joins and term.source.rearranged else None
            if last and last.source.rearranged and kernels.ways.shares_input(*last[1:], *term[1:]):
                found[-1] = last._replace(rule=last.rule.with_beside(term.g))
            else:
                found.append(term)
        return found

    def finish(self) -> tuple[Tensor, dict[str, Tensor]]:
        with torch.no_grad():
            total, bound = self._total()
            factors = self._clip.factors(bound)
            grads = self._kept_sums(factors)
            for name in list(self._pairs):
                self._entries += reversed(self._pairs.pop(name))
            self._entries.sort(key=BY_SIZE, reverse=True)
            while self._entries:  # largest last (an embedding's), when the others are freed
                last = self._entries[-1]
                is_half = isinstance(last, Term) and last.source.rearranged and last.g.dtype in HALF
                if not (is_half and self._added_several(grads, factors)):
                    self._entries.pop().add_sum(grads, factors)
        return total, grads

    def _added_several(self, grads: dict[str, Tensor], factors: Tensor) -> bool:
        """Add the sums of the last layers by one launch, if that is faster; return whether it is."""
        count = kernels.ways.together(self._last_layers())
        if count == 1:
            return False
        terms: Any = self._entries[-count:]
        del self._entries[-count:]
        found = kernels.ways.weighted([term.rule for term in terms], [term.g for term in terms], factors)
        for term, total in zip(terms, found or (), strict=True):
            term.add_found(grads, total)
        return True

    def _last_layers(self) -> Iterator[tuple[Rule, Tensor]]:
        """The entries from the last one back to the first that has no rule, or whose gradient is pulled back."""
        for entry in reversed(self._entries):
            if not (isinstance(entry, Term) and entry.source.rearranged):
                return
            yield entry.rule, entry.g


class LayerByLayer(Norms):
    """Per-layer clipping: forms a parameter's factors and weighted gradient as soon as its norms are known."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._grads: dict[str, Tensor] = {}

    def _single(self, term: Term) -> None:
        source, rule, _, g = term
        if not source.rearranged or source.part is not None:  # factors apply to whole parameters
            return self._several(term)
        doubt = Doubt(self._squares, rule.parameter.numel(), of_layer=True)
        factors = self._factors(next(iter(source.parameters)), term.squared_norms(doubt), doubt)
        source.add_to(self._grads, rule.weighted(g, factors))

    def finish(self) -> tuple[Tensor, dict[str, Tensor]]:
        with torch.no_grad():
            for name, gradient in self._sums.items():
                doubt = Doubt(self._squares, self._parameters[name].numel(), of_layer=True)
                self._grads[name] = weighted_sum(self._factors(name, sum_of_squares(gradient), doubt), gradient)
            self._sums.clear()
            return self._squares.sqrt(), self._grads

    def _factors(self, name: str, squares: Tensor, doubt: Doubt) -> Tensor:
        squares = squares.to(self._squares).clamp_(min=0)
        self._squares += squares
        # a layer's factors depend on its own norms, its position, and the number of layers
        layers = doubt.bound(squares).expand(len(self._parameters), -1)
        return self._clip.factors(layers)[list(self._parameters).index(name)]
