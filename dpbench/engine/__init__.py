"""The privacy engine: any torch optimizer made private, by any backend that can record.

from dpbench import PrivacyEngine

engine = PrivacyEngine(model, batch_size=256, sample_size=len(data), epochs=3, max_grad_norm=1.0, target_epsilon=3)
engine.attach(optimizer)
for inputs, targets in engine.data_loader(data):
    optimizer.step(loss=F.cross_entropy(model(inputs), targets, reduction="none"))
print(engine.privacy_spent())

Every entrance (`optimizer.step(loss=...)`, `virtual_step`, `make_step`, Opacus' interface, Trainer, Lightning,
accelerate) ends in `PrivacyEngine.step` and `Recorder.finish`, which hold the rules for all of them:

| rule | how | when |
|---|---|---|
| The sum has the clipped gradient of each record once, and noise once. | by construction | every step |
| A recording is of the parameters that required gradients in its forward pass. | refused otherwise | every step |
| The expected batch size divides, never the sampled one. | by construction | every step |
| Copies and pickles of an engine have keys of their own. | by construction | always |
| A backend's gradients are autograd's. | compared | the first batch of two records |
| A record's loss has no gradient in the rows of others. | `sample_independence` | new graphs, 1 step of 400 |
| Loss and norm stay where the others are NaN, or other ones. | `checks.second_look` | new shapes, 1 step of 800 |
| They stay where there are records more or less. | the same | new shapes, 1 step of 800 |
| A compiled step (`make_step`) does what the caller's Python does now. | guards (`program.capture`) | every step |
| It is the eager step, and keeps the rules above. | compared, looked at | when code is captured |

The last rule holds for losses where the loss function is known: in `make_step` and `load_backend`, and in Trainer by a
look of its own. In a loop of the caller's it holds for the model's outputs. There losses that are divided by their
number, or by what labels add up to, are the caller's to see to: divide by constants.

Steps that run as programs are not looked at again: a program does the same to every batch of its shape. What numbers in
tensors decide is part of it, so a model that mixes samples once a buffer has counted so far is found in eager steps
alone, 1 in 800.

What differs from one run to the next by itself (a generator of the model's own, say) is looked at by NaN alone,
with a warning. A block-diagonal attention over all records of a batch at once multiplies others by 0, and is refused.
"""

from __future__ import annotations

from dpbench.engine.adam import AdamBC
from dpbench.engine.engine import PrivacyEngine
from dpbench.engine.errors import Misuse, PrivacyWarning
from dpbench.engine.spent import PrivacySpent

__all__ = ["AdamBC", "Misuse", "PrivacyEngine", "PrivacySpent", "PrivacyWarning"]
