"""PrivateTrainer in two processes takes the path of one."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate", reason="accelerate, which transformers' Trainer needs, is not installed")
from ranks import ranks
from test_huggingface import ADAM, trainer_of


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
@pytest.mark.parametrize("kind", ["ddp", "sharded"])
@pytest.mark.slow
def test_two_processes_are_one(kind, tmp_path):
    trainer = trainer_of(tmp_path / "one", per_device_train_batch_size=8, **ADAM)
    trainer.train()
    evaluated = trainer.evaluate(trainer.train_dataset)["eval_loss"]
    for found in ranks(tmp_path, Path(__file__).with_name("huggingface_process.py"), kind):
        assert found["sharded"] == (kind == "sharded")
        assert found["steps"] == 12 and found["epsilon"] == trainer.engine.privacy_spent().epsilon
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
