"""Variants of a backend, ``name:variant``: accepted wherever a backend is, and in no list."""

from __future__ import annotations

import json
import re

import pytest
import torch
from torch import nn

from clipping import BACKENDS, VARIANTS, load_backend
from dpbench.cli import main
from dpbench.errors import UsageError
from dpbench.trials.backend_classes import backend_class
from dpbench.trials.backends import validate_backend


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_has_its_name_and_strategy(name):
    cls = load_backend(name)
    assert cls.name == name and issubclass(cls, load_backend("bk_mixed"))
    with cls(nn.Linear(2, 2), lambda outputs, targets: outputs.sum(1), verify=False) as backend:
        part = name.partition(":")[2]
        assert backend.planner.strategy == ("auto" if part.startswith("without_") else part)
        out = backend(torch.ones(3, 2), torch.zeros(3))
    assert out.norms is not None and out.norms.shape == (3,)
    assert validate_backend(name) is None and backend_class(name) is cls


def test_they_are_no_backends_of_their_own(capsys):
    assert not set(VARIANTS) & set(BACKENDS)
    assert main(["list", "--format", "json"]) == 0
    listed = json.loads(capsys.readouterr().out)["backends"]
    assert [entry["name"] for entry in listed] == list(BACKENDS)


@pytest.mark.parametrize(("name", "meant"), [("bk_mixed:papr", "bk_mixed:paper"), ("gost", "ghost")])
def test_what_is_mistyped_is_told_the_nearest(name, meant):
    said = re.escape(f"got {name!r}; did you mean {meant!r}?")
    with pytest.raises(ValueError, match=rf"expected a backend, {said} \(one of .*bk_mixed:paper.*\)$"):
        load_backend(name)
    with pytest.raises(UsageError, match=rf"expected a backend, {said} \(one of .*or path/file.py:Class\)$"):
        validate_backend(name)
