"""The check of a value's structure."""

import typing

import pytest

from dpbench.trials.shapes import NUMBER, flaw


def test_an_interrupt_within_a_check_is_not_swallowed(monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    assert flaw(1, NUMBER) is None
    monkeypatch.setattr(typing._UnionGenericAlias, "__hash__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        flaw(1, NUMBER)
