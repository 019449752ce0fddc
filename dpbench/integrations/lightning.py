"""Private training with Lightning's Trainer, by a strategy: `training_step` returns one loss a sample.

    from dpbench.integrations.lightning import PrivateStrategy

    class Digits(LightningModule):
        def training_step(self, batch, batch_idx):
            images, targets = batch
            return F.cross_entropy(self.net(images), targets, reduction="none")  # [B]
        ...

    strategy = PrivateStrategy(privacy=dict(batch_size=256, max_grad_norm=1.0, target_epsilon=3))
    Trainer(max_epochs=10, strategy=strategy).fit(Digits(), DataLoader(data, batch_size=64))
    print(strategy.engine.privacy_spent())

Lightning computes losses, runs backward and steps in its strategy. So optimization stays automatic, and a step of
Lightning's is a logical batch: `global_step`, schedulers, `max_steps`, validation intervals and loggers count accounted
steps. The train loader provides the data, collate_fn and workers. The engine draws the batches, of
`privacy["batch_size"]` records (by default the loader's batch_size times the processes), in pieces of the loader's
batch_size; `training_step` runs on each piece. Checkpoints hold the engine's state with its keys, and are as secret as
the data, except those with `save_weights_only=True`.

Not private: values that `training_step` logs, metrics of private records, and buffers that it writes data to.
"""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from clipping.core.autograd import named_versions
from clipping.distributed.spread import sharded_modules
from clipping.program.capture import is_captured
from clipping.program.graphs import Compile
from dpbench.engine import Misuse, PrivacyEngine, PrivacyWarning
from dpbench.engine.distributed import place
from dpbench.engine.recorder import BUFFER
from dpbench.engine.settings import steps_per_epoch
from dpbench.integrations.loader_options import batch_size_of, shared_options
from dpbench.integrations.record_check import look
from dpbench.integrations.turns import Steps, Turn, per_sample
from dpbench.trials.packages import needed

with needed("lightning", __name__):
    from lightning.pytorch import Callback
    from lightning.pytorch.callbacks import BaseFinetuning
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

    from dpbench.integrations.lightning_refusals import refuse, refuse_loader  # needs it, too

STATE = "privacy_engine"
"""Key in a checkpoint: the engine's state."""


class _Turns:
    """One turn a logical batch, for Lightning to count; the step draws the batch."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Turn]:
        return (Turn(is_last=True) for _ in range(self._steps))

    def state_dict(self) -> dict[str, Any]:
        """Empty: the engine knows which batch is next."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As above."""


class _Epsilon(Callback):
    """Logs `epsilon` as often as the Trainer logs; never with `barebones=True` or `log_every_n_steps=0`."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        every = trainer.log_every_n_steps
        if every and (trainer.global_step % every == 0 or trainer.is_last_batch):
            pl_module.log("epsilon", trainer.strategy.engine.privacy_spent().epsilon, on_step=True, on_epoch=False)


class _Private:
    """Mixin before one of Lightning's strategies, which gives it the steps of a `PrivacyEngine`.

    Before the first step `training_step` runs on a few records together and alone, and must give the same losses
    (`dpbench.integrations.record_check`).

    Args:
        privacy: arguments of `PrivacyEngine`, except model, sample_size, epochs and steps, which Lightning knows.
        model: name of the submodule that `training_step` calls. None: the only one with trainable parameters, or the
            LightningModule itself if there are several; `training_step` must then call `self(...)`. With a
            `BaseFinetuning`, frozen parameters count as trainable, as it trains them later.
        pad: as in `PrivacyEngine.data_loader`.
        compile: run steps as programs that include `training_step`, as in `clipping.Backend`. Calls of `self.log` take
            effect after the program has run.
        options: of Lightning's strategy.

    Attributes:
        engine: the engine, once there are data; it stays after `fit`.
        programs: the steps' programs, once training has begun; `programs.graphs` is None if all steps run eagerly.

    Raises:
        ValueError: a feature that cannot be private, named, when training begins.
    """

    lightning_module: Any  # these four are the strategy's
    optimizers: Any
    precision_plugin: Any
    root_device: Any

    def __init__(
        self,
        *args: Any,
        privacy: Mapping[str, Any],
        model: str | None = None,
        pad: bool | None = None,
        compile: Compile = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.engine: PrivacyEngine | None = None
        self._privacy, self._submodule, self._pad, self._compile = dict(privacy), model, pad, compile
        self._logged: list[tuple[Any, Any]] = []  # arguments of `log` within a program
        self._output: Any = None
        self._steps: Steps | None = None
        self._restored: Mapping[str, Any] | None = None

    def setup(self, trainer: Any) -> None:
        """As Lightning's, after refusing what cannot be private."""
        self._trainer = trainer
        if trainer.state.fn == TrainerFn.FITTING:
            refuse(trainer)
            if not any(isinstance(callback, _Epsilon) for callback in trainer.callbacks):
                trainer.callbacks.append(_Epsilon())
            self._hand_on_turns()
        super().setup(trainer)  # type: ignore[misc]

    def _hand_on_turns(self) -> None:
        """Keep `on_before_batch_transfer` for pieces, which are not drawn yet when Lightning calls it with a turn."""
        module = self.lightning_module
        before = type(module)._on_before_batch_transfer

        def hand_on(batch: Any, dataloader_idx: int = 0) -> Any:
            return batch if isinstance(batch, Turn) else before(module, batch, dataloader_idx)

        module._on_before_batch_transfer = hand_on

    def _hold_logs(self) -> None:
        """Keep calls of Lightning's `log` within a program as outputs of the program."""
        module = self.lightning_module
        log = module.log

        def kept(*args: Any, **options: Any) -> None:
            if is_captured():
                self._logged = [*self._logged, (args, options)]
            else:
                log(*args, **options)

        module.log = kept

    def process_dataloader(self, dataloader: Any) -> Any:
        """In training an epoch's turns, backed by the engine's loader; other loaders are unchanged."""
        if not self._trainer.training:
            return dataloader
        refuse_loader(dataloader)
        if self.engine is None:
            self.engine = self._made(dataloader)
        self._source = dataloader
        self._loader = self.engine.data_loader(
            dataloader.dataset,
            max_physical_batch_size=batch_size_of(dataloader),
            pad=self._pad,
            **shared_options(dataloader),
        )
        if self._steps is not None:  # of a later epoch
            self._steps.begin(self._loader)
        return _Turns(self.engine.settings.steps_per_epoch)

    def on_train_start(self) -> None:
        """As Lightning's, after attaching the engine; `configure_optimizers` may ask for the train loader before."""
        assert self.engine is not None
        if self.engine.model not in set(self.lightning_module.modules()):
            raise Misuse(
                "expected the module that this strategy has trained before, got another one, which its engine does not "
                "train: take a strategy and a Trainer for each; their ε add up if they see the same records"
            )
        if self._restored is not None:
            self.engine.load_state_dict(self._restored)  # type: ignore[arg-type]
            self._restored = None
        inside = set(self.engine.model.modules())
        named = self.lightning_module.named_modules()
        self._outside = [(name, each) for name, each in named if each not in inside and each._buffers]
        self._is_looked_at = bool(sharded_modules(self.lightning_module))
        if self._is_looked_at and self._source.collate_fn is not default_collate:
            has_index = is_param_in_hook_signature(self.lightning_module.training_step, "batch_idx", min_args=2)
            self._look_at_records((0,) if has_index else ())
        self._steps = Steps(
            self.engine,
            self.optimizers[0],
            self._losses_of,
            advice="training_step returns them, one a sample",
            compile=self._compile,
        )
        self.programs = self._steps.programs
        if self.programs.graphs is not None:
            self._hold_logs()
        self._steps.begin(self._loader)
        super().on_train_start()  # type: ignore[misc]

    def _look_at_records(self, others: tuple[Any, ...]) -> None:
        """Check that a record's loss depends on that record alone; nothing is logged or kept.

        Called in the first step, as hooks of the module may prepare what `training_step` reads. A module sharded by
        FSDP2 is checked before, and only with a collate_fn: the optimizer's parameters must not be gathered.
        """
        assert self.engine is not None
        module, source, recorder = self.lightning_module, self._source, self.engine._recorder
        with mock.patch.object(module, "log", lambda *args, **options: None), recorder.paused():
            look(
                module,
                source.dataset,
                batch_size_of(source),
                source.collate_fn,
                lambda batch: self._losses_of((self._transferred(batch), *others)),
            )
        self._is_looked_at = True

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """As Lightning's; a turn's pieces move when they are drawn."""
        if isinstance(batch, Turn):
            return batch
        return super().batch_to_device(batch, device, dataloader_idx)  # type: ignore[misc]

    def training_step(self, turn: Turn, *others: Any) -> Any:
        """Run the module's `training_step` on each piece of a logical batch.

        Returns:
            Its output for the last piece, with the mean loss of all pieces in place of the losses.
        """
        if not isinstance(turn, Turn):
            raise ValueError(
                "expected one train DataLoader with a private strategy, and training_step(self, batch, ...), got one "
                f"of type {type(turn).__name__}: ε is that of one data set; put the records of all into one "
                "(torch.utils.data.ConcatDataset, StackDataset), whose loader is in no list or CombinedLoader"
            )
        refuse(self._trainer)  # callbacks may set what was not set before
        if not self._is_looked_at:
            self._look_at_records(others)
        steps, self._output, before = self._steps, None, self._buffers()
        assert steps is not None
        self._log_means_over(None)
        for piece in steps.take(turn):
            self._logged = []
            self._log_means_over(piece)
            if steps.run((self._transferred(piece), *others)):
                for args, options in self._logged:
                    self.lightning_module.log(*args, **options)
        for name in dict(self._buffers().items() - before.items()):
            warnings.warn(BUFFER.format(name, "training_step"), PrivacyWarning, stacklevel=2)
        mean = torch.as_tensor(steps.mean(), device=self.root_device)
        return {**self._output, "loss": mean} if isinstance(self._output, Mapping) else mean

    def _log_means_over(self, piece: Any) -> None:
        """Let `self.log(..., on_epoch=True)` weigh a mean by the size of this piece, as the turn has none."""
        results = self._trainer._results
        if results is not None:
            results.batch, results.batch_size = piece, None

    def _buffers(self) -> dict[str, tuple[int, int]]:
        """Name -> (identity, version) of each buffer in a checkpoint that is outside of the engine's model."""
        buffers = {
            f"{name}.{buffer}".lstrip("."): x
            for name, each in self._outside
            for buffer, x in each._buffers.items()
            if x is not None and buffer not in each._non_persistent_buffers_set
        }
        return named_versions(buffers)

    def _losses_of(self, given: tuple[Any, ...]) -> Tensor:
        output = self._output = super().training_step(*given)  # type: ignore[misc]
        return per_sample(output["loss"] if isinstance(output, Mapping) else output, given[0], "training_step")

    def _transferred(self, piece: Any) -> Any:
        """Move a piece to the device, with Lightning's hooks and conversions."""
        piece = self.precision_plugin.convert_input(piece)
        return self.batch_to_device(self.lightning_module._on_before_batch_transfer(piece))

    def backward(self, closure_loss: Any, *args: Any, **options: Any) -> Any:
        """Calls the hooks around a backward pass alone: `optimizer.step()` computes the clipped gradients."""
        self.pre_backward(closure_loss)  # type: ignore[attr-defined]
        loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        loss = self.precision_plugin.post_backward(loss, self.lightning_module)
        self.post_backward(loss)  # type: ignore[attr-defined]
        return loss

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **options: Any) -> None:
        """As Lightning's, with the engine's state beside the optimizer's."""
        if self.engine is not None and "optimizer_states" in checkpoint:
            checkpoint[STATE] = self.engine.state_dict()
        super().save_checkpoint(checkpoint, *args, **options)  # type: ignore[misc]

    def load_checkpoint(self, *args: Any, **options: Any) -> Any:
        """As Lightning's; in training the engine resumes from its state with noise of a fresh key.

        Raises:
            ValueError: a checkpoint without the engine's state, to train on.
        """
        checkpoint = super().load_checkpoint(*args, **options)  # type: ignore[misc]
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            if STATE not in checkpoint:
                raise ValueError(
                    f"expected {STATE!r} in the checkpoint to train on, got one without: its steps would not be "
                    "accounted; take one that a private strategy has saved, with save_weights_only=False"
                )
            self._restored = checkpoint[STATE]
        return checkpoint

    def teardown(self) -> None:
        """As Lightning's; restores module and optimizer, and keeps the engine."""
        for name in ("_on_before_batch_transfer", "log"):
            vars(self.lightning_module).pop(name, None)
        steps, self._steps, self._output = self._steps, None, None
        if steps is not None:
            steps.close()
        super().teardown()  # type: ignore[misc]

    def _made(self, dataloader: Any) -> PrivacyEngine:
        sample_size = len(dataloader.dataset)
        privacy = {"batch_size": batch_size_of(dataloader) * place()[1], **self._privacy}
        steps = steps_per_epoch(privacy["batch_size"], sample_size, privacy.get("sampling", "poisson"))
        trainer = self._trainer
        ends = [trainer.max_steps] if trainer.max_steps > 0 else []
        if trainer.max_epochs is not None and trainer.max_epochs > 0:
            limit = trainer.limit_train_batches
            taken = min(steps, limit) if isinstance(limit, int) else int(steps * limit)
            ends.append(trainer.max_epochs * max(1, taken))
        thawed = any(isinstance(callback, BaseFinetuning) for callback in trainer.callbacks)
        module = _called(self.lightning_module, self._submodule, thawed)
        engine = PrivacyEngine(module, sample_size=sample_size, steps=min(ends, default=None), **privacy)
        engine._recorder.call = "call self(...) in training_step, or pass model=, the name of what it calls"
        return engine


class PrivateStrategy(_Private, SingleDeviceStrategy):
    """On one device: the Trainer's, by its `accelerator` and `devices`.

    Args:
        device: "cpu" or "cuda:1"; None for the Trainer's.
        privacy, model, pad, compile: as in `_Private`.

    Raises:
        ValueError: a Trainer with several devices.
    """

    def __init__(self, device: Any = None, *args: Any, **options: Any) -> None:
        chosen = torch.device("cpu" if device is None else device)
        super().__init__(torch.device("cuda", 0) if str(chosen) == "cuda" else chosen, *args, **options)
        self._is_chosen = device is not None

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """A given device, which takes precedence over the Trainer's; else None."""
        return [self._root_device] if self._is_chosen else None

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) != 1:
            raise ValueError(
                f"expected devices=1 with PrivateStrategy, got {len(devices)}: it trains in one process; say "
                "devices=1, or take PrivateDDPStrategy"
            )
        self._root_device = devices[0]


class PrivateDDPStrategy(_Private, DDPStrategy):
    """In several processes: the engine adds up their clipped sums, and no gradient is averaged before clipping.

    A checkpoint holds the first process's state; all processes resume from it.
    """

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return model

    def _register_ddp_hooks(self) -> None:
        """Does nothing, as there is no DistributedDataParallel."""


class PrivateModelParallelStrategy(_Private, ModelParallelStrategy):
    """In several processes that shard the parameters: `configure_model` calls `fully_shard(..., mesh=...)` (FSDP2).

    The mesh is `self.device_mesh["data_parallel"]`, of all processes. With `save_distributed_checkpoint=False` a
    checkpoint is one file.

    Raises:
        ValueError: tensor parallelism.
    """

    def __init__(self, *args: Any, tensor_parallel_size: int = 1, **options: Any) -> None:
        if tensor_parallel_size != 1:
            raise ValueError(
                f"expected tensor_parallel_size=1 with a private strategy, got {tensor_parallel_size!r}: the norm of a "
                "sample's gradient is found where all of the sample is"
            )
        super().__init__(*args, tensor_parallel_size=1, **options)

    def setup_environment(self) -> None:
        """As Lightning's, with all processes in one data-parallel mesh."""
        self._data_parallel_size: int | str = self.num_nodes * self.num_processes
        super().setup_environment()


def _called(module: nn.Module, name: str | None, thawed: bool) -> nn.Module:
    """The module that the engine records: see `_Private`. `thawed`: parameters frozen now are trained later."""
    if name is not None:
        return module.get_submodule(name)
    mine = {id(p) for p in module.parameters() if thawed or p.requires_grad}
    for child in module.children():
        if mine and mine <= {id(p) for p in child.parameters()}:
            return child
    return module
