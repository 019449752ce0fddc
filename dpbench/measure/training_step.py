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

from __future__ import annotations

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
_NOISY = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}


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


class _Given(NamedTuple):
    """What an engine is opened on: its name, its own model and data, the optimizer of that model, and the batch."""

    name: str
    workload: Workload
    optimizer: torch.optim.Optimizer
    inputs: Any
    targets: Any

    def losses(self, model: nn.Module | None = None) -> Tensor:
        """The losses [B] of the batch, by the model itself or by a library's wrapper of it."""
        return self.workload.loss_fn(
            forward(self.workload.model if model is None else model, self.inputs), self.targets
        )

    def by_backward(self, model: nn.Module, optimizer: Any) -> Callable[[], Tensor]:
        """A step as in an ordinary training loop."""

        def take() -> Tensor:
            losses = self.losses(model)
            losses.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            return losses.detach()

        return take

    def by_step(self, close: Callable[[], None], before: Callable[[], object] = lambda: None) -> _TrainingStep:
        """A step that hands its losses to the optimizer, to which an engine is attached."""
        step: Any = self.optimizer.step

        def take() -> Tensor:
            before()
            losses = self.losses()
            step(loss=losses)
            self.optimizer.zero_grad()
            return losses.detach()

        return _TrainingStep(self, take, close)


@dataclass
class _TrainingStep:
    """One whole step of an engine, ready to run.

    Attributes:
        given: what the engine is opened on.
        take: runs a step and returns the losses [B].
        close: detaches the engine.
        graphs: the graphs that run its steps; None if steps run eagerly.
        losses: of the last step.
    """

    given: _Given
    take: Callable[[], Tensor]
    close: Callable[[], None] = lambda: None
    graphs: Graphs | None = None
    losses: Tensor | None = None

    def __call__(self) -> None:
        self.losses = self.take()

    def holds(self) -> list[Tensor]:
        """Tensors that live before and after the step: parameters, buffers, the optimizer's state and the batch."""
        given, model = self.given, self.given.workload.model
        state = list(given.optimizer.state.values())
        return [*model.parameters(), *model.buffers(), *tensors_of((state, given.inputs, given.targets))]


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
        self._step = opened(_Given(self.name, own, optimizer, inputs, targets))
        keep_to(self.trial.way, self._step.graphs)
        self._batch_bytes = storage_bytes(tensors_of((inputs, targets)))

    def turn(self, number: int, position: int) -> None:
        """As for a backend's entry, with energy. Other libraries' turns run without our engine's optimizer hooks."""
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


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    if name == "SGD":
        return torch.optim.SGD(trained, lr=1e-3, momentum=0.9)
    return torch.optim.AdamW(trained, lr=1e-4)


def _plain(given: _Given) -> _TrainingStep:
    return _TrainingStep(given, given.by_backward(given.workload.model, given.optimizer))


def _plain_compiled(given: _Given) -> _TrainingStep:
    """Ordinary training as a graph."""
    model, loss_fn = given.workload.model, given.workload.loss_fn
    size, named = len(given.targets), dict(model.named_parameters())
    mean = lambda outputs, targets: loss_fn(outputs, targets) / size  # noqa: E731
    backend = load_backend("nonprivate")(model, mean, compile=True)

    def take() -> Tensor:
        found = backend(given.inputs, given.targets)
        for name, grad in found.grads.items():
            named[name].grad = grad
        given.optimizer.step()
        given.optimizer.zero_grad()
        return found.losses * size

    return _TrainingStep(given, take, backend.close, backend.graphs)


def engine_for(backend: str, workload: Workload, batch_size: int) -> PrivacyEngine:
    """Our engine, not attached yet.

    Args:
        backend: its name.
    """
    options: dict[str, Any] = _NOISY | {"batch_size": batch_size, "sample_size": STEPS * batch_size}
    return PrivacyEngine(workload.model, backend=backend, sampling="shuffled", **options)


def _attached(given: _Given) -> PrivacyEngine:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)
        engine = engine_for(given.name, given.workload, len(given.targets))
        engine.attach(given.optimizer)
    return engine


def _ours_compiled(given: _Given) -> _TrainingStep:
    engine = _attached(given)
    step = engine.make_step(given.workload.loss_fn, compile=True)

    def take() -> Tensor:
        losses = step(given.inputs, given.targets)
        given.optimizer.zero_grad()
        return losses

    return _TrainingStep(given, take, engine.detach, step.graphs)


def _ours(given: _Given) -> _TrainingStep:
    return given.by_step(_attached(given).detach)


def _not_in_place(model: nn.Module) -> nn.Module:
    """Replace in-place modules, as Opacus' users must: its hooks forbid in-place changes of a module's output."""
    for module in model.modules():
        if getattr(module, "inplace", False) is True:
            module.inplace = False  # type: ignore[assignment]
    return model


def _opacus_hooks(given: _Given) -> _TrainingStep:
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    model = GradSampleModule(_not_in_place(given.workload.model), loss_reduction="mean")
    private = DPOptimizer(given.optimizer, **_NOISY, expected_batch_size=len(given.targets))
    return _TrainingStep(given, given.by_backward(model, private), model.to_standard_module)


def _opacus_ghost(given: _Given) -> _TrainingStep:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

    model = GradSampleModuleFastGradientClipping(
        _not_in_place(given.workload.model), max_grad_norm=1.0, use_ghost_clipping=True, loss_reduction="mean"
    )
    private = DPOptimizerFastGradientClipping(given.optimizer, **_NOISY, expected_batch_size=len(given.targets))

    def take() -> Tensor:
        losses = given.losses(model)
        DPTensorFastGradientClipping(model, private, losses, loss_reduction="mean").backward()
        private.step()
        private.zero_grad()
        return losses.detach()

    return _TrainingStep(given, take, model.to_standard_module)


def _theirs(make: Callable[..., Any], given: _Given, **options: Any) -> Any:
    """The attached engine of a library whose engine is like ours."""
    size = len(given.targets)
    options |= {"batch_size": size, "sample_size": STEPS * size, "epochs": 1}
    engine = make(given.workload.model, **_NOISY, **options)
    engine.attach(given.optimizer)
    return engine


def _private_cnn(given: _Given) -> _TrainingStep:
    hooks = importlib.import_module("private_CNN.privacy_utils.autograd_grad_sample")
    make = importlib.import_module("private_CNN").PrivacyEngine
    engine = _theirs(make, given, ghost_clipping=True, mixed=True)
    # the mode is a global of that module, which each step changes
    return given.by_step(engine.detach, before=lambda: hooks.set_hooks_mode("ghost_norm_mixed"))


def _fastdp(given: _Given) -> _TrainingStep:
    options = {"clipping_mode": "MixOpt", "clipping_fn": "Abadi", "clipping_style": "all-layer"}
    engine = _theirs(engine_of, given, loss_reduction="mean", **options)
    model = given.workload.model
    every, held = list(engine.named_params), beyond_origin(model)
    step = given.by_backward(model, given.optimizer)

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
    return _TrainingStep(given, take, engine.detach)


_OF_OTHERS = {
    "nonprivate": _plain,
    "opacus_hooks": _opacus_hooks,
    "opacus_ghost": _opacus_ghost,
    "private_cnn": _private_cnn,
    "fastdp": _fastdp,
}
#: Steps of other libraries' engines cannot be graphs; their backends are refused earlier.
_COMPILED = {"nonprivate": _plain_compiled}
