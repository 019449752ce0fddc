"""The experiment `evidence`: what a GPU is to give, in its order, and all of it in miniature on a CPU."""

import re
from types import SimpleNamespace

import pytest
import torch
from report_records import CUDA, RunFile

from clipping.rules import linear
from dpbench.engine import engine as engine_module
from dpbench.engine.release import Sums
from dpbench.experiment import MaxBatch, load_experiment
from dpbench.measure import device, norms, parts, profile
from dpbench.measure.traces import Trace
from dpbench.records.reader import LeftOut, read
from dpbench.report.figures import evidence as tables
from dpbench.trials import OverheadTrial, PeakTrial
from dpbench.trials.evidence import FAMILIES, DeviceTrial, NormsTrial, PartsTrial, ProfileTrial
from dpbench.trials.expected import expected_seconds
from dpbench.trials.not_here import NotHere
from dpbench.trials.outcome import Mismatch, Outcome, PartlyFailed, classify
from dpbench.trials.whole_step import TrainingStepTrial

EVIDENCE = load_experiment("evidence")
#: What each stage is made of.
STAGES = {
    "steps": TrainingStepTrial,
    "device": DeviceTrial,
    "norms": NormsTrial,
    "overheads": OverheadTrial,
    "parts": PartsTrial,
    "profiles": ProfileTrial,
    "peaks": PeakTrial,
    "largest": MaxBatch,
}
CPU = torch.device("cpu")


@pytest.mark.parametrize("cells", [EVIDENCE.cells("cuda"), EVIDENCE.cells("cpu"), EVIDENCE.smoke("cpu")])
def test_each_stage_has_trials_on_either_device_and_in_miniature(cells):
    for stage, kind in STAGES.items():
        assert any(type(cell) is kind for cell in cells), stage
    devices = {getattr(cell, "probe", cell).device for cell in cells}
    assert len(devices) == 1


def test_nine_minutes_of_at_most_a_hundred_trials_bring_the_readmes_table_and_its_first_figure():
    """482 trials and 70 minutes once; what each takes is told before it starts."""
    cells = EVIDENCE.declared("cuda")
    trials = [trial for c in cells for trial in ([c.probe, c.then] if isinstance(c, MaxBatch) else [c])]
    assert len(trials) <= 100 and all(expected_seconds(trial) for trial in trials)
    first = [cell for cell in cells[:16] if type(cell) is TrainingStepTrial]
    table = {"cnn", "resnet18", "resnet50", "vgg11", "convnext_pico", "vit_tiny_patch16_224", "bert", "gpt2"}
    names = [re.sub(r"^.*:|[?@].*", "", trial.model) for trial in first]
    assert sorted(names) == sorted([*table, *table])
    for name in table:
        engines = {engine for trial, own in zip(first, names, strict=True) if own == name for engine in trial.backends}
        assert engines == {"nonprivate", "bk_mixed", "opacus_hooks", "opacus_ghost", "private_cnn", "fastdp"}
    assert EVIDENCE.figures[0] == "training_step"
    eager = [trial for trial in trials if getattr(trial, "way", "eager") == "eager"]
    assert sum(map(expected_seconds, first)) < 0.75 * 9 * 60 and sum(map(expected_seconds, eager)) < 20 * 60
    assert sum(map(expected_seconds, trials)) < 60 * 60  # programs are compiled


def test_a_device_says_what_it_can_do():
    found = device.run(DeviceTrial(sizes=(64,), copied=2**16))
    assert found["facts"]["name"] and found["versions"]["torch"] == torch.__version__
    assert [row["precision"] for row in found["products"]] == ["float32", "bfloat16"]
    for row in found["products"]:
        assert row["flops_per_second"] == pytest.approx(2 * 64**3 / row["seconds"])
    copy, summed = found["bandwidth"]
    assert copy["bytes"] == 2 * summed["bytes"] == 2 * 2**16
    assert all(row["seconds"] > 0 for row in found["latency"])


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_to_a_norm_holds_its_limit_on_a_cpu(family, precision):
    rows = norms.run(NormsTrial(family=family, precision=precision, small=True))["rows"]
    assert rows and all(row["outcome"] == Outcome.OK and row["error"] <= row["limit"] for row in rows)
    assert {row["limit"] for row in rows} == {norms.LIMITS[precision]}


def test_a_wrong_way_is_a_mismatch_that_names_it(monkeypatch):
    right = linear.gram_product
    monkeypatch.setattr(linear, "gram_product", lambda *args: right(*args) * (1 + 1e-3))
    with pytest.raises(
        Mismatch, match=r"norms differ from float64's; the worst: (linear|matmul) .*ghost gram"
    ) as raised:
        norms.run(NormsTrial(family="linear", small=True))
    wrong = [row for row in raised.value.result["rows"] if row["outcome"] != Outcome.OK]
    assert {row["way"] for row in wrong} == {"gram"} and {row["outcome"] for row in wrong} == {Outcome.MISMATCH}
    assert all(4e-4 < row["error"] < 6e-4 for row in wrong)  # half of 1e-3: of the norm, not of its square
    assert classify(raised.value)[0] == Outcome.MISMATCH


def test_a_way_that_raises_is_an_error_and_the_others_go_on(monkeypatch):
    def broken(*_):
        raise RuntimeError("a kernel that does not launch")

    monkeypatch.setattr(linear, "gram_product", broken)
    with pytest.raises(PartlyFailed, match="a kernel that does not launch") as raised:
        norms.run(NormsTrial(family="linear", small=True))
    assert raised.value.outcome == Outcome.ERROR
    assert {row["way"] for row in raised.value.result["rows"] if row["outcome"] == Outcome.ERROR} == {"gram"}


def test_tf32_is_unsupported_on_a_cpu_with_the_reason():
    with pytest.raises(NotHere, match="TF32 is a format of CUDA's tensor cores") as raised:
        norms.run(NormsTrial(family="linear", precision="tf32", small=True))
    assert classify(raised.value)[:2] == (Outcome.UNSUPPORTED, str(raised.value))


def test_parts_add_up_to_the_step_and_leave_the_engine_as_it_was():
    before = Sums.require_finite, engine_module.release_gradients
    found = parts.run(PartsTrial(model="cnn", batch_size=2, steps=2))
    assert (Sums.require_finite, engine_module.release_gradients) == before
    assert found["counted"] == "operations that torch dispatches" and found["tensors"] == 16
    for name, entry in found["steps"].items():
        assert tuple(entry["parts"]) == parts.PARTS[name]
        for index, whole in enumerate(entry["step_seconds"]):
            assert whole == pytest.approx(sum(part["seconds"][index] for part in entry["parts"].values()))
        for part in parts.PARTS[name]:
            assert entry["parts"][part]["launches"] > 0, (name, part)
    own, plain = (found["steps"][name]["parts"] for name in ("private", "plain"))
    assert own["optimizer"]["launches"] == plain["optimizer"]["launches"]
    assert own["finite"]["waits"] <= 2  # on a CPU, where a number is read at no cost


def kernel(name: str, start: float, duration: float, external: int = 0) -> dict[str, object]:
    event = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": start, "dur": duration}
    return event | {"args": {"External id": external, "stream": 7}}


def host(category: str, name: str, start: float, duration: float = 1.0, external: int = 0) -> dict[str, object]:
    event = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": start, "dur": duration}
    return event | {"args": {"External id": external}}


def test_a_trace_of_a_gpu_tells_kernels_launches_and_waits():
    trace = Trace(
        [
            host("cpu_op", "aten::mm", 0, 5, external=1),
            host("cuda_runtime", "cudaLaunchKernel", 1),
            host("cuda_driver", "cuLaunchKernelEx", 6),
            host("cuda_runtime", "cudaGraphLaunch", 8),
            host("cuda_runtime", "cudaMemcpyAsync", 10),
            host("cuda_runtime", "cudaStreamSynchronize", 11),
            host("cuda_runtime", "cudaDeviceSynchronize", 90),
            host("cuda_runtime", "cudaEventRecord", 91),
            kernel("gemm", 10, 40, external=1),
            kernel("gemm", 60, 20, external=1),
            kernel("_gram", 90, 10),
        ],
        b"",
    )
    assert trace.saw_the_device
    assert [tuple(operation) for operation in trace.operations()] == [
        ("gemm", 2, pytest.approx(60e-6), "aten::mm"),
        ("_gram", 1, pytest.approx(10e-6), ""),
    ]
    assert trace.launches() == [1, 6, 8] and trace.waits() == [11, 90]
    said = profile.summary(trace, 1, torch.device("cuda"))
    assert (said["launches"], said["waits"], said["operations"]) == (3, 2, 3)
    assert said["top"][0]["share"] == pytest.approx(6 / 7)


def test_a_gpu_on_which_no_program_of_tritons_runs_says_why(monkeypatch):
    why = "RuntimeError: Failed to find C compiler"
    monkeypatch.setattr(device.cuda, "trouble", lambda device: why)
    card = {"name": "A card", "major": 9, "minor": 0, "multi_processor_count": 132, "total_memory": 2**36}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**card))
    monkeypatch.setattr(device.counters, "sample", lambda device: None)
    assert device.facts(torch.device("cuda"))["triton_programs"] == why
    monkeypatch.setattr(device.cuda, "trouble", lambda device: None)
    assert device.facts(torch.device("cuda"))["triton_programs"] == "run"


def test_a_profile_keeps_traces_of_a_size_and_says_what_failed():
    trial = ProfileTrial(model="cnn", batch_size=2, steps=1)
    found = profile.run(trial)
    assert set(found["files"]) == {"nonprivate.json.gz", "bk_mixed.json.gz"}
    for entry in found["backends"].values():
        assert entry["outcome"] == Outcome.OK and entry["launches"] is None
        shares = [row["share"] for row in entry["top"]]
        assert shares == sorted(shares, reverse=True) and 0.5 < sum(shares) <= 1 + 1e-9
    assert profile.run(trial.replace(most_bytes=10))["files"] == {}


def test_tables_of_a_gpus_records_say_what_does_not_hold(tmp_path):
    run = RunFile(tmp_path / "run.jsonl", CUDA, experiment="evidence")
    good = {"operation": "linear", "sizes": "2×3, 4 to 5", "parameter": "weight", "route": "ghost", "way": "gram"}
    good |= {"error": 1e-7, "limit": 2e-5, "outcome": "ok", "evidence": None}
    wrong = good | {"way": "gram kernel", "error": "inf", "outcome": "mismatch"}
    run.add(NormsTrial(family="linear", device="cuda"), {"rows": [good, wrong]}, "mismatch", evidence="1 of 2 differ")
    run.add(NormsTrial(family="group_norm", device="cuda"), None, "unsupported", evidence="no Triton")
    frame = tables.norms_table(read(tmp_path), LeftOut())
    assert list(tables.FIGURES["norms"].texts(frame).Holds) == ["yes", "**mismatch: wrong gradient**"]
    assert list(tables.FIGURES["norms"].texts(frame)["Largest error"]) == ["1.0e-07", "inf"]
    assert (
        tables.FIGURES["norms"]
        .finding(frame)
        .startswith("1 of 2 hold their limit; the nearest to it, or furthest beyond: ")
    )
    assert "ghost gram kernel" in tables.FIGURES["norms"].finding(frame)
