"""Measured costs: what is timed, and the file that they are kept in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from clipping import load_backend
from clipping.planning import costs, planner
from clipping.planning.costs import CostCache, Costs, measured, predicted
from clipping.rules.base import Spec
from clipping.rules.convolution import ConvolutionWeight
from clipping.rules.linear import LinearWeight

CPU = torch.device("cpu")
COSTS = Costs({(True, "pixels", 8): 1e-3, (True, "patches", 0): 3e-3, (False, "grouped", 4): 2e-3}, 5e-4, None)
OTHER = Costs({(False, "direct", 1): 2e-3}, 5e-4, 1e-5)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def the_file(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def conv(batch: int = 4) -> tuple[ConvolutionWeight, Spec]:
    weight, x = torch.randn(6, 4, 3, 3), torch.randn(batch, 4, 8, 8)
    rule = ConvolutionWeight(weight, x, torch.Size((8, 8)), [1, 1], [1, 1], [1, 1], 1)
    return rule, Spec(torch.Size((batch, 6, 8, 8)), torch.float32)


def test_the_best_of_each_kind_of_route():
    route, seconds = COSTS.best(ghost=True)
    assert (route.ghost, route.way, route.block, route.kept, seconds) == (True, "pixels", 8, False, 1e-3)
    assert OTHER.best(ghost=True) is None


def test_a_disturbed_turn_is_not_on_record(monkeypatch):
    """The second turn finds the one way fast and the other slow, and the last one the sums."""
    turns = [
        Costs({(True, "gram", 1): gram, (False, "direct", 1): 2.0}, summed, 2 * summed)
        for gram, summed in ((1.0, 3.0), (1e-3, 3.0), (1.0, 3.0), (1.0, 3e3))
    ]
    keys = list(turns[0].norms)
    monkeypatch.setattr(costs, "_descend", lambda rule, g, ghost, way, clock: dict.fromkeys(keys, 1.0))
    monkeypatch.setattr(costs, "_turn", lambda *_: turns.pop())
    assert measured(*conv()) == Costs({(True, "gram", 1): 1.0, (False, "direct", 1): 2.0}, 3.0, 6.0)
    assert not turns


def test_what_is_written_down_is_read_again(folder):
    cache = CostCache(CPU)
    assert cache.get("a") is None
    cache.add({"a": COSTS})
    cache.add({"b": OTHER})
    again = CostCache(CPU)
    assert (again.get("a"), again.get("b"), again.get("c")) == (COSTS, OTHER, None)
    assert the_file(folder).name.startswith("routes-cpu-") and set(json.loads(the_file(folder).read_text())) == {
        "a",
        "b",
    }


@pytest.mark.parametrize(
    "text",
    [
        '{"a": {"norms": [[true, "pixels"',
        "",
        "[1, 2]",
        "null",
        '{"a": 7}',
        '{"a": {"norms": [[1, 2]], "kept": null}}',
        "\x00",
        "[" * 100_000,
        '{"a": {"norms": [], "weight_gradient": ' + "9" * 400 + ', "kept": null}}',
    ],
    ids=["torn", "empty", "a list", "null", "a number", "other fields", "binary", "brackets", "400 digits"],
)
def test_a_torn_or_foreign_file_is_measured_again(folder, text):
    CostCache(CPU).add({"a": COSTS})
    the_file(folder).write_text(text)
    cache = CostCache(CPU)
    assert cache.get("a") is None
    cache.add({"b": OTHER})
    assert (CostCache(CPU).get("a"), CostCache(CPU).get("b")) == (None, OTHER)


WRONG = {
    "no way": {"norms": [], "weight_gradient": 1e-3, "kept": None},
    "no time": {"norms": [[True, "pixels", 8, float("nan")]], "weight_gradient": 1e-3, "kept": None},
    "less than no time": {"norms": [[True, "pixels", 8, -1.0]], "weight_gradient": 1e-3, "kept": None},
    "half a sample": {"norms": [[True, "pixels", 0.5, 1e-3]], "weight_gradient": 1e-3, "kept": None},
    "less than no sample": {"norms": [[True, "pixels", -1, 1e-3]], "weight_gradient": 1e-3, "kept": None},
}


@pytest.mark.parametrize("entry", WRONG.values(), ids=WRONG)
def test_a_wrong_entry_is_dropped_and_the_others_are_kept(folder, entry):
    CostCache(CPU).add({"a": COSTS, "b": OTHER})
    entries = json.loads(the_file(folder).read_text())
    the_file(folder).write_text(json.dumps(entries | {"a": entry}))
    assert (CostCache(CPU).get("a"), CostCache(CPU).get("b")) == (None, OTHER)


def test_ways_that_a_rule_does_not_have_do_not_fit_it():
    rule, _ = conv()
    known = {(True, rule.ghosts[0], 0): 1e-3, (False, rule.instantiations[0], 4): 1e-3}
    assert Costs(known, 1e-3, None).fit(rule)
    assert not Costs({}, 1e-3, None).fit(rule)
    assert not Costs(known | {(True, "a way of nobody", 0): 1e-9}, 1e-3, None).fit(rule)


def test_a_step_goes_on_whatever_stands_in_the_file(folder):
    """Each entry is wrong in a way of its own; the norms are those of a step without a file."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    x, y = torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 3])
    loss_fn = lambda out, y: nn.functional.cross_entropy(out, y, reduction="none")  # noqa: E731

    def norms() -> torch.Tensor:
        with load_backend("bk_mixed")(model, loss_fn) as backend:
            return [backend(x, y).norms for _ in range(3)][-1]  # a second step times what is not on record

    expected = norms()
    entries = json.loads(the_file(folder).read_text())
    assert entries
    for wrong in (*WRONG.values(), {"norms": [[True, "nobody's", 0, 1e-9]], "weight_gradient": 1e-3, "kept": None}):
        the_file(folder).write_text(json.dumps(dict.fromkeys(entries, wrong)))
        torch.testing.assert_close(norms(), expected)


@pytest.mark.parametrize("what", ["folder", "file", "link"])
def test_what_others_could_have_written_is_not_used_and_said(folder, tmp_path, what):
    CostCache(CPU).add({"a": COSTS})
    if what == "link":
        elsewhere = the_file(folder).rename(tmp_path / "elsewhere")
        content = elsewhere.read_text()
        (folder / next(iter(costs._path(CPU).parts[-1:]))).symlink_to(elsewhere)
        cache = CostCache(CPU)
        cache.add({"b": OTHER})
        assert cache.get("a") is None and elsewhere.read_text() == content
        return
    (folder if what == "folder" else the_file(folder)).chmod(0o777)
    with pytest.warns(UserWarning, match="timed routes are not kept: .*others may write to"):
        cache = CostCache(CPU)
    assert cache.get("a") is None
    before = the_file(folder).read_text()
    cache.add({"b": OTHER})
    assert cache.get("b") == OTHER and the_file(folder).read_text() == before


def test_nobody_can_guess_where_a_file_is_written_before_it_has_its_name(folder, tmp_path, monkeypatch):
    CostCache(CPU).add({"a": COSTS})
    names, replace = [], Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, target: (names.append(self.name), replace(self, target))[1])
    for entry in ("b", "c"):
        CostCache(CPU).add({entry: OTHER})
    assert len(set(names)) == 2 and all(len(name) > 20 for name in names) and the_file(folder)


def test_bytes_that_are_no_text_are_measured_again(folder):
    CostCache(CPU).add({"a": COSTS})
    the_file(folder).write_bytes(b"\xff\xfe{}")
    assert CostCache(CPU).get("a") is None


def test_a_folder_that_cannot_be_written_to_is_done_without(tmp_path, monkeypatch):
    """A file stands where the folder would be: no permission is asked, root has them all."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path / "file" / "cache"))
    cache = CostCache(CPU)
    cache.add({"a": COSTS})
    assert cache.get("a") == COSTS
    assert CostCache(CPU).get("a") is None


def test_off_keeps_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in (("HOME", str(tmp_path)), ("XDG_CACHE_HOME", str(tmp_path)), ("DPBENCH_CACHE", "off")):
        monkeypatch.setenv(name, value)
    cache = CostCache(CPU)
    cache.add({"a": COSTS})
    assert cache.get("a") == COSTS and not list(tmp_path.iterdir())
    assert CostCache(CPU).get("a") is None


def test_a_cache_of_this_process_alone_leaves_the_file(folder):
    CostCache(CPU).add({"a": COSTS})
    cache = CostCache(CPU, file=False)
    assert cache.get("a") is None
    cache.add({"b": OTHER})
    assert CostCache(CPU).get("b") is None


@pytest.mark.parametrize(
    ("variables", "where"),
    [({"XDG_CACHE_HOME": "xdg"}, "xdg/dpbench"), ({}, ".cache/dpbench"), ({"DPBENCH_CACHE": ""}, ".cache/dpbench")],
)
def test_where_the_file_lies_by_default(tmp_path, monkeypatch, variables, where):
    for name in ("DPBENCH_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, str(tmp_path / value) if value else "")
    CostCache(CPU).add({"a": COSTS})
    assert len(list((tmp_path / where).glob("routes-cpu-*.json"))) == 1


def test_another_number_of_threads_is_another_file(folder):
    before = torch.get_num_threads()
    CostCache(CPU).add({"a": COSTS})
    try:
        torch.set_num_threads(before + 1)
        assert CostCache(CPU).get("a") is None
        CostCache(CPU).add({"a": OTHER})
    finally:
        torch.set_num_threads(before)
    assert CostCache(CPU).get("a") == COSTS and len(list(folder.iterdir())) == 2


def test_no_half_written_file_is_left(folder):
    CostCache(CPU).add({"a": COSTS})
    assert [path.suffix for path in folder.iterdir()] == [".json"]


def test_measured_costs_have_a_route_of_each_kind():
    rule, output = conv()
    costs = measured(rule, output)
    assert {key[0] for key in costs.norms} == {True, False}
    assert all(1 <= block <= 4 and seconds > 0 for (_, _, block), seconds in costs.norms.items())
    assert costs.weight_gradient > 0 and costs.kept is not None and costs.kept > 0
    assert {way for ghost, way, _ in costs.norms if ghost} <= set(rule.ghosts)
    assert {way for ghost, way, _ in costs.norms if not ghost} <= set(rule.instantiations)


def test_what_the_formulas_call_hopeless_is_not_timed(monkeypatch):
    """2T²(p + d) against 2Tpd, with T = 2048 and a tiny weight: minutes by Gram matrices in the worst case."""
    rule = LinearWeight(torch.randn(4, 4), torch.randn(64, 2048, 4))
    monkeypatch.setattr(type(LinearWeight.ways[0]), "norms", lambda *_: pytest.fail("timed"))
    costs = measured(rule, Spec(torch.Size((64, 2048, 4)), torch.float32))
    assert costs.best(ghost=True) is None and costs.best(ghost=False) is not None


def test_no_more_samples_are_timed_than_tell(monkeypatch):
    seen: list[int] = []
    original = LinearWeight.instantiate

    def watched(self, g, samples, way=""):
        seen.append(g.shape[0])
        return original(self, g, samples, way)

    monkeypatch.setattr(LinearWeight, "instantiate", watched)
    rule = LinearWeight(torch.randn(4, 4), torch.randn(1000, 8, 4))
    measured(rule, Spec(torch.Size((1000, 8, 4)), torch.float32))
    assert set(seen) == {64}


def test_formulas_need_no_tensors():
    rule, output = conv()
    costs = predicted(rule, output)
    assert set(costs.norms) == {(True, "pixels", 0), (True, "patches", 0), (False, "unfold", 0), (False, "grouped", 0)}
    assert all(seconds > 0 for seconds in (*costs.norms.values(), costs.weight_gradient, costs.kept))


def uses_timed() -> int:
    """How many uses of a parameter a training times."""
    calls = []
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 16, 3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "measured", lambda *given: calls.append(1) or measured(*given))
        with load_backend("bk_mixed")(model, lambda out, y: out.square().sum(1), verify=False) as backend:
            for _ in range(3):
                backend(torch.randn(4, 3, 6, 6), torch.zeros(4))
    return len(calls)


@pytest.mark.slow
def test_the_next_run_times_nothing_again(folder, monkeypatch):
    """Another process, the same device: what one has measured the other reads."""
    monkeypatch.setenv("DPBENCH_CACHE", str(folder))
    code = "from test_clipping_costs import uses_timed; print(uses_timed())"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert (int(other.stdout), uses_timed()) == (2, 0)


def test_training_needs_no_folder(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DPBENCH_CACHE", str(tmp_path / "file" / "cache"))
    model = nn.Linear(4, 3)
    with load_backend("bk_mixed")(model, lambda out, y: out.square().sum(1), verify=False) as backend:
        for _ in range(2):
            out = backend(torch.randn(5, 4), torch.zeros(5))
    assert out.norms is not None


def test_what_empties_the_caches_exceeds_what_all_cores_of_a_gpu_share(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=50 * 2**20))
    assert costs._more_than_caches(torch.device("cuda")) == 100 * 2**20
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=4 * 2**20))
    assert costs._more_than_caches(torch.device("cuda")) == costs._more_than_caches(torch.device("cpu")) == costs.CACHES
