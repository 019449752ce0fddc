"""Run a `TrainingStepTrial`: time whole training steps of engines as their libraries ship them, interleaved.

A step is forward pass, losses, backward, clipping, noise (σ = 1) and the optimizer's update; it frees the gradients at
its end. The loader is excluded. Unless steps run eagerly, our engine runs them in one call (`PrivacyEngine.make_step`),
and the plain step is a graph too. Each engine has its own copy of the model, of the same seed, and its own optimizer;
all share the batch. Otherwise engines are opened, timed in turns and measured as backends are by
`dpbench.measure.overhead`, with the same result. One untimed step begins each turn: in training, a step follows one of
the same engine, not one of an engine that has just freed per-sample gradients.

jax_privacy's steps run in a process of their own (`dpbench.measure.jax_peer.entry`).

The result is that of an `OverheadTrial`, and ``energy``: the name of the counter, or "not readable". With a counter, a
turn has ``joules_per_step``: all energy that the machine's processors, or the GPU, used meanwhile.
"""

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from clipping import load_backend
from clipping.core.batches import forward, tensors_of
from clipping.peers.fastdp import beyond_origin, engine_of
from clipping.program.graphs import Graphs
from dpbench.engine import PrivacyEngine, PrivacyWarning
from dpbench.measure import counters
from dpbench.measure.bench import Memory, device_of, open_workload, storage_bytes
from dpbench.measure.jax_peer.entry import JaxEntry
from dpbench.measure.memory import peak_of
from dpbench.measure.overhead import Entry, compared, keep_to
from dpbench.models.workload import Workload
from dpbench.trials.whole_step import JAX_PRIVACY, TrainingStepTrial

#: Steps in an epoch of the data set, which engines' accountants require.
STEPS = 100


def run(trial: TrainingStepTrial) -> dict[str, Any]:
    """See the module's docstring.

    Raises:
        PartlyFailed: an entry is a `mismatch` or an `error`; with the whole result.
        NotHere: the device lacks this precision.
    """
    device = device_of(trial.device)
    by, joules = counters.energy(device)
    entries = [
        JaxEntry(name, trial, device) if name == JAX_PRIVACY else _Engine(name, trial, device, joules=joules)
        for name in trial.backends
    ]
    return compared(trial, device, entries) | {"energy": by}


@dataclass
class _TrainingStep:
    """One whole step, ready to run.

    Attributes:
        model, optimizer: that it trains.
        batch: (inputs, targets).
        take, close, graphs: as in `_Opened`.
        losses: of the last step.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: tuple[Any, Any]
    take: Callable[[], Tensor]
    close: Callable[[], None]
    graphs: Graphs | None
    losses: Tensor | None = None

    def __call__(self) -> None:
        self.losses = self.take()

    def holds(self) -> list[Tensor]:
        """Tensors that live before and after the step: parameters, buffers, the optimizer's state and the batch."""
        state = list(self.optimizer.state.values())
        return [*self.model.parameters(), *self.model.buffers(), *tensors_of((state, self.batch))]


@dataclass
class _Engine(Entry):
    """An engine's step, from opening to record. `joules` reads a counter of energy, if there is one."""

    trial: TrainingStepTrial
    joules: Callable[[], float] | None = None
    fewest: int = 3
    lead: int = 1
    _step: Any = field(default=None)
    _batch_bytes: int = 0

    def _opened(self, workload: Workload, inputs: Any, targets: Any) -> None:
        super()._opened(workload, inputs, targets)
        self._close()
        own = open_workload(self.trial)
        optimizer = _optimizer(self.trial.optimizer, own.model)
        others, ours = (_COMPILED, _ours_compiled) if self.trial.compiled else (_OF_OTHERS, _ours)
        opened = others.get(self.name, ours)
        found = opened(self.name, own, optimizer, inputs, targets)
        self._step = _TrainingStep(own.model, optimizer, (inputs, targets), *found)
        keep_to(self.trial.way, found.graphs)
        self._batch_bytes = storage_bytes(tensors_of((inputs, targets)))

    def turn(self, number: int, position: int) -> None:
        """As for a backend's entry, with energy. Our engine checks every optimizer's step; only ours pays for that."""
        before = self.joules() if self.joules is not None else 0.0
        with mock.patch.dict(_global_optimizer_pre_hooks, clear=self.name in _OF_OTHERS):
            super().turn(number, position)
        if self.joules is not None and self._step is not None:
            self.record["turns"][-1]["joules_per_step"] = (self.joules() - before) / (self.lead + self.steps)

    def _peak(self) -> Memory:
        return peak_of(self._step, self.device)

    def _left_by_others(self, memory: Memory) -> int:
        """Bytes of a CUDA device after this engine and its model are closed, without the batch."""
        return torch.cuda.memory_allocated(self.device) - self._batch_bytes


class _Opened(NamedTuple):
    """An engine on a model.

    Attributes:
        take: runs a step and returns the losses [B].
        close: detaches the engine.
        graphs: the graphs that run its steps; None if steps run eagerly.
    """

    take: Callable[[], Tensor]
    close: Callable[[], None] = lambda: None
    graphs: Graphs | None = None


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    if name == "SGD":
        return torch.optim.SGD(trained, lr=1e-3, momentum=0.9)
    return torch.optim.AdamW(trained, lr=1e-4)


def _losses(workload: Workload, model: nn.Module, inputs: Any, targets: Any) -> Tensor:
    return workload.loss_fn(forward(model, inputs), targets)


def _by_backward(
    workload: Workload, model: nn.Module, optimizer: Any, inputs: Any, targets: Any
) -> Callable[[], Tensor]:
    """A step as in an ordinary training loop."""

    def take() -> Tensor:
        losses = _losses(workload, model, inputs, targets)
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return losses.detach()

    return take


def _plain(_: str, workload: Workload, optimizer: torch.optim.Optimizer, inputs: Any, targets: Any) -> _Opened:
    return _Opened(_by_backward(workload, workload.model, optimizer, inputs, targets))


def _plain_compiled(_: str, workload: Workload, optimizer: torch.optim.Optimizer, inputs: Any, targets: Any) -> _Opened:
    """Ordinary training as a graph."""
    size, named = len(targets), dict(workload.model.named_parameters())
    backend = load_backend("nonprivate")(
        workload.model, lambda outputs, targets: workload.loss_fn(outputs, targets) / size, compile=True
    )

    def take() -> Tensor:
        found = backend(inputs, targets)
        for name, grad in found.grads.items():
            named[name].grad = grad
        optimizer.step()
        optimizer.zero_grad()
        return found.losses * size

    return _Opened(take, backend.close, backend.graphs)


def engine_for(backend: str, workload: Workload, batch_size: int) -> PrivacyEngine:
    """Our engine, not attached yet.

    Args:
        backend: its name.
    """
    options: dict[str, Any] = {"batch_size": batch_size, "sample_size": STEPS * batch_size, "max_grad_norm": 1.0}
    return PrivacyEngine(workload.model, noise_multiplier=1.0, backend=backend, sampling="shuffled", **options)


def _attached(name: str, workload: Workload, optimizer: torch.optim.Optimizer, targets: Any) -> PrivacyEngine:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        engine = engine_for(name, workload, len(targets))
        engine.attach(optimizer)
    return engine


def _ours_compiled(
    name: str, workload: Workload, optimizer: torch.optim.Optimizer, inputs: Any, targets: Any
) -> _Opened:
    engine = _attached(name, workload, optimizer, targets)
    step = engine.make_step(workload.loss_fn, compile=True)

    def take() -> Tensor:
        losses = step(inputs, targets)
        optimizer.zero_grad()
        return losses

    return _Opened(take, engine.detach, step.graphs)


def _ours(name: str, workload: Workload, optimizer: torch.optim.Optimizer, inputs: Any, targets: Any) -> _Opened:
    engine = _attached(name, workload, optimizer, targets)
    step: Any = optimizer.step

    def take() -> Tensor:
        losses = _losses(workload, workload.model, inputs, targets)
        step(loss=losses)
        optimizer.zero_grad()
        return losses.detach()

    return _Opened(take, engine.detach)


def _not_in_place(model: nn.Module) -> nn.Module:
    """Replace in-place modules, as Opacus' users must: its hooks forbid in-place changes of a module's output."""
    for module in model.modules():
        if getattr(module, "inplace", False) is True:
            module.inplace = False  # type: ignore[assignment]
    return model


def _opacus_hooks(_: str, workload: Workload, optimizer: torch.optim.Optimizer, inputs: Any, targets: Any) -> _Opened:
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    model = GradSampleModule(_not_in_place(workload.model), loss_reduction="mean")
    private = DPOptimizer(optimizer, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=len(targets))

    return _Opened(_by_backward(workload, model, private, inputs, targets), model.to_standard_module)


def _opacus_ghost(_: str, workload: Workload, optimizer: torch.optim.Optimizer, inputs: Any, targets: Any) -> _Opened:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

    model = GradSampleModuleFastGradientClipping(
        _not_in_place(workload.model), max_grad_norm=1.0, use_ghost_clipping=True, loss_reduction="mean"
    )
    private = DPOptimizerFastGradientClipping(
        optimizer, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=len(targets)
    )

    def take() -> Tensor:
        losses = _losses(workload, model, inputs, targets)
        DPTensorFastGradientClipping(model, private, losses, loss_reduction="mean").backward()
        private.step()
        private.zero_grad()
        return losses.detach()

    return _Opened(take, model.to_standard_module)


def _theirs(
    make: Callable[..., Any], workload: Workload, optimizer: torch.optim.Optimizer, targets: Any, **options: Any
) -> Any:
    """The attached engine of a library whose engine is like ours."""
    size = len(targets)
    options |= {"batch_size": size, "sample_size": STEPS * size, "epochs": 1}
    engine = make(workload.model, max_grad_norm=1.0, noise_multiplier=1.0, **options)
    engine.attach(optimizer)
    return engine


def _private_cnn(_: str, workload: Workload, optimizer: torch.optim.Optimizer, inputs: Any, targets: Any) -> _Opened:
    hooks = importlib.import_module("private_CNN.privacy_utils.autograd_grad_sample")
    make = importlib.import_module("private_CNN").PrivacyEngine
    engine = _theirs(make, workload, optimizer, targets, ghost_clipping=True, mixed=True)
    step: Any = optimizer.step

    def take() -> Tensor:
        hooks.set_hooks_mode("ghost_norm_mixed")  # a global of that module, which each step changes
        losses = _losses(workload, workload.model, inputs, targets)
        step(loss=losses)
        optimizer.zero_grad()
        return losses.detach()

    return _Opened(take, engine.detach)


def _fastdp(_: str, workload: Workload, optimizer: torch.optim.Optimizer, inputs: Any, targets: Any) -> _Opened:
    options = {"clipping_mode": "MixOpt", "clipping_fn": "Abadi", "clipping_style": "all-layer"}
    engine = _theirs(engine_of, workload, optimizer, targets, loss_reduction="mean", **options)
    every, held = list(engine.named_params), beyond_origin(workload.model)
    step = _by_backward(workload, workload.model, optimizer, inputs, targets)

    def hold(holds: bool) -> None:
        for p in held:
            p.requires_grad_(not holds)

    def take() -> Tensor:
        losses = step()
        if len(engine.named_params) < len(every):  # it drops what is not computed from the first layer's output
            engine.named_params = list(every)
            hold(False)
        return losses

    hold(True)
    return _Opened(take, engine.detach)


_OF_OTHERS = {
    "nonprivate": _plain,
    "opacus_hooks": _opacus_hooks,
    "opacus_ghost": _opacus_ghost,
    "private_cnn": _private_cnn,
    "fastdp": _fastdp,
}
#: Steps of other libraries' engines cannot be graphs; their backends are refused earlier.
_COMPILED = {"nonprivate": _plain_compiled}
