"""Tape backends: they differ in how norms are found and how the clipped sum is formed.

                        instantiate every gradient    every Gram matrix   the cheaper of the two
    two passes          FastGradClip                  Ghost               MixedGhost
    book-keeping                                      BkGhost             BkMixed

*Two passes*: one backward pass of activation gradients for the norms, and another for Σ_i c_i g_i. (Kifer 2020,
arXiv:2009.03106; Li et al. 2021, arXiv:2110.05679; Bu et al. 2022, arXiv:2205.10683, Algorithm 1)

*Book-keeping*: one backward pass. Ordinary training spends T·p·d each on the forward pass, on the activation gradients
and on the weight gradients. Book-keeping spends the same, because it forms Σ_i c_i g_iᵀa_i once, with the library's own
kernels, from what the backward pass left. Only the norms are extra. (Bu et al. 2022, arXiv:2210.00038, Algorithm 1)

Per-layer clipping gives each parameter its own factors, which depend on the norms of that parameter alone. All backends
then form the weighted gradient where they find the norm.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from itertools import islice
from typing import Any, ClassVar

from torch import Tensor, nn

from clipping.backends.base import Backend
from clipping.checks.sample_independence import Occasions, mixed_rows
from clipping.core.batches import forward
from clipping.core.dtypes import norm_dtype, without_autocast
from clipping.core.microbatching import power_of_two
from clipping.core.reference import with_zeros
from clipping.core.types import ClippedGradient, LossFunction, Parameters, Problem, UnsupportedModel
from clipping.distributed.fsdp import norms_of
from clipping.distributed.spread import no_rows, row_of_zeros, stand_ins
from clipping.norms.collection import Book, LayerByLayer, Norms, TwoPasses
from clipping.numerics.products import full_precision_on_cpu
from clipping.numerics.rounding_bounds import excess, portion, rounds_operands
from clipping.planning.costs import ghost_by_paper
from clipping.planning.planner import Planner, Strategy
from clipping.provenance.derived_parameters import Source
from clipping.rules.base import Refused, Route, Rule, Spec
from clipping.tape.compiled import compiled_modules, explained
from clipping.tape.graph import unrecorded
from clipping.tape.record import Tape

UNSEEN = (1024, 4096)
"""Positions and features assumed before the first call."""


class TapeBackend(Backend):
    """Runs the forward pass under the tape, then one backward pass of activation gradients, which `norms` receives."""

    norms: ClassVar[type[Norms]] = TwoPasses
    compilable = True

    def __init__(self, model: nn.Module, loss_fn: LossFunction, **options: Any) -> None:
        super().__init__(model, loss_fn, **options)
        self.stand_in = stand_ins(self.model)
        self._sizes = UNSEEN
        ours = [p for p in model.parameters() if p.requires_grad]
        self._rounds_operands = any(rounds_operands(p, library) for p in ours[:1] for library in ("cublas", "cudnn"))

    def problems(self) -> Iterable[Problem]:
        yield from super().problems()
        yield from compiled_modules(self.model)

    def _rounding(self, batch_size: int) -> tuple[float, float]:
        positions, features = self._sizes
        dtype = self._dtype()
        most = min(batch_size, portion(batch_size, positions, dtype))
        return excess(
            batch_size, positions, features, most, dtype, of_layers=self.clip.per_layer, operands=self._rounds_operands
        )

    def _choose_for(self, batch_size: int) -> None:
        """Choose routes for one batch size, a power of two, until a batch is more than twice as large.

        A norm's bound depends on its route. If the route depended on the number of records, one more record would
        change the factors of all others.
        """
        if batch_size > 2 * self.chosen_for:
            likely = self.expected if batch_size <= 2 * self.expected < 4 * batch_size else batch_size
            self.chosen_for = power_of_two(likely)

    def settle(self) -> dict[str, Any]:
        return super().settle() | {"chosen_for": self.chosen_for}

    def resume(self, settled: Mapping[str, Any]) -> None:
        super().resume(settled)
        self.chosen_for = settled.get("chosen_for", 0)

    def _saw(self, tape: Tape) -> None:
        first = self._sizes == UNSEEN
        positions, features = (1, 1) if first else self._sizes
        rounds = self._rounds_operands and not first
        for use in tape.uses:
            for (_, rule), route in zip(use.rules, use.routes, strict=True):
                positions, features = max(positions, rule.positions), max(features, rule.features(route))
                rounds = rounds or bool(rule.library and rounds_operands(rule.parameter, rule.library))
        self._sizes, self._rounds_operands = (positions, features), rounds

    @property
    def lets_go(self) -> bool:
        """True if checkpointed inputs are freed and recomputed."""
        return not self.book_kept

    def by_ghost(self, rule: Rule) -> bool:
        """Whether to find this rule's norm by Gram matrices. Called only if the rule has them."""
        raise NotImplementedError(f"{type(self).__name__} plans its routes otherwise")

    def plan(self, tape: Tape, losses: Tensor) -> None:
        """Choose the route of each norm."""
        for use in tape.uses:
            use.routes = [self.route(*rule, use.output) for rule in use.rules]

    def route(self, source: Source, rule: Rule, output: Spec) -> Route:
        """Choose by `by_ghost` and the cost formulas; keep small gradients (`Rule.is_kept`)."""
        ghost = source.rearranged and bool(rule.ghosts) and self.by_ghost(rule)
        return Route(ghost, kept=not ghost and source.rearranged and rule.is_kept(output, self.chosen_for))

    def _clipped(self, parameters: Parameters, inputs: Any, targets: Any, batch_size: int) -> ClippedGradient:
        run = partial(self.losses, inputs, targets, batch_size)
        return self.of_losses(run, parameters, (inputs, targets), batch_size, self.occasions)

    def of_losses(
        self,
        losses: Callable[[], Tensor],
        parameters: Parameters,
        batch: Any,
        batch_size: int,
        occasions: Occasions | None = None,
    ) -> ClippedGradient:
        tape = Tape(parameters, batch, batch_size, self.stand_in, lets_go=self.lets_go)
        with closing(tape), self.explained():
            with tape:
                found = losses()
            return self.clipped(tape, found, parameters, occasions=occasions)

    def _nothing(self, parameters: Parameters, inputs: Any, targets: Any) -> ClippedGradient:
        if not self.sharded:
            return super()._nothing(parameters, inputs, targets)
        row = row_of_zeros(inputs)
        tape = Tape(parameters, (row, targets), 1, self.stand_in)
        with closing(tape), self.explained():
            with tape:
                losses = self.loss_fn(no_rows(forward(self.model, row)), targets)
            return self._finished(tape, losses, parameters)

    def clipped(
        self,
        tape: Tape,
        losses: Tensor,
        parameters: Parameters,
        *,
        keep_graph: bool = False,
        occasions: Occasions | None = None,
    ) -> ClippedGradient:
        """Clip a forward pass that the caller ran under `tape`, within `explained`: see `clipping.backends.recording`.

        Args:
            tape: no longer active.
            losses: [B], with their graph. The tape must hold every use of a parameter in it.
            occasions: when to check that samples stay apart; None for never.
        """
        if problems := tape.problems or unrecorded(losses, tape, parameters):
            raise UnsupportedModel(self.name, dict.fromkeys(problems))
        tape.arrivals.state_of = self.moving.of_hooks
        with tape.replaying():
            problem = mixed_rows(tape, losses, occasions)
            if problem is not None:
                raise UnsupportedModel(self.name, [problem])
            return self._finished(tape, losses, parameters, keep_graph)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Context that raises UnsupportedModel in place of an error that an unsupported model causes."""
        try:
            yield
        except Refused as refused:  # known only when the gradient arrived
            raise UnsupportedModel(self.name, [Problem("model", refused.reason, refused.remedy)]) from refused
        except RuntimeError as error:
            problem = explained(error)
            if problem is None:
                raise
            raise UnsupportedModel(self.name, [problem]) from error

    def _finished(
        self, tape: Tape, losses: Tensor, parameters: Parameters, keep_graph: bool = False
    ) -> ClippedGradient:
        kind = LayerByLayer if self.clip.per_layer else self.norms
        if kind is Book and tape.let_go.count:
            kind = TwoPasses  # do not hold what each backward pass recomputes
        if self.sharded:
            kind = norms_of(kind, losses)
        if losses.shape[0]:
            self._choose_for(losses.shape[0])
            self.plan(tape, losses)
            self._saw(tape)
        norms = kind(losses, parameters, self.clip, self.chosen_for)
        twice = kind.second_pass
        with full_precision_on_cpu():  # norms and sums bound each other
            tape.backward(losses, norms.arrived, retain_graph=twice or keep_graph, last=not twice)
            if isinstance(norms, TwoPasses):
                norms.again = partial(tape.backward, losses, retain_graph=keep_graph)
            with without_autocast():
                total, grads = norms.finish()
        self.coverage = norms.coverage()
        for name, grad in grads.items():
            wide = norm_dtype(parameters[name].dtype)
            if grad.dtype != wide:  # type promotion made it wider
                grads[name] = grad.to(wide)
        return ClippedGradient(with_zeros(grads, parameters), total, losses.detach(), norms.bounds)


class FastGradClip(TapeBackend):
    """Instantiates the per-sample gradients of one use at a time, and frees them once the norm is known."""

    name = "fastgradclip"

    def by_ghost(self, rule: Rule) -> bool:
        return False


class Ghost(TapeBackend):
    """Ghost norm wherever a use has one: weights of linear layers, convolutions and embeddings."""

    name = "ghost"

    def by_ghost(self, rule: Rule) -> bool:
        return True


class MixedGhost(TapeBackend):
    """Ghost norm where it takes less space than the gradient: 2T² ≤ pd. (arXiv:2205.10683, equation 4.1)

    With G groups there are G Gram pairs and G blocks of p·d entries, so the rule is the same.
    """

    name = "mixed_ghost"

    def by_ghost(self, rule: Rule) -> bool:
        return ghost_by_paper(rule.positions, rule.inputs, rule.outputs)


class BkGhost(Ghost):
    """Book-keeping with the ghost norm wherever a use has one."""

    name = "bk_ghost"
    norms = Book
    book_kept = True


class BkMixed(TapeBackend):
    """Book-keeping with a planned route for each use.

    Under activation checkpointing the book would hold the activations that the checkpoint frees. "auto" and "memory"
    then run two backward passes, as `MixedGhost` does, unless the model is sharded by FSDP2.

    Args:
        model, loss_fn, options: as for every backend.
        timing: also time the routes on this device in the second step; else plan by formula.
    """

    name = "bk_mixed"
    norms = Book
    book_kept = True
    strategy: ClassVar[Strategy] = "auto"
    """The planner's objective (`clipping.planning.planner`)."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction, *, timing: bool = True, **options: Any) -> None:
        super().__init__(model, loss_fn, timing=timing, **options)
        # a sharded module's parameters are absent between passes, so there is nothing to time with
        self.planner = Planner(self.strategy, timing=timing and not self.sharded)

    def settle(self) -> dict[str, Any]:
        return super().settle() | {"plans": self.planner.settle()}

    def resume(self, settled: Mapping[str, Any]) -> None:
        super().resume(settled)
        if settled:
            self.planner.resume(settled["plans"])

    @property
    def lets_go(self) -> bool:
        """True where memory counts: under checkpointing a second backward pass replaces the book."""
        return self.planner.strategy in ("auto", "memory") and not self.sharded

    def plan(self, tape: Tape, losses: Tensor) -> None:
        routes = iter(self.planner.plan(tape, losses, self.chosen_for).routes)
        for use in tape.uses:
            use.routes = list(islice(routes, len(use.rules)))


class BkMixedPaper(BkMixed):
    """Book-keeping with the ghost norm where 2T² ≤ pd, as in arXiv:2210.00038."""

    name = "bk_mixed:paper"
    strategy = "paper"


class BkMixedTime(BkMixed):
    """Book-keeping with the fastest route of each use, whatever its memory."""

    name = "bk_mixed:time"
    strategy = "time"


class BkMixedMemory(BkMixed):
    """Book-keeping with the route of each use that keeps the least memory, whatever its time."""

    name = "bk_mixed:memory"
    strategy = "memory"
