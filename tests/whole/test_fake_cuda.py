"""The command line and people's loops on a CUDA device: on the fake of `tests/support/fake_cuda.py`, where none is.

What the fake cannot show is written there; the tests marked `gpu` are for a real one (`make gpu-test`).
"""

import json
import os
import shutil

import pytest
import torch
from fake_cuda import environment
from fake_loops import NAMES
from marks import slow_unless
from waiting import ROOT, python

from dpbench.records.store import read_records

SUPPORT = ROOT / "tests" / "support"
NOT_HERE = ("no Triton program runs on cuda here", "expected kernels in the profiler's trace")

pytestmark = pytest.mark.skipif(
    torch.version.cuda is None or shutil.which("cc") is None, reason="needs a torch for CUDA, and a C compiler"
)


def on_fake(*command: str, **more: str) -> str:
    paths = [str(SUPPORT / "fake_site"), str(ROOT), str(SUPPORT), str(ROOT / "tests" / "integrations")]
    return python(*command, **environment(PYTHONPATH=os.pathsep.join(paths), **more))


def dpbench(*arguments: str, **more: str) -> str:
    return on_fake("-m", "dpbench", *arguments, **more)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["evidence", "stress_test", "training_step"])
def test_an_experiment_on_cuda(experiment, tmp_path):
    dpbench("run", experiment, "--device", "cuda", "--smoke", "--output", str(tmp_path))
    records = read_records(tmp_path / f"{experiment}-smoke")
    assert records and {record["trial"].get("device", "cuda") for record in records} <= {"cuda"}
    for record in records:
        said = str(record.get("evidence"))
        assert record["outcome"] == "ok" or said.startswith(NOT_HERE), (record["trial"], said)
    assert list(tmp_path.rglob("*.svg"))


@pytest.mark.slow
def test_recommend_and_check_on_cuda():
    command = ("recommend", "cnn", "--batch-size", "8", "--memory", "256MiB", "--device", "cuda", "--format", "json")
    answer = json.loads(dpbench(*command))
    assert answer["recommended"] in {row["backend"] for row in answer["backends"] if row["status"] == "ok"}
    rows = json.loads(dpbench("check", "--model", "cnn", "--device", "cuda", "--format", "json"))
    assert {row["status"] for row in rows} <= {"ok", "unsupported"} and len(rows) > 10


CONFORMANCE = """
from clipping import load_backend
from dpbench.conformance.suite import conformance
names = "norms in float32", "the model left as it was"
print([verdict.reason for verdict in conformance(load_backend("bk_mixed"), "cuda", names)])
"""


@pytest.mark.slow
def test_conformance_on_cuda_where_convolutions_take_tf32_and_steps_are_programs():
    """Both are a GPU's defaults."""
    assert on_fake("-c", CONFORMANCE).splitlines()[-1] == "[None, None]"


@pytest.mark.parametrize("name", slow_unless(lambda name: name == "device", NAMES))
def test_a_loop_trains_what_it_trains_on_a_cpu(name):
    if name in ("trainer", "lightning"):
        pytest.importorskip({"trainer": "accelerate", "lightning": "lightning"}[name])
    assert on_fake(str(SUPPORT / "fake_loops.py"), name, WANDB_DISABLED="true").splitlines()[-1] == "as a CPU's"
