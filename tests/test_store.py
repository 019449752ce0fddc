"""Records survive what happens to a run: kills, torn lines, older and newer versions."""

from __future__ import annotations

import json
import math
import os

import pytest

from dpbench import store
from dpbench.store import Store, read_records, read_runs


def record(number: int) -> dict:
    return {"experiment": "e", "id": f"{number:016x}", "round": 0, "outcome": "ok", "result": {"n": number}}


def fail(warning: str) -> None:
    raise AssertionError(f"unexpected warning: {warning}")


@pytest.fixture
def written(tmp_path):
    runs = Store(tmp_path / "deep" / "e", {"device": "cpu"})
    for number in range(3):
        runs.append(record(number))
    runs.close()
    return runs.path


def test_what_is_appended_is_read_back_in_order(written):
    (run,) = read_runs(written.parent, fail)
    assert run.environment == {"device": "cpu"} and run.path == written
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
    assert synced == [str(runs.path), str(tmp_path / "e"), str(runs.path)]  # environment, the file's name, the trial
    runs.append(record(1))
    assert synced[3:] == [str(runs.path)]


def test_no_file_before_the_first_record(tmp_path):
    Store(tmp_path / "e", {}).close()
    assert list((tmp_path / "e").iterdir()) == []
    assert read_records(tmp_path / "nowhere", fail) == []


@pytest.mark.parametrize("keep", [1, 10, 40])
def test_a_torn_last_line_is_passed_over_in_silence(written, keep):
    whole = written.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    written.write_bytes(whole[: last + keep])
    assert [r["result"]["n"] for r in read_records(written.parent, fail)] == [0, 1]


def test_a_torn_environment_line_is_no_run(written):
    written.write_bytes(written.read_bytes()[:20])
    assert read_runs(written.parent, fail) == []


def test_a_torn_line_in_the_middle_is_named_by_file_and_line(written):
    lines = written.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2][:25] + b"\n"
    written.write_bytes(b"".join(lines))
    warnings: list[str] = []
    assert [r["result"]["n"] for r in read_records(written.parent, warnings.append)] == [0, 2]
    (warning,) = warnings
    assert f"{written}:3:" in warning and "passed over" in warning


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


def test_floats_that_are_not_finite_become_strings():
    text = store.to_json({"a": [math.inf, -math.inf, math.nan, 1.5], "b": {"c": (math.inf,)}})
    assert json.loads(text) == {"a": ["inf", "-inf", "nan", 1.5], "b": {"c": ["inf"]}}


def test_a_folder_that_cannot_be_written_fails_before_anything_is_measured(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        Store(tmp_path / "file" / "e", {})
