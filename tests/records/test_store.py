"""Records survive what happens to a run: kills, torn lines, older and newer versions."""

import json
import math
import os

import pytest

from dpbench.records import reader as records
from dpbench.records import store
from dpbench.records.store import Store, read_records, read_runs

ENVIRONMENT = {"device": "cpu", "device_name": "CPU"}


def record(number: int) -> dict:
    return {
        **{"experiment": "e", "id": f"{number:016x}", "round": 0, "fingerprint": "f", "trial": {"kind": "of ours"}},
        **{"outcome": "ok", "seconds": 1.0, "utc": "2026-01-01T00:00:00.000000Z", "result": {"n": number}},
    }


def fail(warning: str) -> None:
    raise AssertionError(f"unexpected warning: {warning}")


@pytest.fixture
def written(tmp_path):
    runs = Store(tmp_path / "deep" / "e", ENVIRONMENT)
    for number in range(3):
        runs.append(record(number))
    runs.close()
    return runs.path


def test_what_is_appended_is_read_back_in_order(written):
    (run,) = read_runs(written.parent, fail)
    assert run.environment == ENVIRONMENT and run.path == written
    assert [r["result"]["n"] for r in run.records] == [0, 1, 2]


def test_first_line_is_the_environment_and_every_line_has_a_schema(written):
    lines = [json.loads(text) for text in written.read_text().splitlines()]
    assert [line["type"] for line in lines] == ["environment", "trial", "trial", "trial"]
    assert {line["schema"] for line in lines} == {store.SCHEMA}
    assert lines[0]["run"] == written.stem


def test_a_line_is_on_the_disk_when_append_returns(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(store.os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    runs = Store(tmp_path / "e", {})
    runs.append(record(0))
    # the folder's name, the environment, the file's name, the trial
    assert synced == [str(tmp_path), str(runs.path), str(tmp_path / "e"), str(runs.path)]
    runs.append(record(1))
    assert synced[4:] == [str(runs.path)]


def test_no_file_before_the_first_record(tmp_path):
    Store(tmp_path / "e", {}).close()
    assert list((tmp_path / "e").iterdir()) == []
    assert read_records(tmp_path / "nowhere", fail) == []


def test_two_runs_of_one_process_within_a_second_have_a_file_each(tmp_path):
    stores = [Store(tmp_path, ENVIRONMENT) for _ in range(3)]
    for number, runs in enumerate(stores):
        runs.append(record(number))
        runs.close()
    assert len({runs.path for runs in stores}) == 3 and len(read_records(tmp_path, fail)) == 3


@pytest.mark.parametrize("keep", [1, 10, 40])
def test_a_torn_last_line_is_passed_over_in_silence(written, keep):
    whole = written.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    written.write_bytes(whole[: last + keep])
    assert [r["result"]["n"] for r in read_records(written.parent, fail)] == [0, 1]


def test_a_torn_environment_line_is_no_run(written):
    written.write_bytes(written.read_bytes()[:20])
    assert read_runs(written.parent, fail) == []


def test_a_newer_schema_is_passed_over_and_said(written):
    with written.open("a") as file:
        file.write(json.dumps({"type": "trial", "schema": store.SCHEMA + 1}) + "\n")
    warnings: list[str] = []
    assert len(read_records(written.parent, warnings.append)) == 3
    assert f"schema {store.SCHEMA + 1}" in warnings[0]


def test_an_older_schema_is_upgraded_as_it_is_read(written, monkeypatch):
    monkeypatch.setattr(store, "SCHEMA", store.SCHEMA + 2)
    monkeypatch.setattr(
        store,
        "UPGRADES",
        {store.SCHEMA - 2: lambda line: line | {"a": 1}, store.SCHEMA - 1: lambda line: line | {"b": line.get("a")}},
    )
    before = written.read_bytes()
    assert all(r["b"] == 1 and r["schema"] == store.SCHEMA for r in read_records(written.parent, fail))
    assert written.read_bytes() == before


#: A run as the first version of this project wrote it.
SCHEMA_1 = """\
{"type": "environment", "schema": 1, "run": "20261120T130558Z-vm-6959", "utc": "2026-11-20T13:06:15.696619Z", \
"environment": {"utc": "2026-11-20T13:05:57.072873Z", "dpbench": "0.1.0", "host": "vm", "device": "cpu", \
"device_name": "AMD EPYC, 2 CPUs", "cpus_available": 2, "load_average": 1.29, "torch": "2.15.0+cu132", "threads": 2}}
{"type": "trial", "schema": 1, "experiment": "memory_speed", "id": "8307ba3cde532d27", "round": 1, \
"fingerprint": "e4dd033f5178d84a", "trial": {"kind": "step", "timeout": 600.0, "model": "vgg16", "backend": \
"nonprivate", "batch_size": 32, "device": "cpu", "dtype": "float32", "image_size": 32, "num_classes": 10, "data": \
"digits", "max_grad_norm": 1.0, "seed": 0, "threads": null, "memory_budget": null, "steps": 3, "max_seconds": 8.0}, \
"outcome": "ok", "evidence": null, "seconds": 3.44, "utc": "2026-11-20T13:28:34.722353Z", "result": {"parameters": \
14728266, "verification": {"samples": 2, "max_norm_error": 0.0, "max_grad_error": 3.5e-15, "tolerance": 1e-06}, \
"coverage": {}, "warmup_seconds": [0.37, 0.303, 0.292], "step_seconds": [0.2927, 0.2981, 0.3097], "memory": \
{"source": "cpu_allocator", "peak_bytes": 194167512, "baseline_bytes": 59306536}, "loss": 2.45}}
"""


def test_a_record_from_schema_1_still_loads(tmp_path):
    path = tmp_path / "old.jsonl"
    path.write_text(SCHEMA_1)
    (run,) = read_runs(path, fail)  # one file, as well as the folder
    assert run == read_runs(tmp_path, fail)[0] and run.environment["threads"] == 2
    (line,) = run.records
    assert (line["schema"], line["load"], line["stolen"]) == (store.SCHEMA, None, None)
    assert line["result"]["step_seconds"] == [0.2927, 0.2981, 0.3097]
    assert line["trial"]["precision"] == "float32" and "dtype" not in line["trial"]
    (record,) = records.read(path)
    assert (record.device, record.load, record.cell) == ("cpu AMD EPYC, 2 CPUs", None, ("vgg16", "nonprivate"))
    assert path.read_text() == SCHEMA_1


def test_floats_that_are_not_finite_become_strings():
    text = store.to_json({"a": [math.inf, -math.inf, math.nan, 1.5], "b": {"c": (math.inf,)}})
    assert json.loads(text) == {"a": ["inf", "-inf", "nan", 1.5], "b": {"c": ["inf"]}}


def test_a_folder_that_cannot_be_written_fails_before_anything_is_measured(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        Store(tmp_path / "file" / "e", {})
