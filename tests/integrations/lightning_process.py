"""One process of two of Lightning's training: python lightning_process.py FOLDER KIND. Writes what became of it."""

from __future__ import annotations

import os
import sys
import warnings
from functools import partial
from pathlib import Path

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from test_lightning import Classifier, fit, strategy_of
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dpbench.integrations.lightning import PrivateDDPStrategy, PrivateModelParallelStrategy


class Whole(Classifier):
    """Each process has every parameter."""

    momentum = 0.5


class Sharded(Whole):
    """Each process has half of every parameter."""

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        if not isinstance(self.net[0].weight, DTensor):
            fully_shard(self.net[0], mesh=mesh)
            fully_shard(self.net, mesh=mesh)


KINDS = {
    "ddp": (PrivateDDPStrategy, Whole, {}),
    "sharded": (PrivateModelParallelStrategy, Sharded, {"save_distributed_checkpoint": False}),
    "saved in parts": (PrivateModelParallelStrategy, Sharded, {"save_distributed_checkpoint": True}),
}


def whole(p):
    """All of a parameter."""
    return p.detach().full_tensor() if isinstance(p, DTensor) else p.detach()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    cls, module, options = KINDS[sys.argv[2]]
    saved = ModelCheckpoint(dirpath=folder, every_n_train_steps=7, save_top_k=-1, filename="at")
    strategy = strategy_of(cls=partial(cls, **options))
    _, first = fit(strategy, module(), devices=2, callbacks=[saved])
    other = strategy_of(cls=partial(cls, **options))
    _, second = fit(other, module(), devices=2, ckpt_path=folder / "at.ckpt")
    found = {
        "sharded": isinstance(next(first.parameters()), DTensor),
        "whole": [whole(p) for p in first.parameters()],
        "resumed": [whole(p) for p in second.parameters()],
        "steps": strategy.engine.steps,
        "epsilon": strategy.engine.privacy_spent().epsilon,
    }
    torch.save(found, folder / f"{os.environ['RANK']}.pt")
    torch.distributed.barrier()  # or the first to end takes its store away from the other
    torch.distributed.destroy_process_group()
    os._exit(0)  # past the end of the interpreter, at which gloo's threads now and then abort the process
