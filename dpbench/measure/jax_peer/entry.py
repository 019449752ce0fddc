"""jax_privacy's entry in a `TrainingStepTrial`: another framework's engine, beside that framework's own plain step.

The model is a function in jax with the same parameters (`dpbench.measure.jax_peer.models`). It is compared with the
oracle on the same samples as every backend. Then a process that imports no torch compiles both steps, and takes turns:
some private steps and some plain ones, in changing order. Compiling is not part of a turn; ``compile_seconds`` has it.

A ratio to torch's plain step would mix two libraries of kernels, so the entry has its own ``plain`` turns and memory.
Memory is what XLA plans for the compiled step: arguments, results and temporaries.
"""

import math
import resource
from dataclasses import dataclass
from typing import Any

import torch

from clipping import ClippedGradient, Flat, compare
from clipping.checks.verification import limit_of
from clipping.core.types import Problem, UnsupportedModel
from dpbench.measure import verify
from dpbench.measure.bench import open_workload
from dpbench.measure.jax_peer import Settings
from dpbench.measure.jax_peer.handed import Process, unavailable
from dpbench.measure.overhead import Entry
from dpbench.measure.timing import Stopwatch
from dpbench.models.workload import Workload
from dpbench.trials.backend_classes import UnavailableBackend
from dpbench.trials.whole_step import JAX_PRIVACY, TrainingStepTrial

#: Models that `dpbench.measure.jax_peer.models` has; that module imports jax.
KNOWN = ("mlp", "cnn", "resnet18", "transformers:gpt2")
#: Options of a model that are not written in jax.
NOT_WRITTEN = ("frozen=", "positions=", "tie_word_embeddings=")
#: Our precision profile -> jax's name for the precision of products on a GPU. A CPU does not round operands.
PRECISIONS = {"float32": "highest", "float64": "highest", "tf32": "tensorfloat32"}
TURNS = ("plain", "private")


@dataclass
class JaxEntry(Entry):
    """See the module's docstring."""

    trial: TrainingStepTrial
    lead: int = 1
    _process: Process | None = None

    def _opened(self, workload: Workload, inputs: Any, targets: Any) -> None:
        if (reason := unavailable()) is not None:
            raise UnavailableBackend(JAX_PRIVACY, reason)
        settings = settings_of(self.trial, workload)
        wide = open_workload(self.trial.replace(precision="float64"))
        few = wide.batch(verify.SAMPLES)
        with self._started(wide, *few, settings) as process:
            self.record["verification"] = self._compared(process, wide, *few)
        self._process = process = self._started(workload, inputs, targets, settings)
        self._step = process  # type: ignore[assignment]  # what an entry closes
        told = process.ask("compile")
        memory = told.pop("memory")
        self.record |= told | {"versions": process.versions, "memory": memory["private"]}
        self.record["plain"] = {"turns": [], "memory": memory["plain"]}
        few = inputs[: verify.SAMPLES], targets[: verify.SAMPLES]
        self.record["verification"]["in_own_precision"] = self._compared(process, workload, *few)
        self.record["coverage"] = {"ghost": 0.0, "instantiated": 1.0, "fallback": 0.0}

    def _started(self, workload: Workload, inputs: Any, targets: Any, settings: Settings) -> Process:
        return Process(workload, inputs, targets, settings, self.device.type == "cuda")

    def _compared(self, process: Process, workload: Workload, inputs: Any, targets: Any) -> dict[str, Any]:
        reference = verify.oracle(workload, inputs, targets, Flat(max_grad_norm=self.trial.max_grad_norm))
        norms = None if reference.norms is None else reference.norms.cpu()
        grads = {name: grad.cpu() for name, grad in reference.grads.items()}
        agreement = compare(process.clipped(len(targets)), ClippedGradient(grads, norms, reference.losses.cpu()))
        limit = limit_of([next(workload.model.parameters()).dtype])
        record = verify.verification_record(agreement, limit, len(targets))
        verify.require(JAX_PRIVACY, agreement, limit, {})
        return record

    def _stopwatch(self) -> Stopwatch:
        return lambda _, count, most: self._timed("private", count)

    def _timed(self, which: str, count: int) -> list[float]:
        assert self._process is not None
        told = self._process.ask("steps", which=which, count=count)
        if which == "private":
            self.record["loss"] = told["loss"]
        seconds: list[float] = told["seconds"]
        return seconds

    def turn(self, number: int, position: int) -> None:
        """Time private and plain steps of one round, in an order that changes from round to round."""
        if self._step is None:
            return
        with self._guarded():
            taken = {}
            for which in TURNS if number % 2 else reversed(TURNS):
                taken[which] = self._timed(which, self.lead + self.steps)[self.lead :]
            turn = {"round": number, "position": position}
            self.record["turns"].append(turn | {"step_seconds": taken["private"]})
            self.record["plain"]["turns"].append(turn | {"step_seconds": taken["plain"]})

    def open(self, workload: Workload, inputs: Any, targets: Any) -> None:
        """Verify it, and warm it up; it is jitted beside torch's eager steps."""
        super().open(workload, inputs, targets)
        if self._step is not None:
            self.record["way"] = "jitted"

    def take_memory(self) -> None:
        """End the process; the memory is known since compiling."""
        self._close()


def settings_of(trial: TrainingStepTrial, workload: Workload) -> Settings:
    """The settings of the process.

    Raises:
        UnsupportedModel: there is no such model in jax here, or no such precision.
    """
    plain = trial.model.partition("?")[0].partition("@")[0]
    if plain not in KNOWN or any(option in trial.model for option in NOT_WRITTEN):
        remedy = f"one of {', '.join(KNOWN)}"
        raise UnsupportedModel(JAX_PRIVACY, [Problem("model", f"{trial.model} is not written in jax here", remedy)])
    if trial.precision not in PRECISIONS:
        remedy = f"one of {', '.join(PRECISIONS)}"
        raise UnsupportedModel(JAX_PRIVACY, [Problem("precision", f"{trial.precision} is not measured", remedy)])
    options = {"heads": workload.model.config.n_head} if plain == "transformers:gpt2" else {}  # type: ignore[union-attr]
    device = torch.device(trial.device)
    return Settings(
        model=plain,
        options=options,
        optimizer=trial.optimizer,
        max_grad_norm=trial.max_grad_norm,
        precision=PRECISIONS[trial.precision] if device.type == "cuda" else None,
        threads=torch.get_num_threads(),
        device=device.index or 0,
        room=_room(device),
    )


def _room(device: torch.device) -> float:
    """Bytes that the process may need: the free memory of a GPU, or the limit of a trial on a CPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return math.inf if soft == resource.RLIM_INFINITY else soft
