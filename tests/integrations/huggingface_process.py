"""One process of two of a PrivateTrainer's training: python huggingface_process.py FOLDER. Writes what became of it."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch
from test_huggingface import trainer_of


def main() -> None:
    folder = Path(sys.argv[1])
    warnings.simplefilter("ignore")
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "ddp_backend": "gloo"}
    whole = trainer_of(folder, save_strategy="steps", save_steps=3, **options)
    whole.train()
    resumed = trainer_of(folder, **options)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    found = {
        "whole": {name: p.detach() for name, p in whole.model.named_parameters()},
        "resumed": {name: p.detach() for name, p in resumed.model.named_parameters()},
        "steps": whole.engine.steps,
        "epsilon": whole.engine.privacy_spent().epsilon,
    }
    torch.save(found, folder / f"{os.environ['RANK']}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
