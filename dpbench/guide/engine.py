"""The engine: train a model of your own with differential privacy.

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
for epoch in range(4):
    for images, targets in engine.data_loader(data):
        losses = torch.nn.functional.cross_entropy(model(images), targets, reduction="none")
        optimizer.step(loss=losses)
print(engine.privacy_spent())
```

Three things differ from an ordinary loop. The loader is the engine's: it draws **Poisson samples**, on which ε is
founded, so batches differ in size. The loss is **one number a record**, [B]. And there is **no `backward()`**:
`optimizer.step(loss=losses)` clips, adds noise, divides by the expected batch size, and steps.

## What you say, and what follows

| you say | the engine finds |
|---|---|
| `target_epsilon`, `epochs` (or `steps`) | the noise multiplier that ends at ε |
| `noise_multiplier` | the ε that it has at the end: `privacy_spent()` |
| `batch_size`, `sample_size` | the sampling rate b/n |
| `max_grad_norm` | the threshold C |
| `target_delta` | δ; 1/(2n) if left out |
| `backend` | how the sum is found: `dpbench.guide.backends` |
| `clip` | `"flat"`, `"automatic"`, `"per_layer"`, or a function of your own |
| `sampling` | Poisson, or `truncated_poisson`, `balls_and_bins`, `shuffled`, ...: for each, ε is that scheme's |
| `noise` | `"gaussian"`; `"discrete"`: exact on a grid; `"banded:8"`, `"blt:3"`: cancels over steps |

Noise comes from a cipher (ChaCha20, keyed by the operating system) at the price of `torch.randn`. A `generator` of your
own makes a run repeatable, and is not private.

## Noise that cancels

SGD's iterates are sums of gradients, so later noise may cancel earlier noise. `"banded:8"` (BandMF) does so over 8
steps, and keeps the amplification by sampling: the right choice where `data_loader` may draw the batches. Where records
come in one order (`sampling="one_pass"`) nothing is amplified, and `"blt:3"` (a BLT of at most 3 buffers) cancels over
all steps. Say `steps` or `epochs` with it: its numbers are the best for that many. ε is then for a record whose
gradient is made zero. Either keeps rows in float64, 7 for 8 bands and 3 for 3 buffers, each twice the size of the
parameters.

## Adam

Adam divides by the root of the mean of squared gradients. Noise adds its variance to that mean, and where most of it is
noise, all entries are divided by about the same number: Adam is then SGD with momentum. `AdamBC` subtracts the variance
(DP-AdamBC, arXiv:2312.14334); with `decoupled_weight_decay=True` it is AdamW so corrected:

```text
from dpbench import AdamBC

optimizer = AdamBC(model.parameters(), lr=0.002)
engine.attach(optimizer)  # the rest is as above
```

The engine tells it the noise of every step, through every loop below and with every schedule. Below `floor` the mean is
not trusted; it follows the noise unless you say a number. Correlated noise and `amsgrad` are refused. Its best learning
rate is about half of Adam's. Try both: on the digits it gains nothing (experiment `adam_bias`).

## More than one batch in memory

A logical batch may be larger than the memory: `engine.data_loader(data, max_physical_batch_size=64)` hands it out in
pieces, and the step is taken with the last. In a loop of your own, `optimizer.virtual_step(loss=losses)` adds up and
`optimizer.step(loss=losses)` ends the batch.

## A step in one call

```python
def loss_fn(outputs, targets):
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")

step = engine.make_step(loss_fn)
for images, targets in engine.data_loader(data):
    losses = step(images, targets)
```

Here the engine sees the loss function, too: a loss that mixes records is refused. From the third or fourth batch of a
shape on a step runs as one program, if it can be captured and that is faster. It pays for small models, where Python
between the operations is most of the time. `compile=False` runs it eagerly, `compile=True` refuses what is no program.

## Checkpoints, several processes, schedulers

`engine.state_dict()` and `load_state_dict` go on bit for bit, and steps undone by going back still count. Models under
`DistributedDataParallel` and `fully_shard` (FSDP2) train under `torchrun`: open the engine on the wrapped model.
Learning rate schedulers step where `engine.stepped` is true.

## Loops of other libraries

Install what they need from the repository: `pip install -e '.[integrations]'`.

**Opacus.** Change one import; `make_private`, `make_private_with_epsilon`, `get_epsilon`, the modes `hooks` and
`ghost`, `flat`, `per_layer`, `adaptive` and `automatic` clipping, the schedulers and the checkpoints stay as they are
(`dpbench.integrations.opacus`):

```text
from dpbench.integrations.opacus import BatchMemoryManager, PrivacyEngine
```

Without noise the weights are Opacus' to 1e-5. `nn.LSTM` and tied weights work, too. What breaks the guarantee in
silence there is refused in one line: a loss divided by what the batch holds (`ignore_index`, class weights), a sum that
is said to be a mean, mixup, gradients of several batches. `poisson_sampling=False` is accounted as what it is, passes
over fixed batches, at a larger ε. `dpbench.integrations.tutorials.from_opacus` goes through it.

**transformers.** Two words change. LoRA, bf16, accumulation, checkpoints, `torchrun` and `fully_shard` stay as they
are; ε is in the logs and on the model card (`dpbench.integrations.huggingface`). On a GPU, or with
`PrivacyArguments(compile="auto")`, steps run as programs, as those of `make_step` do:

```text
from dpbench.integrations.huggingface import PrivacyArguments, PrivateTrainer

PrivateTrainer(model, args, train_dataset=data, privacy=PrivacyArguments(target_epsilon=3)).train()
```

**Lightning.** A strategy; `training_step` returns one loss a record (`dpbench.integrations.lightning`). On a GPU, or
with `PrivateStrategy(..., compile="auto")`, it is part of a program, which logs what `self.log` was given:

```text
from dpbench.integrations.lightning import PrivateStrategy

strategy = PrivateStrategy(privacy=dict(batch_size=256, max_grad_norm=1.0, target_epsilon=3))
Trainer(strategy=strategy).fit(module, loader)
```

**accelerate.** `prepare` comes before the engine or after it; `optimizer.step(loss=losses)` is the step, and there is
no `accelerator.backward()` (`dpbench.integrations`).

## What the engine holds to

Proved for every step: each record's clipped gradient is in the sum once, noise is added once, and a constant divides.
Whether records mix is looked at, by other records, by NaN in their place and by more or fewer of them:

| entrance | what is looked at | when |
|---|---|---|
| `make_step` | model and loss | new code and shapes; a program does the same later, or its guards see it |
| `optimizer.step`, `virtual_step`, accelerate | model, and what is made of its outputs | new shapes, 1 step of 400 |
| Trainer, Lightning, Opacus | the same, and how the loss divides | first batches, new shapes, programs, 1 step of 400 |
| `load_backend(...)` | model and loss | new graphs and shapes, 1 step of 400 |

What mixes is refused. A step that fails releases nothing. `dpbench.engine` has the rules
that every entrance ends in, and `dpbench.integrations.sharp_edges` what people do, what happens then, and the test that
holds it. One thing is yours to see to: in a loop of your own the engine sees the model, and not what the loss reads
from the labels of other records. Divide losses by constants.
"""
