"""A test of a backend which cannot run here is skipped, and says why; and no test waits for ever."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from waiting import PATIENCE

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: the cases are small, and waiting threads spin
os.environ["OMP_WAIT_POLICY"] = "passive"  # two threads of a trial spin long where a test holds the other core
os.environ["DPBENCH_CACHE"] = "off"  # no plan depends on what an earlier run has measured
os.environ["DPBENCH_HOST"] = os.environ["DPBENCH_COMMIT"] = ""  # as where nobody has said what they are

from clipping import BACKENDS, load_backend
from clipping.native import library

# A slow machine is no fault of what it tests.
settings.register_profile("dpbench", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dpbench")

LIBRARIES = tempfile.TemporaryDirectory(prefix="dpbench-tests-")
library._folder = lambda: Path(LIBRARIES.name)  # type: ignore[assignment]  # compiled once by each process of the tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reasons: dict[str, str | None] = {}
    for item in items:
        name = item.callspec.params.get("backend") if hasattr(item, "callspec") else None
        if isinstance(name, str) and name in BACKENDS:
            if name not in reasons:
                reasons[name] = load_backend(name).unavailable()
            if reasons[name] is not None:
                item.add_marker(pytest.mark.skip(reason=f"{name}: {reasons[name]}"))


def pytest_configure() -> None:
    """Signals that pytest was started to ignore (in the background, by nohup) are not so for what a test starts."""
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(signum) is signal.SIG_IGN:
            signal.signal(signum, lambda *_: None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Whatever it waits for without a limit of its own, a test fails in the end."""

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
    """What imports and other modules left is not gone through by every collection: hundreds of tests ask for one."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or libraries would call what is left at the end their leaks
