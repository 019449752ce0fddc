"""The minutes of a run: what still starts, what is cut off and runs again, what never fits, and what is said of it."""

from __future__ import annotations

import itertools
import re

import pytest
from bodies import FOREVER
from fake_run import Fake, sleepers
from test_schedule import CELLS, record_of

from dpbench.errors import UsageError
from dpbench.execution import allowance as module
from dpbench.execution.allowance import Allowance, check_minutes
from dpbench.execution.executors import Cluster
from dpbench.execution.progress import Progress
from dpbench.execution.runner import Request, run
from dpbench.execution.schedule import Clock, History, Run, Schedule
from dpbench.experiment import load_experiment
from dpbench.process.parent import Answer
from dpbench.records.store import read_runs
from dpbench.trials.outcome import Outcome

FIRST, SECOND = (trial.replace(timeout=3600.0) for trial in CELLS[:2])


class Given:
    """An allowance of ten minutes, on a clock that the test sets."""

    def __init__(self, monkeypatch, cells=(FIRST, SECOND), records=(), rounds=1, minutes=10.0, cuts=()) -> None:
        self.now = 1000.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        self.schedule = Schedule("e", cells, rounds, History(records, lambda _: "f", ()), in_order=True)
        self.clock = Clock(records)
        self.allowance = Allowance(minutes, 1000.0, self.schedule, self.clock, lambda _: "f", cuts)

    def after(self, seconds: float) -> Allowance:
        self.now = 1000.0 + seconds
        return self.allowance


def took(trial, seconds: float, number: int = 0) -> dict:
    return record_of(Run(trial, number)) | {"seconds": seconds}


def cut_after(trial, seconds: float, fingerprint: str = "f") -> dict:
    return {"type": "cut", "id": trial.id, "fingerprint": fingerprint, "seconds": seconds}


def killed_after(seconds: float) -> Answer:
    return Answer(1, Outcome.TIMEOUT, "killed", None, seconds)


def test_a_trial_starts_while_its_own_earlier_rounds_say_that_it_ends_in_time(monkeypatch):
    given = Given(monkeypatch, records=[took(FIRST, 100.0), took(FIRST, 140.0, 1)], rounds=3)
    assert given.after(480).admits(FIRST) and not given.after(481).admits(FIRST)


def test_else_what_is_most_like_it_says_so(monkeypatch):
    other = FIRST.replace(batch_size=99)
    given = Given(monkeypatch, records=[took(other, 100.0), took(SECOND.replace(model="vgg19"), 300.0)])
    assert given.after(500).admits(FIRST) and not given.after(501).admits(FIRST)


def test_what_is_known_from_others_alone_is_tried_in_a_run_of_its_own_however_long_they_took(monkeypatch):
    given = Given(monkeypatch, records=[took(FIRST.replace(batch_size=99), 590.0)])
    assert given.after(300).admits(FIRST) and not given.after(301).admits(FIRST)


@pytest.mark.parametrize(("minutes", "guess"), [(10.0, module.GUESS), (1.0, 6.0)])
def test_of_what_is_not_known_at_all_a_modest_guess_is_made(monkeypatch, minutes, guess):
    given = Given(monkeypatch, minutes=minutes)
    assert given.after(60 * minutes - guess).admits(FIRST)
    assert not given.after(60 * minutes - guess + 1).admits(FIRST)


def test_no_trial_is_expected_to_take_longer_than_its_limit(monkeypatch):
    given = Given(monkeypatch, records=[took(FIRST.replace(batch_size=99), 250.0)])
    brief = FIRST.replace(timeout=30.0)
    assert given.after(560).admits(brief) and not given.after(571).admits(brief)


def test_after_the_end_nothing_starts(monkeypatch):
    given = Given(monkeypatch, records=[took(FIRST, 0.001)], rounds=2)
    assert not given.after(600.1).admits(FIRST)


def test_what_was_killed_because_the_time_was_over_is_cut_and_needs_more_than_that(monkeypatch):
    given = Given(monkeypatch)
    line = given.after(600).cut(Run(FIRST, 0), killed_after(400.0))
    assert (line["type"], line["id"], line["fingerprint"], line["seconds"]) == ("cut", FIRST.id, "f", 400.0)
    again = Given(monkeypatch, cuts=[line])
    assert again.after(150).admits(FIRST) and not again.after(161).admits(FIRST)


@pytest.mark.parametrize(
    "answer", [killed_after(3600.2), Answer(1, Outcome.OK, None, {}, 3.0), Answer(1, Outcome.CRASH, "gone", None, 3.0)]
)
def test_what_ended_by_itself_or_by_its_own_limit_is_no_cut(monkeypatch, answer):
    assert Given(monkeypatch).allowance.cut(Run(FIRST, 0), answer) is None


def test_what_was_cut_off_in_other_sources_is_not_held_against_it(monkeypatch):
    given = Given(monkeypatch, cuts=[cut_after(FIRST, 599.0, fingerprint="old")])
    assert given.after(0).admits(FIRST)


def test_what_cannot_fit_is_passed_over_and_named_and_the_others_go_on(monkeypatch):
    given = Given(monkeypatch, cuts=[cut_after(FIRST, 590.0)])
    assert given.schedule.next(may=given.after(0).admits) == Run(SECOND, 0)
    given.schedule.history.add(took(SECOND, 1.0))
    assert given.schedule.next(may=given.allowance.admits) is None
    assert given.allowance.farewell() == [
        "--minutes 10 is too little for what is passed over: step cnn nonprivate 8 (10 min 49 s or more)"
    ]


def test_a_run_that_is_repeated_comes_to_an_end_though_a_trial_never_does(monkeypatch):
    """Each run gives it more than the one before, until nothing more can be given."""
    cuts: list[dict] = []
    for _ in itertools.count():
        given = Given(monkeypatch, cells=[SECOND, FIRST], records=[took(SECOND, 450.0)] if cuts else [], cuts=cuts)
        begun = 450.0 if not cuts else 5.0
        if not given.after(begun).admits(FIRST):
            break
        cuts.append(given.after(600).cut(Run(FIRST, 0), killed_after(600 - begun)))
    assert [line["seconds"] for line in cuts] == [150.0, 595.0]


def test_the_end_says_what_is_left_and_that_the_same_line_goes_on(monkeypatch):
    given = Given(monkeypatch, minutes=1.0)
    assert given.allowance.farewell() == [
        "the time is over (--minutes 1); 2 trials are left, and the same line goes on"
    ]
    given.clock.add(took(FIRST, 50.0))
    assert "2 trials are left (about 1 min 40 s), and the same line goes on" in given.allowance.farewell()[0]
    for trial in (FIRST, SECOND):
        given.schedule.history.add(took(trial, 50.0))
    assert given.allowance.farewell() == []


@pytest.mark.parametrize("minutes", [0, -1.0, float("nan"), float("inf")])
def test_minutes_that_are_no_positive_number_are_refused(minutes):
    with pytest.raises(UsageError, match="a positive number for --minutes"):
        check_minutes(minutes)


@pytest.mark.parametrize("name", ["ray", "slurm"])
def test_a_cluster_starts_trials_when_it_likes_and_has_no_minutes(tmp_path, name):
    asked = Request(experiment=load_experiment("stress_test"), results=tmp_path, cluster=Cluster(name=name), minutes=9)
    with pytest.raises(UsageError, match=f"--minutes with --executor local, got '--executor {name}'"):
        run(asked, Progress())


def test_a_run_ends_in_its_time_and_the_same_line_goes_on(tmp_path):
    """What is cut off has no record; nothing that has one runs again; figures and exit code are those of any run."""
    for seconds in (1.5, 6.0, 24.0):  # on a slow machine not one trial fits in the first times
        fake = Fake(tmp_path / str(seconds), sleepers(3, seconds), in_order=True)
        line = ("--minutes", f"{seconds * 0.03:g}")  # for one trial, and not for two
        first = fake.run(*line)
        said = rf"\(--minutes {line[1]}\); [123] trials? (is|are) left.*, and the same line goes on\n"
        assert first.returncode == 0 and re.search(said, first.stderr)
        done = list(fake.numbers)
        for _ in range(4):
            again = fake.run(*line)
            assert again.returncode == 0 and max(fake.numbers.values(), default=1) == 1
            if "nothing is left to run" in again.stderr:
                break
        assert {record["outcome"] for record in fake.records} <= {"ok"} and fake.left_over() == []
        if len(fake.records) == 3:
            assert list(fake.numbers) == [0, 1, 2] and done == [0, 1, 2][: len(done)] != [0, 1, 2]
            return
    raise AssertionError(f"expected all three after some runs, got {again.stderr}")


def test_a_trial_that_never_fits_is_named_and_the_others_are_done(tmp_path):
    cells = sleepers(1, FOREVER) + " + " + sleepers(3).replace("[0, 1, 2]", "[7, 8, 9]")
    for minutes in ("0.03", "0.15", "0.75"):  # on a slow machine nothing begins in the first
        fake = Fake(tmp_path / minutes, cells, in_order=True)
        first = fake.run("--minutes", minutes)
        assert fake.records == []
        last = fake.run("--minutes", minutes)
        if "cut off after" in first.stderr and len(fake.records) == 3:
            break
    assert "cut off after" in first.stderr and fake.numbers == {7: 1, 8: 1, 9: 1}
    cut = read_runs(fake.output / "fake")[0].cuts[0]
    assert cut["trial"]["number"] == 0 and cut["seconds"] < FOREVER
    assert last.returncode == 0 and "the same line goes on" not in last.stderr
    said = rf"--minutes {minutes} is too little for what is passed over: act \(\d+ s or more\)\n"
    assert re.search(said, last.stderr)
    assert "act (" in fake.run("--minutes", minutes).stderr and len(fake.records) == 3
    assert fake.left_over() == []
