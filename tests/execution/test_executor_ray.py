"""The same on a Ray cluster of two nodes, which the tests start on this machine."""

import os
import signal
import socket

import pytest
from bodies import FOREVER
from fake_run import Fake, ended, finish, sleepers, waiters
from smoke_run import smoke, smoke_here
from waiting import all_gone, lines, of_process, until

from dpbench.process.linux import kill
from dpbench.records.store import read_runs

pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore")

NODE = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 * 2**20}


@pytest.fixture(scope="module")
def cluster():
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    yield cluster
    cluster.shutdown()


def on(cluster, *more: str) -> tuple[str, ...]:
    return ("--executor", "ray", "--address", cluster.address, *more)


def parent(pid: int) -> int:
    return int(of_process(pid, "stat").rpartition(b")")[2].split()[1])


def trials(fake: Fake) -> list[int]:
    """The processes of those that have begun."""
    return [int(line.split()[1]) for line in lines(fake.folder / "begun")]


@pytest.mark.slow
def test_trials_go_to_both_nodes_what_fails_is_a_record_and_local_has_nothing_left(tmp_path, cluster):
    cells = (
        "grid(bodies.Act, action='sleep', number=list(range(4)), seconds=0.4, folder=FOLDER)"
        " + grid(bodies.Beside, action=['segfault', 'raise', 'oom', 'where'])"
        f" + [bodies.Act(action='sleep', number=9, seconds={FOREVER}, timeout=1.0)]"
    )
    fake = Fake(tmp_path, cells)
    done = fake.run_apart(*on(cluster))
    assert done.returncode == 0, done.stderr
    assert "recorded 9 trials" in done.stderr and "in 2 files of" in done.stderr
    found = {(r["trial"]["action"], r["trial"]["number"]): r["outcome"] for r in fake.records}
    assert found == {("sleep", n): "ok" for n in range(4)} | {
        ("segfault", 0): "crash",
        ("raise", 0): "error",
        ("oom", 0): "oom",
        ("where", 0): "ok",
        ("sleep", 9): "timeout",
    }
    runs = read_runs(fake.output / "fake")
    assert len({run.environment["node"] for run in runs}) == 2
    assert all(run.environment["executor"]["cluster"] == cluster.address for run in runs)
    assert all(run.environment["host"] == socket.gethostname() for run in runs)
    assert "nothing is left to run" in fake.run_apart("--only", "number=0,1,2,3,9").stderr, "for whichever executor"


@pytest.mark.slow
def test_a_run_is_continued_by_another_executor_and_a_killed_driver_loses_nothing(tmp_path, cluster):
    fake = Fake(tmp_path, waiters(6), in_order=True)
    fake.go(0, 1)
    process = fake.start(*on(cluster))
    until(lambda: len(fake.records) == 2, "two records")
    process.kill()
    finish(process)
    before = fake.records
    fake.go()
    done = fake.run_apart("--only", "number=0,1,2")
    assert done.returncode == 0
    done = fake.run_apart(*on(cluster))
    assert done.returncode == 0
    assert fake.records[: len(before)] == before or {r["utc"] for r in before} <= {r["utc"] for r in fake.records}
    assert fake.numbers == dict.fromkeys(range(6), 1)


def test_an_address_where_nothing_answers_is_one_line(tmp_path):
    fake = Fake(tmp_path, sleepers(1))
    done = fake.run_apart("--executor", "ray", "--address", "127.0.0.1:1")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "expected a Ray cluster that answers at 127.0.0.1:1" in done.stderr and "Connection refused" in done.stderr
    assert "host:port" in fake.run_apart("--executor", "ray", "--address", "nowhere").stderr


@pytest.mark.slow
def test_a_lost_node_and_a_killed_worker_lose_nothing(tmp_path, cluster):
    node = cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    count = 10
    fake = Fake(tmp_path, waiters(count), in_order=True)
    fake.go(0)
    process = fake.start(*on(cluster))
    until(lambda: fake.records, "a record")
    fake.wait_for(4, "begun")  # on each node one waits
    before = fake.records
    kill(parent(parent(trials(fake)[-1])))  # the trial's parent is the server, and its parent is Ray's worker
    fake.wait_for(5, "begun")
    cluster.remove_node(node, allow_graceful=False)
    fake.go()
    ended(process)
    assert fake.numbers == dict.fromkeys(range(count), 1)
    assert {r["utc"] for r in before} <= {r["utc"] for r in fake.records}
    assert {r["outcome"] for r in fake.records} == {"ok"}
    assert len(fake.trace("begun")) > count, "a trial that was lost is begun again"


@pytest.mark.slow
def test_ctrl_c_ends_in_good_order_and_leaves_no_trial_on_a_node(tmp_path, cluster):
    fake = Fake(tmp_path, waiters(3))
    process = fake.start(*on(cluster))
    fake.wait_for(2, "begun")
    os.killpg(process.pid, signal.SIGINT)
    err = ended(process, 130)
    assert err.strip().splitlines()[-1].endswith("the same command continues from there")
    assert all_gone(trials(fake))


@pytest.mark.slow
def test_the_smoke_run_has_the_same_cells_as_on_one_machine(tmp_path, cluster):
    assert smoke(tmp_path, *on(cluster)) == smoke_here()
    runs = read_runs(tmp_path / "stress_test-smoke")
    assert len(runs) == 2
    steps = [{r["trial"]["backend"] for r in run.records if r["trial"]["kind"] == "step"} for run in runs]
    assert set() in steps, "what is set beside each other ran on one node"
