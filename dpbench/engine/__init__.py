"""The privacy engine: trains with any torch optimizer and any recordable backend under differential privacy.

from dpbench import PrivacyEngine

engine = PrivacyEngine(model, batch_size=256, sample_size=len(data), epochs=3, max_grad_norm=1.0, target_epsilon=3)
engine.attach(optimizer)
for inputs, targets in engine.data_loader(data):
    optimizer.step(loss=F.cross_entropy(model(inputs), targets, reduction="none"))
print(engine.privacy_spent())

Every interface (`optimizer.step(loss=...)`, `virtual_step`, `make_step`, Opacus' interface, Trainer, Lightning,
accelerate) ends in `PrivacyEngine.step` and `Recorder.finish`, which enforce the rules of this table:

| rule | how | when |
|---|---|---|
| The sum has the clipped gradient of each record once, and noise once. | by construction | every step |
| A recording covers exactly the parameters that required gradients in its forward pass. | else refused | every step |
| The gradient is divided by the expected batch size, never by the sampled one. | by construction | every step |
| Copies and pickles of an engine have their own keys. | by construction | always |
| The backend's gradients equal autograd's. | compared | the first batch of two records |
| The loss of a record has no gradient in other records' rows. | `sample_independence` | new graphs, 1 step in 400 |
| Loss and norm stay if the other records are NaN or replaced. | `checks.rerun` | new shapes, 1 step in 800 |
| They stay if the batch has more or fewer records. | the same | new shapes, 1 step in 800 |
| A compiled step (`make_step`) does what the caller's Python does now. | guards (`program.capture`) | every step |
| Losses and gradient are those of the caller's Python, where guards see nothing. | compared | its first two steps |
| Its losses stay so. | compared | 1 step in 200 |
| It equals the eager step and keeps the rules above. | compared, checked | when code is captured |

Gradients and replaced records are also checked in eager steps 2, 4, 8, ...: mixing that a schedule begins in step t is
found by step 2t. In these steps the batches of `data_loader` are followed, so that the rules cover what you compute
from inputs and labels before the model and in the loss. The rule on more or fewer records covers losses if the loss
function is known: in `make_step` and `load_backend`. In other loops it covers the model's outputs, and does not detect
losses that are divided by their number: divide by constants.

A loss must not read an earlier batch (a queue of outputs, a running mean of losses or labels): the earlier records
would move several sums, but be clipped in only one. `make_step` detects it in what the model and the loss function
hold. Other loops detect tensors computed from the first batches. They do not detect tensors written in place and
numbers that left torch.

A compiled program does the same to every batch of its shape. A model whose behaviour depends on values in tensors, such
as one that mixes samples once a buffer reaches some count, is detected in eager steps only, 1 in 800.

If a model's results differ from run to run (it reads an iterator, say), it is checked with NaN only, and a warning
says so. Block-diagonal attention over all records of a batch multiplies other records by 0, and is refused.

Functions take:
    engine, model, optimizer: an engine, its model without a wrapper, and an optimizer.
    batch_size, sample_size, sampling, max_batch_size, group_size, generator: as in `PrivacyEngine`.
    epochs, target_epsilon, target_delta, noise_multiplier, accountant, name, noise: as there; `name` is the noise's.
    bands, buffers, coordinates: N of banded noise and of a BLT; the number of entries of all parameters.
    settings, sensitivity, clip: of the engine; S; norms -> factors.
    steps, step, delta: logical batches that the engine has released; the number of one; δ.
    inputs, targets, losses, loss_fn: a physical batch, every tensor [B, ...]; [B]; loss_fn(outputs, targets) -> [B].
    grads, blocks, flags, layers: clipped sums by name; sums; whether parameters' sums are finite; from `batch_norms`.
    key, branch, state: 32 secret bytes; steps undone before; a part of a checkpoint.
    x, p, true, ticket, operation, args, kwargs: a tensor; a parameter; bools; a batch's; a call.
    now: do not wait until it is time.
"""

from dpbench.engine.adam import AdamBC
from dpbench.engine.engine import PrivacyEngine
from dpbench.engine.errors import Misuse, PrivacyWarning
from dpbench.engine.spent import PrivacySpent

__all__ = ["AdamBC", "Misuse", "PrivacyEngine", "PrivacySpent", "PrivacyWarning"]
