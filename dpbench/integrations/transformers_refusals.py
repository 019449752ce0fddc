"""Refuse the features of transformers' Trainer that cannot be private, each by name.

The engine draws the batches that ε assumes; each record has a loss of its own, and so a per-sample gradient; and a
checkpoint's state holds the keys of noise and sampling, and must not be published.
"""

import os
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset
from transformers import Trainer

DRAWN = "batches are drawn as privacy.sampling says"
SECRET = "a checkpoint holds the keys of the noise and of the sampling, which are as secret as the data"
TRUE = ("true", "1", "on", "yes")
UPLOADS = (
    ("wandb", "WANDB_LOG_MODEL", "false", ("checkpoint",)),
    ("mlflow", "HF_MLFLOW_LOG_ARTIFACTS", "false", TRUE),
    ("dagshub", "HF_DAGSHUB_LOG_ARTIFACTS", "false", TRUE),
    ("comet_ml", "COMET_LOG_ASSETS", "false", TRUE),
    ("clearml", "CLEARML_LOG_MODEL", "true", TRUE),
    ("dvclive", "HF_DVCLIVE_LOG_MODEL", "false", ("all",)),
)
"""(tracker, environment variable, its value if it is not set, the values by which whole checkpoints are uploaded)."""
Refusal = tuple[Any, str, Any, str, str]
"""(is it refused?, name, what came, what is expected, why)."""


def refuse(trainer: Any, options: dict[str, Any]) -> None:
    """Raise a ValueError for the first feature that cannot be private.

    Args:
        trainer: its class is checked for overridden methods; it need not be initialised.
        options: the arguments of `Trainer`, by name, with `args`.
    """
    for found in (_of_arguments(options["args"]), _of_options(options), _of_class(type(trainer))):
        for wrong, name, came, wanted, why in found:
            if wrong:
                raise ValueError(f"expected {name}={wanted} with PrivateTrainer, got {came}: {why}")


def _of_arguments(args: Any) -> Iterator[Refusal]:
    optimizer, hub = (str(getattr(each, "value", each)) for each in (args.optim, args.hub_strategy))
    by_length = args.train_sampling_strategy != "random"
    inside = "layerwise" in optimizer or "lomo" in optimizer
    published = args.push_to_hub and hub in ("checkpoint", "all_checkpoints")
    smooth = "its loss is a mean over the batch; give a compute_loss_func of label_smoothing= and one loss a sample"
    again = "it restarts after released steps; lower per_device_train_batch_size, raise gradient_accumulation_steps"
    longest = "its noise is scaled by the length of the longest record in the batch"
    shards = "call fully_shard(model) before PrivateTrainer(model, ...), and start by torchrun"
    late = f"it shards after the engine has seen the model; {shards}"
    split = "DataParallel splits batches; start by torchrun, a process a GPU"
    for wrong, name, wanted, why in (
        (by_length, "train_sampling_strategy", "'random'", f"{DRAWN}, whatever the lengths"),
        (args.dataloader_drop_last, "dataloader_drop_last", "False", f"{DRAWN}; each batch counts"),
        (args.label_smoothing_factor, "label_smoothing_factor", "0", smooth),
        (args.auto_find_batch_size, "auto_find_batch_size", "False", again),
        (args.neftune_noise_alpha is not None, "neftune_noise_alpha", "None", longest),
        (args.fp16, "fp16", "False", "losses cannot be scaled before they are clipped; take bf16"),
        (args.deepspeed, "deepspeed", "None", "it steps by itself; take torchrun alone"),
        (args.fsdp, "fsdp", "''", late),
        (args.torch_compile, "torch_compile", "False", "a compiled model shows no per-sample gradients"),
        (args.n_gpu > 1, "n_gpu", "1", split),
    ):
        yield wrong, name, repr(getattr(args, name)), wanted, why
    for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
        kwargs = getattr(args, name, None) or {}
        yield kwargs.get("use_reentrant"), name, repr(kwargs), "{'use_reentrant': False}", "it records nothing"
    yield inside, "optim", repr(optimizer), "'adamw_torch'", "it steps within backward, before anything is clipped"
    yield published, "hub_strategy", repr(hub), "'end'", SECRET
    for variable in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM"):
        value = os.environ.get(variable, "false")
        yield (
            value.lower() in TRUE,
            variable,
            repr(value),
            "'false'",
            "accelerate launch shards the model by it; " + shards,
        )
    keeps = args.save_strategy != "no" and not args.save_only_model
    for tracker, variable, usual, values in UPLOADS:
        value = os.environ.get(variable, usual)
        yield keeps and tracker in args.report_to and value.lower() in values, variable, repr(value), "'false'", SECRET


def _of_options(options: dict[str, Any]) -> Iterator[Refusal]:
    privacy, norm, dataset = options["privacy"], options["args"].max_grad_norm, options.get("train_dataset")
    why = "its fields are the engine's arguments"
    yield not hasattr(privacy, "for_engine"), "privacy", type(privacy).__name__, "PrivacyArguments(...)", why
    why = "it is C, and of gradients clipped to 0 nothing is learned; where Trainer would not clip, say how far"
    yield norm is None or not privacy.for_engine(norm)["max_grad_norm"], "max_grad_norm", repr(norm), "C > 0", why
    why = "each train() would create another model, and ε is one model's; pass model="
    yield options.get("model_init") is not None, "model_init", "a function", "None", why
    streams = dataset is not None and (not hasattr(dataset, "__len__") or isinstance(dataset, IterableDataset))
    why = f"{DRAWN} from numbered records; give one with __len__ and __getitem__"
    yield streams, "train_dataset", type(dataset).__name__, "a dataset of a known length", why
    collator = type(options.get("data_collator")).__name__
    why = "it puts all records in one row; take a collator that pads, one row a record"
    yield collator == "DataCollatorWithFlattening", "data_collator", collator, "one that keeps records apart", why


def _of_class(cls: type) -> Iterator[Refusal]:
    """Overridden methods that would bypass the engine's loader or step."""
    drawn = f"{DRAWN}; leave the method as it is, and choose the records by train_dataset"
    private: Any = next(c for c in cls.__mro__ if c.__name__ == "PrivateTrainer")
    for name, own, why in (
        ("_get_train_sampler", Trainer, drawn),
        ("get_train_dataloader", private, drawn),
        ("get_batch_samples", private, drawn),
        ("training_step", private, "it clips and adds; compute what you like in compute_loss, one loss a sample"),
    ):
        yield getattr(cls, name) is not getattr(own, name), name, "another one", f"{own.__name__}'s own", why
