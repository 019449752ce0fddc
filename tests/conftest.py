"""A test that is given the name of a backend which cannot run here is skipped, and says why."""

from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: the cases are small, and waiting threads spin
os.environ["OMP_WAIT_POLICY"] = "passive"  # two threads of a trial spin long where a test holds the other core
os.environ["DPBENCH_CACHE"] = "off"  # no plan depends on what an earlier run has measured
os.environ["DPBENCH_HOST"] = os.environ["DPBENCH_COMMIT"] = ""  # as where nobody has said what they are

from clipping import BACKENDS, load_backend
from clipping.kernels import library

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


@pytest.fixture(scope="module", autouse=True)
def few_objects_to_collect() -> None:
    """What imports and other modules left is not gone through by every collection: hundreds of tests ask for one."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or libraries would call what is left at the end their leaks
