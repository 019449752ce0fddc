"""Refuse the features of transformers' Trainer that cannot be private, each by name.

The engine draws the batches that ε assumes; each record has a loss of its own, and so a per-sample gradient; and a
checkpoint's state holds the keys of noise and sampling, and must not be published.
"""

from __future__ import annotations

import os
from typing import Any

from torch.utils.data import IterableDataset
from transformers import Trainer

DRAWN = "batches are drawn as privacy.sampling says"
SECRET = "a checkpoint holds the keys of the noise and of the sampling, which are as secret as the data"


def refuse(trainer: Any, options: dict[str, Any]) -> None:
    """Raise a ValueError for the first feature that cannot be private.

    Args:
        trainer: its class is checked for overridden methods; it need not be initialised.
        options: the arguments of `Trainer`, by name, with `args`.
    """
    for name, came, wanted, why in (
        *_of_arguments(options["args"]),
        *_of_options(options),
        *_of_class(type(trainer)),
    ):
        raise ValueError(f"expected {name}={wanted} with PrivateTrainer, got {came}: {why}")


def _of_arguments(args: Any) -> list[tuple[str, str, str, str]]:
    sampling = getattr(args, "train_sampling_strategy", "random")
    optimizer = str(getattr(args.optim, "value", args.optim))
    hub = str(getattr(args.hub_strategy, "value", args.hub_strategy))
    reentrant = [
        name
        for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")
        if (getattr(args, name, None) or {}).get("use_reentrant")
    ]
    found: list[tuple[bool, str, Any, str, str]] = [
        (sampling != "random", "train_sampling_strategy", sampling, "'random'", f"{DRAWN}, whatever the lengths"),
        (
            bool(getattr(args, "group_by_length", False)),
            "group_by_length",
            True,
            "False",
            f"{DRAWN}, whatever the lengths",
        ),
        (args.dataloader_drop_last, "dataloader_drop_last", True, "False", f"{DRAWN}; each batch counts"),
        (
            args.label_smoothing_factor != 0,
            "label_smoothing_factor",
            args.label_smoothing_factor,
            "0",
            "its loss is a mean over the batch; give a compute_loss_func with label_smoothing= and one loss a sample",
        ),
        (
            args.auto_find_batch_size,
            "auto_find_batch_size",
            True,
            "False",
            "it restarts training after released steps; lower per_device_train_batch_size, and raise "
            "gradient_accumulation_steps, which is the same training",
        ),
        (
            args.neftune_noise_alpha is not None,
            "neftune_noise_alpha",
            args.neftune_noise_alpha,
            "None",
            "its noise is scaled by the length of the longest record in the batch",
        ),
        (args.fp16, "fp16", True, "False", "losses cannot be scaled before they are clipped; take bf16"),
        (bool(args.deepspeed), "deepspeed", args.deepspeed, "None", "it steps by itself; take torchrun alone"),
        (
            bool(args.fsdp),
            "fsdp",
            args.fsdp,
            "''",
            "it shards after the engine has seen the model; call fully_shard(model) before PrivateTrainer(model, ...)",
        ),
        (args.torch_compile, "torch_compile", True, "False", "a compiled model shows no per-sample gradients"),
        (args.n_gpu > 1, "n_gpu", args.n_gpu, "1", "DataParallel splits batches; start by torchrun, a process a GPU"),
        (
            "layerwise" in optimizer or "lomo" in optimizer,
            "optim",
            optimizer,
            "'adamw_torch'",
            "it steps within backward, before anything is clipped",
        ),
        (
            args.push_to_hub and hub in ("checkpoint", "all_checkpoints"),
            "hub_strategy",
            hub,
            "'end'",
            SECRET,
        ),
        (
            os.environ.get("WANDB_LOG_MODEL") == "checkpoint" and "wandb" in args.report_to,
            "WANDB_LOG_MODEL",
            "checkpoint",
            "'end'",
            SECRET,
        ),
        (bool(reentrant), "".join(reentrant[:1]), "use_reentrant", "{'use_reentrant': False}", "it records nothing"),
    ]
    return [(name, repr(came), wanted, why) for wrong, name, came, wanted, why in found if wrong]


def _of_options(options: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    found = []
    privacy, norm = options["privacy"], options["args"].max_grad_norm
    if not hasattr(privacy, "for_engine"):
        found.append(
            ("privacy", type(privacy).__name__, "PrivacyArguments(...)", "its fields are the engine's arguments")
        )
    elif not privacy.for_engine(norm)["max_grad_norm"]:
        why = "it is C, and of gradients clipped to 0 nothing is learned; where Trainer would not clip, say how far"
        found.append(("max_grad_norm", repr(norm), "C > 0", why))
    if options.get("model_init") is not None:
        why = "each train() would create another model, and ε is one model's; pass model="
        found.append(("model_init", "a function", "None", why))
    dataset = options.get("train_dataset")
    if dataset is not None and (not hasattr(dataset, "__len__") or isinstance(dataset, IterableDataset)):
        why = f"{DRAWN} from numbered records; give one with __len__ and __getitem__"
        found.append(("train_dataset", type(dataset).__name__, "a dataset of a known length", why))
    collator = type(options.get("data_collator")).__name__
    if collator == "DataCollatorWithFlattening":
        why = "it puts all records in one row; take a collator that pads, one row a record"
        found.append(("data_collator", collator, "one that keeps records apart", why))
    return found


def _of_class(cls: type) -> list[tuple[str, str, str, str]]:
    """Overridden methods that would bypass the engine's loader or step."""
    drawn = f"{DRAWN}; leave the method as it is, and choose the records by train_dataset"
    wanted = "Trainer's own"
    found = []
    if cls._get_train_sampler is not Trainer._get_train_sampler:  # type: ignore[attr-defined]
        found.append(("_get_train_sampler", "another one", wanted, drawn))
    own = next(c for c in cls.__mro__ if c.__name__ == "PrivateTrainer")
    for name, why in (
        ("get_train_dataloader", drawn),
        ("get_batch_samples", drawn),
        ("training_step", "it clips and adds; compute what you like in compute_loss, one loss a sample"),
    ):
        if getattr(cls, name) is not getattr(own, name):
            found.append((name, "another one", "PrivateTrainer's own", why))
    return found
