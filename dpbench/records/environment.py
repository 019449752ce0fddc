"""Records where a run took place: the facts needed to read and compare its numbers.

The parent reads facts that need no torch (`host_facts`). A separate process, run like a trial, reads those from torch
(`TorchFacts`), so that the parent never creates a CUDA context.
"""

import functools
import hashlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from clipping.native import library
from dpbench.errors import RunEnded, UsageError
from dpbench.process.linux import available_cpus, memory_total
from dpbench.process.parent import Answer, Isolation
from dpbench.process.variables import ALLOCATOR
from dpbench.records.host import host_name
from dpbench.records.store import utc_now
from dpbench.trials import Trial
from dpbench.trials.outcome import Outcome

VERSION = "0.1.0"
"""Of dpbench; `dpbench.__version__`."""
ROOT = Path(__file__).resolve().parents[2]
DEVICES = ("auto", "cpu", "cuda")
#: Name of the C kernels' compiler among the versions of libraries; its version is None if torch's operations replace
#: the kernels.
KERNELS = "kernels in C"
#: Environment variable with the commit, used without git.
COMMIT = "DPBENCH_COMMIT"
_PACKAGES = ("torchvision", "timm", "transformers", "opacus", "dp-accounting", "numpy", "scipy")
_VARIABLES = (
    *("CUDA_", "CUBLAS_", "CUDNN_", "KMP_", "MKL_", "NVIDIA_TF32", "OMP_", "PYTORCH_", "TORCH_", "MALLOC_"),
    "DPBENCH_HOST",
)
_GPU_STATE = (
    "clocks.sm,clocks.mem,clocks_throttle_reasons.active,temperature.gpu,power.draw,utilization.gpu,memory.used"
)


@dataclass(frozen=True, kw_only=True)
class TorchFacts(Trial):
    """Facts of torch and of `device`; run as a trial, recorded as part of the environment."""

    kind: ClassVar[str] = "facts"
    body: ClassVar[str] = f"{__name__}:torch_facts"
    device: str
    timeout: float = 300.0

    def modules(self) -> tuple[str, ...]:
        return ("torch",)


def torch_facts(trial: TorchFacts) -> dict[str, Any]:
    """The body of `TorchFacts`; creates a CUDA context if `device` is cuda and there is one."""
    import torch

    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "mkldnn": torch.backends.mkldnn.is_available(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cuda_build": torch.version.cuda,
        "cuda_available": torch.cuda.is_available(),
        "kernels": library.describe(),
    }
    if trial.device == "cuda" and facts["cuda_available"]:
        properties = torch.cuda.get_device_properties(0)
        torch.zeros(1, device="cuda")  # a device without free memory fails here once, rather than in every trial
        facts |= {
            "allocator": next((os.environ[name] for name in ALLOCATOR if name in os.environ), ""),
            "device_name": properties.name,
            "device_memory": properties.total_memory,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "l2_cache": properties.L2_cache_size,
            "cudnn": torch.backends.cudnn.version(),
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "cudnn_deterministic": torch.backends.cudnn.deterministic,
            "tf32_matmul": torch.backends.cuda.matmul.allow_tf32,
            "tf32_cudnn": torch.backends.cudnn.allow_tf32,
        }
    return facts


def gather(device: str, isolation: Isolation, *, with_torch: bool = True) -> dict[str, Any]:
    """The environment of a run on `device`.

    Args:
        isolation: runs torch.
        with_torch: whether the run uses torch.

    Raises:
        UsageError: torch finds no cuda although requested, or torch cannot be used at all.
        RunEnded: the process that runs torch was killed.
    """
    facts = host_facts(device)
    return facts | _checked(device, isolation.run(TorchFacts(device=device))) if with_torch else facts


def _checked(device: str, answer: Answer) -> dict[str, Any]:
    if answer.outcome is Outcome.CRASH:
        why = " ".join((answer.evidence or "it crashed").split())
        raise RunEnded(f"expected torch to answer on {device}, and {why}; nothing was measured")
    if answer.outcome is not Outcome.OK or answer.result is None:
        reason = (answer.evidence or str(answer.outcome)).splitlines()[-1]
        raise UsageError(f"a torch that can be used on {device}", reason)
    if device == "cuda" and not answer.result["cuda_available"]:
        build = answer.result["cuda_build"] or "no CUDA"
        raise UsageError(f"a CUDA device that torch {answer.result['torch']} (built for {build}) can use", "none")
    return answer.result


def host_facts(device: str) -> dict[str, Any]:
    """Facts that need no torch."""
    facts: dict[str, Any] = {
        "utc": utc_now(),
        "dpbench": VERSION,
        "host": host_name(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "device": device,
        "device_name": device_name(device),
        "cpu": _cpu_name(),
        "cpu_model": _cpu_numbers("family", "model", "stepping") or None,
        "cpu_count": os.cpu_count(),
        "cpus_available": available_cpus(),
        "memory_total": memory_total(),
        "load_average": os.getloadavg()[0],
        "cpu_governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "cpu_khz": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq"),
        "torch": version_of("torch"),
        "packages": {name: version_of(name) for name in _PACKAGES},
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)},
    }
    facts["git_sha"], facts["git_dirty"] = _git()
    if device == "cuda":
        facts["driver"] = _nvidia_smi("--query-gpu=driver_version")
        facts["gpu_state"] = dict(zip(_GPU_STATE.split(","), _nvidia_smi(f"--query-gpu={_GPU_STATE}"), strict=False))
        facts["gpu_processes"] = _nvidia_smi("--query-compute-apps=pid,used_memory")
    return facts


def resolve_device(asked: str) -> str:
    """ "cpu" or "cuda" for "auto", read from /proc: at once, and without touching the device.

    Args:
        asked: "auto", "cpu" or "cuda".

    Raises:
        UsageError: cuda is requested, and there is no GPU.
    """
    found = _gpu_name() is not None
    if asked == "cuda" and not found:
        raise UsageError("a CUDA device on this machine for --device cuda (try --device cpu)", "none")
    return "cuda" if asked != "cpu" and found else "cpu"


def device_name(device: str) -> str:
    """The GPU's name, or the CPU's with the number of usable CPUs: "AMD EPYC, 2 CPUs"."""
    return (_gpu_name() or "unknown GPU") if device == "cuda" else f"{_cpu_name()}, {available_cpus()} CPUs"


def device_label(environment: Mapping[str, Any]) -> str:
    """The key of records and figures of a device: "cpu AMD EPYC, 2 CPUs"."""
    return f"{environment['device']} {environment['device_name']}"


def seal(sources: Mapping[str, str], versions: Mapping[str, str | None], *machine: str) -> str:
    """16 hex digits over the sources' hashes, the machine's names, and the versions of the libraries.

    Args:
        sources: glob or path -> hash.
        versions: library -> version.
        machine: its names.
    """
    parts = [*sources.values(), *machine, *(f"{name} {version}" for name, version in sorted(versions.items()))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def sources_of(trial: Trial) -> dict[str, str]:
    """The trial's sources, as globs under the project's root or absolute paths of files -> the hash of each.

    The user's own trial, body, model or backend is a file beside the project's.

    Raises:
        OSError: a file cannot be read.
    """
    backends = (getattr(trial, "backend", ""), *getattr(trial, "backends", ()))
    named = (str(each).rpartition(":")[0] for each in (trial.body, getattr(trial, "model", ""), *backends))
    own = {str(Path(name).resolve()) for name in (type(trial).__module__, *named) if name.endswith(".py")}
    return {pattern: hash_of(pattern) for pattern in (*trial.sources, *sorted(own))}


def libraries_of(trial: Trial) -> set[str]:
    """The libraries with versions that affect this trial's measurement."""
    kernels = [KERNELS] if any(source.endswith(".c") for source in trial.sources) else []
    return {"torch", *kernels, *(module.partition(".")[0] for module in trial.modules())}


def kernels_missing(device: str, trials: Iterable[Trial]) -> str | None:
    """Why trials cannot use the C kernels, in a line; None if they can, or do not need to.

    Args:
        trials: to be measured.
    """
    uses = device == "cpu" and any(KERNELS in libraries_of(trial) for trial in trials)
    return library.trouble() if uses else None


@functools.cache
def version_of(distribution: str) -> str | None:
    """The installed version, or None. Does not import the library; compiles the C kernels if needed.

    Args:
        distribution: its name, or `KERNELS`.
    """
    if distribution == KERNELS:
        return library.version()
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def hash_of(pattern: str) -> str:
    """Hash of the files that match a glob under the project's root, or of one absolute path.

    Args:
        pattern: a glob under the project's root, or an absolute path.
    """
    path = Path(pattern)
    files = [path] if path.is_absolute() else sorted(ROOT.glob(pattern))
    digest = hashlib.sha256()
    for file in files:
        digest.update(str(file.relative_to(ROOT) if file.is_relative_to(ROOT) else file.name).encode())
        digest.update(b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


@functools.cache
def _gpu_name() -> str | None:
    """The name of the first visible GPU; None without one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if visible in ("", "-1"):
        return None
    names = _gpus_in_proc() or _nvidia_smi("--query-gpu=name")
    index = int(visible) if visible.isdigit() else 0
    return names[index] if index < len(names) else None


def _gpus_in_proc() -> list[str]:
    """GPUs listed by the driver in /proc, in bus order; empty if not available."""
    return [
        line.partition(":")[2].strip()
        for information in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
        for line in information.read_text().splitlines()
        if line.startswith("Model:")
    ]


def _nvidia_smi(query: str) -> list[str]:
    """The fields that nvidia-smi returns; empty without nvidia-smi, or if it fails."""
    said = _output("nvidia-smi", query, "--format=csv,noheader,nounits", seconds=10) or ""
    return [field.strip() for line in said.splitlines() for field in line.split(",")]


@functools.cache
def _cpu_name() -> str:
    """The CPU's name, with family and model if virtual machines use one name for several generations."""
    name = _cpu_facts().get("model name") or platform.processor() or platform.machine()
    numbers = _cpu_numbers("family", "model")
    return f"{name} ({numbers})" if numbers and not any(map(str.isdigit, name)) else name


def _cpu_numbers(*names: str) -> str:
    """ "family 25, model 17, stepping 1"."""
    facts = _cpu_facts()
    facts["family"] = facts.get("cpu family", "")
    return ", ".join(f"{name} {facts[name]}" for name in names if facts.get(name))


def _cpu_facts() -> dict[str, str]:
    """Linux's facts of the first CPU."""
    lines = (line.partition(":") for line in (_read("/proc/cpuinfo") or "").split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _output(*command: str, seconds: float = 30) -> str | None:
    """What a command prints; None if it cannot be run, or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _git() -> tuple[str | None, bool | None]:
    """(commit, whether sources differ from it) of the running clone; without a clone, from DPBENCH_COMMIT.

    That is a commit, with "-dirty" after it if sources differ.
    """
    told = os.environ.get(COMMIT, "").strip()
    said = (told.removesuffix("-dirty"), told.endswith("-dirty")) if told else (None, None)
    if not (ROOT / ".git").exists():
        return said
    changes = _output("git", "-C", str(ROOT), "status", "--porcelain", "--", ".", ":(exclude)results")
    commit = _output("git", "-C", str(ROOT), "rev-parse", "HEAD")  # None without git, or before the first commit
    return said if commit is None else (commit, None if changes is None else bool(changes))
