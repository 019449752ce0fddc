"""Records of every kind that a figure is drawn of."""

from dpbench.conformance import ConformanceTrial
from dpbench.conformance.coverage import CoverageTrial
from dpbench.conformance.sensitivity import SensitivityTrial
from dpbench.training import AdamTrial, AuditTrial, CorrelatedTrial, DistributedTrial, MemorisationTrial, UtilityTrial
from dpbench.trials import (
    CalibrationTrial,
    CheckTrial,
    ExplainTrial,
    MapTrial,
    PeakTrial,
    SchemeTrial,
    StepTrial,
    SweepTrial,
    TunedTrial,
)
from dpbench.trials.evidence import DeviceTrial, LaunchesTrial, NormsTrial, PartsTrial, ProfileTrial
from dpbench.trials.whole_step import TrainingStepTrial


def everything(run, name="net.py:make"):
    """Add records of every kind, some of them failed. The model is `name`, which every evidence contains."""
    for number in range(2):
        run.step(name, "nonprivate", [1.0], 2**30, round=number).step(name, "ghost", [2.5], 2**30, round=number)
        run.step(name, "opacus_hooks", [4.0], 2**31, round=number)
    run.search(name, "nonprivate", [8, 200], [201]).search(name, "ghost", [8, 100], [101])
    run.add(StepTrial(model=name, backend="vmap", batch_size=8), outcome="error", evidence=f"Traceback\nBad: {name} 7")
    run.add(StepTrial(model=name, backend="bk_mixed", batch_size=8), outcome="error", evidence=f"T\nBad: {name} 8")
    for steps in (100, 10_000):
        run.epsilon("moments", steps, 1.2586 * steps / 1e4).epsilon("prv", steps, 1.2 * steps / 1e4)
    for size in (32, 64):
        run.overhead(
            "vgg11", {"nonprivate": [1.0, 1.0], "ghost": [3.0, 3.0]}, failed={"vmap": ("oom", name)}, image_size=size
        )
        run.overhead("vgg11", {"nonprivate": [1.0], "ghost": [3.0]}, batch_size=size)
        tokens = {"model": f"transformers:gpt2@{size}", "image_size": None}
        run.overhead(seconds={"nonprivate": [1.0], "ghost": [2.0]}, **tokens)
    run.overhead("timm:deit_tiny_patch16_224", {"nonprivate": [1.0], "mixed_ghost": [1.5]}, image_size=224)
    run.overhead("vgg11", {"nonprivate": [1.0], "bk_mixed": [1.1]}, kind=TrainingStepTrial)
    use = {"parameter": "a.weight", "op": "linear", "T": 2, "d": 4, "p": 8, "two_T_squared": 8, "p_times_d": 32}
    costs = {name: {"ghost": 1, "instantiate": 2} for name in ("bytes", "flops")}
    rows, summary = [use | costs | {"paper_choice": "ghost", "plan": "kept"}], {"inputs": [[8, 3, 32, 32]]}
    run.add(ExplainTrial(model="cnn", batch_size=8), {"rows": rows, "summary": summary | {"batch_size": 8}})
    point = {"sample_rate": 0.01, "delta": 1e-5, "noise_multiplier": 4.0}
    for kind, more in ((SweepTrial, {}), (MapTrial, {}), (SchemeTrial, {"scheme": "Poisson"})):
        for accountant, value, bound in (("prv", 1.2, "upper_bound"), ("prv:lower", 1.1, "lower_bound")):
            result = {"epsilon": value, "kind": bound, "detail": {}, "compute_seconds": 0.01}
            run.add(kind(accountant=accountant, steps=100, **point, **more), result)
    for distribution, runs, value in (("", 1, 1.2), ("poisson", 10, 2.5)):
        trial = TunedTrial(accountant="rdp", steps=100, distribution=distribution, runs=runs, **point)
        run.add(trial, {"epsilon": value, "kind": "upper_bound", "detail": {}, "compute_seconds": 0.01})
    for accountant, value in (("moments", 100), ("prv", 120)):
        trial = CalibrationTrial(accountant=accountant, unknown="steps", target_epsilon=1.0, **point)
        run.add(trial, {"value": value, "epsilon": 0.99, "kind": "upper_bound"})
    verdict = {"case": "a", "result": "wrong", "raised": False, "reason": None, "coverage": {}}
    run.add(ConformanceTrial(backend="vmap"), {"rows": [verdict | {"norm_error": 1.0, "grad_error": 1.0}]})
    far = {"case": "a", "outcome": "exceeds", "excess": 2.0, "limit": 1.01, "record": "large", "counts": {"exceeds": 1}}
    run.add(SensitivityTrial(backend="vmap"), {"rows": [far]})
    curve = {
        "curve": [{"accuracy": 0.9, "seconds": 1.0, "steps": 4}],
        "accuracy": 0.9,
        "test_losses": [0.5],
        "epsilon": 2.0,
    }
    run.add(UtilityTrial(network="linear", target_epsilon=2.0, seed=0), curve | {"noise_multiplier": 1.0})
    run.add(UtilityTrial(network="linear", target_epsilon=None, seed=0), curve | {"accuracy": 0.93})
    for noise, loss in (("gaussian", 0.5), ("banded:4", 0.4)):
        trial = CorrelatedTrial(network="linear", target_epsilon=2.0, seed=0, noise=noise)
        run.add(trial, curve | {"test_losses": [loss], "noise_multiplier": 1.0})
    for optimizer, spread in (("SGD", {}), ("Adam", {"spread": 1.2}), ("AdamBC", {"spread": 3.0})):
        run.add(AdamTrial(network="linear", target_epsilon=2.0, seed=0, optimizer=optimizer), curve | spread)
    for simulated in (True, False):
        memory = {"source": "simulated" if simulated else "cpu_allocator", "peak_bytes": 2**20, "phases": {}}
        run.add(PeakTrial(model="cnn", backend="vmap", batch_size=8, simulated=simulated), {"memory": memory})
    entry = {"turns": [{"round": 0, "step_seconds": [1.0]}], "memory": [{"source": "rss", "peak_bytes": 2**20}]}
    spread = {"backends": {"nonprivate": entry, "bk_mixed": entry}, "oversubscribed": False, "communication": "gloo"}
    run.add(DistributedTrial(model="cnn", processes=2, spread="ddp", batch_size=8), spread)
    exact = {
        "backend": "ghost",
        "status": "exact",
        "norm_error": 0.0,
        "grad_error": 0.0,
        "coverage": {},
        "reason": None,
    }
    built = {"built": True, "dtype": "float64", "image_size": 64, "parameters": 5, "random": False, "mixes": False}
    run.add(CoverageTrial(model="timm:a", task="t", backends=("ghost",)), built | {"tolerance": 1e-9, "rows": [exact]})
    for backend, size in (("ghost", 7), ("vmap", 9)):
        run.add(CheckTrial(model="cnn", backend=backend), {"largest": size})
    for backend, bound in (("ghost", 2.5), ("vmap", 3.5)):
        result = {"claimed_epsilon": 4.0, "epsilon_lower_bound": bound, "violated": False}
        result |= {"guesses": 100, "correct": 60, "delta": 1e-6}
        run.add(AuditTrial(backend=backend, seed=0), result)
    for target, bits in ((None, 13.0), (8.0, 1.5)):
        secrets = [{"times": 64, "bits": bits}]
        found = {"exposures": secrets, "bits_of_all": 13.3, "bits_per_byte": 2.0, "bits_per_byte_before": 3.0}
        run.add(
            MemorisationTrial(target_epsilon=target, seed=0), found | {"epsilon": target, "delta": None, "seconds": 1.0}
        )
    return evidence(run, name)


def evidence(run, name):
    """A record of each kind that the experiment of that name has of its own; `name` is a model's."""
    rate = [{"what": "copy on the device", "bytes": 4, "seconds": 1e-9, "bytes_per_second": 4e9}]
    product = [{"size": 64, "precision": "tf32", "seconds": 1e-6, "flops_per_second": 5e11}]
    facts = {"facts": {"name": name}, "versions": {"torch": "2.15.0"}, "bandwidth": rate, "products": product}
    run.add(DeviceTrial(), facts | {"latency": [{"what": "one operation to the next", "seconds": 2e-6}]})
    row = {"operation": "linear", "sizes": "2×3", "parameter": "weight", "route": "ghost", "way": "gram"}
    row |= {"error": 1e-7, "limit": 2e-5, "outcome": "ok", "evidence": None}
    run.add(NormsTrial(family="linear"), {"rows": [row]})
    part = {"seconds": [0.1, 0.2], "launches": 3.0, "waits": 0.0}
    names = {"plain": ("forward", "backward", "optimizer", "rest")}
    names["private"] = ("forward", "clip", "finite", "noise", "optimizer", "rest")
    steps = {which: {"parts": dict.fromkeys(own, part), "step_seconds": [1.0]} for which, own in names.items()}
    run.add(
        PartsTrial(model=name, batch_size=8), {"tensors": 2, "parameters": 9, "counted": "launches", "steps": steps}
    )
    top = [{"name": f"aten::{name}", "asked_by": "", "calls": 2.0, "seconds": 0.1, "share": 1.0}]
    told = {"outcome": "ok", "evidence": None, "launches": 5.0, "waits": 0.0, "operations": 2.0, "device_seconds": 0.1}
    files = {"nonprivate.json.gz": "a-nonprivate.json.gz"}
    profile = {"parameters": 9, "counted": "kernels", "backends": {"nonprivate": told | {"top": top}}, "files": files}
    run.add(ProfileTrial(model=name, batch_size=8), profile)
    plain, private = (
        {"outcome": "ok", "launches": n, "bytes_read": n, "bytes_written": n, "flops": n, "operations": {"mm": n}}
        for n in (5, 9)
    )
    trial = LaunchesTrial(model=name, backends=["nonprivate", "ghost"], batch_size=8)
    return run.add(trial, {"parameters": 9, "backends": {"nonprivate": plain, "ghost": private}})
