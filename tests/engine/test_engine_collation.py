"""A collator that mixes records is refused; one that moves, pads or perturbs them is not."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset, default_collate

from dpbench import Misuse, PrivacyEngine

torch.manual_seed(0)
ROWS = [torch.randn(length, 3) for length in (2, 3, 5, 4, 1, 5, 2, 3, 4, 1, 3, 2, 5, 4, 2, 1)]


def mixed_up(records):
    x, y = default_collate(records)
    share = torch.rand(()) / 2 + 0.25
    return share * x + (1 - share) * x[torch.randperm(len(x))], y


def mixed_targets(records):
    x, y = default_collate(records)
    soft = nn.functional.one_hot(y, 3).double()
    return x, (soft + soft.flip(0)) / 2


def centred(records):
    x, y = default_collate(records)
    return (x - x.mean(0)) / (1 + x.std(0)), y


def noisy(records):
    x, y = default_collate(records)
    return x + torch.randn(x.shape), y


def longest_first(records):
    rows = sorted(records, key=len, reverse=True)
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor([len(row) for row in rows])


def one_after_another(records):
    return torch.cat(records), torch.tensor([len(row) for row in records])


@pytest.fixture
def engine():
    return PrivacyEngine(nn.Linear(3, 3), batch_size=8, sample_size=16, max_grad_norm=1.0, noise_multiplier=1.0)


@pytest.mark.parametrize("collate", [mixed_up, mixed_targets, centred])
def test_a_collator_that_mixes_records_is_refused(engine, collate):
    dataset = TensorDataset(torch.randn(16, 3), torch.arange(16) % 3)
    drawn = torch.get_rng_state()
    with pytest.raises(Misuse, match=r"^expected the numbers of record \d to be its own.*collate_fn mix no records$"):
        engine.data_loader(dataset, collate_fn=collate)
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize("collate", [noisy, longest_first, one_after_another])
def test_a_collator_that_mixes_none_is_taken(engine, collate):
    dataset = TensorDataset(torch.randn(16, 3), torch.arange(16) % 3) if collate is noisy else ROWS
    engine.data_loader(dataset, collate_fn=collate, pad=True)
