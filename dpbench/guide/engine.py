"""The engine: train your own model with differential privacy.

## In two lines

`dpbench.PrivacyEngine` makes the steps of any torch optimizer private:

```python
import torch
from sklearn.datasets import load_digits

from dpbench import PrivacyEngine

digits = load_digits()
x, y = torch.tensor(digits.images / 8 - 1, dtype=torch.float32), torch.tensor(digits.target)
data = torch.utils.data.TensorDataset(x, y)
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

engine = PrivacyEngine(
    model, batch_size=512, sample_size=len(x), epochs=5, max_grad_norm=1.0, target_epsilon=2
)
engine.attach(optimizer)
for epoch in range(4):  # the fifth is below, by `make_step`
    for images, targets in engine.data_loader(data):
        losses = torch.nn.functional.cross_entropy(model(images), targets, reduction="none")
        optimizer.step(loss=losses)
print(engine.privacy_spent())
```

Three things differ from an ordinary loop. The engine's loader draws **Poisson samples**, which ε assumes, so the batch
size varies. The loss is **one number a record**, [B]. And there is **no `backward()`**: `optimizer.step(loss=losses)`
clips, adds noise, divides by the expected batch size, and steps.

## Parameters

| parameter | meaning |
|---|---|
| `target_epsilon`, `epochs` (or `steps`) | the engine calibrates the noise multiplier to end at this ε |
| `noise_multiplier` | used instead of `target_epsilon`; `privacy_spent()` returns the ε so far |
| `batch_size`, `sample_size` | b and n; the sample rate is b/n |
| `max_grad_norm` | the threshold C |
| `target_delta` | δ; default 1/(2n) |
| `backend` | computes the clipped sum: `dpbench.guide.backends` |
| `clip` | `"flat"`, `"automatic"`, `"per_layer"`, or your own function |
| `sampling` | Poisson, or `truncated_poisson`, `balls_and_bins`, `shuffled`, ...; ε is computed for this scheme |
| `noise` | `"gaussian"`; `"discrete"`: exact on a grid; `"banded:8"`, `"blt:3"`: cancels over steps |

The noise comes from a cipher (ChaCha20, keyed by the operating system); on a CPU with AVX-512 it costs about as much as
`torch.randn`. Your own `generator` makes a run repeatable, but not private.

## Noise that cancels

SGD's iterates are sums of gradients, so later noise may cancel earlier noise. `"banded:8"` (BandMF) cancels over 8
steps and keeps the amplification by sampling: choose it if `data_loader` may draw the batches. If records come in one
order (`sampling="one_pass"`), nothing is amplified, and `"blt:3"` (a BLT of at most 3 buffers) cancels over all steps.
Pass `steps` or `epochs` with it: its coefficients are optimal for that number. ε then protects a record whose gradient
is made zero. Both keep float64 rows, 7 for 8 bands and 3 for 3 buffers, each twice the size of the parameters.

## Adam

Adam divides by the root of the mean of squared gradients. Noise adds its variance to that mean. If the noise dominates,
all entries are divided by about the same number, and Adam becomes SGD with momentum. `AdamBC` subtracts the variance
(DP-AdamBC, arXiv:2312.14334); `decoupled_weight_decay=True` makes it a corrected AdamW:

```text
from dpbench import AdamBC

optimizer = AdamBC(model.parameters(), lr=0.002)
engine.attach(optimizer)  # the rest is as above
```

The engine sets the noise of every step, in every loop below and with every schedule. `floor` is the smallest corrected
mean; by default it follows the noise. Correlated noise and `amsgrad` are refused. The best learning rate is about half
of Adam's. Try both: on the digits AdamBC gains nothing (experiment `adam_bias`).

## Batches larger than the memory

`engine.data_loader(data, max_physical_batch_size=64)` splits a logical batch into pieces, and the optimizer steps after
the last. In your own loop `optimizer.virtual_step(loss=losses)` accumulates, and `optimizer.step(loss=losses)` ends the
batch.

## A step in one call

```python
def loss_fn(outputs, targets):
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")

step = engine.make_step(loss_fn)
for images, targets in engine.data_loader(data, pad=True):
    losses = step(images, targets)  # 0 for padding
```

Here the engine also sees the loss function, and refuses a loss that mixes records. From the third or fourth batch of a
shape, a step runs as one program if it can be captured and that is faster; on a CPU after 20 s, as capture takes some
seconds. Small models gain most: Python between the operations dominates their time. `compile=False` runs every step
eagerly; `compile=True` captures at once, and refuses a step that cannot be captured. Twelve shapes have programs. A
Poisson sample has one of many sizes, and `pad=True` pads it to one of about nine, as is the default on a GPU.

## Checkpoints, several processes, schedulers

`engine.state_dict()` and `load_state_dict` resume bit for bit. Steps undone by loading an earlier checkpoint still
count. For `DistributedDataParallel` and `fully_shard` (FSDP2) under `torchrun`, open the engine on the wrapped model.
Step learning rate schedulers when `engine.stepped` is true.

## Loops of other libraries

Install their dependencies from the repository: `pip install -e '.[integrations]'`.

**Opacus.** Change one import. `make_private`, `make_private_with_epsilon`, `get_epsilon`, the modes `hooks` and
`ghost`, `flat`, `per_layer`, `adaptive` and `automatic` clipping, the schedulers and the checkpoints stay as they are
(`dpbench.integrations.opacus`):

```text
from dpbench.integrations.opacus import BatchMemoryManager, PrivacyEngine
```

Without noise the weights equal Opacus' to 1e-5. `nn.LSTM` and tied weights work, too. Mistakes that silently break
the guarantee in Opacus raise one-line errors: a loss divided by counts of the batch (`ignore_index`, class weights), a
sum declared as a mean, mixup, gradients of several batches. `poisson_sampling=False` is accounted as passes over fixed
batches, at a larger ε. `dpbench.integrations.tutorials.from_opacus` shows the change step by step.

**transformers.** Change two names. LoRA, bf16, accumulation, checkpoints, `torchrun` and `fully_shard` stay as they
are; the logs and the model card state ε (`dpbench.integrations.huggingface`). On a GPU, or with
`PrivacyArguments(compile="auto")`, steps run as programs, as those of `make_step` do:

```text
from dpbench.integrations.huggingface import PrivacyArguments, PrivateTrainer

PrivateTrainer(model, args, train_dataset=data, privacy=PrivacyArguments(target_epsilon=3)).train()
```

**Lightning.** Pass a strategy, and return one loss a record from `training_step` (`dpbench.integrations.lightning`).
On a GPU, or with `PrivateStrategy(..., compile="auto")`, it is part of a program, including its `self.log` calls:

```text
from dpbench.integrations.lightning import PrivateStrategy

strategy = PrivateStrategy(privacy=dict(batch_size=256, max_grad_norm=1.0, target_epsilon=3))
Trainer(strategy=strategy).fit(module, loader)
```

**accelerate.** Call `prepare` before or after opening the engine. Call `optimizer.step(loss=losses)`, and no
`accelerator.backward()` (`dpbench.integrations`).

## What the engine guarantees

By construction, every step sums each record's clipped gradient once, adds noise once, and divides by a constant. Checks
find records that mix: they replace the other records, set them to NaN, and add or remove some.

| interface | checks | when |
|---|---|---|
| `make_step` | model and loss | new code and shapes; guards, and 1 step in 200, compare a program with your code |
| your own loop, accelerate, Lightning, Trainer | model, operations on batches, outputs | new shapes, 1 step in 400 |
| Lightning, Trainer | losses of a few records, together and alone | before the first step |
| Opacus | the same, and the loss's divisor | first batches, new shapes, programs, 1 step in 400 |
| `load_backend(...)` | model and loss | new graphs and shapes, 1 step in 400 |

The checks of 1 step in 400 also run in eager steps 2, 4, 8, ..., but not beside a CUDA graph, which leaves no memory
for them. If records mix, the step is refused. A step that fails releases nothing. `dpbench.engine` lists the rules
behind every interface, and `dpbench.integrations.sharp_edges` common mistakes, the result of each, and its test. **Not
detected:** what you compute outside of torch, and in your own loop losses divided by their number, or batches and
labels that `data_loader` did not yield. Divide by constants.
"""
