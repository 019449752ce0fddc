"""PrivateTrainer in two processes takes the path of one."""

import json
import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate", reason="accelerate, which transformers' Trainer needs, is not installed")
from ranks import ranks
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
    """In each process: what became of the training and of what went on from its checkpoint."""
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


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
@pytest.mark.parametrize("kind", ["ddp", "sharded"])
@pytest.mark.slow
def test_two_processes_are_one(kind, tmp_path):
    trainer = trainer_of(tmp_path / "one", per_device_train_batch_size=8, **ADAM)
    trainer.train()
    evaluated = trainer.evaluate(trainer.train_dataset)["eval_loss"]
    for found in ranks(tmp_path, Path(__file__), kind):
        assert found["sharded"] == (kind == "sharded")
        assert found["steps"] == 6 and found["epsilon"] == trainer.engine.privacy_spent().epsilon
        assert found["evaluated"] == pytest.approx(evaluated, rel=1e-6)
        for way in ("whole", "resumed"):
            for name, p in trainer.model.named_parameters():
                torch.testing.assert_close(found[way][name], p.detach(), rtol=0, atol=1e-10)
    assert json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())["global_step"] == 3
    # one process goes on from what two have written
    alone = trainer_of(tmp_path / "one", per_device_train_batch_size=8, **ADAM)
    alone.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for name, p in trainer.model.named_parameters():
        torch.testing.assert_close(alone.model.get_parameter(name).detach(), p.detach(), rtol=0, atol=1e-10)
