"""One process of two of Lightning's training: python lightning_process.py FOLDER. Writes what became of it."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from test_lightning import fit, strategy_of

from dpbench.integrations.lightning import PrivateDDPStrategy

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    saved = ModelCheckpoint(dirpath=folder, every_n_train_steps=7, save_top_k=-1, filename="at")
    strategy = strategy_of(cls=PrivateDDPStrategy)
    _, whole = fit(strategy, devices=2, callbacks=[saved])
    other = strategy_of(cls=PrivateDDPStrategy)
    _, resumed = fit(other, devices=2, ckpt_path=folder / "at.ckpt")
    found = {
        "whole": [p.detach() for p in whole.parameters()],
        "resumed": [p.detach() for p in resumed.parameters()],
        "steps": strategy.engine.steps,
        "epsilon": strategy.engine.privacy_spent().epsilon,
    }
    torch.save(found, folder / f"{os.environ['RANK']}.pt")
    torch.distributed.destroy_process_group()
