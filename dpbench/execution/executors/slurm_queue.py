"""The queue of jobs: submitit creates and submits them, and `squeue` tells which still run.

submitit itself uses `sacct`, which needs a database that small clusters lack.

Functions take:
    say: receives a line for the person.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dpbench.errors import UsageError, last_line
from dpbench.execution.executors import Cluster
from dpbench.process.parent import our_path
from dpbench.records.host import host_name
from dpbench.trials.packages import to_be_installed

#: Default limits: minutes of a job, and jobs at once.
MINUTES, JOBS = 240, 16
#: Seconds between two queries for running jobs: on this machine, of SLURM.
_ASK_HERE, _ASK_SLURM = 0.5, 5.0
#: Seconds for the results of a vanished job to reach this machine.
_SETTLES_IN = 5.0
#: Seconds for a job to end and record when told to; then it is killed with its processes.
_ENDS_IN = 15.0
_ENDED = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL")


class Queue:
    """Jobs submitted by this process and by earlier ones.

    Args:
        cluster: the requested resources.
        home: the folder of job specifications and output.
        job: specification -> {"error"}, run on a node.
    """

    def __init__(self, cluster: Cluster, device: str, home: Path, job: Callable[..., Any]) -> None:
        try:
            import submitit
        except ImportError:
            raise UsageError(to_be_installed("submitit"), "none") from None
        self._submitit, self._asked, self._device, self._home, self._job = submitit, cluster, device, home, job
        self.local = cluster.cluster == "local"
        if not self.local and shutil.which("sbatch") is None:
            raise UsageError("a machine that submits to SLURM (sbatch), or --cluster local", "none")
        self.patience = _ASK_HERE if self.local else _ASK_SLURM
        self.cluster = host_name() if self.local else _cluster_name()
        self._waiting: list[dict[str, Any]] = []
        self._jobs: list[Any] = []
        self._ledger: Path | None = None
        self._failed = False
        self._gone: dict[str, float] = {}
        self._asked_at = 0.0

    def submit(self, specs: list[dict[str, Any]]) -> None:
        """Submit the jobs: all at once to SLURM; one after the other on this machine, so that timings are undisturbed.

        Args:
            specs: one for each job.
        """
        self._waiting = specs
        if not self.local:
            self._start(len(specs))

    def _start(self, count: int) -> None:
        specs, self._waiting = self._waiting[:count], self._waiting[count:]
        maker = self._submitit.LocalExecutor if self.local else self._submitit.SlurmExecutor
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = our_path()
        try:
            executor = maker(folder=self._home / "%j", max_num_timeout=0)
            executor.update_parameters(**self._parameters())
            with _ignoring(signal.SIGINT):  # Ctrl-C is for this process, which then ends the jobs in order
                jobs = executor.map_array(self._job, specs)
        except (self._submitit.core.utils.FailedJobError, subprocess.SubprocessError, ValueError) as error:
            raise UsageError("jobs that SLURM takes", last_line(str(error))) from error
        finally:
            os.environ["PYTHONPATH"] = before or ""
        self._jobs += jobs
        if self._ledger is None:
            self._ledger = self._home / f"{int(time.time())}-{os.getpid()}.json"
        told = self._ledger.with_suffix(".new")
        told.write_text(json.dumps({"cluster": self.cluster, "jobs": [job.job_id for job in self._jobs]}))
        told.replace(self._ledger)  # atomically

    def _parameters(self) -> dict[str, Any]:
        """Resources of a job: timed trials have a node, or a GPU, for themselves."""
        minutes = self._asked.time or MINUTES
        gpu = f"gpu:{self._asked.gpu_type}:1" if self._asked.gpu_type else "gpu:1"
        if self.local:
            return {"timeout_min": minutes} | ({"gpus_per_node": 1} if self._device == "cuda" else {})
        asked: dict[str, Any] = {"job_name": "dpbench", "time": minutes, "use_srun": False}
        asked["array_parallelism"] = self._asked.jobs or JOBS
        asked |= {"partition": self._asked.partition} if self._asked.partition else {}
        asked |= {"gres": gpu} if self._device == "cuda" else {}
        if self._asked.cpus:
            asked["cpus_per_task"] = self._asked.cpus
        elif self._device == "cpu":
            asked["exclusive"] = True
        return asked

    def busy(self, say: Callable[[str], None]) -> bool:
        """Whether a job runs or is still to start; reports jobs that ended early."""
        for job in list(self._jobs):
            if not job.paths.result_pickle.exists():
                continue
            self._jobs.remove(job)
            raised = job.exception()
            error = job.result()["error"] if raised is None else last_line(str(raised))
            if error:
                self._failed = True
                say(f"dpbench: job {job.job_id} ended early: {error}; what it had measured is recorded")
        self._drop_the_lost(say)
        if self.local:
            while self._waiting and len(self._jobs) < (self._asked.jobs or 1):
                self._start(1)
        return bool(self._jobs)

    def _drop_the_lost(self, say: Callable[[str], None]) -> None:
        """Drop jobs that vanished: they were killed, or their node was."""
        if not self._jobs or time.monotonic() < self._asked_at + self.patience:
            return
        self._asked_at = time.monotonic()
        alive = self._alive([job.job_id for job in self._jobs])
        for job in list(self._jobs):
            if job.job_id in alive:
                self._gone.pop(job.job_id, None)
            elif time.monotonic() - self._gone.setdefault(job.job_id, time.monotonic()) > _SETTLES_IN:
                self._jobs.remove(job)
                self._failed = True
                say(f"dpbench: job {job.job_id} was lost; what it had measured is recorded")

    def left_over(self) -> list[str]:
        """Jobs of an earlier run that still run."""
        found = []
        for ledger in self._home.glob("*.json"):
            told = json.loads(ledger.read_text())
            if told["cluster"] != self.cluster:
                continue
            alive = sorted(self._alive(told["jobs"]))
            if alive:
                found += alive
            else:
                ledger.unlink(missing_ok=True)
        return found

    def _alive(self, jobs: Sequence[str]) -> set[str]:
        if self.local:
            return {job for job in jobs if self._is_ours(job)}
        asked = ["squeue", "--noheader", "--array", "--states=all", "--format=%i %T"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            return set(jobs)  # no answer from the controller: assume that all still run
        lines = [line.split() for line in done.stdout.splitlines()]
        return {line[0] for line in lines if len(line) == 2 and line[1] not in _ENDED} & set(jobs)

    def _is_ours(self, pid: str) -> bool:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False
        return b"submitit.local._local" in command and str(self._home).encode() in command

    def end(self) -> None:
        """End the running jobs in order, and forget the rest."""
        self._waiting.clear()
        until = time.monotonic() + _ENDS_IN
        if not self.local:
            for job in self._jobs:
                job.cancel(check=False)
        while self._jobs and self._alive([job.job_id for job in self._jobs]) and time.monotonic() < until:
            for job in self._jobs:
                if self.local and not job.done() and self._is_ours(job.job_id):
                    os.kill(int(job.job_id), signal.SIGTERM)  # repeated, because a starting job may miss it
            time.sleep(_ASK_HERE)
        self._jobs.clear()
        if self._ledger is not None:
            self._ledger.unlink(missing_ok=True)
            self._ledger = None
        if not self._failed and not list(self._home.glob("*.json")):
            shutil.rmtree(self._home, ignore_errors=True)  # the output of successful jobs is not needed


@contextlib.contextmanager
def _ignoring(signum: int) -> Iterator[None]:
    """Processes started inside also ignore the signal."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signum, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signum, before)


def _cluster_name() -> str:
    if name := os.environ.get("SLURM_CLUSTER_NAME"):
        return name
    done = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True, timeout=60, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("ClusterName"):
            return line.partition("=")[2].strip()
    raise UsageError("a SLURM controller that answers", last_line(done.stderr))
