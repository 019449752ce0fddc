"""The minutes of a run: what still starts, what is cut off and runs again, what never fits, and what is said of it."""

import itertools
import re

import pytest
from fake_run import Fake, sleepers
from test_schedule import CELLS, record_of

from dpbench.execution import allowance as module
from dpbench.execution.allowance import Allowance
from dpbench.execution.schedule import Clock, History, Run, Schedule
from dpbench.process.parent import Answer
from dpbench.trials.outcome import Outcome

FIRST, SECOND = (trial.replace(timeout=3600.0) for trial in CELLS[:2])


class Given:
    """An allowance of ten minutes, on a clock that the test sets."""

    def __init__(self, monkeypatch, cells=(FIRST, SECOND), records=(), rounds=1, minutes=10.0, cuts=()) -> None:
        self.now = 1000.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        self.schedule = Schedule("e", cells, rounds, History(records, lambda _: {"f": ""}, ()), in_order=True)
        self.clock = Clock(records)
        self.allowance = Allowance(minutes, 1000.0, self.schedule, self.clock, lambda _: "f", cuts)

    def after(self, seconds: float) -> Allowance:
        self.now = 1000.0 + seconds
        return self.allowance


def took(trial, seconds: float, number: int = 0) -> dict:
    return record_of(Run(trial, number)) | {"seconds": seconds}


def cut_after(trial, seconds: float) -> dict:
    return {"type": "cut", "id": trial.id, "fingerprint": "f", "seconds": seconds}


def killed_after(seconds: float) -> Answer:
    return Answer(1, Outcome.TIMEOUT, "killed", None, seconds)


OTHER = FIRST.replace(batch_size=99)


@pytest.mark.parametrize(
    ("records", "trial", "last"),
    [
        pytest.param([took(FIRST, 100.0), took(FIRST, 140.0, 1)], FIRST, 480, id="its own earlier rounds"),
        pytest.param([took(OTHER, 100.0), took(SECOND.replace(model="vgg19"), 300.0)], FIRST, 500, id="what is alike"),
        pytest.param([took(OTHER, 590.0)], FIRST, 300, id="a run of its own tries it"),
        pytest.param([], FIRST, 600 - module.GUESS, id="a modest guess"),
        pytest.param([took(OTHER, 250.0)], FIRST.replace(timeout=30.0), 570, id="its limit"),
        pytest.param([took(FIRST, 0.001)], FIRST, 599, id="nothing starts after the end"),
    ],
)
def test_a_trial_starts_while_what_is_known_says_that_it_ends_in_time(monkeypatch, records, trial, last):
    given = Given(monkeypatch, records=records, rounds=3)
    assert given.after(last).admits(trial) and not given.after(last + 1).admits(trial)


def test_what_was_killed_because_the_time_was_over_is_cut_and_needs_more_than_that(monkeypatch):
    given = Given(monkeypatch)
    line = given.after(600).cut(Run(FIRST, 0), killed_after(400.0))
    assert (line["type"], line["id"], line["fingerprint"], line["seconds"]) == ("cut", FIRST.id, "f", 400.0)
    again = Given(monkeypatch, cuts=[line])
    assert again.after(150).admits(FIRST) and not again.after(161).admits(FIRST)
    of_other_sources = Given(monkeypatch, cuts=[line | {"fingerprint": "old", "seconds": 599.0}])
    assert of_other_sources.after(0).admits(FIRST)


@pytest.mark.parametrize(
    "answer", [killed_after(3600.2), Answer(1, Outcome.OK, None, {}, 3.0), Answer(1, Outcome.CRASH, "gone", None, 3.0)]
)
def test_what_ended_by_itself_or_by_its_own_limit_is_no_cut(monkeypatch, answer):
    assert Given(monkeypatch).allowance.cut(Run(FIRST, 0), answer) is None


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
