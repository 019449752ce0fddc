"""One process of two of a PrivateTrainer."""

import warnings

import torch
from test_huggingface import ADAM, model_of, trainer_of
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def model(kind):
    """Every process has all of it, or half of every parameter."""
    made = model_of("gpt2")
    if kind == "sharded":
        for block in made.transformer.h:
            fully_shard(block)
        fully_shard(made)
    return made


def whole(trainer):
    return {
        name: p.detach().full_tensor() if isinstance(p, DTensor) else p.detach()
        for name, p in trainer.model.named_parameters()
    }


def main(folder, kind):
    """What became of the training and of what went on from its checkpoint."""
    warnings.simplefilter("ignore")
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "ddp_backend": "gloo", **ADAM}
    torch.distributed.init_process_group("gloo")
    first = trainer_of(folder, model=model(kind), save_strategy="steps", save_steps=3, **options)
    first.train()
    resumed = trainer_of(folder, model=model(kind), **options)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    return {
        "sharded": isinstance(next(first.model.parameters()), DTensor),
        "whole": whole(first),
        "resumed": whole(resumed),
        "evaluated": resumed.evaluate(first.train_dataset)["eval_loss"],
        "steps": first.engine.steps,
        "epsilon": first.engine.privacy_spent().epsilon,
    }
