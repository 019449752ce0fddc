"""Clocks, power and temperature of a GPU, from a driver that a test plays; on a machine with a GPU, from its own."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from dpbench.measure import counters, overhead
from dpbench.measure.bench import Memory, device_of
from dpbench.trials import OverheadTrial

CUDA = torch.device("cuda", 0)
NOTHING = {"sm_mhz": None, "memory_mhz": None, "watts": None, "celsius": None}
UUID = "01234567-89ab-cdef-0123-456789abcdef"


class Driver:
    """NVML with one GPU, whose functions return 0 or, as `fails` says, an error."""

    def __init__(self, fails: tuple[str, ...] = ()) -> None:
        self._fails = fails

    def _answer(self, name: str, out: object, value: int) -> int:
        if name in self._fails:
            return 3  # NVML_ERROR_NOT_SUPPORTED
        out._obj.value = value
        return 0

    def nvmlInit_v2(self) -> int:
        return 1 if "nvmlInit_v2" in self._fails else 0

    def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: object) -> int:
        return self._answer("handle", handle, 77) if name == f"GPU-{UUID}".encode() else 6

    def nvmlDeviceGetClockInfo(self, handle: ctypes.c_void_p, kind: ctypes.c_uint, out: object) -> int:
        assert handle.value == 77
        return self._answer("clock", out, {1: 1980, 2: 2619}[kind.value])

    def nvmlDeviceGetPowerUsage(self, handle: ctypes.c_void_p, out: object) -> int:
        return self._answer("power", out, 412_345)

    def nvmlDeviceGetTemperature(self, handle: ctypes.c_void_p, sensor: ctypes.c_uint, out: object) -> int:
        assert sensor.value == 0
        return self._answer("temperature", out, 61)


@pytest.fixture
def driver(monkeypatch):
    def play(driver: Driver | None, uuid: str = UUID) -> None:
        def load(name: str) -> Driver:
            if driver is None:
                raise OSError(f"{name}: cannot open shared object file")
            return driver

        monkeypatch.setattr(counters.ctypes, "CDLL", load)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuid))

    counters._handle.cache_clear()
    yield play
    counters._handle.cache_clear()


def test_what_it_does_not_say_is_none_and_the_rest_is_there(driver):
    driver(Driver(fails=("power",)))
    assert counters.sample(CUDA) == {"sm_mhz": 1980, "memory_mhz": 2619, "watts": None, "celsius": 61}


OTHER = "ffffffff-89ab-cdef-0123-456789abcdef"
SILENT = [(None, UUID), (Driver(fails=("nvmlInit_v2",)), UUID), (Driver(fails=("handle",)), UUID), (Driver(), OTHER)]


@pytest.mark.parametrize(("silent", "uuid"), SILENT)
def test_without_a_driver_that_knows_this_gpu_everything_is_none(driver, silent, uuid):
    driver(silent, uuid)
    assert counters.sample(CUDA) == NOTHING


def test_a_turn_on_cuda_says_them_and_asks_when_its_time_is_taken(monkeypatch):
    events: list[str] = []

    def stopwatch(step, count, max_seconds):
        events.append("timed")
        return [0.5] * count

    monkeypatch.setattr(overhead, "stopwatch_for", lambda device: stopwatch)
    monkeypatch.setattr(counters, "sample", lambda device: events.append("asked") or {"sm_mhz": 1980})
    trial = OverheadTrial(model="cnn", backends=["nonprivate"], batch_size=2)
    entry = overhead.Entry("nonprivate", trial, CUDA, _step=object())
    entry.record["turns"] = []
    entry.turn(0, 1)
    assert entry.record["turns"] == [{"round": 0, "position": 1, "step_seconds": [0.5], "gpu": {"sm_mhz": 1980}}]
    assert events == ["timed", "asked"]


def test_what_the_others_hold_is_in_no_peak_of_a_backend():
    own = overhead.without(40, Memory("cuda_allocator", 100, 10, reserved_bytes=160))
    assert own == Memory("cuda_allocator", 60, 10, reserved_bytes=120)


def test_a_named_card_becomes_the_current_one(monkeypatch):
    current = [0]
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.append(device.index))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    assert [device_of(name).index for name in ("cpu", "cuda", "cuda:1", "cuda")] == [None, 0, 1, 1]


@pytest.mark.gpu
def test_a_real_gpu_has_a_clock_and_a_temperature():
    found = counters.sample(CUDA)
    if found == NOTHING:
        pytest.skip("the driver does not tell, as for a part of a card (MIG)")
    assert found["sm_mhz"] > 100 and found["memory_mhz"] > 100 and 0 < found["celsius"] < 120
