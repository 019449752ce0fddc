"""Wherever trials go: what stays together, whose records count, and a disk that is full. No cluster here."""

import errno
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from fake_run import BODIES, ROOT, Fake, sleepers
from report_records import CPU, RunFile

from dpbench.errors import RunEnded, UsageError
from dpbench.execution import shards
from dpbench.execution.executors import Cluster, worker
from dpbench.execution.executors.on_ray import cpus_of, device_of
from dpbench.execution.executors.worker import different, own_cpus
from dpbench.execution.loop import Loop
from dpbench.execution.machines import Machine, begin_sweep, machines_of
from dpbench.execution.progress import Progress
from dpbench.execution.schedule import Clock, History, Run, Schedule, key_of
from dpbench.execution.shards import Shards
from dpbench.experiment import MaxBatch, grid, load_experiment
from dpbench.process.parent import Answer, Place
from dpbench.records import environment
from dpbench.records.reader import LeftOut, read
from dpbench.records.store import Run as RunRead
from dpbench.records.store import read_records, read_runs
from dpbench.report.figures import overhead
from dpbench.trials import EpsilonTrial, OverheadTrial, PeakTrial, StepTrial
from dpbench.trials.outcome import Outcome
from dpbench.trials.reference import load_module

bodies = load_module(str(BODIES))
STEP = StepTrial(model="cnn", backend="ghost", batch_size=8)
PROBE = PeakTrial(model="cnn", backend="ghost", batch_size=8, simulated=True, memory_budget=2**30)
NO_CLUSTER = {"name": "ray", "cluster": "elsewhere", "driver": "a stranger", "versions": {}}


def where(host: str, device_name: str = "Test CPU, 2 CPUs", **more) -> dict:
    return {"host": host, "device": "cpu", "device_name": device_name} | more


# what stays together


def test_all_timed_trials_of_a_model_stay_together_in_all_rounds():
    cells = grid(StepTrial, model=["cnn", "vgg11"], backend=["nonprivate", "ghost"], batch_size=[4, 8])
    cells += [OverheadTrial(model="cnn", backends=["nonprivate", "ghost"], batch_size=4)]
    blocks = Schedule("e", cells, 3, History([], lambda trial: {"f": ""}, ())).blocks()
    assert [block.together for block in blocks] == [True, True]
    assert [sum(1 for _ in block.schedule.runs()) for block in blocks] == [15, 12]


def test_what_is_not_timed_may_go_anywhere():
    epsilon = EpsilonTrial(accountant="rdp", sample_rate=0.1, delta=1e-5, noise_multiplier=1.0, steps=10)
    search, timed = MaxBatch(probe=PROBE), MaxBatch(probe=PROBE, then=STEP)
    history = History([], lambda trial: {"f": ""}, ())
    blocks = Schedule("e", [epsilon, search, timed, STEP], 1, history).blocks()
    assert [block.together for block in blocks] == [False, False, True]
    assert key_of(timed) == key_of(STEP) != key_of(search)


def test_the_blocks_of_an_experiment_are_all_of_it():
    experiment = load_experiment("stress_test")
    history = History([], lambda trial: {"f": ""}, ())
    whole = Schedule("stress_test", experiment.cells("cpu"), 2, history)
    blocks = whole.blocks()
    assert sorted(run.trial.id for block in blocks for run in block.schedule.runs()) == sorted(
        run.trial.id for run in whole.runs()
    )
    assert sum(len(block.schedule.searches) for block in blocks) == len(whole.searches)


# whose records count


def run_of(environment_, trial=STEP, **record) -> RunRead:
    fingerprint = Machine.of(environment_).fingerprint(trial)
    line = {"id": trial.id, "round": 0, "fingerprint": fingerprint, "trial": trial.describe(), "outcome": "ok"}
    return RunRead(Path("x.jsonl"), environment_, [line | {"utc": "2026-01-01", "seconds": 1.0} | record])


OURS = NO_CLUSTER | {"cluster": "ours"}
#: Whose run -> whether its record counts in our sweep.
RUNS = {
    "another machine's own": (run_of(where("a stranger")), False),
    "a sweep that others drove": (run_of(where("node", executor=NO_CLUSTER)), False),
    "driven from here": (run_of(where("node", executor=NO_CLUSTER | {"driver": socket.gethostname()})), True),
    "of the same cluster": (run_of(where("node", executor=OURS)), True),
    "with another torch": (run_of(where("node", executor=OURS | {"versions": {"torch": "1.0"}})), False),
    "of other sources": (run_of(where("node", executor=OURS), fingerprint="of other sources"), False),
}


@pytest.mark.parametrize(("run", "counts"), RUNS.values(), ids=RUNS)
def test_a_record_of_another_machine_counts_if_it_is_of_the_same_sweep(run, counts):
    sweep = begin_sweep("ray", "ours", [STEP])
    machines = machines_of([run], "cpu", [STEP], sweep)
    history = History(run.records, machines.accepted, ())
    assert (history.of(Run(STEP, 0)) is not None) is counts


def test_a_search_goes_on_from_the_probes_of_one_device_on_whichever_node():
    sizes = {8: ("a", "small"), 16: ("a", "small"), 32: ("b", "large"), 64: ("c", "large")}
    runs = [
        run_of(where(host, device, executor=OURS), PROBE.replace(batch_size=size), utc=f"2026-01-{size:02d}")
        for size, (host, device) in sizes.items()
    ]
    machines = machines_of(runs, "cpu", [PROBE], begin_sweep("ray", "ours", [PROBE]))
    history = History([r for run in runs for r in run.records], machines.accepted, ())
    assert sorted(history.by_batch_size(PROBE)) == [32, 64]


def test_rounds_of_two_nodes_are_pooled_and_a_ratio_stays_within_one(tmp_path):
    for host, rounds in {"a": [(0, 1.0, 2.0)], "b": [(1, 4.0, 12.0), (2, None, 12.0)], "c": [(2, 1.0, None)]}.items():
        more = {"schema": 3, "version": "v"}
        file = RunFile(tmp_path / f"{host}.jsonl", CPU | {"host": host, "executor": OURS}, more=more)
        for number, base, ghost in rounds:
            for backend, seconds in (("nonprivate", base), ("ghost", ghost)):
                if seconds is not None:
                    file.step("cnn", backend, [seconds], round=number, fingerprint=f"on {host}")
    frame = overhead.table(read(tmp_path), LeftOut())
    row = frame[frame.backend == "ghost"].iloc[0]
    assert (row.rounds, row.paired_rounds) == (3, 2)  # round 2 has ordinary training on another node
    assert (row.time_ratio_low, row.time_ratio_high) == (2.0, 3.0)


# a full disk


class TwoNodes:
    """An executor whose trials end at once, by turns on one of two nodes."""

    blocks, workers = 4, 1

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.keys = 0

    def submit(self, trial, block) -> int:
        self.keys += 1
        host = "ab"[self.keys % 2]
        facts = where(host, executor=NO_CLUSTER | {"driver": socket.gethostname()})
        place = Place(host, facts, Machine.of(facts).fingerprint(trial), 0.1)
        found = {"epsilon": 1.0, "kind": "upper_bound", "compute_seconds": 0.1}
        self.answers.append(Answer(self.keys, Outcome.OK, None, found, 0.5, place))
        return self.keys

    def wait(self, timeout=None):
        answers, self.answers = self.answers, []
        return answers

    def release(self, block):
        pass


def carry_out(folder: Path, trials, said: list[str]):
    runs = read_runs(folder)
    machines = machines_of(runs, "cpu", trials)
    history = History([r for run in runs for r in run.records], machines.accepted, ())
    schedule = Schedule("e", trials, 1, history)
    kept = Shards(folder, said.append, lambda: where(socket.gethostname()), machines.add)
    with open(os.devnull, "w") as nothing:
        return Loop(
            schedule, schedule.blocks(), TwoNodes(), kept, Progress(nothing), machines.fingerprint, Clock([])
        ).run()


EPSILONS = grid(
    EpsilonTrial, accountant="rdp", sample_rate=0.1, delta=1e-5, noise_multiplier=1.0, steps=[1, 2, 3, 4, 5, 6]
)


def test_each_node_has_a_file_of_its_own_and_its_environment(tmp_path):
    report = carry_out(tmp_path, EPSILONS, [])
    runs = read_runs(tmp_path)
    assert sorted(run.environment["host"] for run in runs) == ["a", "b"] and len(report.paths) == 2
    assert all(f"-{run.environment['host']}-" in run.path.name for run in runs)
    assert sorted(r["trial"]["steps"] for run in runs for r in run.records) == [1, 2, 3, 4, 5, 6]
    assert not carry_out(tmp_path, EPSILONS, []).outcomes, "a finished cell is never done twice"


def test_a_full_disk_ends_the_run_and_the_next_one_goes_on(tmp_path, monkeypatch):
    class Full(shards.Store):
        def append(self, record):
            if "-a-" in self.path.name:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            super().append(record)

        def save_again(self):
            return "saved"

    with monkeypatch.context() as patch, pytest.raises(RunEnded, match=r"No space left on device: .*; saved"):
        patch.setattr(shards, "Store", Full)
        carry_out(tmp_path, EPSILONS, [])
    carry_out(tmp_path, EPSILONS, [])
    assert sorted(r["trial"]["steps"] for r in read_records(tmp_path)) == [1, 2, 3, 4, 5, 6]


# what a person typed


@pytest.mark.parametrize(("name", "package"), [("ray", "ray"), ("slurm", "submitit")])
def test_a_missing_extra_is_one_line_that_says_what_to_install(tmp_path, name, package):
    fake = Fake(tmp_path, sleepers(1))
    code = f"import sys; sys.modules[{package!r}] = None; from dpbench.cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["run", str(fake.file), "--output", str(fake.output), "--executor", name]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"pip install -e '{ROOT}[{name}]'" in done.stderr
    assert fake.trace("begun") == []


def test_slurm_needs_an_experiment_that_its_jobs_can_find():
    pytest.importorskip("submitit")
    from dpbench.execution.runner import Request, run

    request = Request(
        experiment=load_experiment("accountants"), results=Path("x"), cluster=Cluster(name="slurm", cluster="local")
    )
    with pytest.raises(UsageError, match="by its name or file"):
        run(request, Progress())


@pytest.mark.parametrize(
    ("options", "device", "nodes", "said"),
    [
        ({}, "cpu", [{"CPU": 8}, {"CPU": 8}], 8),
        ({}, "cpu", [{"CPU": 8}, {"CPU": 4}, {"memory": 1}], 8),
        ({"cpus": 4}, "cpu", [{"CPU": 8}, {"CPU": 4}], 4),
        ({"cpus": 9}, "cpu", [{"CPU": 8}], "expected a node with 9 CPUs in the Ray cluster, got 'at most 8'"),
        ({}, "cpu", [{"memory": 1}], "got 'at most 0'"),
        ({}, "cuda", [{"CPU": 64, "GPU": 8}, {"CPU": 16, "GPU": 4}], 4),
        ({"gpu_type": "A100"}, "cuda", [{"CPU": 64, "GPU": 8, "accelerator_type:A100": 1}, {"CPU": 2, "GPU": 1}], 8),
        ({"gpu_type": "A10"}, "cuda", [{"CPU": 64, "GPU": 8, "accelerator_type:A100": 1}], "did you mean 'A100'?"),
    ],
)
def test_what_a_trial_asks_of_a_ray_cluster(options, device, nodes, said):
    told: list[str] = []
    if isinstance(said, int):
        assert cpus_of(Cluster(name="ray", **options), device, nodes, told.append) == said
        assert len(told) == (len({n["CPU"] for n in nodes if "CPU" in n}) > 1 and device == "cpu" and not options)
    else:
        with pytest.raises(UsageError, match=re.escape(said)):
            cpus_of(Cluster(name="ray", **options), device, nodes, told.append)


def test_a_ray_cluster_without_a_gpu_is_measured_on_its_cpus_unless_cuda_is_asked_for():
    assert device_of("auto", [{"CPU": 8}]) == "cpu" and device_of("auto", [{"CPU": 8, "GPU": 1}]) == "cuda"
    with pytest.raises(UsageError, match="a node with a GPU in the Ray cluster for --device cuda"):
        device_of("cuda", [{"CPU": 8}])


def test_what_a_job_asks_of_slurm(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    from dpbench.execution.executors import slurm_queue

    def asked(device, **options):
        monkeypatch.setattr(slurm_queue.shutil, "which", lambda name: f"/usr/bin/{name}")
        monkeypatch.setenv("SLURM_CLUSTER_NAME", "ours")
        queue = slurm_queue.Queue(Cluster(name="slurm", **options), device, tmp_path, print)
        return {k: v for k, v in queue._parameters().items() if k not in ("job_name", "use_srun")}

    assert asked("cpu") == {"time": 240, "array_parallelism": 16, "exclusive": True}
    assert asked("cpu", cpus=4, partition="short", time=30, jobs=3) == {
        "time": 30,
        "array_parallelism": 3,
        "partition": "short",
        "cpus_per_task": 4,
    }
    assert asked("cuda", gpu_type="a100") == {"time": 240, "array_parallelism": 16, "gres": "gpu:a100:1"}


# a node that is not like the others, or shared


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")
def test_trials_that_ask_for_cpus_of_their_own_do_not_share_them():
    with own_cpus(1) as first, own_cpus(1) as second, own_cpus(None) as everything:
        assert len(first) == len(second) == 1 and set(first).isdisjoint(second)
        assert everything is None
    with own_cpus(1) as again:
        assert again == first
    with own_cpus(10_000) as more:
        assert more is None


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")
def test_a_node_pins_what_must_run_alone_to_its_cpus(monkeypatch):
    monkeypatch.setattr(worker, "_node", None)
    monkeypatch.chdir(ROOT)
    asked = {"device": "cpu", "with_torch": False, "folder": str(ROOT), "libraries": (), "all_libraries": ("torch",)}
    asked |= {"sources": {}, "cpus": 1}
    try:
        answers = [
            worker.run_trial(worker.Job(trial=bodies.Act(action="cpus").to_wire(), alone=alone, **asked), "n")
            for alone in (False, True)
        ]
    finally:
        worker._node.isolation.close()
    assert [len(answer.result["cpus"]) for answer in answers] == [len(os.sched_getaffinity(0)), 1]
    assert all(answer.place.environment["device_name"].endswith(" 1 CPUs") for answer in answers), (
        "one device, one label"
    )
    where = answers[0].place.environment
    assert where["node"] == "n" and set(where["libraries"]) == {"torch"}


def test_a_node_that_lacks_a_file_or_has_another_one_says_which(tmp_path):
    own = tmp_path / "model.py"
    own.write_text("x = 1\n")
    sources = {name: environment.hash_of(name) for name in (str(own), "clipping/**/*.py")}
    assert different(sources) is None
    assert f"another {own} than where the run was started" in (different(sources | {str(own): "0"}) or "")
    assert "other sources (clipping/**/*.py" in (different(sources | {"clipping/**/*.py": "0"}) or "")
    missing = str(tmp_path / "missing.py")
    assert f"cannot read {missing}, which this trial needs (No such file" in (different({missing: "0"}) or "")
