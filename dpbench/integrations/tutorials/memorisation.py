"""How a language model memorises a secret: LoRA fine-tuning by transformers' Trainer, with and without privacy.

A small GPT-2 reads lines, byte by byte. It trains on public prose first; then LoRA adapts it to private code with
canaries: lines with a number that appears nowhere else, some once and some many times. An attacker has the model, knows
how such a line begins, and ranks all numbers by their probability. **Exposure** (Carlini et al., The Secret Sharer,
2019) is log2(numbers) − log2(rank): the bits that the model gives away.

1. The text is the installed Python standard library: `lines`.
2. The public model is trained without privacy: `pretrained`.
3. The private data include the canaries: `private_lines`.
4. Fine-tuning with LoRA: `fine_tuned`. Private training differs in two places: `PrivateTrainer` instead of `Trainer`,
   and `privacy=PrivacyArguments(...)`.
5. The attacker's gain: `exposure`. The cost: `bits_per_byte` of unseen lines.

Run it: `python -m dpbench.integrations.tutorials.memorisation` (some minutes). `python -m dpbench run memorisation`
records and draws the results.

ε-differential privacy bounds any attacker's gain. Under (ε, δ) a secret that appears once comes first of R with
probability at most e^ε/R + δ, instead of 1/R. A secret that appears n times has n times the ε.

Functions take:
    seed: of the weights, the order of the data, and the canaries' numbers.
    epochs, batch_size, lr: passes over the data, b, and the learning rate.
    public, private: lines to train on, and to adapt to.
    model, name, number: GPT-2, adapted or not; a canary's name, and its number.
"""

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
"""Largest number of bytes of a line; shorter lines are padded, and padding is masked."""
NUMBERS = 10_000
"""Possible numbers of a canary: exposure is 13.3 bits if the model ranks it first, 1.4 by chance."""
REPETITIONS = (1, 4, 16, 64)
"""How often a canary appears in the data."""
PAD = 0


def lines(seed: int = 0) -> tuple[list[str], list[str], list[str]]:
    """Lines of Python's standard library in random order: (prose, code to train on, held-out code).

    Prose, as in docstrings, has no brackets, equals signs or underscores. All code lines of a module are in the same
    part, and no line appears twice.
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
    """name -> (its number, how often it appears): four of each of `REPETITIONS`."""
    draw = random.Random(seed)
    return {
        f"{name}_{times}": (draw.randrange(NUMBERS), times)
        for times in REPETITIONS
        for name in ("alice", "bob", "carol", "dave")
    }


def secret(name: str) -> str:
    """The beginning of a canary's line; its number follows."""
    return f'pin_of_{name} = "'


def private_lines(found: Sequence[str], hidden: dict[str, tuple[int, int]], count: int) -> list[str]:
    """`count` lines, with the canaries.

    Args:
        found: lines of code, at least `count`.
        hidden: from `canaries`.
        count: lines in all.
    """
    secrets = [f'{secret(name)}{number:04d}"' for name, (number, times) in hidden.items() for _ in range(times)]
    return secrets + list(found[: count - len(secrets)])


class Lines(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Records for a language model: input_ids and labels [LENGTH], with label -100 after the line's end."""

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
    """A GPT-2 of 3 layers and 96 features that reads bytes: 0.35 million parameters."""
    torch.manual_seed(seed)
    size = {"vocab_size": 128, "n_embd": 96, "n_layer": 3, "n_head": 4, "n_positions": LENGTH}
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**size, **drop, bos_token_id=PAD, eos_token_id=PAD))


def arguments(folder: str, *, epochs: float, lr: float, batch_size: int, seed: int) -> TrainingArguments:
    """Settings of both ordinary and private training.

    Args:
        folder: where nothing is kept.
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
    """Train a model on the public lines."""
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
    """Adapt the model in place to the private lines by LoRA; return it and its spent privacy.

    Args:
        privacy: None for ordinary fine-tuning.
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
    return adapted, trainer.engine.privacy_spent()


@torch.no_grad()
def exposure(model: Any, name: str, number: int) -> float:
    """Bits of a canary's number that the model gives away: log2 of all numbers, less log2 of its rank among them."""
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
    """The mean of -log2 p of a byte, without the first of each line.

    Args:
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
