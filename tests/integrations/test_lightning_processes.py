"""Lightning's training in two processes takes the path of one."""

import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("lightning", reason="lightning is not installed")
from lightning.pytorch.callbacks import ModelCheckpoint
from ranks import ranks
from test_lightning import Classifier, fit, strategy_of
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dpbench.integrations.lightning import PrivateDDPStrategy, PrivateModelParallelStrategy


class Whole(Classifier):
    """Each process has every parameter."""

    momentum = 0.5  # without a state of the optimizer Lightning cannot load one file for all processes


class Synced(Whole):
    """Each process waits for the others in every piece, also if its own has no records."""

    def training_step(self, batch, batch_idx):
        losses = super().training_step(batch, batch_idx)
        self.log("train_loss", losses.mean(), sync_dist=True)
        return losses


class Sharded(Whole):
    """Each process has half of every parameter."""

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        if not isinstance(self.net[0].weight, DTensor):
            fully_shard(self.net[0], mesh=mesh)
            fully_shard(self.net, mesh=mesh)


class Counted(Whole):
    """A program would be captured again for each number of a batch that it notes down."""

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")


KINDS = {
    "ddp": (PrivateDDPStrategy, Whole, {}),
    "synced": (PrivateDDPStrategy, Synced, {}),
    "compiled": (PrivateDDPStrategy, Counted, {"compile": True, "pad": True}),
    "sharded": (PrivateModelParallelStrategy, Sharded, {"save_distributed_checkpoint": False}),
    "saved in parts": (PrivateModelParallelStrategy, Sharded, {"save_distributed_checkpoint": True}),
}


def whole(p):
    """All of a parameter."""
    return p.detach().full_tensor() if isinstance(p, DTensor) else p.detach()


def main(folder, kind):
    """In each process: what became of the training and of what went on from its checkpoint."""
    warnings.simplefilter("ignore")
    cls, module, options = KINDS[kind]
    saved = ModelCheckpoint(dirpath=folder, every_n_train_steps=7, save_top_k=-1, filename="at")
    strategy = strategy_of(cls=partial(cls, **options))
    _, first = fit(strategy, module(), devices=2, max_epochs=3, callbacks=[saved])
    other = strategy_of(cls=partial(cls, **options))
    _, second = fit(other, module(), devices=2, max_epochs=3, ckpt_path=folder / "at.ckpt")
    return {
        "sharded": isinstance(next(first.parameters()), DTensor),
        "whole": [whole(p) for p in first.parameters()],
        "resumed": [whole(p) for p in second.parameters()],
        "steps": strategy.engine.steps,
        "programs": 0 if strategy.programs.graphs is None else strategy.programs.graphs.steps,
        "epsilon": strategy.engine.privacy_spent().epsilon,
    }


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_two_processes_are_one(kind, tmp_path):
    strategy, module = strategy_of(), Whole()
    fit(strategy, module, max_epochs=3)
    for found in ranks(tmp_path, Path(__file__), kind):
        assert found["sharded"] == (kind in ("sharded", "saved in parts"))
        assert found["programs"] > 4 if kind == "compiled" else not found["programs"]
        assert found["steps"] == 15 and found["epsilon"] == strategy.engine.privacy_spent().epsilon
        for way in ("whole", "resumed"):
            for p, q in zip(module.parameters(), found[way], strict=True):
                torch.testing.assert_close(p.detach(), q, rtol=0, atol=1e-12)
