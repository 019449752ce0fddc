"""PrivateTrainer in two processes takes the path of one."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("accelerate", reason="accelerate, which transformers' Trainer needs, is not installed")
from test_huggingface import trainer_of
from torchrun import torchrun


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
def test_two_processes_are_one(tmp_path):
    trainer = trainer_of(tmp_path / "one", per_device_train_batch_size=8)
    trainer.train()
    for found in torchrun(tmp_path, "huggingface_process.py"):
        assert found["steps"] == 12 and found["epsilon"] == trainer.engine.privacy_spent().epsilon
        for way in ("whole", "resumed"):
            for name, p in trainer.model.named_parameters():
                torch.testing.assert_close(found[way][name], p.detach(), rtol=0, atol=1e-12)
    assert json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())["global_step"] == 3
