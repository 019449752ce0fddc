"""The engine: DP-SGD's step around any optimizer.

    sum over the logical batch of the clipped gradients            (clipping; several physical batches add up)
    + N(0, σ²S²I), once, S the clipping function's sensitivity     (dpbench.engine.noise)
    / b, the expected batch size, a constant                       -> p.grad, and the optimizer's own step

Under Poisson sampling the actual size of a batch is private, and never divides anything. A batch of no samples is an
ordinary step. (Abadi et al. 2016, arXiv:1607.00133, Algorithm 1)
"""

import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from clipping.backends.recording import for_recording
from clipping.core.clip_functions import ClipFunction
from clipping.core.types import LossFunction
from clipping.distributed.spread import reshard, sharded_modules, unwrapped
from dpbench.engine.batch_identity import Ticket, Tickets
from dpbench.engine.distributed import agreed, place, quieten, same_model, same_settings, shared_key
from dpbench.engine.errors import Misuse, PrivacyWarning
from dpbench.engine.loader import PrivateLoader
from dpbench.engine.noise import secret
from dpbench.engine.patch import Patch, claim, disclaim, mark, require_accounted, require_own
from dpbench.engine.recorder import Recorder
from dpbench.engine.release import Sensitivity, Sums, Unread, gathered, release_gradients, resumed, sensitivity
from dpbench.engine.sampling import Sampler, Sizes
from dpbench.engine.settings import clip_function, of_noise, require_usable, resolve, source_of, usable_backend
from dpbench.engine.spent import LEFT_OUT, NOT_ACCOUNTED, NOT_COUNTED, Abandoned, Log, PrivacySpent
from dpbench.engine.whole_step import WholeStep


class PrivacyEngine:
    """Makes an optimizer's steps differentially private.

    Formal guarantees: the parameters after T steps are (ε, δ)-private, as `privacy_spent` reports, under two
    conditions: the loss of a sample depends on that sample alone (compared with autograd on the first batch), and
    batches are drawn by the reported scheme, as `data_loader` does. Everything else that depends on the data (losses,
    accuracy, early stopping, buffers, a failed step) is not accounted. The theorem is about real numbers: in floating
    point one record moves the sum by at most C(1 + η) (`sensitivity`, derived in `clipping.numerics.rounding_bounds`),
    and noise is scaled to that.

    Args:
        model: in training mode; the optimizer holds its trainable parameters.
        batch_size: b, the expected size of a logical batch.
        sample_size: n, the records in the data set. q = b/n.
        epochs, steps: the planned length, at most one of them; needed for `target_epsilon`. An epoch has ⌈n/b⌉ steps.
        max_grad_norm: C.
        target_epsilon, noise_multiplier: one of them: ε at the end of training, or σ.
        target_delta: δ; 1/(2n) if None.
        backend: "bk_mixed", "bk_ghost", "mixed_ghost", "ghost", "fastgradclip", a variant, or "microbatch".
        clip: "flat", "automatic", "per_layer", or a clipping function of sensitivity C.
        accountant: a name of `accounting`; "prv" if None, or "rdp:whole" with discrete noise.
        noise: "gaussian", "discrete" (`dpbench.engine.discrete`), "banded:8" or "blt:3" (`dpbench.engine.correlated`).
        secure: noise from a cipher keyed by the operating system, which is the default without a generator.
        generator: repeats training bit for bit, with backends planned by formula: not private.
        sampling: how batches are drawn, which decides the neighbouring data sets of ε; see `dpbench.engine.sampling`.
        max_batch_size: for "truncated_poisson" alone.
        group_size: the number of records that ε protects at once, such as a person's (`dpbench.engine.users`).
        ghost_clipping, mixed, numerical_stability_constant: private_CNN's choice of a backend, and clip's stabiliser.
        log: a SummaryWriter, a wandb run or the like, for ε and other public numbers (`dpbench.engine.spent.Log`).

    Methods take:
        optimizer, loss: an optimizer of the model's trainable parameters; the samples' losses [B], with their graph.
        delta, state, replay: δ, the engine's if None; from `state_dict`; whether to draw the checkpoint's noise again.

    Raises:
        ValueError: an invalid argument.
        NoAnswer: the accountant has no bound for this sampling and group size, or no noise meets `target_epsilon`.
        UnsupportedModel: the model has no per-sample gradients, or none that the backend can compute.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        batch_size: int,
        sample_size: int,
        max_grad_norm: float,
        epochs: float | None = None,
        steps: int | None = None,
        target_epsilon: float | None = None,
        noise_multiplier: float | None = None,
        target_delta: float | None = None,
        backend: str = "bk_mixed",
        clip: str | ClipFunction = "flat",
        accountant: str | None = None,
        noise: str = "gaussian",
        secure: bool = False,
        generator: torch.Generator | None = None,
        sampling: str = "poisson",
        max_batch_size: int | None = None,
        group_size: int = 1,
        ghost_clipping: bool | None = None,
        mixed: bool | None = None,
        numerical_stability_constant: float = 0.0,
        log: Any = None,
    ) -> None:
        self._wrapped, model = model, unwrapped(model)
        require_usable(model)
        reshard(model)
        if secure and generator is not None:
            raise ValueError("expected secure or a generator, got both: what is seeded is not secure")
        self.backend, cls = usable_backend(backend, ghost_clipping, mixed)
        clip = clip_function(clip, max_grad_norm, numerical_stability_constant)
        self.settings = resolve(
            batch_size=batch_size,
            sample_size=sample_size,
            epochs=epochs,
            steps=steps,
            target_epsilon=target_epsilon,
            noise_multiplier=noise_multiplier,
            target_delta=target_delta,
            sampling=sampling,
            max_batch_size=max_batch_size,
            group_size=group_size,
            **of_noise(noise, accountant, sampling, group_size),
        )
        if self.noise_multiplier > 0 and not math.isfinite(clip.sensitivity):
            raise ValueError(f"expected a finite max_grad_norm with noise, got {max_grad_norm!r}")
        self.model = model
        self.noise = source_of(noise, self.settings, sum(p.numel() for p in model.parameters()), generator)
        self._sampler, self._tickets = Sampler(self.settings, shared_key(secret(generator))), Tickets()
        timing = self.timing = generator is None and self.noise_multiplier > 0  # else training is compared or repeated
        planned = for_recording(cls, model, clip, timing=timing, expected=self.settings.batch_size // place()[1])
        self._recorder = Recorder(model, planned, self._tickets.read)
        self._patch: Patch | None = None
        self._sums, self._unread, self._log = Sums(), Unread(), None if log is None else Log(log)
        self.steps = self.drawn = self._sampled = self._size = 0
        """Logical batches released; the loader's that were stepped or skipped; released ones of the loader's."""
        self.stepped = False
        """Whether the last `optimizer.step` moved the parameters, rather than accumulate a piece of a logical batch."""
        self._abandoned, self._sizes = Abandoned(), Sizes(*(n / place()[1] for n in (sample_size, batch_size)))
        self._unlike: str | None = None  # how the caller's batch sizes differ from Poisson samples
        self._drawing = -1  # the loader's logical batch whose pieces are in the sum; -1 for none
        self._ended = 0  # logical batches at the end of the last iteration of a loader
        self.counted = 0.0
        """The sum of `Recorder.count` over the last released logical batch: not private."""
        self._mask = 0, 0  # (real, padded) samples of the last physical batch stepped
        self._warned: set[str] = set()
        claim(self)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles are not attached, as a copied optimizer has its own `step`, and write to no log."""
        return {**vars(self), "_patch": None, "_log": None}

    @property
    def noise_multiplier(self) -> float:
        """σ, as given or calibrated."""
        return self.settings.mechanism.noise_multiplier

    @property
    def clip(self) -> ClipFunction:
        """The clipping function."""
        return self._recorder.backend.clip

    @property
    def sensitivity(self) -> Sensitivity:
        """S: how far one record can move the computed sum. Noise is scaled to it."""
        return sensitivity(self._recorder.backend, self.settings.batch_size)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the model's forward passes, replace `optimizer.step`, and add `optimizer.virtual_step`.

        Raises:
            Misuse: the model or the optimizer has an engine, or their parameters differ.
        """
        if self._patch is not None:
            raise Misuse("expected an engine that is not attached; call detach() first")
        reshard(self.model)
        self._patch = Patch(self, optimizer)
        self._recorder.open(self)
        quieten(self._wrapped, True)
        same_settings({**self.settings.as_state(), "sensitivity": self.clip.sensitivity})
        same_model(self.model)
        if beside := self._abandoned.beside(self.model):
            self._warn("beside", NOT_COUNTED.format(beside) + ", unless load_state_dict goes on from its checkpoint")
        if not self.noise.private:
            self._warn("seeded", "the noise comes from a generator of the caller's and can be repeated: not private")

    def detach(self) -> None:
        """Restore model and optimizer, and drop accumulated gradients. May be called twice.

        Then raises a FloatingPointError if the last step on a GPU was not finite.
        """
        self._recorder.close()
        self._sums = Sums()
        if self._patch is not None:
            self._patch.undo()
            quieten(self._wrapped, False)
            self._patch = None
            disclaim(self)
        if self._log is not None:
            self._log.tell(self, now=True)
        self._unread.read(wait=True)

    def step(self, loss: Any) -> None:
        """`optimizer.step(loss=losses)`: end a logical batch.

        If it raises, the logical batch ends without a step and its accumulated gradients are dropped, so that a later
        sum holds no record twice. On a GPU the next step raises for a batch that was not finite
        (`dpbench.engine.release`).
        """
        ticket = self._tickets.take(self.drawn)
        self.stepped = ticket is None or ticket.is_last
        self._end(ticket, partial(self._accumulate, loss, None if ticket is None else (ticket.real, ticket.handed)))

    def make_step(self, loss_fn: LossFunction, *, compile: bool | Literal["auto"] = "auto") -> WholeStep:
        """step(inputs, targets) -> losses [B]: forward, clip, noise and optimizer, as `optimizer.step(loss=...)` does.

        Args:
            loss_fn: loss_fn(outputs, targets) -> [B].
            compile: run the step as a program where that is faster (`program.graphs`). True raises if it cannot be one;
                "auto" then runs it eagerly, and does without TorchInductor on a CPU. A checkpoint keeps the choice.
                `data_loader` then pads on a CUDA device; on a CPU pass `pad=True`, as only 12 shapes have programs.
        """
        return WholeStep(self, loss_fn, compile=compile)

    def virtual_step(self, loss: Any) -> None:
        """`optimizer.virtual_step(loss=losses)`: clip and add part of a logical batch, without noise or step.

        The parts must hold different records: a record in two of them moves the sum by twice the sensitivity.
        """
        self._tickets.refuse_part()
        self.stepped = False
        self._begin(None)
        self._accumulate(loss, None)
        self._tickets.added_part()

    def empty_step(self) -> None:
        """Release a logical batch without samples, for a model that cannot run on one: adds noise, and counts."""
        patch = self._attached()
        require_accounted(patch.optimizer, self.steps)
        if sharded_modules(self.model):
            raise Misuse("expected a forward pass in every process, of no samples too: the model's shards are gathered")
        self._recorder.drop()
        ticket = self._tickets.take_empty(self.drawn)
        self.stepped = True
        self._end(ticket, patch.require_no_other_gradient)

    @property
    def mask(self) -> Tensor:
        """[P] bool, False for padding; of the physical batch being read, else of the next one."""
        ticket = self._tickets.first()
        real, handed = self._mask if ticket is None else (ticket.real, ticket.handed)
        return torch.arange(handed, device="cpu") < real

    def data_loader(
        self, dataset: Any, *, max_physical_batch_size: int | None = None, pad: bool | None = None, **options: Any
    ) -> PrivateLoader:
        """Yield batches of `dataset`, drawn as `sampling` says and as is accounted.

        Args:
            dataset: indexable, of `sample_size` records.
            max_physical_batch_size: split larger batches into pieces. `optimizer.step` moves the parameters at the last
                piece alone (`engine.stepped` says so; step a scheduler then).
            pad: pad physical batches to one of a few sizes, each with a plan and a graph: the multiples of √b, where b
                is `max_physical_batch_size` or `batch_size`; 1/(2√b) more work on average. None: pad on a CUDA device
                if `make_step` runs programs, and with `max_physical_batch_size` on a CUDA device, under FSDP2 and in
                several processes. Padding comes last and has weight 0, whatever its loss; `engine.mask` marks it, for
                averages of your own.
            options: of torch's DataLoader: num_workers, pin_memory, collate_fn, ...
        """
        return PrivateLoader(self, dataset, max_physical_batch_size, pad, options)

    @property
    def accounted(self) -> int:
        """The steps that ε counts: the released ones, those undone by loading a checkpoint, and batches left out."""
        period = self.settings.period  # a skipped batch does not lengthen it, and each undone step may be in its own
        counted = max(self.steps, self.drawn, self._ended) if period > 1 else self.steps
        return counted + self._abandoned.count * period

    def privacy_spent(self, delta: float | None = None) -> PrivacySpent:
        """ε of the steps so far. Steps undone by loading a checkpoint still count.

        Raises:
            Misuse: the optimizer's state was restored and the engine's was not.
            FloatingPointError: the last step on a GPU was not finite; the next call returns ε.
        """
        self._unread.read(wait=True)
        if self._patch is not None:
            require_accounted(self._patch.optimizer, self.steps)
        settings, abandoned, beside = self.settings, self._abandoned.count, self._abandoned.beside(self.model)
        mechanism, steps, by_engine = settings.mechanism, self.steps + abandoned, self._sampled == self.steps
        delta = settings.delta if delta is None else delta
        found = settings.guarantee(self.accounted, delta)
        caveats = []
        if not self.noise.private:
            caveats.append("the noise is seeded and can be repeated")
        if any(each.noise_multiplier == 0 for each, count in (*settings.earlier, (mechanism, 1)) if count):
            caveats.append("there is no noise")
        if found.kind != "upper_bound":
            caveats.append(f"ε is of kind {found.kind.replace('_', ' ')}, not an upper bound")
        if self._unlike is not None:
            caveats.append(f"{self._unlike}: these are not Poisson samples")
        private = not caveats
        if not by_engine:
            caveats.append("batches were not drawn by data_loader: that they follow the scheme is assumed")
        if beside:
            caveats.append(NOT_COUNTED.format(beside))
        if by_engine and (left := max(self.drawn, self._ended) - self.steps) > 0:
            caveats.append(LEFT_OUT.format(left))
        return PrivacySpent(
            epsilon=found.epsilon,
            delta=delta,
            steps=steps,
            accountant=settings.accountant,
            kind=found.kind,
            noise_multiplier=mechanism.noise_multiplier,
            sample_rate=mechanism.sample_rate,
            sampling=settings.sampling,
            adjacency=mechanism.adjacency,
            sampled_by="engine" if by_engine else "assumed",
            noise=self.noise.words,
            sensitivity=self.sensitivity.words,
            group_size=mechanism.group_size,
            private=private,
            caveats=(*caveats, NOT_ACCOUNTED),
        )

    def state_dict(self) -> dict[str, Any]:
        """The engine's state for torch.save, beside the model's and the optimizer's, to resume or repeat training.

        It holds the keys of noise and sampling, and is as secret as the data. Save the state of torch's global
        generator (dropout) yourself. With `replay` or a generator, resume from it only once: two trainings would draw
        the same noise, which cancels in their difference. It lacks steps taken later and lost in a crash: count them if
        their results were seen. Each process saves its own state; between logical batches the first process's state
        serves all.
        Raises a FloatingPointError if the last step on a GPU was not finite; the next call saves.
        """
        self._unread.read(wait=True)
        self._sums.require_clipped_to(self.clip.sensitivity)
        return {
            **self._abandoned.save(self.steps),
            "settings": self.settings.as_state(),
            "sensitivity": self.clip.sensitivity,
            "steps": self.steps,
            "drawn": self.drawn,
            "sampled": self._sampled,
            "key": self._sampler.key,
            "branch": self._sampler.branch,
            "noise": self.noise.state_dict(),
            "sums": {name: total.clone() for name, total in self._sums.items()},
            "counted": self._sums.counted,
            "size": self._size,
            "drawing": self._drawing,
            "backend": self._recorder.backend.settle(),
            "place": list(place()),
        }

    def load_state_dict(self, state: dict[str, Any], *, replay: bool = False) -> None:
        """Resume from `state_dict` with noise of a fresh key; with `replay`, repeat the same training.

        ε never falls: steps that this engine has released since, or in another training, still count.

        Raises:
            ValueError: a setting differs, so that ε would hold for neither run; or the state holds another process's
                or another model's part of a logical batch.
        """
        mine = {**self.settings.as_state(), "sensitivity": self.clip.sensitivity}
        saved = {"bands": 1, "group_size": 1, **state["settings"], "sensitivity": state["sensitivity"]}
        for name in mine:
            if mine[name] != saved.get(name):
                calibrated = name == "noise_multiplier" and self.settings.target_epsilon is not None
                raise ValueError(
                    f"expected {name}={saved.get(name)!r} as in the checkpoint, got {mine[name]!r}"
                    + ": give it in place of target_epsilon, whose noise is that of the planned steps" * calibrated
                )
        sums = resumed(state, dict(self.model.named_parameters()))
        self.noise.load_state_dict(state["noise"], replay=replay)
        self._recorder.backend.resume(state["backend"])
        self._abandoned.go_on(state, self.steps)
        same = replay or self._abandoned.count == state["abandoned"]  # no released step is undone
        self._sampler.take(state["key"], state.get("branch", 0) if same else self._abandoned.count)
        self.steps, self.drawn, self._sampled = state["steps"], state["drawn"], state["sampled"]
        self._unread.clear()
        self._sums, self._size, self._ended = sums, state["size"], 0
        self._drawing = state["drawing"] if self._sums else -1
        self._recorder.drop()
        self._tickets.clear()

    def _end(self, ticket: Ticket | None, add: Callable[[], Mapping[str, nn.Parameter] | None]) -> None:
        """Add a physical batch to the sum, and release the logical batch after its last piece.

        Args:
            ticket: of the batch.
            add: may return the model's parameters by name.
        """
        before, together = self.steps, place()[1] > 1
        try:
            self._begin(ticket)
            with agreed(before, self._drawing) if self.stepped and together else nullcontext():
                if self.stepped:
                    self._unread.read(wait=together)  # all processes raise at the same step
                    if self._log is not None:
                        self._log.tell(self)
                parameters = add()
            if self.stepped:
                self._release(parameters or self._recorder.backend.members(), sampled=ticket is not None)
        except BaseException:
            if self.stepped:
                self._drop_parts()
            if self.steps > before:
                self._attached().know_gradients()  # ctrl-C came between noise and optimizer
            if ticket is not None:
                self._recorder.drop()
                self._tickets.give_back(ticket, released=self.steps > before)
            raise

    def _accumulate(self, losses: Any, drawn: tuple[int, int] | None) -> Mapping[str, nn.Parameter] | None:
        """Add the clipped gradients of a physical batch, and return the model's parameters if it has samples.

        Args:
            losses: [B].
            drawn: (r, B) of the loader's batch: r records, padded to B.
        """
        patch = self._attached()
        require_accounted(patch.optimizer, self.steps)
        sensitivity = self.clip.sensitivity
        self._sums.require_clipped_to(sensitivity)
        with torch.inference_mode(False), torch.enable_grad():  # whatever the caller's mode, losses keep their graph
            result = self._recorder.finish(losses, drawn)
        patch.require_no_other_gradient()
        if result is None:
            return None
        parameters = self._recorder.backend.members()
        sums = gathered(result.grads, parameters, counted=self._recorder.counted, clipped_to=sensitivity)
        sums.require_finite()
        if self._sums.blocks:
            if odd := self._sums.keys() ^ result.grads.keys():
                what = f"got {min(odd)!r} in part"
                raise Misuse(f"expected the same trainable parameters in all of a logical batch, {what}")
            sums.add(self._sums)
        size = len(result.losses) if drawn is None else drawn[0]
        self._sums, self._size = sums, self._size + size  # a whole piece or nothing: it may be retried
        return parameters

    def _release(self, parameters: Mapping[str, nn.Parameter], *, sampled: bool) -> None:
        patch = self._attached()
        self._sums.require_clipped_to(self.clip.sensitivity)
        require_own(patch.optimizer, parameters)
        coordinates = sum(map(Tensor.numel, parameters.values()))
        deviation = self.noise.deviation(self.noise_multiplier, self.sensitivity.bound, coordinates)
        sums, self._sums, self.counted = self._sums, Sums(), self._sums.counted
        self.noise.in_turn(self.drawn - self.steps if sampled else None)
        self.steps += 1  # before the release: an error below may have moved parameters
        self._sampled += sampled
        mark(patch.optimizer, self.steps)
        unread = release_gradients(parameters, sums, self.noise, deviation, self.settings.batch_size, self.steps)
        if unread is not None:
            self._unread.add(self.steps, *unread)
        patch.inner_step(deviation / self.settings.batch_size)
        self._watch(sampled)

    def _watch(self, sampled: bool) -> None:
        """Warn once of batches that are not Poisson samples, and of more steps than planned."""
        settings, size, self._size = self.settings, self._size, 0
        if not sampled and settings.sampling == "poisson" and self._unlike is None:
            self._unlike = self._sizes.add(size)
            if self._unlike is not None:
                remedy = "not Poisson samples, as is accounted; take data_loader, or say sampling='shuffled'"
                self._warn("fixed", f"{self._unlike}: {remedy}")
        planned = settings.planned_steps
        if planned is not None and self.steps > planned and settings.target_epsilon is not None:
            self._warn("over", f"step {self.steps} is beyond the {planned} that target_epsilon was calibrated for")

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(text, PrivacyWarning, stacklevel=4)

    def _begin(self, ticket: Ticket | None) -> None:
        """Begin a step on the loader's batch of this ticket, or on one of the caller's (None)."""
        before, self._drawing = self._drawing, -1 if ticket is None else ticket.step
        if before != self._drawing:  # drop an unfinished batch: its last piece was left out
            self._drop_parts()
        if ticket is not None:
            self._mask, self.drawn = (ticket.real, ticket.handed), ticket.step + ticket.is_last

    def _attached(self) -> Any:
        if self._patch is None:
            raise Misuse("expected engine.attach(optimizer) before a step, got an engine that is not attached")
        return self._patch

    def _begin_drawing(self) -> None:
        if len(self._tickets) or self._sums:
            self._recorder.drop()
            self._drop_parts()
        self._tickets.clear()

    def _drop_parts(self) -> None:
        self._sums, self._size = Sums(), 0
        self._tickets.drop_parts()
