"""`PrivacyEngine` and `BatchMemoryManager` with Opacus' arguments, translated to `dpbench.PrivacyEngine`."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from accounting import calibrate_noise_multiplier
from clipping.core.types import UnsupportedModel
from dpbench.engine import Misuse
from dpbench.engine import PrivacyEngine as Engine
from dpbench.engine.adjust import set_rate
from dpbench.engine.distributed import place
from dpbench.engine.settings import batch_norm_problem, batch_norms, require_known, require_usable
from dpbench.integrations.opacus import checkpoint
from dpbench.integrations.opacus.accountant import Accountant
from dpbench.integrations.opacus.clips import Clips
from dpbench.integrations.opacus.criterion import Backward, DPLoss
from dpbench.integrations.opacus.loaders import DPDataLoader, records_of, scheme_of
from dpbench.integrations.opacus.module import GradSampleHooks, GradSampleModule, unwrapped
from dpbench.integrations.opacus.optimizer import DPOptimizer
from dpbench.integrations.opacus.outputs import Outputs

MODES = ("hooks", "functorch", "ew", "ghost", "ghost_fsdp")
"""All run bk_mixed; the last two also return a criterion."""


class PrivacyEngine:
    """Opacus' `PrivacyEngine`, with the accounting, noise and clipping of `dpbench.PrivacyEngine`.

    Args:
        accountant: "prv", "rdp", "gdp" (an estimate), or another name of `accounting`.
        secure_mode: refuse a noise_generator; without one, noise comes from a cipher with the operating system's key.

    Raises:
        ValueError: an unknown accountant.

    Methods take:
        module: to be trained.
        optimizer, data_loader: Opacus' arguments; ignored by `is_compatible` and `validate`.
        path, more: as in `dpbench.integrations.opacus.checkpoint`.
    """

    def __init__(self, *, accountant: str = "prv", secure_mode: bool = False) -> None:
        self.engine: Engine | None = None
        """The engine, after `make_private`: `engine.privacy_spent()` states the conditions of ε."""
        self.secure_mode = secure_mode
        self.dataset: Any = None
        self._accountant = Accountant(accountant, lambda: self.engine)
        self._optimizer: DPOptimizer | None = None

    @property
    def accountant(self) -> Accountant:
        """Reads ε from the engine. Another one cannot be assigned, as it would not count this engine's steps."""
        return self._accountant

    @accountant.setter
    def accountant(self, other: Any) -> None:
        raise Misuse(
            "expected privacy_engine.accountant to stay, as it counts the steps of this engine, got another one: for "
            "its steps to count as well, call privacy_engine.accountant.load_state_dict(other.state_dict())"
        )

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float | list[float],
        criterion: Any = None,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str = "flat",
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        rand_on_empty: bool = False,
        **others: Any,
    ) -> tuple[Any, ...]:
        """(module, optimizer, data_loader), or (module, optimizer, criterion, data_loader) in the ghost modes.

        The sample rate is 1/len(data_loader), as in Opacus. The noisy sum is divided by the loader's batch size, which
        is public; Opacus divides by int(n/len(data_loader)), which reveals something about the number of records.

        Args:
            module: any that `dpbench.PrivacyEngine` can train, also with nn.LSTM or tied weights, unlike Opacus.
            optimizer: of the module's parameters.
            data_loader: of a dataset with a length. It is the same in all processes, with the batch size of all
                together, or has a DistributedSampler and the batch size of one process; each process gets its part of
                every sample.
            noise_multiplier: σ.
            max_grad_norm: C; with clipping="per_layer" also one of each trainable parameter.
            criterion: nn.CrossEntropyLoss() if None; used in the ghost modes alone.
            batch_first: must be True.
            loss_reduction: of the loss: "mean" or "sum" over the batch.
            poisson_sampling: False keeps the loader's batches. They are accounted as one pass an epoch, for making one
                record's gradient zero. ε is much larger than Opacus', which counts them as Poisson samples.
            clipping: "flat", "per_layer", "automatic", or "adaptive" with the arguments of Opacus' AdaClip in `others`;
                the noise of its count is within the noise multiplier.
            noise_generator: repeatable noise and samples: not private.
            grad_sample_mode: one of `MODES`.
            wrap_model: False trains the model without a wrapper, and returns an object that removes the hooks.
            rand_on_empty: must be False: an empty sample is an empty batch.

        Raises:
            ValueError, TypeError: an invalid argument, named.
            Misuse: arguments that cannot be accounted for, or a second call.
            UnsupportedModel: a model that mixes samples.
        """
        require_known("grad_sample_mode", grad_sample_mode, MODES)
        require_known("loss_reduction", loss_reduction, ("mean", "sum"))
        if not batch_first:
            raise ValueError(
                "expected batch_first=True, got False: let the samples come first in the model's inputs and outputs, "
                "and transpose inside"
            )
        if rand_on_empty:
            raise ValueError(
                "expected rand_on_empty=False, got True: a sample of no records is a batch of no records here"
            )
        if self.engine is not None:
            raise Misuse(
                "expected one make_private of a PrivacyEngine, got a second one: make a PrivacyEngine for each model, "
                "whose ε add up if they see the same records"
            )
        model, optimizer = unwrapped(module), getattr(optimizer, "original_optimizer", optimizer)
        if isinstance(data_loader, DPDataLoader):
            data_loader = data_loader.source
        length = _length(data_loader)
        clips = Clips(clipping, max_grad_norm, optimizer, model, noise_multiplier, others)
        if place()[1] > 1 and (clips.quantile is not None or not poisson_sampling):
            raise Misuse(
                "expected poisson_sampling=True, and no clipping='adaptive', in several processes: which records are "
                "in a batch of the caller's, and how many are unclipped, is not known to all"
            )
        if clips.quantile is not None and not poisson_sampling:
            raise Misuse(
                "expected poisson_sampling=True with clipping='adaptive', got False: a gradient that is made zero is "
                "still counted, and moves the count by twice what its noise covers"
            )
        function = clips.at(clips.norm, noise_multiplier)
        records = len(data_loader.dataset)  # type: ignore[arg-type]
        engine = Engine(
            model,
            batch_size=records_of(data_loader),
            sample_size=records,
            max_grad_norm=function.sensitivity,
            noise_multiplier=noise_multiplier,
            clip=function,
            accountant=self.accountant.mechanism(),
            secure=self.secure_mode,
            generator=noise_generator,
            sampling=scheme_of(data_loader, poisson_sampling),
        )
        set_rate(engine, 1 / length, length)
        engine.attach(optimizer)
        loss: Any = nn.CrossEntropyLoss(reduction=loss_reduction) if criterion is None else criterion
        forget = engine._recorder.drop
        ghost = grad_sample_mode.startswith("ghost")
        losses: Backward | Outputs
        if ghost:
            losses, see = Backward(model, forget), (lambda x: x) if poisson_sampling else engine._recorder.follow
        else:
            losses = Outputs(model, loss_reduction == "mean", forget)
            see, engine._recorder.follows_batches = losses.batch, False
        loader = DPDataLoader.of_engine(data_loader, engine, poisson_sampling, see)
        private = DPOptimizer.of_engine(optimizer, engine, losses, clips, loss_reduction, loader.stepped)
        self.engine, self.dataset, self._optimizer = engine, data_loader.dataset, private
        self.accountant.hand_over()
        made: Any = (GradSampleModule if wrap_model else GradSampleHooks).of_engine(model, loss_reduction, self._detach)
        if isinstance(losses, Backward):
            engine._recorder.remedy = "take the criterion that make_private returned, whose losses have one"
            return made, private, DPLoss(loss, loss_reduction, losses), loader
        return made, private, loader

    def make_private_with_epsilon(
        self,
        *,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: float,
        poisson_sampling: bool = True,
        **arguments: Any,
    ) -> tuple[Any, ...]:
        """As `make_private`, with the noise for this ε at this δ after `epochs` passes over the loader.

        Args:
            data_loader: an ordinary one, which sets batch size and data set.
            target_epsilon, target_delta: at the end of training.
            epochs: passes over the loader.
            poisson_sampling: draw Poisson samples; False keeps the loader's batches, at a larger ε.
            arguments: of `make_private`.

        Raises:
            NoAnswer: no noise meets the target.
            Misuse: earlier steps count, and the target does not include them.
        """
        if self.accountant.history:
            raise Misuse("expected make_private_with_epsilon before the first step, got an engine that has spent ε")
        length = _length(data_loader)
        steps = int(epochs * length)
        noise_multiplier = calibrate_noise_multiplier(
            self.accountant.mechanism(),
            target_epsilon=target_epsilon,
            sample_rate=1 / length,
            steps=steps,
            delta=target_delta,
            sampling=scheme_of(data_loader, poisson_sampling),
        )
        found = self.make_private(
            data_loader=data_loader, noise_multiplier=noise_multiplier, poisson_sampling=poisson_sampling, **arguments
        )
        assert self.engine is not None
        settings = self.engine.settings
        planned = replace(settings, planned_steps=steps, target_epsilon=target_epsilon, delta=target_delta)
        self.engine.settings = planned  # the engine warns of later steps
        return found

    def _detach(self) -> None:
        if self._optimizer is not None:
            self._optimizer.close()
        if self.engine is not None:
            self.engine.detach()

    def get_epsilon(self, delta: float) -> float:
        """ε at δ of all steps so far.

        Args:
            delta: in [0, 1].
        """
        return self.accountant.get_epsilon(delta)

    def is_compatible(self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None) -> bool:
        """Returns whether the module can be trained privately, as far as can be checked without a forward pass."""
        try:
            self.validate(module=module)
        except UnsupportedModel:
            return False
        return True

    def validate(self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None) -> None:
        """Raise an UnsupportedModel if `is_compatible` is False."""
        require_usable(unwrapped(module))

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """Replace layers that mix samples, by Opacus' ModuleValidator.

        Raises:
            ModuleNotFoundError: Opacus is not installed, and the module has a layer to replace.
        """
        if batch_norm_problem(batch_norms(module)) is None:
            return module
        from opacus.validators import ModuleValidator

        fixed: nn.Module = ModuleValidator.fix(module)
        return fixed

    def save_checkpoint(self, *, path: Any, module: nn.Module, **more: Any) -> None:
        """See `dpbench.integrations.opacus.checkpoint.save`."""
        checkpoint.save(self._made_private(), self.accountant, path=path, module=module, **more)

    def load_checkpoint(self, *, path: Any, module: nn.Module, **more: Any) -> dict[str, Any]:
        """See `dpbench.integrations.opacus.checkpoint.load`."""
        return checkpoint.load(self._made_private(), self.accountant, path=path, module=module, **more)

    def _made_private(self) -> DPOptimizer:
        if self._optimizer is None:
            raise Misuse("expected make_private before a checkpoint, got an engine without a model")
        return self._optimizer


class BatchMemoryManager:
    """`with BatchMemoryManager(...) as loader`: batches in pieces of at most `max_physical_batch_size` samples.

    `optimizer.step()` accumulates all but the last piece of a batch; the rest of the loop does not change.

    Args:
        data_loader, optimizer: of `make_private`.
        max_physical_batch_size: samples in a piece.
    """

    def __init__(self, *, data_loader: DPDataLoader, max_physical_batch_size: int, optimizer: DPOptimizer) -> None:
        if not isinstance(data_loader, DPDataLoader):
            raise TypeError(f"expected the data_loader that make_private returned, got {type(data_loader).__name__}")
        if not isinstance(optimizer, DPOptimizer):
            raise TypeError(f"expected the optimizer that make_private returned, got {type(optimizer).__name__}")
        if max_physical_batch_size < 1:
            raise ValueError(f"expected max_physical_batch_size >= 1, got {max_physical_batch_size!r}")
        self._loader, self._most, self._optimizer = data_loader, max_physical_batch_size, optimizer

    def __enter__(self) -> DPDataLoader:
        return self._loader.in_pieces(self._most, self._optimizer._skip_next)

    def __exit__(self, *raised: Any) -> None:
        self._optimizer._skip_next(False)


def _length(source: DataLoader[Any]) -> int:
    """Batches of an epoch."""
    if isinstance(source.dataset, IterableDataset) or not hasattr(source.dataset, "__len__"):
        raise ValueError(
            "expected a data_loader of a dataset with a length, got one that only iterates: no batch of it is sampled"
        )
    if len(source) < 1:
        raise ValueError("expected a data_loader with at least one batch, got an empty one")
    return len(source)
