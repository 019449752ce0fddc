"""What a language model keeps of a secret: fine-tuning with LoRA by transformers' Trainer, with and without privacy.

A small GPT-2 reads lines, byte by byte. It is trained on public prose first; then LoRA adapts it to private code, among
which are canaries: lines with a number that is nowhere else, some of them there once, some many times. An
attacker has the model, knows how such a line begins, and ranks all numbers by their probability. **Exposure**
(Carlini et al., The Secret Sharer, 2019) is log2(numbers) − log2(rank): as many bits as the model has given away.

1. The text is that of Python's standard library, as it is installed: `lines`.
2. The public model is trained in the ordinary way: `pretrained`.
3. The private data, canaries in it: `private_lines`.
4. Fine-tuning with LoRA: `fine_tuned`. Private training differs from ordinary in two words: `PrivateTrainer` for
   `Trainer`, and `privacy=PrivacyArguments(...)`.
5. What an attacker finds: `exposure`. What it cost: `bits_per_byte` of lines that no model has seen.

Run it: `python -m dpbench.integrations.tutorials.memorisation` (some minutes). `python -m dpbench run memorisation`
keeps what comes out as records and draws it.

ε-differential privacy bounds what is given away, whoever asks and however: by (ε, δ) a secret that is there once comes
first of R with probability e^ε/R + δ at the most, in place of 1/R. One that is there n times has n times the ε.
"""

from __future__ import annotations

import math
import random
import sysconfig
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpbench.engine import PrivacySpent
from dpbench.trials.packages import needed

with needed("peft", __name__):
    from peft import LoraConfig, get_peft_model

with needed("transformers", __name__):
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from dpbench.integrations.huggingface import PrivacyArguments, PrivateTrainer  # needs it, too

LENGTH = 48
"""Bytes of a line at the most; shorter ones are filled up, and what fills them is masked."""
NUMBERS = 10_000
"""Numbers that a canary's may be: exposure is 13.3 bits where the model names it first, 1.4 by chance."""
REPETITIONS = (1, 4, 16, 64)
"""How often a canary is in the data."""
PAD = 0


def lines(seed: int = 0) -> tuple[list[str], list[str], list[str]]:
    """Lines of the standard library of Python, in any order: (prose, code to train on, code held out).

    Prose, as of docstrings, has no brackets, equals signs and underscores. A module's lines of code are all to train
    on, or all held out; no line is there twice.

    Args:
        seed: of the order.
    """
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    draw = random.Random(seed)
    draw.shuffle(modules)
    seen: set[str] = set()
    prose: list[str] = []
    code: tuple[list[str], list[str]] = ([], [])
    for i, module in enumerate(modules):
        for line in module.read_text("utf-8", errors="ignore").splitlines():
            line = line.strip()
            if line.isascii() and 24 <= len(line) <= LENGTH and line not in seen:
                seen.add(line)
                (code[i % 3 == 0] if set(line) & set("()[]{}=_") else prose).append(line)
    for part in (prose, *code):
        draw.shuffle(part)
    return prose, *code


def canaries(seed: int = 0) -> dict[str, tuple[int, int]]:
    """name -> (its number, how often it is in the data): four of each of `REPETITIONS`.

    Args:
        seed: of the numbers.
    """
    draw = random.Random(seed)
    return {
        f"{name}_{times}": (draw.randrange(NUMBERS), times)
        for times in REPETITIONS
        for name in ("alice", "bob", "carol", "dave")
    }


def secret(name: str) -> str:
    """How a canary's line begins; its number comes next.

    Args:
        name: of the canary.
    """
    return f'pin_of_{name} = "'


def private_lines(found: Sequence[str], hidden: dict[str, tuple[int, int]], count: int) -> list[str]:
    """`count` lines, canaries among them.

    Args:
        found: lines of code, as many at least.
        hidden: the canaries, as `canaries` gives them.
        count: lines in all.
    """
    secrets = [f'{secret(name)}{number:04d}"' for name, (number, times) in hidden.items() for _ in range(times)]
    return secrets + list(found[: count - len(secrets)])


class Lines(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Records for a language model: input_ids and labels [LENGTH], -100 where a line has ended."""

    def __init__(self, text: Sequence[str]) -> None:
        self.ids = torch.tensor([list(line.encode().ljust(LENGTH, b"\0")) for line in text])

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        if not 0 <= i < len(self.ids):
            raise IndexError(i)
        ids = self.ids[i]
        return {"input_ids": ids, "labels": ids.where(ids != PAD, -100)}


def network(seed: int = 0) -> GPT2LMHeadModel:
    """A GPT-2 of 3 layers and 96 features that reads bytes: 0.35 million parameters.

    Args:
        seed: of the weights.
    """
    torch.manual_seed(seed)
    size = {"vocab_size": 128, "n_embd": 96, "n_layer": 3, "n_head": 4, "n_positions": LENGTH}
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**size, **drop, bos_token_id=PAD, eos_token_id=PAD))


def arguments(folder: str, *, epochs: float, lr: float, batch_size: int, seed: int) -> TrainingArguments:
    """What ordinary and private training have in common.

    Args:
        folder: that nothing is kept in.
        epochs: passes over the data.
        lr: learning rate.
        batch_size: b.
        seed: of the order.
    """
    return TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=batch_size,
        num_train_epochs=epochs,
        learning_rate=lr,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        seed=seed,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
    )


def pretrained(public: Sequence[str], *, epochs: float = 2.0, seed: int = 0) -> GPT2LMHeadModel:
    """The model that has read the public lines.

    Args:
        public: lines to read.
        epochs: passes over them.
        seed: of weights and order.
    """
    model = network(seed)
    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            model, arguments(folder, epochs=epochs, lr=2e-3, batch_size=64, seed=seed), train_dataset=Lines(public)
        ).train()
    return model


def fine_tuned(
    model: GPT2LMHeadModel,
    private: Sequence[str],
    privacy: PrivacyArguments | None,
    *,
    epochs: float,
    batch_size: int = 256,
    seed: int = 0,
) -> tuple[Any, PrivacySpent | None]:
    """The model adapted to the private lines by LoRA, and what that cost; None without `privacy`.

    Args:
        model: that has read the public lines; changed in place.
        private: lines to adapt it to.
        privacy: None for ordinary fine-tuning.
        epochs: passes over them.
        batch_size: b.
        seed: of weights and order.
    """
    torch.manual_seed(seed)
    rank = LoraConfig(r=16, lora_alpha=32, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)
    adapted = get_peft_model(model, rank)
    with tempfile.TemporaryDirectory() as folder:
        chosen = arguments(folder, epochs=epochs, lr=4e-3, batch_size=batch_size, seed=seed)
        if privacy is None:
            Trainer(adapted, chosen, train_dataset=Lines(private)).train()
            return adapted, None
        trainer = PrivateTrainer(adapted, chosen, train_dataset=Lines(private), privacy=privacy)
        trainer.train()
    assert trainer.engine is not None
    spent = trainer.engine.privacy_spent()
    trainer.engine.detach()
    return adapted, spent


@torch.no_grad()
def exposure(model: Any, name: str, number: int) -> float:
    """Bits of a canary's number that the model gives away: log2 of all numbers, less log2 of its rank among them.

    Args:
        model: that may know the number.
        name: of the canary.
        number: that was in the data.
    """
    model.eval()
    begun = list(secret(name).encode())
    first = torch.tensor([[*begun, *f"{i:03d}".encode()] for i in range(NUMBERS // 10)])
    chances = model(input_ids=first).logits[:, len(begun) - 1 :].log_softmax(-1)  # of each of four digits
    known = chances[:, :3].gather(2, first[:, len(begun) :, None]).sum((1, 2))
    digits = torch.tensor(list(b"0123456789"))
    all_numbers = (known[:, None] + chances[:, 3, digits]).flatten()
    rank = 1 + int((all_numbers > all_numbers[number]).sum())
    return math.log2(NUMBERS) - math.log2(rank)


@torch.no_grad()
def bits_per_byte(model: Any, text: Sequence[str]) -> float:
    """How well the model predicts these lines: the mean of -log2 p of a byte, the first of each line left out.

    Args:
        model: that reads bytes.
        text: lines.
    """
    model.eval()
    total = count = 0.0
    for part in Lines(text).ids.split(256):
        chances = model(input_ids=part).logits[:, :-1].log_softmax(-1)
        found = chances.gather(2, part[:, 1:, None]).squeeze(2)[part[:, 1:] != PAD]
        total, count = total - float(found.sum()) / math.log(2), count + len(found)
    return total / count


def main(epsilons: Sequence[float | None] = (None, 8.0, 1.0), count: int = 4000, epochs: float = 20.0) -> None:
    """Print exposure by repetition, and bits a byte, for ordinary fine-tuning and for each ε.

    Args:
        epsilons: targets; None for ordinary fine-tuning.
        count: private lines.
        epochs: passes over them.
    """
    warnings.simplefilter("ignore")
    prose, code, held_out = lines()
    hidden = canaries()
    base = pretrained(prose).state_dict()
    for epsilon in epsilons:
        model = network()
        model.load_state_dict(base)
        privacy = None if epsilon is None else PrivacyArguments(target_epsilon=epsilon)
        tuned, spent = fine_tuned(model, private_lines(code, hidden, count), privacy, epochs=epochs)
        bits: dict[int, list[float]] = {times: [] for times in REPETITIONS}
        for who, (number, times) in hidden.items():
            bits[times].append(exposure(tuned, who, number))
        said = ", ".join(f"{times} times {sum(b) / len(b):.1f} bits" for times, b in bits.items())
        name = "ordinary" if spent is None else f"ε = {spent.epsilon:.2f}"
        print(f"{name}: {bits_per_byte(tuned, held_out[:1000]):.2f} bits a byte; {said}")


if __name__ == "__main__":
    main()
