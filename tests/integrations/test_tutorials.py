"""The tutorials run, learn, and do what they say; what they say of weights and gradients is held to loops by hand."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from by_hand import clipped_sum
from torch import nn

from dpbench import PrivacyEngine
from dpbench.integrations.tutorials import user_level


@pytest.fixture(autouse=True)
def quiet():
    warnings.filterwarnings("ignore")


@pytest.mark.slow
def test_digits_by_lightning_learns_at_the_epsilon_that_was_asked():
    pytest.importorskip("lightning", reason="lightning is not installed")
    from dpbench.integrations.tutorials import digits

    accuracy, epsilon = digits.trained(8.0, epochs=8)
    assert accuracy > 0.6
    assert 7.9 < epsilon <= 8.0


@pytest.fixture
def from_opacus():
    pytest.importorskip("lightning", reason="lightning is not installed")
    pytest.importorskip("opacus", reason="opacus is not installed")
    from dpbench.integrations.tutorials import from_opacus

    return from_opacus


@pytest.mark.slow  # test_opacus compares the loops' weights
def test_the_loops_of_opacus_and_of_the_engine_learn_alike(from_opacus, monkeypatch):
    train, test = from_opacus.data()
    epsilons = {}
    for name, loop in from_opacus.LOOPS.items():
        torch.manual_seed(0)
        model, epsilons[name] = loop(train, 1.0)
        assert from_opacus.accuracy(model, test) > 0.6, name
    assert epsilons["one import changed"] == pytest.approx(epsilons["Opacus"], rel=0.02)
    # 6 batches of 1438 records: Opacus draws each with 1/6, which is 240 records a batch, and the engine 256 as asked
    assert 1.0 < epsilons["the engine itself"] / epsilons["Opacus"] < 1.15


def per_user(net, data, clip):
    """Σ of the users' clipped gradients, one user at a time."""
    losses = (F.cross_entropy(net(x[there.bool()]), y[there.bool()]) for x, y, there in data)
    return clipped_sum(losses, dict(net.named_parameters()), clip).values()


@pytest.mark.parametrize("backend", ["bk_mixed", "ghost", "mixed_ghost", "fastgradclip", "microbatch"])
def test_a_user_is_clipped_as_one_record(backend):
    users, inputs, targets = user_level.writers(12)
    data = user_level.grouped(users, inputs.double(), targets, 4)
    assert len(data) == 12
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    expected = per_user(net, data, 0.05)
    model = user_level.PerUser(net)
    settings = {"noise_multiplier": 0.0, "max_grad_norm": 0.05, "backend": backend}
    engine = PrivacyEngine(model, batch_size=12, sample_size=12, epochs=1, sampling="shuffled", **settings)
    before = [p.detach().clone() for p in net.parameters()]
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    engine.attach(optimizer)
    for x, y, weights in engine.data_loader(data):
        optimizer.step(loss=user_level.user_losses(model(x), y, weights))
    for p, old, total in zip(net.parameters(), before, expected, strict=True):
        torch.testing.assert_close(old - p.detach(), total / 12, rtol=1e-10, atol=1e-12)


def test_users_have_as_many_examples_as_there_are_at_the_most_k():
    users = torch.tensor([7, 3, 7, 7, 3])
    data = user_level.grouped(users, torch.arange(5.0)[:, None], torch.arange(5), 2)
    assert data.tensors[1].tolist() == [[1, 4], [0, 2]]
    assert data.tensors[2].tolist() == [[1, 1], [1, 1]]
    wide = user_level.grouped(users, torch.arange(5.0)[:, None], torch.arange(5), 3)
    assert wide.tensors[2].tolist() == [[1, 1, 0], [1, 1, 1]]
    with pytest.raises(ValueError, match="expected k of 1 or more, got 0"):
        user_level.grouped(users, torch.arange(5.0)[:, None], torch.arange(5), 0)


def test_more_of_each_user_at_the_same_price_is_learned_better(capsys):
    user_level.main((1, 8))
    said = capsys.readouterr().out.splitlines()
    one, eight = (float(line.split(": ")[1].split("%")[0]) for line in said)
    assert eight > one > 60
    assert all(line.endswith("3.00 of a user") for line in said)


@pytest.fixture
def memorisation():
    pytest.importorskip("peft", reason="peft is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from dpbench.integrations.tutorials import memorisation

    return memorisation


def test_secrets_are_in_the_private_lines_as_often_as_is_said(memorisation):
    prose, code, held_out = memorisation.lines()
    assert not set(prose) & set(code)
    assert not set(code) & set(held_out)
    hidden = memorisation.canaries()
    private = memorisation.private_lines(code, hidden, 1000)
    assert len(private) == 1000
    for name, (number, times) in hidden.items():
        assert private.count(f'{memorisation.secret(name)}{number:04d}"') == times
    records = memorisation.Lines(private)
    assert len(records) == 1000
    assert bytes(records[0]["input_ids"].tolist()).rstrip(b"\0").decode() == private[0]
    assert int((records[0]["labels"] != -100).sum()) == len(private[0])


def test_exposure_is_the_rank_among_all_numbers(memorisation, monkeypatch):
    """By asking the model for each number, one after the other; of four digits, the first is 0."""
    monkeypatch.setattr(memorisation, "NUMBERS", 1000)
    model = memorisation.network(seed=3).eval()
    begun = memorisation.secret("zoe")
    rows = torch.tensor([list(f"{begun}{number:04d}".encode()) for number in range(memorisation.NUMBERS)])
    with torch.no_grad():
        chances = torch.cat([model(input_ids=part).logits.double().log_softmax(-1) for part in rows.split(1000)])
    at = slice(len(begun), len(begun) + 4)
    of_all = chances[:, at.start - 1 : at.stop - 1].gather(2, rows[:, at, None]).sum((1, 2))
    for number in (0, 123, int(of_all.argmax()), 999):
        rank = 1 + int((of_all > of_all[number]).sum())
        expected = math.log2(memorisation.NUMBERS / rank)
        assert memorisation.exposure(model, "zoe", number) == pytest.approx(expected, abs=0.01 + 2 / rank)
