"""Tiny models of transformers, and records for them."""

import torch
import torch.nn.functional as F
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

RECORDS, LENGTH, WORDS = 24, 6, 40


class Records(torch.utils.data.Dataset):
    """Sequences of different lengths, with labels: the next tokens, or a class."""

    def __init__(self, kind, count=RECORDS):
        self.kind, self.count = kind, count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        if i >= self.count:
            raise IndexError(i)
        numbers = torch.Generator().manual_seed(i)
        words = torch.randint(1, WORDS, (LENGTH,), generator=numbers)
        mask = (torch.arange(LENGTH) < 3 + i % (LENGTH - 2)).long()
        labels = words.where(mask != 0, -100) if self.kind == "gpt2" else torch.tensor(i % 3)
        return {"input_ids": words, "attention_mask": mask, "labels": labels}


def model_of(kind, dtype=torch.float64):
    torch.manual_seed(0)
    if kind == "gpt2":
        size = {"vocab_size": WORDS, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": LENGTH}
        drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2LMHeadModel(GPT2Config(**size, **drop, bos_token_id=0, eos_token_id=0)).to(dtype)
    size = {"vocab_size": WORDS, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    drop = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(**size, **drop, intermediate_size=16, max_position_embeddings=LENGTH, num_labels=3)
    return BertForSequenceClassification(config).to(dtype)


def loss_of(kind, model, record):
    """The loss of one record, by itself."""
    logits = model(input_ids=record["input_ids"][None], attention_mask=record["attention_mask"][None]).logits
    if kind == "gpt2":
        return F.cross_entropy(logits[0, :-1], record["labels"][1:], ignore_index=-100)
    return F.cross_entropy(logits, record["labels"][None])
