"""The same as a job array: by submitit's local executor, and by SLURM itself where there is one."""

import os
import shutil
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from fake_run import Fake, ended, waiters
from smoke_run import smoke, smoke_here
from waiting import PATIENCE

from dpbench.process.linux import kill
from dpbench.records.store import read_runs

pytest.importorskip("submitit")
LOCAL = ("--executor", "slurm", "--cluster", "local")
MODELS = """
from dataclasses import dataclass
from typing import ClassVar

@dataclass(frozen=True, kw_only=True)
class Of(bodies.Act):
    kind: ClassVar[str] = "of"
    model: str
"""


def of_models(folder: Path, cells: str) -> Fake:
    fake = Fake(folder, cells, in_order=True)
    fake.file.write_text(fake.file.read_text().replace("def cells", MODELS + "\ndef cells"))
    return fake


def test_each_job_has_a_file_of_its_own_and_what_fails_is_a_record(tmp_path):
    cells = (
        "grid(Of, model=['a', 'b'], action='sleep', number=[0, 1], seconds=0.1, folder=FOLDER)"
        " + grid(bodies.Act, action=['raise', 'segfault'])"
    )
    fake = of_models(tmp_path, cells)
    done = fake.run_apart(*LOCAL, "--jobs", "2")
    assert done.returncode == 0, done.stderr
    assert "recorded 6 trials" in done.stderr and "KeyError: 'no such thing'" in done.stderr
    runs = read_runs(fake.output / "fake")
    together = [{r["trial"]["model"] for r in run.records if "model" in r["trial"]} for run in runs]
    assert len(runs) >= 3 and all(len(models) <= 1 for models in together), "a model's trials have one job"
    assert Counter(r["outcome"] for r in fake.records) == {"ok": 4, "error": 1, "crash": 1}
    assert all(run.environment["executor"]["name"] == "slurm" for run in runs)
    assert "nothing is left to run" in fake.run_apart().stderr, "whichever executor did it"
    assert fake.left_over() == []


@pytest.fixture
def job(tmp_path):
    """A run by one job, of which two trials have ended and the third waits to be let go."""
    fake = of_models(tmp_path, waiters(5, "Of").replace("grid(Of,", "grid(Of, model='a',"))
    fake.go(0, 1)
    process = fake.start(*LOCAL)
    fake.wait_for(3, "begun")
    return fake, process


@pytest.mark.slow
def test_jobs_outlive_a_killed_driver_and_the_next_run_waits_for_them(job):
    fake, process = job
    process.kill()
    process.wait(PATIENCE)
    assert fake.processes("submitit"), "it goes on"
    following = fake.start(*LOCAL)
    assert any("1 jobs of an earlier run still go on" in line for line in following.stderr)
    fake.go()
    ended(following)
    assert fake.numbers == dict.fromkeys(range(5), 1)
    assert Counter(fake.trace("begun")) == dict.fromkeys(range(5), 1), "nothing is done twice"
    assert fake.left_over() == []


@pytest.mark.slow
def test_a_killed_job_is_submitted_again_and_loses_nothing(job):
    fake, process = job
    for pid in fake.processes("submitit"):
        kill(pid)
    fake.go()
    assert "was lost; what it had measured is recorded" in ended(process)
    assert fake.numbers == dict.fromkeys(range(5), 1)
    assert fake.left_over() == []


@pytest.mark.slow
def test_ctrl_c_ends_the_jobs_in_good_order(job):
    fake, process = job
    os.killpg(process.pid, signal.SIGINT)
    ended(process, 130)
    assert fake.left_over() == [] and fake.records
    fake.go()
    fake.run_apart()
    assert fake.numbers == dict.fromkeys(range(5), 1)


@pytest.mark.slow
def test_jobs_that_bring_nothing_are_not_submitted_for_ever(tmp_path):
    fake = of_models(tmp_path, "grid(Of, model='a', action='sleep', number=[0, 1])")
    text = fake.file.read_text()
    fake.file.write_text(
        text + "\nimport os\nif 'SUBMITIT_EXECUTOR' in os.environ:\n    raise OSError(28, 'No space')\n"
    )
    done = fake.run_apart(*LOCAL)
    assert done.returncode == 1 and done.stderr.count("ended early") == 1 and "No space" in done.stderr
    assert "2 trials are not recorded" in done.stderr


@pytest.fixture
def slurm():
    """A controller that answers; without one the test is skipped."""
    if shutil.which("sbatch") is None:
        pytest.skip("no sbatch: SLURM is not installed here")
    if " UP" not in subprocess.run(["scontrol", "ping"], capture_output=True, text=True).stdout:
        pytest.skip("sbatch is installed, and no SLURM controller answers")


@pytest.mark.slow
def test_slurm_itself_runs_the_smoke_run(tmp_path, slurm):
    """On a shared folder of all nodes, which the temporary folder is where SLURM runs on this machine alone."""
    assert smoke(tmp_path, "--executor", "slurm", "--time", "20", "--jobs", "2") == smoke_here()
    runs = read_runs(tmp_path / "stress_test-smoke")
    assert len(runs) > 1, "an array of several jobs"
