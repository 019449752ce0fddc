"""Skips tests of backends that cannot run here, with the reason, and limits the time of every test."""

import gc
import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from waiting import PATIENCE

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: the cases are small, and waiting threads spin
os.environ["OMP_WAIT_POLICY"] = "passive"  # a trial's two threads would spin while a test uses the other core
os.environ["DPBENCH_CACHE"] = "off"  # no plan depends on an earlier run's measurements
os.environ["DPBENCH_HOST"] = os.environ["DPBENCH_COMMIT"] = ""  # as if unset

import torch

from clipping import BACKENDS, load_backend
from clipping.native import library
from clipping.planning import costs
from clipping.program import graphs

# A slow machine must not fail a test.
settings.register_profile("dpbench", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dpbench")

LIBRARIES = tempfile.TemporaryDirectory(prefix="dpbench-tests-")
library._folder = lambda: Path(LIBRARIES.name)  # type: ignore[assignment]  # each test process compiles once
costs.CACHES, costs.TURNS = 2**16, 1  # routes are timed, but by how much one is faster is no matter here
graphs.WARM_UP = 0.0  # short tests run programs, too


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reasons: dict[str, str | None] = {}
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device: none here"))
        name = item.callspec.params.get("backend") if hasattr(item, "callspec") else None
        if isinstance(name, str) and name in BACKENDS:
            if name not in reasons:
                reasons[name] = load_backend(name).unavailable()
            if reasons[name] is not None:
                item.add_marker(pytest.mark.skip(reason=f"{name}: {reasons[name]}"))


def pytest_configure() -> None:
    """Handle signals that pytest inherited as ignored (background, nohup): children would ignore them, too."""
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, lambda *_: None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Fail a test that takes longer than 2 * PATIENCE, for waits without their own limit."""

    def give_up(*_: object) -> None:
        pytest.fail(f"still waiting after {2 * PATIENCE:g} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, 2 * PATIENCE)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module", autouse=True)
def few_objects_to_collect() -> None:
    """Freeze objects of imports and other modules: hundreds of tests call for a garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def trials_here() -> Iterator[None]:
    """Trials of a command run in this process: see `in_process.answered_here`."""
    from in_process import answered_here  # not before what is set above

    with answered_here():
        yield


@pytest.fixture
def dpbench(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command in this process: its exit code, standard output and standard error."""
    from dpbench.cli import main

    def run(*words: object) -> tuple[int, str, str]:
        code = main([str(word) for word in words])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def rows(dpbench: Callable[..., tuple[int, str, str]]) -> Callable[..., dict[str, dict]]:
    """Runs `epsilon` or `calibrate` in this process: accountant -> its row."""

    def run(*words: object) -> dict[str, dict]:
        code, out, err = dpbench(*words, "--format", "json")
        assert (code, err) == (0, "")
        return {row["accountant"]: row for row in json.loads(out, parse_constant=lambda name: pytest.fail(name))}

    return run


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries would report frozen objects as leaks at the end
