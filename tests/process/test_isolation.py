"""However a trial ends, it is answered with a name and evidence, nothing of it is left, and the next one runs."""

import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processor import quick, work
from waiting import PATIENCE, alive, all_gone, lines, python, state, until

from dpbench.process import parent as module
from dpbench.process.linux import CpuTime
from dpbench.process.parent import Answer, Isolation
from dpbench.process.variables import server_variables
from dpbench.trials.outcome import Outcome
from dpbench.trials.reference import load_module

SUPPORT = Path(__file__).resolve().parents[1] / "support"

bodies = load_module(str(SUPPORT / "bodies.py"))
Act, FOREVER = bodies.Act, bodies.FOREVER


@pytest.fixture(scope="module")
def isolation():
    with Isolation() as isolation:
        yield isolation


def answers(isolation: Isolation, count: int) -> dict[int, Answer]:
    """The next so many, by their keys."""
    found: dict[int, Answer] = {}

    def come() -> bool:
        found.update({answer.key: answer for answer in isolation.wait(1.0)})
        return len(found) >= count

    until(come, f"{count} answers")
    return found


def wait_for_pids(folder: Path, count: int = 4, name: str = "pids") -> list[int]:
    """The process in the last word of each line, once there are so many."""
    until(lambda: len(lines(folder / name)) >= count, f"{count} processes in {name}")
    return [int(line.split()[-1]) for line in lines(folder / name)]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="torch may multiply by OpenBLAS, and is left its threads")
def test_a_process_that_forks_has_one_thread(monkeypatch):
    """With more a fork may hang, and Python 3.12 warns of it among the lines of a run."""
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    told = server_variables("cpu")
    assert told.items() <= (server_variables("cuda") | {"CUDA_VISIBLE_DEVICES": ""}).items()  # it is told no less
    with Isolation(told) as isolation:
        found = isolation.run(bodies.WithTorch(action="where")).result
    assert (found["threads_of_parent"], found["torch"]) == (1, True)  # a trial costs a fork, and no import


@pytest.mark.parametrize(
    ("action", "outcome", "evidence", "result"),
    [
        ("raise", Outcome.ERROR, "KeyError: 'no such thing'", None),
        ("oom", Outcome.OOM, "MemoryError: no memory for 5 GiB", None),
        ("over_budget", Outcome.OVER_BUDGET, "needs 7 bytes of 5", {"peak": 7}),
        ("mismatch", Outcome.MISMATCH, "norms differ by 0.5", {"error": 0.5}),
        ("segfault", Outcome.CRASH, "killed by SIGSEGV", None),
        ("segfault", Outcome.CRASH, "last words", None),
        ("leave", Outcome.CRASH, "exit code 3", None),
        ("nothing", Outcome.ERROR, "result: Expected `object`, got `null`", None),
        ("a list", Outcome.ERROR, "result: Expected `object`, got `array`", None),
        ("deep", Outcome.ERROR, "nested too deeply", None),
        ("no text", Outcome.ERROR, r"half \ud83d of a face, and \udcff of a path", None),
        ("halves", Outcome.OK, None, {r"half \ud83d": [r"\udcff"]}),
        ("scribble", Outcome.ERROR, "wrote to a descriptor that is not its own", None),
        ("stop", Outcome.OK, None, {"number": 0}),
        ("files", Outcome.ERROR, "result.files: Expected `object`, got `int`", None),
        ("long", Outcome.ERROR, "x" * 4000, None),
        ("unrecordable", Outcome.ERROR, "not JSON serializable", None),
        ("infinite", Outcome.OK, None, {"epsilon": "inf"}),
        ("big", Outcome.OK, None, {"text": "x" * 3_000_000}),
    ],
)
def test_every_end_has_a_name_and_evidence_and_the_next_trial_runs(isolation, action, outcome, evidence, result):
    answer = isolation.run(Act(action=action))
    assert (answer.outcome, answer.result) == (outcome, result)
    assert answer.evidence is None if evidence is None else evidence in answer.evidence
    assert isolation.run(Act(action="sleep")).outcome is Outcome.OK


def test_an_error_is_named_without_an_import_and_its_evidence_has_an_end(isolation):
    """To import torch in a trial that has failed takes seconds, and its limit may be shorter."""
    assert python("-c", NAMED) == "error False\n"
    answer = isolation.run(Act(action="long"))
    assert len(answer.evidence) <= 4096 and answer.evidence.endswith("the end")


NAMED = """
import sys, clipping, accounting
from dpbench.trials.outcome import classify
print(classify(KeyError("x"))[0], "torch" in sys.modules)
"""


def test_a_trial_has_a_process_and_a_session_of_its_own(isolation):
    one, two = (isolation.run(Act(action="where")).result for _ in range(2))
    assert one["pid"] == one["session"] != two["pid"]
    assert one["parent"] == two["parent"] != os.getpid()
    assert os.getsid(one["parent"]) == one["parent"]  # the server's own session: Ctrl-C does not reach it
    assert one["oom_score_adj"] == 1000 and one["torch"] is False  # which no trial has needed


def test_the_limit_ends_a_trial_and_says_where_it_stood(isolation):
    for limit in (0.5, 5.0, 50.0):  # a slow machine has not come so far within the first
        answer = isolation.run(Act(action="sleep", seconds=FOREVER, timeout=limit))
        assert answer.outcome is Outcome.TIMEOUT and limit <= answer.seconds < PATIENCE
        assert f"its limit of {limit:g} s" in answer.evidence
        if "in _sleep" in answer.evidence:
            return
    raise AssertionError(f"expected a trace that ends in _sleep, got {answer.evidence}")


@pytest.mark.parametrize("outcome", [Outcome.TIMEOUT, Outcome.OK])
def test_no_descendant_of_a_trial_outlives_it(isolation, tmp_path, outcome):
    seconds, limits = (FOREVER, (2.0, 10.0, 50.0)) if outcome is Outcome.TIMEOUT else (0.0, (FOREVER,))
    for limit in limits:  # a slow machine has not begun them all within the first
        (tmp_path / "pids").unlink(missing_ok=True)
        answer = isolation.run(Act(action="offspring", folder=str(tmp_path), seconds=seconds, timeout=limit))
        pids = [int(line) for line in lines(tmp_path / "pids")]
        assert answer.outcome is outcome and not [pid for pid in pids if alive(pid)]
        if len(pids) == 4:
            return
    raise AssertionError(f"expected a trial and three descendants, got the processes {pids}")


def test_trials_run_beside_each_other_and_answer_by_their_key(isolation, tmp_path):
    asked = [Act(action="wait", number=n, folder=str(tmp_path)) for n in range(3)]
    keys = {isolation.submit(trial): trial.number for trial in asked}
    wait_for_pids(tmp_path, 3, "begun")
    (tmp_path / "go").touch()
    assert {key: answer.result["number"] for key, answer in answers(isolation, 3).items()} == keys


def test_stolen_time_is_a_share_of_that_in_which_there_was_something_to_run(isolation):
    now = CpuTime.now()
    assert CpuTime(now.busy + 60, now.stolen + 20).stolen_since(now) == 0.25
    assert now.stolen_since(now) is None and CpuTime(now.busy + 5, now.stolen).stolen_since(now) == 0
    if sys.platform == "linux":
        assert now.busy > 0 and 0 <= isolation.run(Act(action="spin", seconds=0.2)).stolen <= 1


def test_waiting_is_bounded(isolation, tmp_path):
    key = isolation.submit(Act(action="wait", folder=str(tmp_path)))
    assert isolation.wait(0.05) == []
    (tmp_path / "go").touch()
    assert list(answers(isolation, 1)) == [key]
    assert isolation.wait() == []  # nothing is in flight, so nothing to wait for


def test_a_trial_that_the_server_cannot_make_is_its_own_error(isolation):
    class Hidden(Act):  # not at the top level of a module: no other process can find it
        pass

    answer = isolation.run(Hidden(action="sleep"))
    assert answer.outcome is Outcome.ERROR and __name__ in answer.evidence
    assert isolation.run(Act(action="sleep")).outcome is Outcome.OK


def test_a_server_that_dies_is_a_crash_and_another_one_takes_over(tmp_path):
    with Isolation() as isolation:
        where = isolation.run(Act(action="where")).result
        key = isolation.submit(Act(action="wait", folder=str(tmp_path)))
        trial = wait_for_pids(tmp_path, 1, "begun")
        os.kill(where["parent"], signal.SIGKILL)
        assert all_gone(trial)
        found = answers(isolation, 1)
        assert list(found) == [key] and found[key].outcome is Outcome.CRASH and "SIGKILL" in found[key].evidence
        assert isolation.run(Act(action="where")).result["parent"] != where["parent"]


def test_closing_leaves_no_process(tmp_path):
    with Isolation() as isolation:
        server = isolation.run(Act(action="where")).result["parent"]
        isolation.submit(Act(action="offspring", folder=str(tmp_path), seconds=FOREVER))
        pids = wait_for_pids(tmp_path)
    assert all_gone([server, *pids])


def test_when_the_parent_is_killed_server_and_trial_go_with_it(tmp_path):
    code = f"""
import sys, time
from dpbench.process.parent import Isolation
from dpbench.trials.reference import load_module
bodies = load_module({bodies.__file__!r})
isolation = Isolation()
print(isolation.run(bodies.Act(action="where")).result["parent"], flush=True)
isolation.submit(bodies.Act(action="offspring", folder={str(tmp_path)!r}, seconds={FOREVER}))
time.sleep({FOREVER})
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    server = int(parent.stdout.readline())
    pids = wait_for_pids(tmp_path)
    parent.kill()
    parent.wait(PATIENCE)
    assert all_gone([server, *pids])


def test_a_large_result_is_copied_a_few_times_and_not_once_for_each_piece_of_it(isolation):
    """64 MB come through pipes of 64 KiB: looked through anew for each piece, they would take minutes."""
    came = []
    seconds, _ = work(lambda: came.append(isolation.run(Act(action="huge"))))
    assert came[0].outcome is Outcome.OK and len(came[0].result["text"]) == 64_000_000
    assert quick(seconds, 10)


def test_who_scribbles_harms_no_trial_beside_it(isolation, tmp_path):
    waiting = isolation.submit(bodies.Beside(action="wait", number=7, folder=str(tmp_path)))
    wait_for_pids(tmp_path, 1, "begun")
    scribbling = isolation.submit(bodies.Beside(action="scribble"))
    assert answers(isolation, 1)[scribbling].outcome is Outcome.ERROR
    (tmp_path / "go").touch()
    found = answers(isolation, 1)[waiting]
    assert (found.outcome, found.result) == (Outcome.OK, {"number": 7})


def test_a_server_that_is_stopped_goes_on_and_can_be_closed(monkeypatch):
    """And ends by itself: it is not killed for want of an answer."""
    monkeypatch.setattr(module, "_PATIENCE", PATIENCE)
    with Isolation() as own:
        assert own.run(Act(action="stop", number=3)).result == {"number": 3}
        own.submit(Act(action="stop"))
        server = own._server
        until(lambda: state(server.pid) == "T", "a server that is stopped")
    assert server.returncode == 0
