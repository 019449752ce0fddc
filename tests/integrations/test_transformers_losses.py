"""Losses of transformers' models, one a sample: those that transformers itself computes of each record alone."""

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")
import transformers

from dpbench.integrations.transformers_losses import IGNORED, per_sample_losses

B, T, WORDS = 4, 7, 32
BERT = {"vocab_size": WORDS, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
BERT |= {"intermediate_size": 16, "max_position_embeddings": T}
T5 = {"vocab_size": WORDS, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
VIT = {"image_size": 8, "patch_size": 4, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
VIT |= {"intermediate_size": 16}


def words(*ignored):
    """Labels, of which each record has others that do not count."""
    labels = torch.randint(1, WORDS, (B, T))
    for i in range(B):
        labels[i, torch.randperm(T)[: 1 + i]] = IGNORED
    return labels


def encoder(name, labels, **options):
    config = transformers.BertConfig(**BERT, **options)
    inputs = {"input_ids": torch.randint(1, WORDS, (B, T))}
    inputs |= labels if isinstance(labels, dict) else {"labels": labels}
    return getattr(transformers, f"BertFor{name}")(config), inputs


def causal():
    config = transformers.GPT2Config(vocab_size=WORDS, n_embd=8, n_layer=1, n_head=2, n_positions=T)
    return transformers.GPT2LMHeadModel(config), {"input_ids": torch.randint(1, WORDS, (B, T)), "labels": words()}


def translation():
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5, decoder_start_token_id=0))
    return model, {"input_ids": torch.randint(1, WORDS, (B, T)), "labels": words()}


def choices():
    model, inputs = encoder("MultipleChoice", torch.randint(0, 2, (B,)))
    return model, {**inputs, "input_ids": torch.randint(1, WORDS, (B, 2, T))}


def images():
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**VIT, num_labels=3))
    return model, {"pixel_values": torch.randn(B, 3, 8, 8, dtype=torch.float64), "labels": torch.randint(0, 3, (B,))}


def sequence(labels, **options):
    return encoder("SequenceClassification", labels, **options)


KINDS = {
    "causal": causal,
    "masked": lambda: encoder("MaskedLM", words()),
    "token classes": lambda: encoder("TokenClassification", words(), num_labels=WORDS),
    "classes": lambda: sequence(torch.randint(0, 3, (B,)), num_labels=3),
    "several classes": lambda: sequence(torch.randint(0, 2, (B, 3)).double(), num_labels=3),
    "regression": lambda: sequence(torch.randn(B, 1).double(), num_labels=1),
    "regressions": lambda: sequence(torch.randn(B, 2).double(), num_labels=2, problem_type="regression"),
    # the last is beyond the sequence: it does not count
    "answers": lambda: encoder(
        "QuestionAnswering",
        {"start_positions": torch.tensor([0, 2, 4, T + 5]), "end_positions": torch.tensor([1, 3, T - 1, T + 5])},
    ),
    "translation": translation,
    "choices": choices,
    "images": images,
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_loss_is_that_of_transformers_of_the_record_alone(kind):
    torch.manual_seed(0)
    model, inputs = KINDS[kind]()
    model = model.double().eval()
    losses, _ = per_sample_losses(model, inputs)
    alone = [model(**{name: x[i : i + 1] for name, x in inputs.items()}).loss for i in range(B)]
    # Of records whose every position is beyond the sequence transformers' mean is 0 / 0
    alone = [torch.zeros_like(loss) if loss.isnan() else loss for loss in alone]
    exact = 1e-6 if kind == "causal" else 1e-12  # transformers computes causal losses in float32 always
    torch.testing.assert_close(losses, torch.stack(alone).double(), rtol=exact, atol=exact)
    assert losses.requires_grad
    assert losses.shape == (B,)


def test_tokens_that_peft_puts_in_front_are_no_labels():
    peft = pytest.importorskip("peft")
    config = transformers.GPT2Config(vocab_size=WORDS, n_embd=8, n_layer=1, n_head=2, n_positions=T + 3)
    front = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), front).eval()
    batch = {"input_ids": torch.randint(1, WORDS, (B, T)), "labels": words()}
    losses, _ = per_sample_losses(model, batch)
    alone = [model(**{name: x[i : i + 1] for name, x in batch.items()}).loss for i in range(B)]
    torch.testing.assert_close(losses, torch.stack(alone))
