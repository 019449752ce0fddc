"""Run a `DistributedTrial`: fork ranks from the trial's process, which train together.

Weak scaling: each process has `batch_size` samples. Each backend has its own model, spread in the same way. The steps
are: compare the summed clipped gradient with one process's; warm up; run rounds in which every backend has a turn, in a
random order; and measure the memory of one more step of each, in every process.

A step is all of training: forward, backward, communication, noise and the optimizer (SGD with momentum). The wrapper of
ordinary training averages gradients during the backward pass; the engine's sums are sent after it, once the factors are
known. If there are more processes than CPUs or GPUs, throughput is marked `oversubscribed`, and does not represent a
machine with enough of them.
"""

import contextlib
import math
import multiprocessing
import random
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from datetime import timedelta
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clipping import Flat, compare, load_backend
from clipping.checks.verification import Agreement, limit_of
from clipping.core.batches import forward, map_tensors, tensors_of
from clipping.distributed.spread import here
from dpbench.engine import PrivacyEngine, PrivacyWarning
from dpbench.measure import verify
from dpbench.measure.bench import parameter_count, storage_bytes
from dpbench.measure.memory import measured_peak
from dpbench.measure.timing import stopwatch_for
from dpbench.models.loading import load_workload
from dpbench.models.workload import Workload
from dpbench.process.linux import available_cpus
from dpbench.training import DistributedTrial
from dpbench.trials.outcome import Outcome, TrialFailure, classify

#: Length of a turn in seconds, and its largest number of steps.
TURN_SECONDS, MOST_IN_A_TURN = 0.3, 10
#: Samples of each process for the verification.
VERIFIED = 2
_MAX_GRAD_NORM, _NOISE = 1.0, 0.01


class RankFailed(TrialFailure):
    """A process of the training exited or raised before its answer."""

    def __init__(self, result: dict[str, Any], message: str, outcome: Outcome = Outcome.ERROR) -> None:
        super().__init__(result, message)
        self.outcome = outcome

    def __reduce__(self) -> Any:
        return RankFailed, (self.result, str(self), self.outcome)


def run(trial: DistributedTrial) -> dict[str, Any]:
    """{"parameters", "communication", "oversubscribed", "verification", "backends": {name: {"turns", "memory"}}}.

    A turn is {"round", "position", "step_seconds"}, of the first process; memory is a list, one of each process.

    Raises:
        Mismatch: the summed clipped gradient differs from one process's.
        RankFailed: a process exited or raised.
    """
    on_cuda = trial.device.startswith("cuda")
    places = torch.cuda.device_count() if on_cuda else available_cpus() // trial.threads
    if on_cuda and trial.processes > places:
        raise RankFailed({}, f"expected at most {places} processes, one a GPU, got {trial.processes}")
    answers = _launched(trial)
    first = answers[0]
    found = Agreement(**first["agreement"])
    limit = limit_of([torch.bfloat16 if trial.precision == "mixed" else torch.float32])
    result: dict[str, Any] = {
        "parameters": first["parameters"],
        "communication": first["communication"],
        "oversubscribed": trial.processes > places,
        "verification": verify.verification_record(found, limit, VERIFIED * trial.processes),
        "backends": {
            name: {"turns": first["turns"][name], "memory": [answer["memory"][name] for answer in answers]}
            for name in trial.backends
        },
    }
    verify.require(trial.backends[-1], found, limit, result)
    return result


def _launched(trial: DistributedTrial) -> list[dict[str, Any]]:
    """Run all ranks, and return their answers in order. Ranks that still run end with the trial's session."""
    fork = multiprocessing.get_context("fork")  # the trial's process has imported torch, and used no device
    pool = ProcessPoolExecutor(trial.processes, mp_context=fork)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [pool.submit(_rank, trial, rank, f"file://{folder}/meet") for rank in range(trial.processes)]
        try:
            for rank in as_completed(ranks):
                rank.result()
        except BrokenProcessPool:
            raise RankFailed({}, "a process of the training went away", Outcome.CRASH) from None
    return [rank.result() for rank in ranks]


def _rank(trial: DistributedTrial, rank: int, meet: str) -> dict[str, Any]:
    try:
        torch.set_num_threads(trial.threads)
        on_cuda = trial.device.startswith("cuda")
        if on_cuda:
            torch.cuda.set_device(rank)
        library, timeout = "nccl" if on_cuda else "gloo", timedelta(seconds=trial.timeout)
        dist.init_process_group(library, init_method=meet, rank=rank, world_size=trial.processes, timeout=timeout)
        return {**_measured(trial, rank), "communication": library}
    except Exception as error:
        outcome, evidence, _ = classify(error)
        raise RankFailed({}, f"process {rank}: {evidence}", outcome) from None


def _measured(trial: DistributedTrial, rank: int) -> dict[str, Any]:
    agreement = _agreement(trial, rank)
    steps = {name: _Step(trial, name, rank) for name in trial.backends}
    device = torch.device(trial.device)
    stopwatch = stopwatch_for(device)
    counts = {}
    for name, step in steps.items():  # the same number of steps in every process, so no warm-up until times settle
        stopwatch(step, 1, math.inf)
        dist.barrier()
        seconds = fmean(stopwatch(step, 2, math.inf))
        counts[name] = max(1, min(MOST_IN_A_TURN, math.ceil(_of_the_first(TURN_SECONDS / seconds))))
    order = random.Random(trial.seed)
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in steps}
    spent = 0.0
    for number in range(trial.rounds):
        for position, name in enumerate(order.sample(list(steps), len(steps))):
            dist.barrier()
            seconds_each = stopwatch(steps[name], counts[name], math.inf)
            spent += sum(seconds_each)
            turns[name].append({"round": number, "position": position, "step_seconds": seconds_each})
        if number and _of_the_first(spent) > trial.max_seconds:
            break
    memory = {}
    for name, step in steps.items():
        others = sum(storage_bytes(other.holds()) for key, other in steps.items() if key != name)
        peak = measured_peak(step, step.holds(), device).as_record()
        if device.type == "cuda":
            peak["peak_bytes"] -= others  # the allocator's peak includes the others
        memory[name] = peak
    return {
        "agreement": agreement._asdict(),
        "parameters": steps[trial.backends[0]].parameters,
        "turns": turns,
        "memory": memory,
    }


def _of_the_first(number: float) -> float:
    """The first process's number, in all of them, so that they take the same turns."""
    box = [number]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def workload_of(trial: DistributedTrial) -> Workload:
    """The same model in every process."""
    settings = {"image_size": trial.image_size, "num_classes": trial.num_classes}
    given: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    return load_workload(trial.model, device=trial.device, data=trial.data, dtype="float32", seed=trial.seed, **given)


def spread(model: nn.Module, trial: DistributedTrial) -> nn.Module:
    """Wrap the model, or shard it in place, block by block."""
    if trial.spread == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if trial.precision == "mixed":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks(model):
        fully_shard(block, mp_policy=policy)
    # the root's own layers read what blocks return, in their dtype: only the losses read float32
    fully_shard(model, mp_policy=replace(policy, output_dtype=torch.float32))
    return model


def blocks(model: nn.Module) -> list[nn.Module]:
    """The modules to shard together: the outermost of module lists, unless they share parameters with others."""
    found = []

    def look(module: nn.Module) -> None:
        for child in module.children():
            listed = isinstance(module, (nn.ModuleList, nn.Sequential))
            if listed and next(child.parameters(), None) is not None:
                found.append(child)
            else:
                look(child)

    def owners(module: nn.Module) -> Counter[int]:
        """Each parameter, and how many modules have it."""
        return Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))

    look(model)
    in_all = owners(model)
    return [block for block in found if owners(block).items() <= in_all.items()]


def _agreement(trial: DistributedTrial, rank: int) -> Agreement:
    """Compare the sum of all processes' clipped gradients with one process's, before the model was spread."""
    private = next((name for name in trial.backends if load_backend(name).private), None)
    if private is None:
        return Agreement(0.0, 0.0, "")
    work = workload_of(trial)
    clip = Flat(max_grad_norm=_MAX_GRAD_NORM)
    inputs, targets = work.batch(VERIFIED * trial.processes)
    alone = load_backend("microbatch")(work.model, work.loss_fn, clip=clip)(inputs, targets)
    mine = map_tensors(lambda x: x[rank :: trial.processes], (inputs, targets))
    model = spread(work.model, trial)
    with load_backend(private)(model, work.loss_fn, clip=clip, verify=False) as backend, _autocast(trial):
        together = backend(*mine)
    grads = {name: getattr(g, "full_tensor", lambda g=g: g)() for name, g in together.grads.items()}
    assert alone.norms is not None
    norms = alone.norms[rank :: trial.processes]
    reference = alone.grads
    if trial.precision == "mixed":  # compare the whole: bfloat16 rounding is large for a small parameter
        grads, reference = ({"the model": torch.cat([g[n].flatten() for n in alone.grads])} for g in (grads, reference))
    return compare(type(alone)(grads, together.norms, together.losses), type(alone)(reference, norms, alone.losses))


@contextlib.contextmanager
def _autocast(trial: DistributedTrial) -> Iterator[None]:
    """Mixed precision, unless FSDP does it."""
    on = trial.precision == "mixed" and trial.spread == "ddp"
    with torch.autocast(torch.device(trial.device).type, torch.bfloat16, enabled=on):
        yield


class _Step:
    """One training step of one backend on this process's samples."""

    def __init__(self, trial: DistributedTrial, name: str, rank: int) -> None:
        work = workload_of(trial)
        self._trial, self._loss_fn = trial, work.loss_fn
        self.parameters = parameter_count(work.model)
        batch = work.batch(trial.batch_size * trial.processes)
        mine = slice(rank * trial.batch_size, (rank + 1) * trial.batch_size)
        self._inputs, self._targets = map_tensors(lambda x: x[mine].clone(), batch)
        self._model = spread(work.model, trial)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3, momentum=0.9)
        self._engine: PrivacyEngine | None = None
        if load_backend(name).private:
            total = trial.batch_size * trial.processes
            settings = {"batch_size": total, "sample_size": 1000 * total, "max_grad_norm": _MAX_GRAD_NORM}
            self._engine = PrivacyEngine(self._model, noise_multiplier=_NOISE, backend=name, **settings)  # type: ignore[arg-type]
            self._engine.attach(self._optimizer)

    def __call__(self) -> None:
        with _autocast(self._trial):
            losses = self._loss_fn(forward(self._model, self._inputs), self._targets)
        if self._engine is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", PrivacyWarning)  # fixed batches are fine for timing
                self._optimizer.step(loss=losses)  # type: ignore[call-arg]
        else:
            losses.mean().backward()
            self._optimizer.step()
        self._optimizer.zero_grad()

    def holds(self) -> list[Tensor]:
        """The tensors that live before and after the step, in this process."""
        state = tensors_of(list(self._optimizer.state.values()))
        mine = map(here, (*self._model.parameters(), *self._model.buffers(), *state))
        return [*mine, *tensors_of((self._inputs, self._targets))]
