"""Precision profiles: what a trial says is what torch does, for every backend, simulated too; and what is read back."""

import copy
import json
from typing import Any

import pytest
import torch
from report_records import RunFile
from torch import nn

import clipping
from clipping import Flat, UnsupportedModel, load_backend
from clipping.backends.microbatch import Microbatch
from clipping.backends.recording import Recording, for_recording
from clipping.backends.tape import BkMixed
from clipping.checks.verification import (
    GRADIENTS,
    ROUNDINGS,
    Agreement,
    Limit,
    WrongGradient,
    agreement_in_own_arithmetic,
    agreement_with_oracle,
    limit_of,
)
from dpbench.cli import main
from dpbench.conformance.modules import Net
from dpbench.errors import UsageError
from dpbench.execution.selection import select
from dpbench.experiment import load_experiment
from dpbench.measure import largest, memory, overhead, parts, precision, recommend, step
from dpbench.measure.bench import open_workload
from dpbench.models.workload import Workload
from dpbench.trials import LargestTrial, OverheadTrial, PeakTrial, RecommendTrial, StepTrial
from dpbench.trials.evidence import PartsTrial, ProfileTrial
from dpbench.trials.not_here import NotHere
from dpbench.trials.outcome import Mismatch, Outcome, classify
from dpbench.trials.precision import PROFILES, with_profile

CPU = torch.device("cpu")
STEP = StepTrial(model="cnn", backend="mixed_ghost", batch_size=4, image_size=16, steps=2, max_seconds=0.1)
BFLOAT16 = torch.finfo(torch.bfloat16)
MANY = ("nonprivate", "microbatch", "vmap", "fastgradclip", "ghost", "mixed_ghost", "bk_ghost", "bk_mixed")
OPACUS = ("opacus_hooks", "opacus_functorch", "opacus_ew", "opacus_ghost")


class Rounded(Microbatch):
    """Wrong by 5 % in the norm of the sample whose norm is smallest, but not in float64: so a kernel may be."""

    name = "rounded"

    def _clipped(self, parameters: Any, inputs: Any, targets: Any, batch_size: int) -> Any:
        out = super()._clipped(parameters, inputs, targets, batch_size)
        if out.losses.dtype != torch.float64 and next(iter(parameters.values())).dtype != torch.float64:
            out.norms[out.norms.argmin()] *= 1.05
        return out


@pytest.fixture(autouse=True)
def rounded(monkeypatch):
    monkeypatch.setitem(clipping.BACKENDS, "rounded", clipping.BackendInfo(f"{__name__}:Rounded", "for a test"))


# ---- what a trial says


@pytest.mark.parametrize(
    "trial",
    [
        STEP,
        OverheadTrial(model="cnn", backends=["ghost"], batch_size=2),
        PeakTrial(model="cnn", backend="ghost", batch_size=2, simulated=True),
        ProfileTrial(model="cnn", batch_size=2),
    ],
)
def test_a_precision_that_is_none_is_refused_in_one_line(trial):
    with pytest.raises(UsageError) as caught:
        trial.replace(precision="bfloat16-autocst")
    said = str(caught.value)
    assert said.startswith("expected a precision, got 'bfloat16-autocst'; did you mean 'bfloat16-autocast'?")
    assert "(one of float32, tf32, bfloat16-autocast, bfloat16," in said and "\n" not in said


def test_only_takes_precisions():
    cells = load_experiment("evidence").cells("cuda")
    chosen = select(cells, {"precision": ["tf32"]})
    assert chosen and all(getattr(cell, "probe", cell).precision == "tf32" for cell in chosen)
    assert {type(cell) for cell in chosen} >= {OverheadTrial}


# ---- TF32


def switches() -> list[Any]:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return [part.fp32_precision for part in (matmul, cudnn.conv, cudnn.rnn)]


@pytest.fixture
def as_torch_begins():
    """Afterwards TF32 is as torch has it by default: on in cuDNN alone."""
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True


def one_by_the_newer_way() -> None:
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.conv.fp32_precision = "tf32"  # the older way can say that no more


BEFORE = {
    "as torch begins": lambda: None,
    "all on": lambda: (torch.set_float32_matmul_precision("high"), setattr(torch.backends.cudnn, "allow_tf32", True)),
    "all off": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "one part": one_by_the_newer_way,
}


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("before", BEFORE)
def test_tf32_is_switched_everywhere_and_put_back(as_torch_begins, before, on):
    BEFORE[before]()
    kept = switches()
    matmul = torch.get_float32_matmul_precision()
    with pytest.raises(KeyError), precision.tf32(on):
        assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (on, on)
        assert [word == "tf32" for word in switches()] == [on] * 3
        assert torch.get_float32_matmul_precision() == ("high" if on else "highest")
        raise KeyError
    assert switches() == kept and torch.get_float32_matmul_precision() == matmul


@pytest.mark.parametrize(
    ("body", "trial"),
    [
        (step.run, STEP),
        (overhead.run, OverheadTrial(model="cnn", backends=["ghost"], batch_size=2)),
        (recommend.run, RecommendTrial(model="cnn", backends=["ghost"], batch_size=2)),
        (memory.run, PeakTrial(model="cnn", backend="ghost", batch_size=2, simulated=True)),
        (memory.run, PeakTrial(model="cnn", backend="ghost", batch_size=2, simulated=False)),
        (largest.run, LargestTrial(model="cnn", backend="ghost", batch_size=2, memory_budget=2**30)),
        (parts.run, PartsTrial(model="cnn", batch_size=2)),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_a_cpu_has_no_tf32_and_never_computes_something_else_in_its_place(body, trial):
    with pytest.raises(UnsupportedModel) as caught:
        body(trial.replace(precision="tf32"))
    said = "TF32 is a format of CUDA's tensor cores, and cpu has none: run on --device cuda"
    assert classify(caught.value) == (Outcome.UNSUPPORTED, said, None)


@pytest.mark.parametrize(("name", "value"), [("float32", "1"), ("tf32", "0"), ("bfloat16-autocast", "1")])
def test_what_the_environment_overrules_is_not_measured_under_a_false_name(monkeypatch, name, value):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    cuda = torch.device("cuda")
    with precision.arithmetic(name, cuda):
        pass
    monkeypatch.setenv(precision.OVERRIDE, value)
    with pytest.raises(NotHere, match=f"expected {precision.OVERRIDE} unset for precision {name}, got {value}"):
        precision.arithmetic(name, cuda).__enter__()
    with precision.arithmetic("bfloat16", cuda):
        pass


def test_an_older_gpu_has_no_tf32(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Test GPU")
    with pytest.raises(NotHere, match="Test GPU has less"):
        precision.arithmetic("tf32", torch.device("cuda")).__enter__()


# ---- what runs, and what is read back


@pytest.mark.parametrize("name", [name for name in PROFILES if name != "tf32"])
def test_every_profile_runs_on_a_cpu_and_says_in_which_formats(name):
    result = step.run(STEP.replace(precision=name))
    told = result["precision"]
    dtype, mixed = PROFILES[name].dtype, PROFILES[name].autocast
    assert (told["profile"], told["parameters"]) == (name, [dtype])
    assert told["computed"] == sorted({dtype, mixed} - {None})
    assert (told["tf32"]["cublas"], told["matmul"]) == ("ieee", "highest")
    assert result["verification"]["max_grad_error"] < 1e-12  # the method, in float64
    own = result["verification"].get("in_own_precision")
    if name == "float64":
        assert own is None
    else:
        assert 0 < own["max_grad_error"] <= own["tolerance"] and own["samples"] == 2
    json.dumps(result)


def test_what_is_read_back_is_what_is_and_not_what_was_asked_for(as_torch_begins):
    workload = open_workload(STEP.replace(precision="bfloat16-autocast"))
    batch = workload.batch(2)
    with precision.tf32(True):
        told = precision.facts("float32", workload, *batch)
    assert told["computed"] == ["bfloat16", "float32"] and told["tf32"] == {"cublas": "tf32", "cudnn": "tf32"}
    told = precision.facts("bfloat16-autocast", open_workload(STEP), *batch)
    assert told["computed"] == ["float32"] and told["tf32"]["cudnn"] == "tf32" and told["tf32"]["cublas"] != "tf32"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bfloat16-autocast", "bfloat16"])
def test_every_backend_runs_in_half_precision_or_says_why_not(name):
    backends = [*MANY, *(each for each in OPACUS if load_backend(each).unavailable() is None)]
    trial = OverheadTrial(
        model="cnn", backends=backends, batch_size=4, image_size=16, rounds=1, max_seconds=0.05, precision=name
    )
    result = overhead.run(trial)
    assert result["precision"]["profile"] == name and "bfloat16" in result["precision"]["computed"]
    for backend, entry in result["backends"].items():
        if backend == "opacus_ew" and name == "bfloat16-autocast":
            assert entry["outcome"] == "unsupported" and "same dtype" in entry["evidence"]
        else:
            assert (entry["outcome"], entry["evidence"]) == ("ok", None), backend
            assert 0 <= entry["verification"]["in_own_precision"]["max_norm_error"] < 2e-2


def test_under_autocast_the_forward_pass_and_the_losses_are_cast_and_the_backward_pass_is_not():
    workload = open_workload(STEP.replace(precision="bfloat16-autocast"))
    inputs, targets = workload.batch(2)
    on = []
    workload.model.register_forward_pre_hook(lambda *_: on.append(torch.is_autocast_enabled("cpu")))
    first = next(module for module in workload.model.modules() if isinstance(module, nn.Conv2d))
    first.register_forward_pre_hook(lambda *_: on.append(torch.is_autocast_enabled("cpu")))
    outputs = workload.model(inputs)
    losses = workload.loss_fn(outputs, targets)
    outputs.register_hook(lambda g: on.append(torch.is_autocast_enabled("cpu")))
    losses.sum().backward()
    assert on == [False, True, False]  # the whole model's hook is called outside of its forward pass
    assert (outputs.dtype, losses.dtype) == (torch.bfloat16, torch.float32)


def test_a_copy_of_a_model_under_autocast_computes_with_its_own_parameters():
    """Opacus copies modules that have parameters of their own."""
    owner = Net(lambda net, x: nn.functional.linear(x * net.scale, torch.eye(3)), scale=torch.ones(3))
    model = precision.autocasting(Workload(owner, lambda y, t: y.sum(1), None), "bfloat16", CPU).model
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.scale.fill_(3)
    x = torch.ones(2, 3)
    assert torch.equal(model(x).float(), x) and torch.equal(other(x).float(), 3 * x)
    assert model(x).dtype == other(x).dtype == torch.bfloat16


def test_a_forward_that_lies_on_the_object_is_cast_too():
    model = nn.Identity()
    model.forward = lambda x: torch.nn.functional.linear(x, torch.eye(3))
    model = precision.autocasting(Workload(model, lambda y, t: y.sum(1), None), "bfloat16", CPU).model
    assert model(torch.ones(2, 3)).dtype == torch.bfloat16


# ---- simulated peaks


WIDE = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 2048), nn.ReLU(), nn.Linear(2048, 10))
"""


@pytest.mark.parametrize("backend", ["nonprivate", "bk_mixed"])
def test_a_simulated_peak_has_the_copies_that_autocast_makes(tmp_path, backend):
    file = tmp_path / "wide.py"
    file.write_text(WIDE)
    trial = PeakTrial(
        model=f"{file}:build",
        backend=backend,
        batch_size=4,
        image_size=16,
        simulated=True,
        precision="bfloat16-autocast",
    )
    peaks = [memory.run(trial.replace(simulated=simulated))["memory"]["peak_bytes"] for simulated in (True, False)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.02)
    weights = 4 * (3 * 16 * 16 * 2048 + 2048 * 10)
    full = memory.run(trial.replace(precision="float32"))["memory"]["peak_bytes"]
    half = memory.run(trial.replace(precision="bfloat16"))["memory"]["peak_bytes"]
    if backend == "nonprivate":
        assert peaks[0] > full + 0.4 * weights  # a copy of half the size for each weight, which backward needs
        assert half == pytest.approx(full / 2, rel=0.05)
    else:  # fullest when sums are formed, in float32 whatever the parameters are, and copies have gone
        assert peaks[0] >= full
        assert half == pytest.approx(full * 3 / 4, rel=0.05)


# ---- what rounding explains


def test_limits_go_by_the_coarsest_format():
    assert limit_of([torch.float64]) == Limit(1e-9, 1e-9)
    mixed = limit_of([torch.float32, torch.bfloat16])
    assert mixed == limit_of([torch.bfloat16]) == Limit(ROUNDINGS * BFLOAT16.eps / 2, GRADIENTS[torch.bfloat16])
    assert limit_of([torch.float32]).norm == limit_of([torch.float16]).norm == 2e-2
    assert all(limit_of([dtype]).norm < 0.05 for dtype in GRADIENTS)  # so that 5 % is found
    assert str(Limit(1e-6, 1e-6)) == "1e-06" and str(Limit(0.03125, 0.4)) == "3.1e-02 and 4.0e-01"
    assert not Agreement(0.04, 0.01, "").within(mixed) and Agreement(0.03, 0.3, "").within(mixed)


def small_models() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.Flatten()]
    sequences = [nn.Linear(20, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 3), nn.Flatten()]
    dense = [nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()]
    deep = [layer for _ in range(8) for layer in (nn.Linear(24, 24), nn.Tanh())]
    return {
        "convolutions": (nn.Sequential(*convolutions, nn.Linear(128, 3)), (3, 8, 8)),
        "sequences": (nn.Sequential(*sequences, nn.Linear(24, 3)), (8, 20)),
        "dense": (nn.Sequential(*dense, nn.Linear(32, 3)), (20,)),
        "deep": (nn.Sequential(*deep, nn.Linear(24, 3)), (24,)),
    }


def under_autocast(name: str) -> tuple[Workload, Any, Any]:
    model, shape = small_models()[name]
    x, y = torch.randn(2, *shape), torch.tensor([0, 2])
    x[1] *= 0.1  # the second sample's norm is another
    loss = nn.CrossEntropyLoss(reduction="none")
    return precision.autocasting(Workload(model, loss, lambda _: (x, y)), "bfloat16", CPU), x, y


@pytest.mark.parametrize("name", small_models())
def test_a_fault_of_5_percent_in_one_samples_norm_is_found_under_autocast(name):
    workload, x, y = under_autocast(name)
    with Rounded(workload.model, workload.loss_fn, clip=Flat(1e6), verify=False) as wrong:
        found, limit = agreement_in_own_arithmetic(wrong, x, y)
        assert found.norm_error > 0.04 and found.norm_error > limit.norm and not found.within(limit)
        found, limit = agreement_with_oracle(wrong, x, y)
        assert found.within(limit) and limit == Limit(1e-6, 1e-6)  # in float64 it is right
    for backend in ("bk_mixed", "mixed_ghost", "fastgradclip"):
        with load_backend(backend)(workload.model, workload.loss_fn, clip=Flat(1e6), verify=False) as exact:
            found, limit = agreement_in_own_arithmetic(exact, x, y)
            assert found.within(limit) and found.grad_error < 0.05, (found, limit)


class Astray(BkMixed):
    """On the tape, and 5 % off in one norm."""

    def clipped(self, *args: Any, **kwargs: Any) -> Any:
        out = super().clipped(*args, **kwargs)
        out.norms[0] *= 1.05
        return out


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", small_models())
def test_in_one_graph_it_is_found_too_wherever_autocast_was_entered(name, inside):
    """As the engine verifies its first step: the script's own autocast, or one inside the model."""
    workload, x, y = under_autocast(name)
    model = workload.model if inside else small_models()[name][0]

    def recorded(backend):
        with torch.autocast("cpu", torch.bfloat16, enabled=not inside), Recording(backend, x, 2) as recording:
            losses = nn.functional.cross_entropy(model(x), y, reduction="none")
        return recording.finish(losses, verify=True)

    assert recorded(for_recording(BkMixed, model, Flat(1e6))).norms.isfinite().all()
    with pytest.raises(WrongGradient, match=r"relative error 5\.0e-02 in the norms"):
        recorded(for_recording(Astray, model, Flat(1e6)))


def test_a_backend_that_is_wrong_in_the_arithmetic_that_runs_is_not_timed():
    for name in ("float32", "bfloat16-autocast", "bfloat16"):
        with pytest.raises(Mismatch, match=f"rounded differs from the microbatch oracle in {name}: ") as caught:
            step.run(STEP.replace(backend="rounded", precision=name))
        assert "step_seconds" not in caught.value.result
        assert caught.value.result["verification"]["in_own_precision"]["max_norm_error"] > 0.04
    assert step.run(STEP.replace(backend="rounded", precision="float64"))["step_seconds"]


# ---- records


def older(run: RunFile, dtype: str = "float32") -> RunFile:
    """The same file as it was written before there were profiles."""
    lines = [json.loads(line) for line in run.path.read_text().splitlines()]
    for line in lines:
        if "precision" in line.get("trial", {}):
            del line["trial"]["precision"]
            line["trial"]["dtype"] = dtype
    run.path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_trials_that_say_a_dtype_are_read_as_their_profile():
    cpu = {"kind": "peak", "device": "cpu", "dtype": "float32"}
    assert with_profile(cpu) == {"kind": "peak", "device": "cpu", "precision": "float32"}
    assert with_profile(cpu | {"dtype": "bfloat16", "device": "cuda"})["precision"] == "bfloat16"
    assert with_profile(cpu | {"device": "cuda"})["precision"] == "float32, TF32 in convolutions"
    for other in ({"kind": "check", "dtype": "float64"}, {"kind": "step", "precision": "tf32"}, {"kind": "epsilon"}):
        assert with_profile(other) == other


def test_records_of_before_and_of_now_are_compared_and_other_profiles_are_not(tmp_path, capsys):
    for name in ("a", "b", "c"):
        run = RunFile(tmp_path / name / "run.jsonl")
        fields = {"precision": "bfloat16"} if name == "c" else {}
        for number in range(3):
            run.step("cnn", "nonprivate", [0.1] * 3, round=number, **fields)
            run.step("cnn", "ghost", [0.2] * 3, round=number, **fields)
        if name == "a":
            older(run)
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["cells"]
    assert {row["backend"] for row in rows} == {"nonprivate", "ghost"}
    assert all(row["setting"]["precision"] == "float32" for row in rows)
    assert main(["compare", str(tmp_path / "b"), str(tmp_path / "c")]) == 2
    assert "expected cells that both measured" in capsys.readouterr().err
