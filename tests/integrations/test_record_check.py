"""A record's loss is its own, whatever the collator, the labels and the padding: else training does not begin."""

import random
import warnings

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("accelerate", reason="accelerate, which transformers' Trainer needs, is not installed")
import test_huggingface
from tiny import LENGTH, WORDS, model_of
from transformers import GPT2Config, GPT2LMHeadModel

from clipping import UnsupportedModel
from dpbench import Misuse
from dpbench.engine.loader import require_own_numbers
from dpbench.integrations.huggingface import PrivateTrainer
from dpbench.integrations.record_check import look

RECORDS = 24


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("WANDB_DISABLED", "true")
    warnings.filterwarnings("ignore", message=".*can be repeated.*")


def sentence(i):
    words = torch.randint(1, WORDS, (2 + i % (LENGTH - 1),), generator=torch.Generator().manual_seed(i)).tolist()
    return {"input_ids": words, "labels": words, "kind": i % 3}


def padded(records, *, left=False, length=None):
    length = length or max(len(record["input_ids"]) for record in records)

    def one(words, fill):
        rest = [fill] * (length - len(words))
        return [*rest, *words] if left else [*words, *rest]

    return {
        "input_ids": torch.tensor([one(record["input_ids"], 0) for record in records]),
        "attention_mask": torch.tensor([one([1] * len(record["input_ids"]), 0) for record in records]),
        "labels": torch.tensor([one(record["labels"], -100) for record in records]),
    }


def trainer_of(folder, collate=padded, **options):
    privacy = {"noise_multiplier": 1.0, "generator": torch.Generator().manual_seed(0)}
    known = {"data": [sentence(i) for i in range(RECORDS)], "privacy": privacy, "more": {"data_collator": collate}}
    known |= {"per_device_train_batch_size": 6, "max_steps": 2, "remove_unused_columns": False}
    return test_huggingface.trainer_of(folder, **known, **options)


class PerToken(PrivateTrainer):
    """Divides by the tokens of the batch, as transformers does."""

    begins = 0

    def compute_loss(self, model, inputs, return_outputs=False, **options):
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1]
        labels = inputs["labels"][:, 1:]
        each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").sum(1)
        counts = (labels != -100).sum(1)
        late = self.state.global_step >= self.begins
        return each / (counts.sum() if late else counts)


def test_padding_on_the_left_moves_positions_and_is_refused(tmp_path):
    words = r"^expected the loss of record \d+ to be its own, got [\d.]+ in a batch of 6 and [\d.]+ alone: pad all"
    with pytest.raises(Misuse, match=words) as error:
        trainer_of(tmp_path, lambda records: padded(records, left=True)).train()
    assert "\n" not in str(error.value)
    fixed = trainer_of(tmp_path, lambda records: padded(records, left=True, length=LENGTH))
    fixed.train()
    assert fixed.engine.steps == 2


@pytest.mark.parametrize("options", [{}, {"bf16": True}], ids=["float32", "bf16"])
def test_padding_that_is_masked_is_taken_whatever_is_dropped(options, tmp_path):
    size = {"vocab_size": WORDS, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": LENGTH}
    model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))  # drops a tenth
    trainer = trainer_of(tmp_path, model=model, **options)
    trainer.train()
    assert trainer.engine.steps == 2
    with pytest.raises(Misuse, match="to be its own"):
        trainer_of(tmp_path, lambda records: padded(records, left=True), model=model_of("gpt2"), **options).train()


def test_a_loss_over_the_tokens_of_the_batch_is_refused(tmp_path):
    with pytest.raises(Misuse, match="divide by nothing that the batch holds"):
        trainer_of(tmp_path, cls=PerToken).train()


def test_a_loss_that_begins_to_count_the_batch_s_labels_later_is_refused(tmp_path):
    class Later(PerToken):
        begins = 1

    with pytest.raises(UnsupportedModel, match=r"samples mix: the loss or the norm .* of sample \d"):
        trainer_of(tmp_path, cls=Later).train()


def vectors(records):
    x = torch.stack([torch.randn(4, generator=torch.Generator().manual_seed(i)) for i in records])
    return {"x": x, "y": torch.tensor([i % 3 for i in records])}


def mixed_up(records):
    found, share = vectors(records), random.uniform(0.3, 0.7)
    return found | {"x": share * found["x"] + (1 - share) * found["x"].flip(0)}


def noised(records):
    found = vectors(records)
    return found | {"x": found["x"] + 0.1 * torch.randn_like(found["x"])}


def seen(collate, weights=None, model=None):
    model = torch.nn.Linear(4, 3) if model is None else model

    def losses(batch):
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none") * (
            1 if weights is None else weights(batch)
        )

    look(model.train(), range(20), 8, collate, losses)


def test_what_draws_by_chance_is_compared_with_the_same_numbers():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.5))
    before, states = torch.get_rng_state(), random.getstate()
    seen(vectors, model=model)
    seen(noised, model=model)
    with pytest.raises(Misuse, match=r"got .* in a batch of 8 and .* beside copies of itself"):
        seen(mixed_up, model=model)
    assert torch.equal(before, torch.get_rng_state()) and random.getstate() == states


def sometimes_mixed(records):
    return mixed_up(records) if random.random() < 0.5 else vectors(records)


@pytest.mark.parametrize("seed", range(6))
def test_what_mixes_half_of_its_batches_is_refused_whatever_it_draws_first(seed):
    """By the losses of records, and by the numbers that the engine's loader compares."""
    random.seed(seed)
    with pytest.raises(Misuse, match=r"beside copies of itself"):
        seen(sometimes_mixed)
    with pytest.raises(Misuse, match="numbers of record 0 to be its own"):
        require_own_numbers(range(20), 8, sometimes_mixed)


def test_a_collator_without_random_numbers_is_called_a_few_times():
    calls = []
    require_own_numbers(range(20), 8, lambda records: calls.append(records) or vectors(records))
    assert len(calls) == 3
    calls.clear()
    require_own_numbers(range(20), 8, lambda records: calls.append(records) or noised(records))
    assert len(calls) == 3 * 16


def test_labels_that_are_counted_and_inputs_that_are_centred_are_refused():
    seen(vectors, weights=lambda batch: torch.tensor([1.0, 2.0, 3.0])[batch["y"]])
    with pytest.raises(Misuse, match="to be its own"):
        seen(vectors, weights=lambda batch: 1 / batch["y"].bincount(minlength=3)[batch["y"]])
    with pytest.raises(Misuse, match="to be its own"):
        seen(lambda records: vectors(records) | {"x": vectors(records)["x"] - vectors(records)["x"].mean(0)})


def test_rounding_is_no_reason():
    """A model whose numbers in float32 are off by 1e-4, in another way for each size of batch."""

    class Rounded(torch.nn.Linear):
        def forward(self, x):
            found = super().forward(x)
            return found if found.dtype == torch.float64 else found * (1 + 1e-4 / len(x))

    model = Rounded(4, 3)
    seen(vectors, model=model)
    assert model.weight.dtype == torch.float32


@pytest.mark.parametrize("collate", [vectors, noised])
def test_a_weight_that_grows_with_each_pass_is_no_reason(collate):
    """As the annealed divergence of a variational autoencoder: a number and a buffer."""

    class Annealed(torch.nn.Linear):
        passes = 0

        def forward(self, x):
            self.passes += 1
            self.seen += 1
            return super().forward(x) * min(1, self.passes / 10) * self.seen

    model = Annealed(4, 3)
    model.register_buffer("seen", torch.zeros(()))
    seen(collate, model=model)
    assert model.passes == 0
    assert float(model.seen) == 0
    with pytest.raises(Misuse, match="to be its own"):
        seen(mixed_up, model=model)


def test_a_trainer_that_counts_its_losses_is_taken(tmp_path):
    class Annealed(PerToken):
        begins, calls = 100, 0

        def compute_loss(self, *args, **options):
            self.calls += 1
            return super().compute_loss(*args, **options) * min(1, self.calls / 10)

    trainer = trainer_of(tmp_path, lambda records: padded(records, length=LENGTH), cls=Annealed)
    trainer.train()
    assert trainer.engine.steps == 2
    assert trainer.calls < 6  # two logical batches; the checks count nothing


def test_one_record_at_a_time_has_nothing_to_look_at():
    def never(batch):
        raise AssertionError

    look(torch.nn.Linear(4, 3), range(20), 1, vectors, never)
