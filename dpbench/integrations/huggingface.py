"""A private version of transformers' Trainer.

    from dpbench.integrations.huggingface import PrivacyArguments, PrivateTrainer

    args = TrainingArguments("out", per_device_train_batch_size=8, gradient_accumulation_steps=32, num_train_epochs=3)
    trainer = PrivateTrainer(model, args, train_dataset=data, privacy=PrivacyArguments(target_epsilon=3))
    trainer.train()
    print(trainer.engine.privacy_spent())

`TrainingArguments` set the sizes: a logical batch has an expected per_device_train_batch_size *
gradient_accumulation_steps * processes records, in pieces of at most per_device_train_batch_size. `max_grad_norm` is C.
`PrivacyArguments` set the rest. Everything else works as with `Trainer`, whose steps are the engine's: callbacks,
evaluation, the best model, checkpoints and resuming, LoRA by peft, bf16, activation checkpointing, and several
processes by torchrun. To shard the parameters, call `fully_shard(model)` (FSDP2) first, instead of `fsdp=`; checkpoints
equal a single process's.

Not private: the logged training loss, and evaluation on private records; see `PrivateTrainer`.
"""

import copy
import os
from collections.abc import Iterator
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from clipping.distributed.spread import any_sharded
from clipping.numerics.rng_replay import Draws
from clipping.program.graphs import Compile
from dpbench.engine import Misuse, PrivacyEngine
from dpbench.engine.loader import RECORDS
from dpbench.integrations.record_check import look
from dpbench.integrations.turns import Steps, Turn, per_sample
from dpbench.integrations.whole_states import load_whole_states, load_whole_weights, whole
from dpbench.trials.packages import needed

with needed("transformers", __name__):
    from transformers import Trainer, TrainingArguments
    from transformers.trainer import OPTIMIZER_NAME
    from transformers.trainer_utils import get_last_checkpoint

    from dpbench.integrations.transformers_losses import per_sample_losses, require_own_loss  # needs it, too
    from dpbench.integrations.transformers_refusals import refuse  # needs it, too

STATE = "privacy_engine_{}.pt"
"""File in a checkpoint: the engine's state of the process of this rank."""
PREPARED = {"device_placement": False, "evaluation_mode": True}
"""Options of `Accelerator.prepare_model` for a sharded model."""


@dataclass
class PrivacyArguments:
    """The arguments of `PrivacyEngine` that `TrainingArguments` lack; also for `HfArgumentParser`.

    `max_grad_norm`, `generator`, `log` and `compile` (as in `clipping.Backend`) are for Python alone; on a command line
    C is `--max_grad_norm` of TrainingArguments.
    """

    target_epsilon: float | None = field(default=None, metadata={"help": "Epsilon at the end of training."})
    noise_multiplier: float | None = field(default=None, metadata={"help": "Sigma, instead of target_epsilon."})
    target_delta: float | None = field(default=None, metadata={"help": "Delta; 1/(2n) if left out."})
    backend: str = field(default="bk_mixed", metadata={"help": "How per-sample gradients are clipped."})
    clip: str = field(default="flat", metadata={"help": "The clipping function: flat, automatic or per_layer."})
    accountant: str | None = field(default=None, metadata={"help": "The accountant, such as prv, rdp or pld."})
    noise: str = field(default="gaussian", metadata={"help": "gaussian, discrete (on a grid), banded:8, or blt:3."})
    secure: bool = field(default=False, metadata={"help": "Insist on noise of a cipher, which is the default."})
    sampling: str = field(default="poisson", metadata={"help": "How batches are drawn, as poisson or shuffled."})
    max_batch_size: int | None = field(default=None, metadata={"help": "For truncated_poisson: the largest batch."})
    numerical_stability_constant: float = field(default=0.0, metadata={"help": "Of the clipping function."})
    group_size: int = field(default=1, metadata={"help": "Records that epsilon protects at once."})
    pad: bool | None = field(default=None, metadata={"help": "Pad pieces to few sizes; on a GPU by default."})
    max_grad_norm: InitVar[float | None] = None
    generator: InitVar[torch.Generator | None] = None
    log: InitVar[Any] = None
    compile: InitVar[Compile] = None

    def __post_init__(
        self,
        max_grad_norm: float | None,
        generator: torch.Generator | None,
        log: Any,
        compile: Compile,
    ) -> None:
        vars(self).update(max_grad_norm=max_grad_norm, generator=generator, log=log, compile=compile)

    def for_engine(self, max_grad_norm: float) -> dict[str, Any]:
        """Return the arguments of `PrivacyEngine`, with this C by default.

        Args:
            max_grad_norm: C, of TrainingArguments.
        """
        found = {name: value for name, value in vars(self).items() if name not in ("pad", "compile")}
        return {**found, "max_grad_norm": max_grad_norm if found["max_grad_norm"] is None else found["max_grad_norm"]}


class PrivateTrainer(Trainer):
    """`transformers.Trainer` with the steps of a `PrivacyEngine`.

    Losses are per sample. Language models, classifiers and question answering have them already
    (`dpbench.integrations.transformers_losses`). For other models give a `compute_loss_func`, or override
    `compute_loss`, to return [B] in training. Before training a few records are tried together and alone, and must have
    the same losses: if padding changes them, pad all records to one length (`dpbench.integrations.record_check`).

    The parameters, and so each checkpoint's weights, are private at the engine's ε. Not private: the training loss
    (`loss`, `train_loss` in the logs), metrics of private records and decisions by them (best model, early stopping),
    and the files `privacy_engine_*.pt` of a checkpoint, which hold keys.

    Args:
        model, args, ...: as in `Trainer`; `model_init` is refused.
        privacy: the privacy settings.

    Attributes:
        engine: the engine; None without a train_dataset.
        programs: the steps' programs, once training has begun; `programs.graphs` is None if all steps run eagerly.

    Raises:
        ValueError: a feature that cannot be private, or settings that conflict, named.
        UnsupportedModel: a model without per-sample gradients.
    """

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        *others: Any,
        privacy: PrivacyArguments,
        **options: Any,
    ) -> None:
        args = args if args is not None else TrainingArguments(output_dir="tmp_trainer")
        given = {"args": args, "data_collator": data_collator, "train_dataset": train_dataset, "privacy": privacy}
        refuse(self, {**given, **options})
        super().__init__(model, args, data_collator, train_dataset, *others, **options)
        self._is_shared = any_sharded(list(self.model.parameters()))
        if self._is_shared:
            load_whole_weights(self.model)
            prepare = self.accelerator.prepare_model  # evaluation mode adds no DistributedDataParallel
            self.accelerator.prepare_model = lambda *args, **options: prepare(*args, **{**options, **PREPARED})
        self.privacy = privacy
        self.engine: PrivacyEngine | None = None
        self._steps: Steps | None = None
        if train_dataset is not None:
            self.engine = self._made()

    @property
    def logical_batch_size(self) -> int:
        """b: the expected records of a step, over all processes."""
        return int(self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size)

    def train(self, resume_from_checkpoint: str | bool | None = None, *others: Any, **options: Any) -> Any:
        """As `Trainer.train`. From a checkpoint the engine resumes with noise of a fresh key.

        Afterwards model and optimizer are ordinary ones, and the engine continues to count if training goes on here.

        Raises:
            ValueError: the checkpoint lacks the engine's state, or has that of an engine with other settings.
        """
        checkpoint = resume_from_checkpoint
        if checkpoint is True:
            checkpoint = get_last_checkpoint(self.args.output_dir)
        if checkpoint:
            self._engine.load_state_dict(_state_in(Path(checkpoint), self.args.process_index))
        try:
            return super().train(resume_from_checkpoint, *others, **options)
        finally:
            steps, self._steps = self._steps, None
            if steps is not None:
                steps.close()

    def get_train_dataloader(self) -> Any:
        """An epoch's turns, for Trainer's loop to count and skip; the engine draws the records."""
        turns = range(self._engine.settings.steps_per_epoch * self.args.gradient_accumulation_steps)
        return DataLoader(turns, generator=torch.Generator())  # type: ignore[arg-type]

    def num_examples(self, dataloader: Any) -> int:
        """The number of records of a loader's data set."""
        if isinstance(getattr(dataloader, "dataset", None), range):
            return len(self.train_dataset)
        return int(super().num_examples(dataloader))

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, *device: Any
    ) -> tuple[list[Turn], None]:
        """The turns of the next logical batch."""
        counted = sum(next(epoch_iterator, None) is not None for _ in range(num_batches))
        return [Turn(place == counted - 1) for place in range(counted)], None

    def training_step(self, model: Any, inputs: Turn, num_items_in_batch: Any = None) -> Tensor:
        """In a logical batch's last turn clip and add its pieces, and hold the last one for `optimizer.step()`.

        Returns:
            The mean loss of the logical batch in its last turn, 0 before.
        """
        steps = self._begun()
        self.model.train()
        getattr(self.optimizer, "train", lambda: None)()
        for piece in steps.take(inputs):
            steps.run(self._prepare_inputs(piece))
        found = steps.mean() if inputs.is_last else 0.0
        return torch.as_tensor(found, dtype=torch.float32, device=self.args.device)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **others: Any
    ) -> Any:
        """In training the losses, [B]; otherwise as `Trainer.compute_loss`, the mean of a batch."""
        if self.compute_loss_func is not None:
            rest = {name: x for name, x in inputs.items() if name != "labels"}
            outputs = model(**rest)
            losses = self.compute_loss_func(outputs, inputs.get("labels"), num_items_in_batch=None)
            losses = losses if model.training else losses.mean()
        elif model.training:
            losses, outputs = per_sample_losses(model, inputs)
        else:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch, **others)
        return (losses, outputs) if return_outputs else losses

    def create_optimizer(self, *args: Any, **options: Any) -> Any:
        """As `Trainer.create_optimizer`."""
        made = super().create_optimizer(*args, **options)
        if self._is_shared:
            load_whole_states(self.optimizer)
        return made

    def log(self, logs: dict[str, float], *others: Any) -> None:
        """As `Trainer.log`, with `epsilon` added to the training loss."""
        if self.engine is not None and logs.keys() & {"loss", "train_loss"}:
            logs["epsilon"] = self.engine.privacy_spent().epsilon
        super().log(logs, *others)

    def floating_point_ops(self, inputs: Any) -> int:
        """The operations of all pieces of a turn."""
        pieces = inputs.pieces if isinstance(inputs, Turn) else [inputs]
        return sum(int(super(PrivateTrainer, self).floating_point_ops(piece)) for piece in pieces)

    def hyperparameter_search(self, *args: Any, **options: Any) -> Any:
        """Refused: each trial would spend ε on the same records, without a total."""
        raise Misuse(
            "expected PrivateTrainer without hyperparameter_search: every trial spends ε on the same records; train a "
            "PrivateTrainer for each and account for all of them together, or search on public data"
        )

    def create_model_card(self, *args: Any, **options: Any) -> None:
        """As `Trainer.create_model_card`, with a section on privacy."""
        super().create_model_card(*args, **options)
        if self.engine is not None and self.is_world_process_zero():
            with open(Path(self.args.output_dir) / "README.md", "a", encoding="utf-8") as card:
                card.write(_section(self.engine))

    def _begun(self) -> Steps:
        """The steps to take; attaches the engine in the first turn, after all preparation."""
        if self._steps is None:
            self._look_at_records()
            advice = "PrivateTrainer takes the steps; call trainer.train()"
            compile = vars(self.privacy)["compile"]
            self._steps = Steps(self._engine, self.optimizer, self._losses_of, advice=advice, compile=compile)
            self.programs = self._steps.programs
            self._steps.begin(self._loader())
        return self._steps

    @property
    def _engine(self) -> PrivacyEngine:
        if self.engine is None:
            raise ValueError("expected a train_dataset to train on, got none: give it when the trainer is made")
        return self.engine

    def _made(self) -> PrivacyEngine:
        args = self.args
        length: dict[str, Any] = {"steps": args.max_steps} if args.max_steps > 0 else {"epochs": args.num_train_epochs}
        return PrivacyEngine(
            self.model,
            batch_size=self.logical_batch_size,
            sample_size=len(self.train_dataset),
            **self.privacy.for_engine(args.max_grad_norm),
            **length,
        )

    def _loader(self) -> Any:
        args = self.args
        options = {
            "num_workers": args.dataloader_num_workers,
            "pin_memory": args.dataloader_pin_memory and args.device.type == "cuda",
            "persistent_workers": args.dataloader_persistent_workers,
            "prefetch_factor": args.dataloader_prefetch_factor,
            "multiprocessing_context": getattr(args, "dataloader_multiprocessing_context", None),
        }
        return self._engine.data_loader(
            self.train_dataset,
            max_physical_batch_size=args.train_batch_size,
            pad=self.privacy.pad,
            collate_fn=self._collate,
            **options,
        )

    @property
    def _collate(self) -> Any:
        return self._get_collator_with_removed_columns(self.data_collator, description="training")

    def _look_at_records(self) -> None:
        """Check, before the engine records the model, that a record's loss is the model's, and depends on it alone."""
        if self.compute_loss_func is None and type(self).compute_loss is PrivateTrainer.compute_loss:
            self._look_at_loss()
        self.model.train()
        look(
            self.model,
            self.train_dataset,
            self.args.train_batch_size,
            self._collate,
            self._losses_of_collated,
        )

    def _look_at_loss(self) -> None:
        """Check on the first record with a finite loss that training uses the model's own loss."""
        self.model.eval()
        with torch.no_grad(), Draws().again(), self.compute_loss_context_manager():
            for i in range(min(RECORDS, len(self.train_dataset))):
                batch = self._collate([copy.copy(self.train_dataset[i])])
                if require_own_loss(self.model, self._prepare_inputs(batch), mixed=self.args.bf16 or self.args.fp16):
                    return

    def _losses_of_collated(self, batch: Any) -> Tensor:
        return self._losses_of(self._prepare_inputs(batch))

    def _losses_of(self, inputs: Any) -> Tensor:
        where = "compute_loss_func" if self.compute_loss_func is not None else "compute_loss"
        with self.compute_loss_context_manager():
            return per_sample(self.compute_loss(self.model, inputs), inputs, where)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self._is_shared and state_dict is None:  # all processes call this
            state_dict = whole(self.model.state_dict())
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self._is_shared:
            state = whole(self.optimizer.state_dict())
            if self.args.should_save:
                torch.save(state, Path(output_dir) / OPTIMIZER_NAME)
        if self.engine is not None:
            path = Path(output_dir) / STATE.format(self.args.process_index)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            torch.save(self.engine.state_dict(), path)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        for piece in inputs.pieces if isinstance(inputs, Turn) else [inputs]:
            super()._track_num_input_tokens(piece)

    def _clip_grad_norm(self, model: Any) -> None:
        """Does nothing: `optimizer.step()` clips each sample's gradient."""

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> None:
        """Returns None, which is not logged: before `optimizer.step()` there is no gradient."""


def _state_in(checkpoint: Path, rank: int) -> dict[str, Any]:
    """The engine's state of this process, else of the first one."""
    for name in (STATE.format(rank), STATE.format(0)):
        if os.path.isfile(checkpoint / name):
            state: dict[str, Any] = torch.load(checkpoint / name, map_location="cpu", weights_only=True)
            return state
    raise ValueError(
        f"expected {STATE.format(rank)} in the checkpoint, got {checkpoint} without it: its steps would not be "
        "accounted; go on from one that PrivateTrainer has saved with save_only_model=False"
    )


def _section(engine: PrivacyEngine) -> str:
    """Markdown for a model card."""
    spent = engine.privacy_spent()
    lines = [
        "",
        "## Privacy",
        "",
        f"Trained with differential privacy (DP-SGD, dpbench): {spent}.",
        "",
        f"- noise multiplier {spent.noise_multiplier:.4g}, sample rate {spent.sample_rate:.4g}, "
        f"clipping norm {engine.clip.sensitivity:.4g}, {engine.settings.sample_size} records",
        f"- noise: {spent.noise}",
        *(f"- {caveat}" for caveat in spent.caveats),
        "",
    ]
    return "\n".join(lines)
