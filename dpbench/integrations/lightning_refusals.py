"""Refuse the features of Lightning that cannot be private."""

from typing import Any

from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
)
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

SAMPLERS = (RandomSampler, SequentialSampler, DistributedSampler, UnrepeatedDistributedSampler)
"""The default samplers of Lightning and DataLoader."""


def refuse(trainer: Any) -> None:
    """Raise a ValueError for the first feature of the Trainer that cannot be private.

    Args:
        trainer: before training, or in it.
    """
    module, callbacks, precision = trainer.lightning_module, trainer.callbacks, str(trainer.precision)
    pieces = "privacy['batch_size'] is cut into pieces of the loader's batch_size"
    steps = "training_step returns the losses, and the strategy steps; for a loop of your own take PrivacyEngine"
    norm = "privacy['max_grad_norm'] clips each sample's gradient"
    trial = "its steps on trial spend ε and are undone; find the value on public data, or account for its steps as well"
    tuners = [type(each).__name__ for each in callbacks if isinstance(each, (BatchSizeFinder, LearningRateFinder))]
    whole = any(isinstance(each, ModelCheckpoint) and not each.save_weights_only for each in callbacks)
    uploads = [type(each).__name__ for each in trainer.loggers if getattr(each, "_log_model", False)]
    secret = "checkpoints hold the keys of noise and sampling; leave log_model out, or keep save_weights_only=True"
    own = [name for name in ("backward", "configure_gradient_clipping") if is_overridden(name, module)]
    never = "optimizer.step() computes and clips the gradients, one a sample; weigh the losses in training_step"
    grows = any(isinstance(each, GradientAccumulationScheduler) for each in callbacks)
    for wrong, wanted, came, why in (
        (not module.automatic_optimization, "automatic_optimization=True", "False", steps),
        (own, f"Lightning's own {' and '.join(own)}", "the module's", never),
        (trainer.accumulate_grad_batches != 1, "accumulate_grad_batches=1", trainer.accumulate_grad_batches, pieces),
        (tuners, "no tuner", " and ".join(tuners), trial),
        (whole and uploads, "no logger that uploads checkpoints", " and ".join(uploads), secret),
        (grows, "no GradientAccumulationScheduler", "one", pieces),
        (trainer.gradient_clip_val is not None, "gradient_clip_val=None", trainer.gradient_clip_val, norm),
        (precision.startswith("16"), "precision='bf16-mixed'", precision, "losses cannot be scaled and then clipped"),
        (trainer.overfit_batches, "overfit_batches=0", trainer.overfit_batches, "batches are drawn from all records"),
    ):
        if wrong:
            raise ValueError(f"expected {wanted} with a private strategy, got {came}: {why}")


def refuse_loader(dataloader: Any) -> None:
    """Raise a ValueError if the engine cannot draw the train loader's records itself.

    Args:
        dataloader: of training.
    """
    if not isinstance(dataloader, DataLoader) or not hasattr(dataloader.dataset, "__len__"):
        came = type(dataloader.dataset if isinstance(dataloader, DataLoader) else dataloader).__name__
        raise ValueError(
            f"expected a train DataLoader of a dataset with a length, got {came}: batches are drawn from numbered "
            "records"
        )
    sampler: Any = dataloader.sampler if type(dataloader.batch_sampler) is BatchSampler else dataloader.batch_sampler
    drops = dataloader.drop_last or getattr(dataloader.batch_sampler, "drop_last", False)
    some = type(sampler) is RandomSampler and (sampler.replacement or len(sampler) != len(dataloader.dataset))
    if drops or some or type(sampler) not in SAMPLERS:
        came = "drop_last=True" if drops else type(sampler).__name__
        came += "(replacement=True)" if some and sampler.replacement else "(num_samples=...)" if some else ""
        raise ValueError(
            f"expected a train loader without a sampler of its own and without drop_last, got {came}: batches are "
            "drawn as privacy['sampling'] says; leave it out"
        )
