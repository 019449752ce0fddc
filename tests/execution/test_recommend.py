"""`dpbench recommend`: a race by a clock of our own, the verdict on findings of our own, the agenda in its time."""

import itertools
import json
from pathlib import Path

import pytest

from clipping import BACKENDS
from dpbench.cli.recommend import left_out, parse_size, table
from dpbench.execution.recommend.agenda import ORDER, Agenda, Question
from dpbench.execution.recommend.findings import Finding, doubt, in_order, interval, take_race, take_search
from dpbench.execution.recommend.verdict import verdict
from dpbench.measure.race import FAR, KEPT, MOST_ROUNDS, TURNS, Race, doubtful, finalists
from dpbench.process import linux
from dpbench.process.parent import Answer
from dpbench.trials import LargestTrial, RecommendTrial
from dpbench.trials.outcome import Outcome

BUDGET = 16 * 2**30


def finding(name, ratios=(1.5,) * 5, memory=1.1, largest=1000, ended="full", status="ok", **fields) -> Finding:
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


def advice(*findings):
    return verdict([ORDINARY, *findings], 32, "16 GiB")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Runner:
    """Steps that take what a function of their number says, on a clock of their own; none after `ends` steps."""

    def __init__(self, clock, name, seconds, ends=float("inf")) -> None:
        self.clock, self.name, self.ends, self.done = clock, name, ends, 0
        self.take = seconds if callable(seconds) else lambda number: seconds
        self.seconds = self.take(0)

    def timed(self, count):
        if self.done + count > self.ends:
            return []
        taken = [self.take(self.done + i) for i in range(count)]
        self.done += count
        self.clock.now += sum(taken)
        return taken


def race(kind="finals", until=1e9, **seconds):
    clock = Clock()
    runners = [
        each if isinstance(each, Runner) else Runner(clock, name, each)
        for name, each in {"nonprivate": 1.0, **seconds}.items()
    ]
    more = (until,) if kind == "finals" else ()
    return getattr(Race(clock), kind)(runners, until, *more), clock, runners


def test_heats_are_three_turns_of_everybody_within_rounds():
    found, _, runners = race("heats", bk_mixed=1.25, ghost=2.0)
    assert found == {"nonprivate": [1.0] * 3, "bk_mixed": [1.25] * 3, "ghost": [2.0] * 3}
    assert [runner.done for runner in runners] == [TURNS] * 3


def test_what_a_machine_does_to_some_rounds_falls_on_all_and_leaves_the_ratio():
    clock = Clock()
    slow = {"nonprivate": 1.0, "bk_mixed": 1.2}
    runners = [Runner(clock, name, lambda n, s=s: s * (5 if n == 2 else 1)) for name, s in slow.items()]
    assert Race(clock).finals(runners, 1e9, 1e9)["bk_mixed"] == [pytest.approx(1.2)] * 5


def test_finals_go_on_until_intervals_are_narrow_or_the_time_is_over():
    assert len(race(bk_mixed=1.25)[0]["bk_mixed"]) == 5
    noisy = lambda n: 1.0 + 0.3 * (n % 3)  # noqa: E731
    assert len(race(bk_mixed=noisy)[0]["bk_mixed"]) == MOST_ROUNDS
    cut, clock, _ = race(bk_mixed=noisy, until=8.0)
    assert 1 < len(cut["bk_mixed"]) < 5 and clock.now <= 8.0


def test_a_runner_that_fails_ends_alone():
    found, _, _ = race(bk_mixed=1.1, ghost=Runner(Clock(), "ghost", 2.0, ends=2))
    assert len(found["bk_mixed"]) == 5 and found["ghost"] == [2.0, 2.0]


def test_losers_are_dropped_but_for_the_fastest_of_opacus():
    heats = {"nonprivate": [1.0] * 3, "bk_mixed": [1.2, 1.1, 9.0], "vmap": [1.3], "ghost": [1.2 * FAR + 0.1] * 3}
    heats |= {"opacus_hooks": [4.0] * 3, "opacus_ghost": [3.0] * 3, "fastdp": []}
    assert finalists(heats) == ["bk_mixed", "vmap", "opacus_ghost"]
    assert finalists({"nonprivate": [1.0]}) == []
    many = {f"b{i}": [1.0 + i / 100] for i in range(9)}
    assert finalists(many) == list(many)[:KEPT] and finalists(many, 1) == ["b0"]
    assert finalists({"opacus_ew": [1.0], "bk_mixed": [1.1]}) == ["opacus_ew", "bk_mixed"]


def test_rounds_that_cannot_be_believed():
    assert doubt([1.1, 1.2, 1.9]) is None and doubt([]) is None
    assert doubt([0.7, 0.75, 0.79]) == "the machine is busy: rounds from 0.70x to 0.79x"
    assert doubt([1.0, 1.2, 2.1]) == "the machine is busy: rounds from 1.00x to 2.10x"
    assert doubtful({"nonprivate": [0.1], "a": [1.0, 3.0], "b": [1.0], "c": [0.5]}) == ["a", "c"]


def test_cpus_that_others_use(monkeypatch):
    looks = iter([[(0, 0), (10, 0)], [(0, 100), (60, 50)]])  # (idle, at work): one CPU all the time, one half of it
    monkeypatch.setattr(linux, "_idle_ticks", lambda: next(looks))
    assert linux.busy_cpus(0.0) == 1.5
    monkeypatch.setattr(linux, "_idle_ticks", list)
    assert linux.busy_cpus(0.0) == 0.0


def test_an_interval_is_stated_from_five_rounds_and_covers_the_median():
    assert interval([1.0, 1.1, 1.2, 1.3]) is None
    assert interval([1.3, 1.0, 1.1, 1.2, 9.0]) == (1.0, 9.0)
    for count, inner in ((8, 0), (9, 1), (15, 3)):  # the chance to lie outside: 2 Σ C(n, i) / 2ⁿ <= 1/16
        assert interval(list(range(count))) == (inner, count - 1 - inner)
    row = finding("ghost", (1.5,) * 4).as_row()
    assert row["time_ratio"] == 1.5 and row["time_ratio_low"] is None is row["time_ratio_high"]


def test_the_fastest_exact_one_is_taken_and_the_sentence_says_what_it_beats():
    found = advice(
        finding("ghost", 1.9, 1.01),
        finding("bk_mixed", 1.11, 1.08, 1234),
        finding("vmap", 4.0, 7.5),
        finding("opacus_hooks", (3.4, 3.3, 3.5)),
    )
    assert found.backend == "bk_mixed"
    assert found.reason == (
        "take bk_mixed: exact, 1.11x the time and 1.08x the memory of ordinary training, batch up to 1234 in 16 GiB "
        "(simulated); ghost takes 1.90x, opacus_hooks 3.40x, vmap 4.00x"
    )


QUICK, LEAN = finding("bk_mixed", (1.10, 1.12, 1.11) * 2, 1.10), finding("bk_ghost", (1.12, 1.13, 1.11) * 2, 1.0)
TIGHT, ROOMY = finding("vmap", 1.1, 8.0, largest=20), finding("ghost", 1.9, 1.0, largest=300)
BROKEN = Finding("nonprivate", status="error", reason="RuntimeError: no such shape")


@pytest.mark.parametrize(
    ("findings", "backend", "said"),
    [
        # by the median, not by an interval's end, which is 5.0
        ([finding("bk_mixed", (2.3, 2.4, 2.37, 2.35, 5.0)), finding("ghost", 5.5)], "bk_mixed", "ghost takes 5.50x"),
        ([finding("bk_mixed", 1.4), finding("ghost", (1.3, 1.3, 1.3))], "bk_mixed", "ghost takes 1.30x"),
        ([finding("bk_mixed", (0.99,))], "bk_mixed", "0.99x the time (roughly: 1 round) and"),
        (
            [finding("bk_mixed", 1.11), finding("opacus_hooks", (), status="unsupported"), Finding("ghost")],
            "bk_mixed",
            "; nothing else could be measured (unsupported: opacus_hooks; not measured: ghost)",
        ),
        (
            [
                finding("bk_mixed", 1.1),
                *(finding(f"b{i}", 1.3 + i / 10) for i in range(8)),
                finding("opacus_hooks", 9.0),
            ],
            "bk_mixed",
            "; b0 takes 1.30x, b1 1.40x, b2 1.50x, opacus_hooks 9.00x",
        ),
        ([QUICK, LEAN], "bk_ghost", "bk_mixed cannot be told from it by time (1.11x), but takes more memory (1.10x)"),
        ([QUICK, finding("bk_ghost", (1.12, 1.13, 1.11) * 2, 1.09)], "bk_mixed", "or memory (1.09x)"),
        ([QUICK, finding("bk_ghost", (1.11, 1.12, 1.13), 1.0)], "bk_mixed", "bk_ghost takes"),  # no interval, no tie
        ([finding("bk_mixed", 1.1, 3.0), finding("microbatch", 1.2, 0.1)], "bk_mixed", "microbatch takes 1.20x"),
        ([TIGHT, ROOMY], "ghost", "faster, but without room for 32 samples in 16 GiB: vmap"),
        ([finding("vmap", 1.1, 8.0, largest=20, ended="time"), ROOMY], "vmap", "up to at least 20 in"),
        ([TIGHT, finding("ghost", 1.9, 1.0, largest=25)], "ghost", "with a smaller batch"),
        ([finding("vmap", 1.1, 8.0, largest=0, ended="nothing")], None, "not even one sample fits in 16 GiB"),
        ([finding("ghost", 1.5, largest=700, ended="limit")], "ghost", "batch up to 700 and more in 16 GiB"),
        (
            [finding("bk_mixed", 1.1, coverage={"ghost": 0.9, "fallback": 0.1})],
            "bk_mixed",
            "exact (10.0% of the parameters by fallback)",
        ),
        ([], None, "no backend that clips"),
        ([BROKEN, Finding("ghost", status="error")], None, "ordinary training fails too (RuntimeError: no such shape)"),
        ([Finding("ghost"), Finding("vmap")], None, "smaller --batch-size or with more --seconds"),
    ],
)
def test_what_is_recommended_and_why(findings, backend, said):
    ordinary = [] if BROKEN in findings else [ORDINARY]
    found = verdict([*ordinary, *findings], 32, "16 GiB")
    assert found.backend == backend and said in found.reason, found.reason


def test_what_is_not_known_is_said_and_never_taken():
    findings = {name: Finding(name) for name in ("nonprivate", "ghost", "vmap")}
    busy = {"nonprivate": entry(1.0), "ghost": entry(0.31, 0.6), "vmap": entry(4.0, 4.1)}
    take_race(findings, busy, 8)
    row = findings["ghost"].as_row()
    assert (row["status"], row["time_ratio"], row["time_ratio_low"]) == ("not known", None, None)
    assert row["reason"] == "not known, the machine is busy: rounds from 0.31x to 0.60x"
    found = verdict(findings.values(), 8, "1 GiB")
    assert found.backend == "vmap"
    question = Question(model="cnn", batch_size=8, memory_budget=BUDGET)
    lines = table(question, {}, in_order(findings.values()), found)
    assert any(line.startswith("ghost ") and line.count("not known") == 3 for line in lines)
    take_race(findings, {"nonprivate": entry(1.0), "ghost": entry(0.3), "vmap": entry(1.0, 9.0)}, 8)
    nothing = verdict(findings.values(), 8, "1 GiB")
    assert nothing.backend is None and nothing.reason.startswith("not known, the machine is busy: ")
    assert "ghost 0.30x to 0.30x, vmap 1.00x to 9.00x" in nothing.reason


def test_a_step_that_does_not_fit_the_time_says_what_does():
    none = [Finding("nonprivate"), Finding("ghost")]
    said = verdict(none, 8, "1 GiB", {"samples": 2, "seconds": 10.0}).reason
    assert "takes 10.0 s with 2 samples, about 40 s with 8" in said and "--seconds 5500 should do" in said
    assert "took all the time" in verdict(none, 8, "1 GiB", {"samples": 2, "seconds": None}).reason


def test_times_of_fewer_samples_say_so():
    found = advice(
        finding("bk_mixed", 1.1, smaller=8), finding("ghost", 1.5, smaller=8), finding("vmap", (2.0,), smaller=4)
    )
    assert found.reason.endswith("; these times are of 8 samples: for 32, ask with more --seconds")
    assert "; ghost takes 1.50x, vmap 2.00x with 4 samples;" in found.reason
    other = advice(finding("bk_mixed", 1.2), finding("ghost", 1.1, smaller=8))
    assert other.backend == "bk_mixed" and other.reason.endswith("; ghost takes 1.10x with 8 samples")
    row = finding("bk_mixed", 1.1, smaller=8).as_row()
    assert row["time_ratio"] is row["time_ratio_low"] is None
    assert row["smaller_batch"] == {"batch_size": 8, "time_ratio": 1.1}


@pytest.mark.parametrize("status", ["mismatch", "unsupported", "error", "oom", "crash"])
def test_only_what_is_exact_and_was_timed_comes_into_question(status):
    fast = finding("fastdp", 0.5, 0.5, status=status)
    assert advice(fast, finding("vmap", 4.0)).backend == "vmap"
    nothing = advice(fast)
    assert nothing.backend is None and f"{status}: fastdp" in nothing.reason


def entry(*ratios, peak=100, outcome="ok", evidence=None, samples=8):
    memory = {"source": "cpu_allocator", "peak_bytes": peak, "baseline_bytes": 20}
    verification = {"max_norm_error": 1e-15, "max_grad_error": 2e-15}
    found = {"outcome": outcome, "evidence": evidence, "verification": verification, "coverage": {"ghost": 1.0}}
    times = {"ratios": list(ratios), "batch_size": samples, "step_seconds": 0.1, "memory": memory}
    return found | (times if outcome == "ok" else {})


def test_rows_are_in_the_order_of_medians():
    findings = {name: Finding(name) for name in ("nonprivate", "ghost", "vmap", "bk_mixed", "fastdp", "microbatch")}
    take_race(
        findings,
        {
            "nonprivate": entry(1.0, 1.0, 1.0),
            "ghost": entry(1.5, 1.6, 1.4, peak=150),
            "vmap": entry(1.4, 1.5, 1.45),
            "bk_mixed": entry(1.2, samples=4),
            "fastdp": entry(outcome="mismatch", evidence="fastdp differs\nby much"),
            "microbatch": entry(outcome="timeout", evidence="left out for want of time"),
        },
        8,
    )
    assert findings["ghost"].time_ratio == 1.5 and findings["ghost"].memory_ratio == 1.5
    assert (
        findings["bk_mixed"].smaller == 4 and findings["bk_mixed"].time_ratio is None and findings["bk_mixed"].candidate
    )
    assert (findings["fastdp"].status, findings["fastdp"].reason) == ("mismatch", "fastdp differs")
    assert findings["microbatch"].status == "not measured"
    order = ["nonprivate", "bk_mixed", "vmap", "ghost", "fastdp", "microbatch"]
    assert [f.backend for f in in_order(findings.values())] == order
    row = findings["ghost"].as_row()
    assert {"backend", "status", "coverage", "time_ratio", "memory_ratio", "max_batch_size"} <= set(row)


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
    take_search(found, outcome, evidence, None, 32)
    assert found.largest is None and found.largest_note == said


def test_a_search_gives_the_peak_that_was_not_measured():
    found = Finding("ghost")
    result = {"batch_size": 90, "ended": "full", "probes": [{"batch_size": 32, "peak_bytes": 7}]}
    take_search(found, Outcome.OK, None, result, 32)
    assert (found.largest, found.peak_bytes, found.memory_source) == (90, 7, "simulated")


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
        if isinstance(trial, RecommendTrial):
            seconds = min(seconds, max(0.0, trial.until - self.now)) if seconds < 30 else seconds
        if seconds > longest:
            seconds, outcome = longest, Outcome.TIMEOUT
        elif (ended := self.ends(trial)) is not None:
            outcome = ended
        elif isinstance(trial, RecommendTrial):
            speed = {"nonprivate": 1.0, "bk_mixed": 1.1}
            entries = {name: entry(*[speed.get(name, 2.0)] * 5) for name in trial.backends}
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


def test_with_time_enough_everything_races_in_one_process_and_is_searched_the_fastest_first():
    machine = Machine(lambda trial: 2.0)
    findings, said = carry_out(machine)
    assert all(f.status == "ok" and f.largest == 100 for f in findings.values())
    raced = [trial.backends for trial in machine.trials if isinstance(trial, RecommendTrial)]
    assert raced == [("nonprivate", *ORDER)] and raced[0][1] == "bk_mixed"
    searched = [trial.backend for trial in machine.trials if isinstance(trial, LargestTrial)]
    assert searched[:2] == ["nonprivate", "bk_mixed"] and sorted(searched) == sorted(findings)
    assert said[-1] == "the largest batches, by simulation"


@pytest.mark.parametrize("seconds", [0.5, 6.0, 20.0, 40.0, 90.0, 1e9])
@pytest.mark.parametrize("limit", [30.0, 110.0])
def test_it_ends_in_time_whatever_a_trial_takes_and_no_row_is_missing(seconds, limit):
    machine = Machine(lambda trial: seconds)
    machine.starts = 10.0  # a process may take long to start
    findings, _ = carry_out(machine, seconds=limit)
    assert machine.now <= limit and set(findings) == set(BACKENDS) == {*ORDER, "nonprivate"}
    told = left_out(Question(model="cnn", batch_size=8, memory_budget=BUDGET), list(findings.values()))
    missing = [name for name, found in findings.items() if found.status == "not measured"]
    assert all(name in told[0] and "Left out for want of time" in told[0] for name in missing)
    for found in findings.values():
        assert found.status == "ok" or (found.status == "not measured" and found.reason)
        assert found.largest is not None or found.largest_note or found.status != "ok"


class Notes(Machine):
    """The process of a race with `culprit` goes away while it opens that one; it leaves notes behind."""

    def __init__(self, culprit, outcome) -> None:
        super().__init__(lambda _: 1.0, lambda trial: outcome if culprit in getattr(trial, "backends", ()) else None)
        self.culprit = culprit

    def submit(self, trial, until=float("inf")):
        if self.culprit in getattr(trial, "backends", ()):
            known = {"nonprivate": entry(1.0), "bk_mixed": entry(1.2)}
            result = {"backends": known, "inputs": [], "parameters": 10}
            Path(trial.notes).write_text(json.dumps({"doing": "", "opening": self.culprit, "result": result}))
        return super().submit(trial, until)


def test_a_backend_that_takes_the_process_down_is_out_and_the_others_race_again():
    findings, _ = carry_out(Notes("opacus_ew", Outcome.CRASH))
    assert {name for name, found in findings.items() if found.status == "crash"} == {"opacus_ew"}
    assert findings["opacus_ew"].reason == "it ended" and findings["ghost"].time_ratio == 2.0
    assert verdict(findings.values(), 8, "16 GiB").backend == "bk_mixed"


def test_what_was_known_when_the_time_was_up_counts():
    machine = Notes("opacus_hooks", Outcome.TIMEOUT)
    findings, _ = carry_out(machine)
    assert findings["bk_mixed"].time_ratio == 1.2 and findings["opacus_hooks"].status == "not measured"
    assert sum(isinstance(trial, RecommendTrial) for trial in machine.trials) == 1


@pytest.mark.parametrize(
    ("text", "size"),
    [("16GiB", BUDGET), ("500 MB", 500_000_000), ("24g", 24 * 10**9), ("1.5GiB", 3 * 2**29), ("2e9", 2 * 10**9)],
)
def test_sizes_as_people_write_them(text, size):
    assert parse_size(text) == size
