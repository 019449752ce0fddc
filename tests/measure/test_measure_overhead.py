"""The body of an overhead trial: turns in every order, pairs within a round, and no backend in another's way."""

import gc
import resource
from typing import Any

import pytest
import torch

import clipping
from clipping.backends.microbatch import Microbatch, NonPrivate
from dpbench.measure import memory, overhead
from dpbench.trials import OverheadTrial, PeakTrial
from dpbench.trials.json_text import to_json
from dpbench.trials.outcome import Outcome, PartlyFailed, classify

TRIAL = OverheadTrial(
    model="cnn", backends=["nonprivate", "mixed_ghost"], batch_size=4, image_size=16, rounds=3, max_seconds=0.1
)
CALLS: list[str] = []


class Logged(NonPrivate):
    """Ordinary training that says when it was called; exact where nothing is clipped."""

    name = "logged"
    private = True  # so that its rounds are limited, as any other's

    def _clipped(self, *args: Any, **kwargs: Any) -> Any:
        CALLS.append(self.name)
        return super()._clipped(*args, **kwargs)


class Base(Logged):
    name, private = "base", False


class Other(Logged):
    name = "other"


class Wrong(Microbatch):
    """Twice the gradient of one parameter."""

    name, trusted = "wrong", False

    def _clipped(self, *args: Any, **kwargs: Any) -> Any:
        out = super()._clipped(*args, **kwargs)
        out.grads["0.bias"].mul_(2)
        return out


class Absent(Microbatch):
    name = "absent"

    @classmethod
    def unavailable(cls) -> str | None:
        return "the package fancy is not installed; pip install fancy"


class Tiring(NonPrivate):
    """Breaks after both verifications, the warm-up and one turn."""

    name = "tiring"

    def _clipped(self, *args: Any, **kwargs: Any) -> Any:
        CALLS.append(self.name)
        if CALLS.count(self.name) > 5:
            raise ValueError("that was one too many")
        return super()._clipped(*args, **kwargs)


class Hungry(NonPrivate):
    """Asks for more memory than there is, in every step of a whole batch."""

    name = "hungry"
    limit = 0

    def _clipped(self, parameters: Any, inputs: Any, targets: Any, batch_size: int) -> Any:
        type(self).limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
        if batch_size > 2:
            torch.empty(2**50, dtype=torch.uint8, device=next(self.model.parameters()).device)
        return super()._clipped(parameters, inputs, targets, batch_size)


class Hoarding(NonPrivate):
    """Keeps 64 MiB from its first step until it is closed, and returns 64 MiB in cycles for the collector."""

    name = "hoarding"

    def _clipped(self, *args: Any, **kwargs: Any) -> Any:
        device = next(self.model.parameters()).device
        self.kept = torch.empty(2**24, device=device)
        cycle: list[Any] = [torch.empty(2**24, device=device)]
        cycle.append(cycle)
        return super()._clipped(*args, **kwargs)


@pytest.fixture(autouse=True)
def backends(monkeypatch):
    for backend in (Logged, Base, Other, Wrong, Absent, Tiring, Hungry, Hoarding):
        info = clipping.BackendInfo(f"{__name__}:{backend.__name__}", "for a test")
        monkeypatch.setitem(clipping.BACKENDS, backend.name, info)
    CALLS.clear()
    gc.freeze()  # as the process does that forks trials: what was imported is not looked through before every turn
    yield
    gc.unfreeze()


@pytest.fixture
def one_step_a_turn(monkeypatch):
    """And two steps of warm-up."""
    monkeypatch.setattr(overhead, "MOST_IN_A_TURN", 1)
    monkeypatch.setattr(overhead, "warm_up", lambda step, stopwatch, max_seconds: stopwatch(step, 2, 0.0))


def partly(trial) -> tuple[Outcome, str, dict[str, Any]]:
    with pytest.raises(PartlyFailed) as caught:
        overhead.run(trial)
    outcome, evidence, result = classify(caught.value)
    assert result is not None
    return outcome, evidence, result["backends"]


def test_the_record_of_a_trial():
    result = overhead.run(TRIAL)
    assert list(result) == ["parameters", "precision", "backends"]
    assert list(result["backends"]) == ["nonprivate", "mixed_ghost"]
    keys = {"outcome", "evidence", "verification", "coverage", "warmup_seconds", "way", "turns", "loss", "memory"}
    for entry in result["backends"].values():
        assert set(entry) == keys and (entry["outcome"], entry["evidence"]) == ("ok", None)
        assert entry["verification"]["samples"] == 2 and entry["verification"]["max_grad_error"] < 1e-12
        assert len(entry["warmup_seconds"]) >= 2
        assert [turn["round"] for turn in entry["turns"]] == [0, 1, 2]
        assert all(set(turn) == {"round", "position", "step_seconds"} for turn in entry["turns"])
        assert all(seconds > 0 for turn in entry["turns"] for seconds in turn["step_seconds"])
    ordinary, ghost = result["backends"].values()
    assert {a["position"] + b["position"] for a, b in zip(ordinary["turns"], ghost["turns"], strict=True)} == {1}
    assert ordinary["loss"] == pytest.approx(ghost["loss"])
    assert sum(ghost["coverage"].values()) == pytest.approx(1)
    to_json(result)


def test_every_round_has_an_order_of_its_own(one_step_a_turn):
    names = ["base", "logged", "other"]
    result = overhead.run(TRIAL.replace(backends=names, rounds=6, max_seconds=100.0, max_grad_norm=1e9))
    timed = CALLS[12:-3]  # before: verified twice and warmed up twice, one after the other; after: memory
    assert CALLS[:12] == ["base"] * 4 + ["logged"] * 4 + ["other"] * 4 and CALLS[-3:] == names
    rounds = [timed[3 * number : 3 * number + 3] for number in range(6)]
    assert [sorted(one) for one in rounds] == [sorted(names)] * 6
    assert len({tuple(one) for one in rounds}) > 2
    for name in names:
        positions = [turn["position"] for turn in result["backends"][name]["turns"]]
        assert positions == [one.index(name) for one in rounds]


@pytest.mark.parametrize(
    ("turn", "rounds", "most", "expected"),
    [
        (1.0, 7, 10.0, [0, 1, 2, 3, 4, 5, 6]),
        (2.0, 7, 10.0, [0, 2, 3, 4, 6]),
        (60.0, 7, 10.0, [0, 3, 6]),
        (60.0, 2, 10.0, [0, 1]),
        (60.0, 1, 10.0, [0]),
    ],
)
def test_a_slow_backend_has_fewer_turns_but_three(turn, rounds, most, expected):
    assert overhead.rounds_for(turn, rounds, most) == expected


def test_ordinary_training_has_a_turn_in_every_round(one_step_a_turn):
    result = overhead.run(TRIAL.replace(backends=["base", "logged"], rounds=5, max_seconds=1e-9, max_grad_norm=1e9))
    turns = {name: [turn["round"] for turn in entry["turns"]] for name, entry in result["backends"].items()}
    assert turns == {"base": [0, 1, 2, 3, 4], "logged": [0, 2, 4]}


def test_short_steps_fill_a_turn():
    entry = overhead.run(TRIAL.replace(backends=["nonprivate"], rounds=1))["backends"]["nonprivate"]
    assert 2 <= len(entry["turns"][0]["step_seconds"]) <= overhead.MOST_IN_A_TURN


def test_what_is_refused_is_an_entry_and_the_trial_is_ok():
    entries = overhead.run(TRIAL.replace(backends=["absent", "nonprivate"]))["backends"]
    said = "absent is not available here: the package fancy is not installed; pip install fancy"
    assert entries["absent"] == {"outcome": "unsupported", "evidence": said}
    assert entries["nonprivate"]["outcome"] == "ok" and len(entries["nonprivate"]["turns"]) == 3


def test_what_is_wrong_is_not_timed_and_the_others_are():
    outcome, evidence, entries = partly(TRIAL.replace(backends=["wrong", "nonprivate", "absent"]))
    assert (outcome, evidence) == (Outcome.MISMATCH, "1 of 3 backends without a result: wrong (mismatch)")
    assert entries["wrong"]["outcome"] == "mismatch" and "'0.bias'" in entries["wrong"]["evidence"]
    assert entries["wrong"]["verification"]["max_grad_error"] == pytest.approx(1)
    assert not {"turns", "memory"} & set(entries["wrong"])
    assert len(entries["nonprivate"]["turns"]) == 3 and entries["absent"]["outcome"] == "unsupported"


def test_what_breaks_half_way_keeps_its_turns_and_the_others_go_on(one_step_a_turn):
    trial = TRIAL.replace(backends=["tiring", "wrong", "base"], max_seconds=100.0)
    outcome, evidence, entries = partly(trial)
    assert outcome == Outcome.ERROR and "tiring (error), wrong (mismatch)" in evidence
    assert entries["tiring"]["evidence"].endswith("ValueError: that was one too many")
    assert len(entries["tiring"]["turns"]) == 1 and "memory" not in entries["tiring"]
    assert len(entries["base"]["turns"]) == 3 and entries["base"]["memory"]["peak_bytes"] > 0


def test_memory_that_runs_out_is_one_backend_s_end():
    before = resource.getrlimit(resource.RLIMIT_DATA)
    entries = overhead.run(TRIAL.replace(backends=["hungry", "nonprivate"]))["backends"]
    assert entries["hungry"]["outcome"] == "oom" and entries["nonprivate"]["outcome"] == "ok"
    assert 2**26 < Hungry.limit < 2**50  # an allocation fails before the kernel has to kill somebody
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_a_peak_is_that_of_the_backend_alone_whatever_the_others_keep():
    names = ["nonprivate", "mixed_ghost", "vmap"]
    result = overhead.run(TRIAL.replace(backends=["hoarding", *names], data="synthetic", rounds=1))["backends"]
    assert result["hoarding"]["memory"]["peak_bytes"] > 2**26
    for name in names:
        alone = memory.run(
            PeakTrial(model="cnn", backend=name, batch_size=4, image_size=16, data="synthetic", simulated=False)
        )
        assert result[name]["memory"]["peak_bytes"] == alone["memory"]["peak_bytes"]


def test_peers_on_one_model_do_not_meet():
    pytest.importorskip("opacus")
    names = ["opacus_hooks", "nonprivate", "opacus_ghost", "bk_mixed", "opacus_functorch"]
    entries = overhead.run(TRIAL.replace(backends=names))["backends"]
    assert {entry["outcome"] for entry in entries.values()} == {"ok"}
    losses = [entry["loss"] for entry in entries.values()]
    assert losses == pytest.approx([losses[0]] * len(losses))


@pytest.mark.gpu
@pytest.mark.alone
def test_a_peak_on_cuda_leaves_out_what_the_others_keep():
    trial = TRIAL.replace(backends=["hoarding", "nonprivate", "mixed_ghost"], device="cuda", data="synthetic")
    entries = overhead.run(trial)["backends"]
    peaks = {name: entry["memory"]["peak_bytes"] for name, entry in entries.items()}
    assert peaks["hoarding"] > 2**27 > 2**25 > max(peaks["nonprivate"], peaks["mixed_ghost"])
    assert entries["nonprivate"]["memory"]["source"] == "cuda_allocator"
    hungry = overhead.run(trial.replace(backends=["hungry", "nonprivate"]))["backends"]
    assert [entry["outcome"] for entry in hungry.values()] == ["oom", "ok"]
