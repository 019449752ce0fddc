"""What is recorded of the machine, and when a measurement is another one."""

import socket
import subprocess
from pathlib import Path

import pytest
import torch

from dpbench.errors import UsageError
from dpbench.execution import machines
from dpbench.execution.machines import Machines, folder_name, name_folder
from dpbench.process import variables
from dpbench.process.parent import Isolation
from dpbench.records import environment
from dpbench.trials import EpsilonTrial, OverheadTrial, StepTrial

STEP = StepTrial(model="cnn", backend="ghost", batch_size=8)
#: Lines of /proc/cpuinfo.
MODEL = "model\t\t: 17\ncpu family\t: 25\nstepping\t: 1\n"
EPSILON = EpsilonTrial(accountant="moments", sample_rate=0.01, noise_multiplier=4.0, steps=10, delta=1e-5)


def fingerprint(trial, device):
    """As it would be written here, for a folder of results without a name."""
    return Machines(device).fingerprint(trial)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A project of one file for each that is measured; nothing of it cached before or after."""
    parts = [f"dpbench/{name}" for name in ("measure", "models", "cli")]
    for name in ("clipping", "clipping/rules", "clipping/native", "accounting", *parts):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "one.py").write_text("x = 1\n")
    (tmp_path / "dpbench/models/data.py").write_text("x = 1\n")
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    environment.hash_of.cache_clear()
    yield tmp_path
    environment.hash_of.cache_clear()


@pytest.mark.parametrize(
    ("changed", "trial", "differs"),
    [
        ("clipping/one.py", STEP, True),
        ("clipping/new.py", STEP, True),
        ("clipping/rules/one.py", STEP, True),
        ("clipping/native/one.c", STEP, True),
        ("clipping/native/one.h", STEP, True),
        ("dpbench/measure/one.py", STEP, True),
        ("dpbench/models/one.py", STEP, True),
        ("dpbench/models/data.py", STEP, True),
        ("accounting/one.py", STEP, False),
        ("dpbench/cli/command_line.py", STEP, False),
        ("accounting/one.py", EPSILON, True),
        ("clipping/one.py", EPSILON, False),
    ],
)
def test_the_fingerprint_is_of_the_sources_that_are_measured(root, changed, trial, differs):
    before = fingerprint(trial, "cpu")
    (root / changed).write_text("x = 2\n")
    environment.hash_of.cache_clear()
    assert (fingerprint(trial, "cpu") != before) is differs


def test_the_same_gives_the_same_fingerprint():
    assert fingerprint(STEP, "cpu") == fingerprint(STEP.replace(batch_size=9, timeout=3.0), "cpu")
    assert len(fingerprint(STEP, "cpu")) == 16


def test_a_folder_of_results_has_a_name_that_no_other_has(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    assert folder_name(one) == "" and not one.exists()  # to ask is not to give
    name_folder(one), name_folder(other)
    name = folder_name(one)
    name_folder(one)
    assert folder_name(one) == name != folder_name(other)
    found = {Machines("cpu", folder=folder).fingerprint(STEP) for folder in (None, "", name, folder_name(other))}
    assert len(found) == 4


def test_another_machine_device_or_library_is_another_fingerprint(monkeypatch):
    before = fingerprint(STEP, "cpu")
    for owner, name in ((socket, "gethostname"), (machines, "device_name"), (machines, "version_of")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda *of: "another")
            assert fingerprint(STEP, "cpu") != before
    assert fingerprint(STEP, "cpu") == before


@pytest.mark.parametrize(
    ("told", "recorded"), [("", (None, None)), ("abc123", ("abc123", False)), ("abc123-dirty", ("abc123", True))]
)
def test_the_commit_is_what_the_environment_says_where_git_does_not(root, monkeypatch, told, recorded):
    monkeypatch.setenv("DPBENCH_COMMIT", told)
    facts = environment.host_facts("cpu")
    assert (facts["git_sha"], facts["git_dirty"]) == recorded
    (root / ".git").mkdir()  # a clone that git cannot read
    facts = environment.host_facts("cpu")
    assert (facts["git_sha"], facts["git_dirty"]) == recorded


@pytest.mark.parametrize(
    ("info", "name", "model"),
    [
        (f"model name\t: AMD EPYC\n{MODEL}", "AMD EPYC (family 25, model 17)", "family 25, model 17, stepping 1"),
        (f"model name\t: AMD EPYC 9654\n{MODEL}", "AMD EPYC 9654", "family 25, model 17, stepping 1"),
        ("processor\t: 0\nBogoMIPS\t: 50.00\n", None, None),
    ],
)
def test_processors_of_one_name_are_told_apart(monkeypatch, info, name, model):
    """By what keeps records together, too: figures of two generations are two."""
    monkeypatch.setattr(environment, "_read", lambda path: info if path == "/proc/cpuinfo" else None)
    environment._cpu_name.cache_clear()
    try:
        facts = environment.host_facts("cpu")
    finally:
        environment._cpu_name.cache_clear()
    assert facts["cpu_model"] == model
    assert name is None or facts["cpu"] == name
    assert facts["device_name"] == f"{facts['cpu']}, {facts['cpus_available']} CPUs"


def test_git_is_believed_before_the_environment(root, monkeypatch):
    monkeypatch.setenv("DPBENCH_COMMIT", "abc123")
    for command in ("init -q", "-c user.name=x -c user.email=x commit -q --allow-empty -m one"):
        subprocess.run(["git", "-C", str(root), *command.split()], check=True)
    assert len(environment.host_facts("cpu")["git_sha"]) == 40


def test_the_version_of_opacus_matters_to_opacus_alone(monkeypatch):
    peer = STEP.replace(backend="opacus_hooks")
    before = fingerprint(STEP, "cpu"), fingerprint(peer, "cpu")
    real = environment.version_of
    monkeypatch.setattr(machines, "version_of", lambda name: "0.0" if name == "opacus" else real(name))
    assert fingerprint(STEP, "cpu") == before[0]
    assert fingerprint(peer, "cpu") != before[1]


@pytest.mark.parametrize("part", ["model", "backend", "backends", "body"])
def test_a_file_of_ones_own_is_measured_too(part, tmp_path, monkeypatch):
    file = tmp_path / "own.py"
    file.write_text("x = 1\n")
    if part == "backends":
        trial = OverheadTrial(model="cnn", backends=("nonprivate", f"{file}:Own"), batch_size=4)
    elif part == "body":
        trial = STEP
        monkeypatch.setattr(StepTrial, "body", f"{file}:run")
    else:
        trial = STEP.replace(**{part: f"{file}:Own"})
    before = fingerprint(trial, "cpu")
    file.write_text("x = 2\n")
    environment.hash_of.cache_clear()
    assert fingerprint(trial, "cpu") != before


@pytest.fixture
def gpus(monkeypatch):
    """Pretend that nvidia-smi lists these, and /proc nothing."""

    def pretend(*names: str, visible: str | None = None) -> None:
        monkeypatch.setattr(environment, "_gpus_in_proc", lambda: [])
        monkeypatch.setattr(environment, "_nvidia_smi", lambda query: list(names))
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        environment._gpu_name.cache_clear()

    yield pretend
    environment._gpu_name.cache_clear()


def test_a_gpu_is_taken_where_one_may_be_seen(gpus):
    gpus("A", "B", visible="1,0")
    assert [environment.resolve_device(asked) for asked in ("auto", "cpu", "cuda")] == ["cuda", "cpu", "cuda"]
    assert environment.device_name("cuda") == "B"
    for visible in ("", "-1", "7"):
        gpus("A", visible=visible)
        assert environment.resolve_device("auto") == "cpu"
    with pytest.raises(UsageError, match="a CUDA device on this machine"):
        environment.resolve_device("cuda")


def test_the_environment_says_what_is_needed_to_read_the_numbers(trials_here):
    with Isolation() as isolation:
        found = environment.gather("cpu", isolation)
    wanted = {"device", "device_name", "host", "torch", "python", "cpu_count", "threads", "git_sha", "git_dirty"}
    wanted |= {"platform", "packages", "utc", "memory_total", "load_average", "float32_matmul_precision"}
    assert wanted <= set(found)
    assert found["device"] == "cpu" and found["threads"] >= 1 and found["packages"]["numpy"]


def test_cuda_that_torch_cannot_use_is_one_line(gpus, trials_here, monkeypatch):
    gpus("A card that is not there")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with Isolation() as isolation, pytest.raises(UsageError, match="a CUDA device that torch"):
        environment.gather("cuda", isolation)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_of_cuda_is_in_segments_that_grow_unless_a_person_said_otherwise(monkeypatch, name):
    for known in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(known, raising=False)
    assert variables.server_variables("cuda")["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    cpu = variables.server_variables("cpu")
    assert cpu["CUDA_VISIBLE_DEVICES"] == "" and "PYTORCH_ALLOC_CONF" not in cpu
    monkeypatch.setenv(name, "expandable_segments:False")
    assert "PYTORCH_ALLOC_CONF" not in variables.server_variables("cuda")


@pytest.fixture
def home(monkeypatch, tmp_path):
    """A home of the test's own, in which Triton has kept nothing yet."""
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    variables._folder_for_triton.cache_clear()
    yield tmp_path
    variables._folder_for_triton.cache_clear()


def test_what_triton_compiles_is_kept_where_all_trials_find_it_if_the_home_cannot_be_written_to(home, monkeypatch):
    (home / "file").touch()
    monkeypatch.setenv("HOME", str(home / "file"))
    first, second = (Path(variables.server_variables("cuda")["TRITON_CACHE_DIR"]) for _ in range(2))
    assert first == second and first.is_dir() and first.stat().st_mode & 0o077 == 0
    assert "TRITON_CACHE_DIR" not in variables.server_variables("cpu")
    first.rmdir()
    monkeypatch.setenv("TRITON_HOME", "/proc/nowhere")
    variables._folder_for_triton.cache_clear()
    assert "TRITON_CACHE_DIR" not in variables.server_variables("cuda"), "where a person says"
