"""The table of a kind of trial without a figure, whatever its records hold."""

from collections import Counter
from types import SimpleNamespace

import pytest
from made_records import made
from report_records import RunFile, save_no_pictures

from dpbench.report import plain, write_report


def trial(kind="mine", **fields):
    return SimpleNamespace(kind=kind, id=str(sorted(fields.items())), describe=lambda: {"kind": kind} | fields)


def table(*results, outcome="ok"):
    frame = plain.table([made(trial(n=n), result, outcome) for n, result in enumerate(results)], Counter())
    return frame, plain.text(frame)


@pytest.mark.parametrize("names", [("t", "T"), ("a_b", "a b"), ("a", "A", "A 2", "a_2"), ("n", "n of the trial")])
def test_names_that_look_alike_have_columns_of_their_own(names):
    frame, text = table({name: index for index, name in enumerate(names)}, {})
    assert text.columns.is_unique and text.iloc[0].tolist()[3:] == [str(index) for index in range(len(names))]
    assert frame.columns.is_unique and frame.iloc[0, 3:].tolist() == list(range(len(names)))


@pytest.mark.parametrize("value", ["ok", [1, 2], {"a": 1}, None, 7])
def test_a_record_s_round_and_outcome_are_not_its_result_s(value):
    frame, text = table({"outcome": value, "round": value, "x": 1.0}, {"x": 2.0}, outcome="error")
    assert frame["outcome"].tolist() == ["error", "error"] and frame["round"].tolist() == [0, 0]
    assert text.Outcome.tolist() == ["error", "error"] and text.X.tolist() == ["1", "2"]
    assert ("round of the result" in frame) == isinstance(value, str | int)


def test_kinds_of_names_that_look_alike_have_tables_of_their_own(tmp_path, monkeypatch):
    save_no_pictures(monkeypatch)
    run = RunFile(tmp_path / "e" / "a.jsonl")
    for number, kind in enumerate(("a b", "a-b", "a_b")):
        run.add(trial(kind, n=number), {"x": number})
    found = [path for path in write_report(tmp_path / "e", tmp_path / "out") if path.suffix == ".csv"]
    assert [path.stem for path in found] == ["trials-a-b", "trials-a-b-2", "trials-a_b"]
    assert [path.read_text() for path in found] == [f"round,outcome,x\n0,ok,{number}\n" for number in range(3)]
