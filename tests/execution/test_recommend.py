"""`dpbench recommend`: the verdict on findings of our own making, the agenda within its time, and the whole of it."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from pathlib import Path

import pytest

from clipping import BACKENDS
from dpbench.cli import main
from dpbench.cli.recommend import (
    add_arguments,
    default_batch_size,
    left_out,
    parse_size,
    question_from,
    size_in_words,
)
from dpbench.errors import UsageError
from dpbench.execution.recommend.agenda import GROUPS, RESERVE, Agenda, Question
from dpbench.execution.recommend.findings import Finding, in_order, take_group, take_search
from dpbench.execution.recommend.verdict import contenders, verdict
from dpbench.process.parent import Answer
from dpbench.trials import LargestTrial, RecommendTrial
from dpbench.trials.outcome import Outcome

ROOT = Path(__file__).resolve().parents[2]
BUDGET = 16 * 2**30


def finding(name, ratios=(1.5, 1.5, 1.5), memory=1.1, largest=1000, ended="full", status="ok", **fields) -> Finding:
    ratios = ratios if isinstance(ratios, tuple) else (ratios,) * 5
    return Finding(
        name,
        status=status,
        reason="",
        ratios=ratios,
        memory_ratio=memory,
        largest=largest,
        largest_ended=ended,
        **fields,
    )


ORDINARY = finding("nonprivate", 1.0, 1.0, 2000)


def advice(*findings, batch_size=32):
    return verdict([ORDINARY, *findings], batch_size, "16 GiB")


def test_the_fastest_exact_one_is_taken_and_the_sentence_says_why():
    found = advice(finding("ghost", 1.9, 1.01), finding("bk_mixed", 1.11, 1.08, 1234), finding("vmap", 4.0, 7.5))
    assert found.backend == "bk_mixed"
    assert found.reason == (
        "take bk_mixed: exact, 1.11x the time and 1.08x the memory of ordinary training, batch up to 1234 in 16 GiB "
        "(simulated); the next best exact one, ghost, costs 1.90x the time and 1.01x the memory of it"
    )


@pytest.mark.parametrize("status", ["mismatch", "unsupported", "error", "oom", "crash"])
def test_only_what_is_exact_and_was_timed_comes_into_question(status):
    fast = finding("fastdp", 0.5, 0.5, status=status)
    assert advice(fast, finding("vmap", 4.0)).backend == "vmap"
    nothing = advice(fast)
    assert nothing.backend is None and f"{status}: fastdp" in nothing.reason


def test_ordinary_training_is_never_recommended_and_its_failure_is_told():
    broken = Finding("nonprivate", status="error", reason="RuntimeError: no such shape")
    found = verdict([broken, Finding("ghost", status="error", reason="the same")], 8, "1 GiB")
    assert found.backend is None and "ordinary training fails too (RuntimeError: no such shape)" in found.reason
    assert advice().backend is None


def test_no_time_for_anything_says_what_to_do():
    found = verdict([Finding("nonprivate"), Finding("ghost"), Finding("vmap")], 8, "1 GiB")
    assert found.backend is None and "smaller --batch-size or with more --seconds" in found.reason


def test_a_tie_is_decided_by_memory_and_says_so():
    quick, lean = finding("bk_mixed", (1.10, 1.12, 1.11), 1.10), finding("bk_ghost", (1.12, 1.13, 1.11), 1.0)
    found = advice(quick, lean)
    assert found.backend == "bk_ghost"
    assert "bk_mixed cannot be told from it by time (1.11x), but takes more memory (1.10x)" in found.reason
    equal = advice(quick, finding("bk_ghost", (1.12, 1.13, 1.11), 1.09))  # less, but not by the least effect
    assert equal.backend == "bk_mixed" and "or memory (1.09x)" in equal.reason


def test_a_difference_beyond_the_noise_is_no_tie_however_little_memory_the_slower_takes():
    assert advice(finding("bk_mixed", 1.1, 3.0), finding("microbatch", 1.2, 0.1)).backend == "bk_mixed"


def test_a_noisy_time_neither_wins_nor_ties_by_being_noisy():
    steady = finding("bk_mixed", (1.24, 1.25, 1.26, 1.25, 1.25), 1.2)
    noisy = finding("fastgradclip", (0.5, 2.0, 0.96, 1.8, 0.6), 1.9)
    assert advice(steady, noisy).backend == "bk_mixed"
    far = finding("ghost", (1.2, 9.0, 5.8, 20.0, 3.0), 1.0)  # its interval holds 1.25, its median is far away
    assert advice(steady, far).backend == "bk_mixed" and "ghost cannot be told" not in advice(steady, far).reason
    assert {f.backend for f in contenders([ORDINARY, steady, noisy, far])} >= {"bk_mixed", "fastgradclip"}


def test_times_of_few_rounds_are_called_rough():
    assert "0.69x the time (roughly: 1 round) and" in advice(finding("bk_mixed", (0.69,))).reason
    assert "roughly" not in advice(finding("bk_mixed", (0.69, 0.7, 0.69))).reason


def test_few_rounds_leave_more_open():
    widths = [finding("a", (1.5,) * n).interval() for n in (1, 2, 3, 7)]
    spans = [high / low for low, high in widths]
    assert spans[0] > spans[1] > spans[2] == spans[3] and spans[0] == pytest.approx(1.21)


def test_what_has_no_room_for_the_batch_is_passed_over_and_named():
    tight, roomy = finding("vmap", 1.1, 8.0, largest=20), finding("ghost", 1.9, 1.0, largest=300)
    found = advice(tight, roomy)
    assert found.backend == "ghost" and "faster, but without room for 32 samples in 16 GiB: vmap" in found.reason
    assert advice(finding("vmap", 1.1, 8.0, largest=20, ended="time"), roomy).backend == "vmap"  # it may have room
    small = advice(tight, finding("ghost", 1.9, 1.0, largest=25))
    assert small.backend == "ghost" and "smaller batch" in small.reason and "25 (simulated)" in small.reason
    none = advice(finding("vmap", 1.1, 8.0, largest=0, ended="nothing"))
    assert none.backend is None and "not even one sample fits in 16 GiB" in none.reason


@pytest.mark.parametrize(
    ("ended", "words"),
    [("full", "up to 700 in"), ("time", "up to at least 700 in"), ("limit", "up to 700 and more in")],
)
def test_the_batch_is_said_as_it_is_known(ended, words):
    assert words in advice(finding("ghost", 1.5, largest=700, ended=ended)).reason
    assert "batch" not in advice(finding("ghost", 1.5, largest=None, ended=None)).reason


def test_parts_by_fallback_are_told():
    found = advice(finding("bk_mixed", 1.1, coverage={"ghost": 0.9, "fallback": 0.1}))
    assert "exact (10.0% of the parameters by fallback)" in found.reason


def turns(*seconds):
    return [{"round": n, "position": 0, "step_seconds": [x]} for n, x in enumerate(seconds)]


def entry(*seconds, peak=100, outcome="ok", evidence=None):
    memory = {"source": "cpu_allocator", "peak_bytes": peak, "baseline_bytes": 20}
    verification = {"max_norm_error": 1e-15, "max_grad_error": 2e-15}
    found = {"outcome": outcome, "evidence": evidence, "verification": verification, "coverage": {"ghost": 1.0}}
    return found | ({"turns": turns(*seconds), "memory": memory} if outcome == "ok" else {})


def test_ratios_are_taken_within_rounds():
    findings = {name: Finding(name) for name in ("nonprivate", "ghost", "vmap", "fastdp")}
    take_group(
        findings,
        {
            "nonprivate": entry(1.0, 2.0, 4.0),
            "ghost": entry(1.5, 3.0, 6.0, peak=150),
            "vmap": entry(3.0),
            "fastdp": entry(outcome="mismatch", evidence="fastdp differs\nby much"),
        },
    )
    assert findings["ghost"].ratios == [1.5] * 3 and findings["ghost"].memory_ratio == 1.5
    assert findings["vmap"].ratios == [3.0] and findings["vmap"].candidate
    assert (findings["fastdp"].status, findings["fastdp"].reason) == ("mismatch", "fastdp differs")
    assert [f.backend for f in in_order(findings.values())] == ["nonprivate", "ghost", "vmap", "fastdp"]
    # what is measured again replaces, what is left out later does not
    take_group(
        findings,
        {"nonprivate": entry(1.0), "ghost": entry(1.2), "vmap": entry(outcome="timeout", evidence="left out")},
    )
    assert findings["ghost"].ratios == [1.2] and findings["vmap"].ratios == [3.0] and findings["vmap"].status == "ok"
    row = findings["ghost"].as_row()
    assert {"backend", "status", "coverage", "time_ratio", "memory_ratio", "max_batch_size"} <= set(row)


def test_where_the_search_begins_is_predicted_by_the_measured_peak():
    found = Finding("ghost", peak_bytes=100 + 32 * 10, baseline_bytes=100)
    assert found.predicted_batch(32, 100 + 10 * 500) == 500
    assert Finding("ghost").predicted_batch(32, BUDGET) == 32
    assert found.predicted_batch(32, 50) == 1


@pytest.mark.parametrize(
    ("outcome", "evidence", "said"),
    [
        (Outcome.TIMEOUT, "still running", "not found for want of time"),
        (Outcome.UNSUPPORTED, "ghost does not\nsupport", "not simulated: unsupported: ghost does not"),
        (Outcome.ERROR, "Traceback\nKeyError: 'x'", "not simulated: error: KeyError: 'x'"),
    ],
)
def test_a_search_that_fails_says_so_and_gives_no_number(outcome, evidence, said):
    found = finding("ghost", largest=None)
    take_search(found, outcome, evidence, None)
    assert found.largest is None and found.largest_note == said


class Machine:
    """A runner that answers at once; every trial takes the seconds that `cost` says on a clock of its own."""

    def __init__(self, cost, ends=None) -> None:
        self.starts = 0.0
        self.now, self.trials, self.cost, self.ends = 0.0, [], cost, ends or (lambda trial: None)
        self.keys, self.ready = itertools.count(), []

    def submit(self, trial, until=float("inf")):
        self.trials.append(trial)
        key = next(self.keys)
        seconds = self.cost(trial)
        outcome, result = Outcome.OK, None
        longest = min(self.starts + trial.timeout, until - self.now)  # its time begins when the server has started
        if seconds > longest:
            seconds, outcome = longest, Outcome.TIMEOUT
        elif (ended := self.ends(trial)) is not None:
            outcome = ended
        elif isinstance(trial, RecommendTrial):
            speed = {"nonprivate": 1.0, "bk_mixed": 1.1}
            entries = {name: entry(*[speed.get(name, 2.0)] * 3) for name in trial.backends}
            result = {"backends": entries, "inputs": [[8, 3, 32, 32]], "parameters": 10}
        else:
            result = {"batch_size": 100, "ended": "full", "probes": []}
        self.now += seconds
        self.ready.append(Answer(key, outcome, None if outcome is Outcome.OK else "it ended", result, seconds))
        return key

    def wait(self, timeout=None):
        ready, self.ready = self.ready, []
        return ready


def carry_out(machine, **question):
    asked = {"model": "cnn", "batch_size": 8, "memory_budget": BUDGET} | question
    said = []
    agenda = Agenda(Question(**asked), machine, said.append, clock=lambda: machine.now)
    return agenda.carry_out(), said


def test_with_time_enough_everything_is_measured_and_searched_likely_ones_first():
    machine = Machine(lambda trial: 2.0)
    findings, said = carry_out(machine)
    assert all(f.status == "ok" and f.largest == 100 for f in findings.values())
    timed = [trial.backends for trial in machine.trials if isinstance(trial, RecommendTrial)]
    assert timed[0] == ("nonprivate", "bk_mixed") and all(backends[0] == "nonprivate" for backends in timed)
    assert {name for backends in timed for name in backends} == set(findings)
    searched = [trial.backend for trial in machine.trials if isinstance(trial, LargestTrial)]
    assert searched[:2] == ["nonprivate", "bk_mixed"] and sorted(searched) == sorted(findings)
    assert all("s]" in line for line in said)


@pytest.mark.parametrize("seconds", [0.5, 6.0, 20.0, 40.0, 90.0, 1e9])
@pytest.mark.parametrize("limit", [30.0, 110.0])
def test_it_ends_in_time_whatever_a_trial_takes_and_no_row_is_missing(seconds, limit):
    machine = Machine(lambda trial: seconds)
    findings, _ = carry_out(machine, seconds=limit)
    assert machine.now <= limit
    for found in findings.values():
        assert found.status == "ok" or (found.status == "not measured" and found.reason)
        assert found.largest is not None or found.largest_note or found.status != "ok"


@pytest.mark.parametrize("seconds", [1.0, 7.0, 36.0, 500.0])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_it_ends_within_a_minute_on_every_device_and_says_what_was_left_out(seconds, device):
    """On an H100 `bk_mixed` beside ordinary training took 36 s on GPT-2; a process may also take long to start."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    asked = question_from(parser.parse_args(["transformers:gpt2@1024", "--device", "cpu"]))
    question = dataclasses.replace(asked, device=device)
    machine = Machine(lambda trial: seconds)
    machine.starts = 10.0
    findings = Agenda(question, machine, lambda line: None, clock=lambda: machine.now, begun=1e-9).carry_out()
    assert question.seconds == 60 and machine.now <= 60 - RESERVE + 1e-6
    told = left_out(question, list(findings.values()))
    missing = [name for name, found in findings.items() if found.status == "not measured"]
    assert (told == []) == (seconds == 1.0)
    for name in missing:
        assert name in told[0] and "Left out for want of time (--seconds 60): time of " in told[0]


def test_a_winner_that_was_hardly_timed_is_timed_again():
    class Hasty(Machine):
        def submit(self, trial, until):
            key = super().submit(trial, until)
            if isinstance(trial, RecommendTrial) and len(self.trials) == 1:
                for one in self.ready[-1].result["backends"].values():
                    one["turns"] = one["turns"][:1]
            return key

    machine = Hasty(lambda trial: 2.0)
    findings, _ = carry_out(machine)
    timed = [trial.backends for trial in machine.trials if isinstance(trial, RecommendTrial)]
    assert timed.count(("nonprivate", "bk_mixed")) == 2 and len(findings["bk_mixed"].ratios) == 3


def test_a_process_that_goes_away_takes_its_own_group_with_it_and_no_other():
    second = set(GROUPS[1].backends)
    machine = Machine(
        lambda trial: 1.0,
        ends=lambda trial: Outcome.CRASH if second & set(getattr(trial, "backends", ())) else None,
    )
    findings, _ = carry_out(machine)
    assert {name for name, found in findings.items() if found.status == "crash"} == second
    assert verdict(findings.values(), 8, "16 GiB").backend == "bk_mixed"


def test_the_groups_hold_every_backend_once():
    names = [name for group in GROUPS for name in group.backends]
    assert sorted([*names, "nonprivate"]) == sorted(BACKENDS)


@pytest.mark.parametrize(
    ("text", "size"),
    [("16GiB", BUDGET), ("500 MB", 500_000_000), ("24g", 24 * 10**9), ("1.5GiB", 3 * 2**29), ("2e9", 2 * 10**9)],
)
def test_sizes_as_people_write_them(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "0", "16 parsecs", "1.2.3GB", "inf"])
def test_sizes_that_are_none(text):
    with pytest.raises(UsageError, match="a size for --memory such as 16GiB"):
        parse_size(text)


def test_sizes_in_words():
    assert [size_in_words(n) for n in (BUDGET, 3 * 2**29, 2**20, 5)] == ["16 GiB", "1.5 GiB", "1 MiB", "5 bytes"]


def test_the_batch_size_if_none_is_given():
    assert default_batch_size("cnn", None, "cpu") == 32 and default_batch_size("cnn", 128, "cpu") == 8
    assert default_batch_size("timm:vit_tiny_patch16_224", None, "cpu") == 8
    assert default_batch_size("transformers:gpt2", None, "cuda") == 64


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["resnet19"], ["a model, one of cnn", "did you mean 'resnet18'?"]),
        (["tim:vit"], ["did you mean 'timm'?"]),
        (["nowhere.py:build"], ["path/file.py:factory of an existing file", "nowhere.py:build"]),
        (["cnn", "--batch-size", "0"], ["at least 1 for --batch-size", "0"]),
        (["cnn", "--memory", "plenty"], ["a size for --memory", "'plenty'"]),
        (["cnn", "--device", "tpu"], ["--device", "'tpu'"]),
        (["cnn", "--seconds", "1"], ["at least 20 for --seconds", "1.0"]),
        (["cnn", "--seconds", "nan"], ["at least 20 for --seconds", "nan"]),
        ([], ["MODEL", "nothing"]),
    ],
    ids=" ".join,
)
def test_mistakes_are_one_line_and_exit_2(arguments, said, capsys):
    code = main(["recommend", *arguments])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "") and err.count("\n") == 1
    for words in said:
        assert words in err
