"""What an engine tells a logger: public numbers alone, one line of them a step that it has time for, and the last."""

import copy
import pickle
from functools import partial
from unittest.mock import Mock

import pytest
from attached import attached, batch, cross_entropy

from dpbench.engine import spent as module

NAMES = {"epsilon", "delta", "noise_multiplier", "clipping_threshold", "expected_batch_size"}


Board = partial(Mock, spec=["add_scalar"])
"""As torch.utils.tensorboard.SummaryWriter, whose arguments have other names than those of other boards."""


def rows(board):
    """(step, tag, value) of each call."""
    return [(step, tag, value) for tag, value, step in (call.args for call in board.add_scalar.call_args_list)]


def train(log, steps=3, scale=1.0, **changes):
    settings = {"max_grad_norm": 0.5, "noise_multiplier": 2.0, "accountant": "rdp", "log": log} | changes
    model, optimizer, engine = attached(**settings)
    for _ in range(steps):
        x, y = batch(7)
        optimizer.step(loss=cross_entropy(model(scale * x), y))
    engine.detach()
    return engine


def test_every_step_that_there_is_time_for_and_the_last(monkeypatch):
    monkeypatch.setattr(module, "_SHARE", 0)
    board, run = Board(), Mock(spec=["log"])  # of wandb
    engine = train(board)
    train(run)
    assert [step for step, tag, _ in rows(board) if tag == "privacy/epsilon"] == [1, 2, 3]
    assert {tag for _, tag, _ in rows(board)} == {f"privacy/{name}" for name in NAMES}
    last = {tag: value for step, tag, value in rows(board) if step == 3}
    spent = engine.privacy_spent()
    assert last["privacy/epsilon"] == spent.epsilon and last["privacy/delta"] == spent.delta
    assert (last["privacy/noise_multiplier"], last["privacy/clipping_threshold"]) == (2.0, 0.5)
    assert run.log.call_args.args == (last | {"privacy/step": 3},) and run.log.call_count == 3


def test_an_accountant_that_takes_long_is_asked_seldom():
    board = Board()
    train(board, steps=20)
    steps = {step for step, _, _ in rows(board)}
    assert steps >= {1, 20} and len(steps) < 20


def test_nothing_that_is_written_depends_on_a_record(monkeypatch):
    monkeypatch.setattr(module, "_SHARE", 0)
    boards = [Board(), Board()]
    for board, scale in zip(boards, (1.0, 100.0), strict=True):
        train(board, scale=scale)
    assert rows(boards[0]) == rows(boards[1]) != []


def test_copies_write_nothing():
    board = Board()
    engine = train(board)
    before = len(rows(board))
    for other in (copy.deepcopy(engine), pickle.loads(pickle.dumps(engine))):
        assert other.steps == 3
        other.detach()
    assert len(rows(board)) == before


def test_what_is_no_logger_is_refused():
    with pytest.raises(ValueError, match=r"expected log with add_scalar\(name, value, step\) or log\(dict\), got"):
        train("runs/1")
