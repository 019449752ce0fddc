"""Per-sample losses without reduction: (outputs, targets) -> [B].

Functions take:
    targets: labels or tokens, int64.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def logits_of(outputs: Any) -> Tensor:
    """The logits in transformers' output objects: usually of this name, else the first field."""
    found = getattr(outputs, "logits", outputs)
    return found if isinstance(found, Tensor) else found[0]


def classification_loss(outputs: Any, targets: Tensor) -> Tensor:
    """Cross entropy of each sample: logits [B, K] (or an object with `logits`), labels [B] -> [B]."""
    return F.cross_entropy(logits_of(outputs), targets, reduction="none")


def token_loss(outputs: Any, targets: Tensor) -> Tensor:
    """Mean cross entropy over the tokens of each sample: logits [B, T, V], tokens [B, T] -> [B].

    The mean, not the sum, as in ordinary training: the clipping norm then does not depend on T. If logits and tokens
    differ in length, only positions with both count.
    """
    logits = logits_of(outputs)
    if logits.shape[1] != targets.shape[1]:
        length = min(logits.shape[1], targets.shape[1])
        logits, targets = logits[:, :length], targets[:, :length]
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.reshape(targets.shape).mean(1)


def alignment_loss(outputs: Any, targets: Tensor) -> Tensor:
    """-log of the probability of labels under every alignment: logits [B, T, V], labels [B, L] above 0, the blank."""
    logits = logits_of(outputs)
    frames, labels = (torch.full((len(logits),), length) for length in (logits.shape[1], targets.shape[1]))
    return F.ctc_loss(F.log_softmax(logits, -1).transpose(0, 1), targets, frames, labels, reduction="none")
