"""What runs next, and what does not: order, resume, pruning, searches, time left. Nothing is run here."""

import itertools
import random

import pytest

from dpbench.execution.schedule import Clock, History, Run, Schedule, apart, step_search
from dpbench.experiment import MaxBatch, grid
from dpbench.trials import ConfirmTrial, LargestTrial, OverheadTrial, PeakTrial, StepTrial
from dpbench.trials.outcome import FINAL, Outcome

BACKENDS = ["nonprivate", "ghost", "vmap"]
CELLS = grid(StepTrial, model=["cnn", "vgg11"], backend=BACKENDS, batch_size=[8, 16])
PROBE = PeakTrial(model="cnn", backend="ghost", batch_size=8, simulated=True, memory_budget=1000)
stamps = itertools.count()


def record_of(run: Run, outcome: str = "ok", fingerprint: str = "f", peak: int | None = None) -> dict:
    return {
        "id": run.trial.id,
        "round": run.round,
        "fingerprint": fingerprint,
        "trial": run.trial.describe(),
        "outcome": outcome,
        "utc": f"{next(stamps):09}",
        "seconds": 2.0,
        "result": None if peak is None else {"memory": {"peak_bytes": peak}},
    }


def schedule(cells=CELLS, records=(), rounds=3, retry=(), name="e", in_order=False) -> Schedule:
    return Schedule(name, cells, rounds, History(records, lambda trial: {"f": ""}, retry), in_order)


def carry_out(schedule: Schedule, outcome=lambda run: "ok", peak=lambda run: None) -> list[Run]:
    ran = []
    while (run := schedule.next()) is not None:
        assert run not in ran, f"{run} runs twice"
        ran.append(run)
        schedule.history.add(record_of(run, outcome(run), peak=peak(run)))
    return ran


def test_everything_runs_once_in_every_round_and_rounds_are_outermost():
    ran = carry_out(schedule())
    assert len(ran) == len(set(ran)) == 3 * len(CELLS)
    assert [run.round for run in ran] == sorted(run.round for run in ran)


def test_every_round_has_an_order_of_its_own_and_it_is_always_the_same():
    first, second = carry_out(schedule()), carry_out(schedule())
    assert first == second
    orders = [[run.trial for run in first if run.round == number] for number in range(3)]
    assert orders[0] != orders[1] != orders[2] != list(CELLS)
    assert carry_out(schedule(name="another")) != first


def test_a_selection_keeps_the_order():
    chosen = [trial for trial in CELLS if trial.backend != "ghost"]
    assert carry_out(schedule(chosen)) == [run for run in carry_out(schedule()) if run.trial.backend != "ghost"]


@pytest.mark.parametrize("done", [0, 1, 7, 35, 36])
def test_a_run_continues_where_it_was_killed(done):
    whole = carry_out(schedule())
    records = [record_of(run) for run in whole[:done]]
    random.Random(done).shuffle(records)
    assert carry_out(schedule(records=records)) == whole[done:]


def test_a_trial_that_is_declared_twice_runs_once():
    assert len(carry_out(schedule([*CELLS, *CELLS], rounds=1))) == len(CELLS)


def test_a_record_of_other_sources_or_another_device_does_not_count():
    records = [record_of(run, fingerprint="old") for run in carry_out(schedule())]
    assert len(carry_out(schedule(records=records))) == len(records)


def test_retry_runs_what_ended_so_again_and_only_that():
    runs = carry_out(schedule(rounds=1))
    records = [record_of(run, "error" if n == 3 else "timeout" if n == 5 else "ok") for n, run in enumerate(runs)]
    assert carry_out(schedule(records=records, rounds=1, retry=["error"])) == [runs[3]]
    assert carry_out(schedule(records=records, rounds=1, retry=["error", "timeout"])) == [runs[3], runs[5]]


@pytest.mark.parametrize("outcome", ["oom", "over_budget"])
def test_a_larger_batch_is_not_tried_where_a_smaller_one_does_not_fit(outcome):
    cells = grid(StepTrial, model="cnn", backend=["ghost", "vmap"], batch_size=[8, 16, 32])
    smaller = Run(cells[1], 0)
    assert (smaller.trial.backend, smaller.trial.batch_size) == ("ghost", 16)
    ran = carry_out(schedule(cells, [record_of(smaller, outcome)], rounds=1))
    assert {(run.trial.backend, run.trial.batch_size) for run in ran} == {
        ("ghost", 8),
        ("vmap", 8),
        ("vmap", 16),
        ("vmap", 32),
    }


def test_pruning_says_why_and_asks_for_all_other_fields_to_be_equal():
    cells = grid(StepTrial, model="cnn", backend="ghost", batch_size=[8, 16], precision=["float32", "float64"])
    plan = schedule(cells, [record_of(Run(cells[1], 0), "oom")], rounds=1)
    assert (cells[1].batch_size, cells[1].precision) == (8, "float64")
    assert plan.history.pruned_by(Run(cells[3], 0)) == "oom at batch 8"
    assert plan.history.pruned_by(Run(cells[2], 0)) is None


@pytest.mark.parametrize("outcome", list(Outcome))
def test_every_outcome_is_done_and_what_cannot_run_is_tried_in_one_round_only(outcome):
    ran = carry_out(schedule(CELLS[:1], rounds=3), outcome=lambda run: outcome)
    assert len(ran) == (1 if outcome in FINAL - {Outcome.OK} else 3)


def linear(run: Run) -> int | None:
    return 100 + 10 * run.trial.batch_size if isinstance(run.trial, PeakTrial) else None


def fits(run: Run) -> str:
    peak = linear(run)
    return "over_budget" if peak is not None and peak > 1000 else "ok"


SEARCH = MaxBatch(probe=PROBE, then=StepTrial(model="cnn", backend="ghost", batch_size=1))


def test_a_search_runs_first_and_then_its_step_in_every_round():
    ran = carry_out(schedule([*CELLS, SEARCH]), outcome=fits, peak=linear)
    probes = [run for run in ran if run.trial.kind == "peak"]
    assert ran[: len(probes)] == probes and {run.round for run in probes} == {0}
    assert max(run.trial.batch_size for run in probes if fits(run) == "ok") == 90
    assert [run.round for run in ran if run.trial == SEARCH.then_at(90)] == [0, 1, 2]


def test_a_search_continues_from_its_records():
    whole = carry_out(schedule([SEARCH]), outcome=fits, peak=linear)
    for done in range(len(whole) + 1):
        records = [record_of(run, fits(run), peak=linear(run)) for run in whole[:done]]
        assert carry_out(schedule([SEARCH], records), outcome=fits, peak=linear) == whole[done:]


@pytest.mark.parametrize("outcome", ["unsupported", "error", "timeout", "crash", "mismatch"])
def test_a_search_whose_probe_fails_ends_with_the_reason(outcome):
    plan = schedule([SEARCH])
    ran = carry_out(plan, outcome=lambda run: outcome if run.trial.batch_size == 16 else "ok", peak=linear)
    assert [run.trial.batch_size for run in ran] == [8, 16]
    assert step_search(SEARCH, plan.history).failed == f"{outcome} at batch 16"


WHOLE = LargestTrial(model="cnn", backend="ghost", batch_size=8, memory_budget=1000)
FORETOLD = MaxBatch(probe=WHOLE, then=ConfirmTrial(model="cnn", backend="ghost", batch_size=1))


def searched(trial=WHOLE, outcome="ok", found=90, beyond=92) -> dict:
    """A whole search that ended between two batches; `beyond` None: it was cut off before."""
    probes = [{"batch_size": found, "peak_bytes": 100 + 10 * found, "fits": True}]
    probes += [] if beyond is None else [{"batch_size": beyond, "peak_bytes": 100 + 10 * beyond, "fits": False}]
    return record_of(Run(trial, 0), outcome) | {"result": {"probes": probes} if outcome == "ok" else None}


def test_a_search_in_one_trial_is_followed_by_what_confirms_it():
    plan = schedule([FORETOLD], rounds=1)
    assert plan.next() == Run(WHOLE, 0) and {t.kind: n for t, n in plan.remaining()} == {"largest": 1, "confirm": 1}
    plan.history.add(searched(found=90, beyond=91))
    assert step_search(FORETOLD, plan.history).ended and plan.next() == Run(FORETOLD.then_at(90), 0)
    assert len(plan.recorded()) == 1


def test_a_search_in_one_trial_that_was_cut_off_goes_on_from_what_it_saw():
    plan = schedule([FORETOLD], [searched(found=40, beyond=None)], rounds=1)
    assert plan.next() == Run(WHOLE.replace(batch_size=80), 0)


def test_simulations_run_beside_what_confirms_them_and_nothing_else_does():
    others = [WHOLE.replace(model=model) for model in ("vgg11", "vgg13")]
    cells = [FORETOLD, *(MaxBatch(probe=other, then=FORETOLD.then.replace(model=other.model)) for other in others)]
    plan = schedule([*cells, *CELLS], [searched(found=90, beyond=91)], rounds=1)
    first = plan.next()
    assert first.trial.kind == "confirm"  # as soon as it can, so that the others' searches run meanwhile
    second = plan.next([first])
    third = plan.next([first, second])
    assert {second.trial, third.trial} == set(others) and plan.next([first, second, third]) is None
    plan.history.add(searched(second.trial, found=50, beyond=51))
    assert plan.next([first, third]) is None and plan.next([third]).trial.model == second.trial.model
    timed = Run(CELLS[0], 0)
    assert plan.next([timed]) is None
    for one, other, kept in [(first, third, False), (first, first, True), (first, timed, True), (third, timed, True)]:
        assert apart(one.trial, other.trial) is apart(other.trial, one.trial) is kept


def test_where_no_batch_fits_nothing_follows():
    ran = carry_out(schedule([SEARCH]), outcome=lambda run: "oom")
    assert [run.trial.batch_size for run in ran] == [8, 4, 2, 1]


def test_simulated_probes_run_beside_each_other_and_timed_trials_alone():
    others = [MaxBatch(probe=PROBE.replace(model=model)) for model in ("vgg11", "vgg13")]
    plan = schedule([SEARCH, *others, *CELLS])
    running: list[Run] = []
    while (run := plan.next(running)) is not None:
        running.append(run)
    assert [run.trial.model for run in running] == ["cnn", "vgg11", "vgg13"]  # one probe of each search
    for run in running:
        plan.history.add(record_of(run, "unsupported"))
    timed = plan.next([])
    assert timed.trial.alone and plan.next([timed]) is None


def test_measured_probes_run_alone():
    search = MaxBatch(probe=PROBE.replace(simulated=False, device="cuda"))
    plan = schedule([search, SEARCH])
    first = plan.next([])
    assert first.trial.alone and plan.next([first]) is None
    assert plan.next([Run(SEARCH.probe_at(8), 0)]) is None


def test_the_time_left_is_that_of_what_is_alike():
    clock = Clock([])
    assert clock.left(schedule(CELLS[:1], rounds=2).remaining()) is None
    slow, fast = CELLS[0], CELLS[2]
    assert (slow.backend, fast.backend) == ("nonprivate", "ghost")
    clock.add(record_of(Run(slow, 0)) | {"seconds": 10.0})
    clock.add(record_of(Run(fast, 0)) | {"seconds": 2.0})
    assert clock.left(schedule([slow], rounds=2).remaining()) == 20
    assert clock.left(schedule([slow, fast], rounds=1).remaining()) == 12
    unknown = slow.replace(model="vgg19")
    assert clock.left(schedule([unknown], rounds=1).remaining()) == 6  # the mean of its kind


def test_before_anything_is_recorded_a_plan_for_a_gpu_says_how_long_it_takes():
    trial = OverheadTrial(model="resnet18", backends=["nonprivate", "vmap"], batch_size=8, rounds=9, device="cuda")
    clock = Clock([])
    assert clock.of(trial) == pytest.approx(9.0) and clock.of(trial.replace(device="cpu")) is None
    assert clock.of(StepTrial(model="cnn", backend="ghost", batch_size=8, device="cuda")) is None
    clock.add(record_of(Run(trial, 0)))
    assert clock.of(trial) == 2.0  # what was recorded here counts more
    assert clock.of(trial.replace(model="cnn")) == pytest.approx(8.4)


def test_what_remains_counts_a_search_that_has_not_ended():
    remaining = schedule([SEARCH]).remaining()
    assert {trial.kind: count for trial, count in remaining} == {"peak": 5, "step": 3}
    assert Clock([record_of(Run(PROBE, 0))], workers=2).left([(PROBE, 4)]) == 4  # 4 x 2 s, two at a time


def test_an_experiment_may_have_its_trials_in_the_order_of_their_declaration():
    ran = carry_out(schedule([*CELLS, CELLS[0]], rounds=2, in_order=True))
    assert ran == [Run(trial, number) for number in range(2) for trial in CELLS]
    for done in (1, 7):
        records = [record_of(run) for run in ran[:done]]
        assert carry_out(schedule(CELLS, records, rounds=2, in_order=True)) == ran[done:]


def test_in_that_order_a_search_has_its_place_and_what_follows_it_comes_at_once():
    cells = [CELLS[0], SEARCH, CELLS[1]]
    ran = carry_out(schedule(cells, rounds=2, in_order=True), outcome=fits, peak=linear)
    probes = [run for run in ran if run.trial.kind == "peak"]
    then = SEARCH.then_at(90)
    assert len(probes) > 1 and ran == [
        *(Run(CELLS[0], 0), *probes, Run(then, 0), Run(CELLS[1], 0)),
        *(Run(CELLS[0], 1), Run(then, 1), Run(CELLS[1], 1)),
    ]


def test_in_that_order_what_must_run_alone_is_waited_for_and_not_overtaken():
    probes = [MaxBatch(probe=PROBE.replace(model=model)) for model in ("vgg11", "vgg13")]
    plan = schedule([probes[0], CELLS[0], probes[1]], in_order=True)
    first = plan.next([])
    assert first.trial.model == "vgg11" and plan.next([first]) is None
    assert schedule([*probes, CELLS[0]], in_order=True).next([first]).trial.model == "vgg13"


@pytest.mark.parametrize("in_order", [False, True])
def test_what_may_not_start_is_passed_over(in_order):
    plan = schedule([SEARCH, *CELLS], in_order=in_order)
    assert plan.next(may=lambda trial: trial == CELLS[3]) == Run(CELLS[3], 0)
    assert plan.next(may=lambda trial: False) is None
    assert {run.trial.kind for run in plan.waiting()} == {"peak", "step"}
