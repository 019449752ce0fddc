"""Backends: compute clipped sums in different ways, behind one interface.

## One call

```python
import torch

from clipping import Flat, load_backend

model, inputs, targets = torch.nn.Linear(3, 2), torch.randn(4, 3), torch.randn(4, 2)


def loss_fn(outputs, targets):
    return ((outputs - targets) ** 2).sum(1)  # one loss a record, [B]


with load_backend("bk_mixed")(model, loss_fn, clip=Flat(max_grad_norm=1.0)) as backend:
    out = backend(inputs, targets)
print(out.norms, out.losses, {name: grad.shape for name, grad in out.grads.items()})
```

`out.grads` maps each parameter to the sum of its clipped per-sample gradients, without noise or division. The inputs
are a tensor, a tuple (positional arguments) or a dict (keyword arguments). The model does not change.

## Ours

| backend | norms | sum | use it |
|---|---|---|---|
| `bk_mixed` | planned for each layer, timed on the machine | book-kept, one backward pass | first |
| `bk_ghost` | ghost in every layer that has one | book-kept, one backward pass | to compare with arXiv:2210.00038 |
| `mixed_ghost` | ghost where 2T² ≤ pd | second backward pass | to compare with arXiv:2205.10683 |
| `ghost` | ghost in every layer that has one | second backward pass | if T is small everywhere |
| `fastgradclip` | instantiated, layer by layer | second backward pass | if T is large everywhere |
| `vmap` | all gradients at once, `torch.func.vmap` | weighted sum | for small models on a GPU |
| `microbatch` | one record at a time | weighted sum | as the definition: slow, never wrong |
| `nonprivate` | none | ordinary training | as the baseline |

`dpbench.guide.algorithms` explains the terms. `bk_mixed:paper`, `bk_mixed:time` and `bk_mixed:memory` plan by the
paper's rule, by time alone and by memory alone.

## Other libraries'

`opacus_hooks`, `opacus_functorch`, `opacus_ew`, `opacus_ghost`, `private_cnn`, `fastdp` and `opake` run these libraries
behind the same call, to compare and check them. The last three need their package to be importable. `tf_microbatch:M`
clips the mean of M records, as TensorFlow Privacy does; it is labelled as another mechanism.

`jax_privacy` is no backend: it differentiates models written in jax. Experiment `training_step` times its whole step on
four models with the same weights, beside jax's own plain step, after comparing its clipped sums with the oracle's.

## Is it exact?

```sh
python -m dpbench check --model cnn --backend bk_mixed      # against the microbatch oracle
python -m dpbench check --conformance --backend bk_mixed    # hard cases: tied weights, odd shapes
python -m dpbench check --sensitivity --backend bk_mixed    # how far hard records move its sum
```

A backend raises `clipping.UnsupportedModel` (module, reason, remedy) for a model that it does not support. It never
degrades silently: `coverage` is the share of the parameters with ghost norms, instantiated gradients, or the slow
fallback. The first batch is compared with the definition in float64. `bk_mixed` is exact on 635 of 637 models of timm,
torchvision and transformers; none of 30 kinds of hard records moves its sum by more than 1.000 C.

## Which one, on my model and machine?

```sh
python -m dpbench recommend cnn --batch-size 32    # every backend: exact? time, memory, advice
python -m dpbench explain cnn                      # T, d, p and the norm's method for every parameter
```

For your own model, replace `cnn` by `mine.py:build`: `python -m dpbench template mine.py` writes the file. Built-in
models are `cnn`, `mlp`, `resnet18` to `resnet152`, `wide_resnet`, `resnext` and `vgg11` to `vgg19`; others are
`timm:NAME`, `torchvision:NAME`, `transformers:NAME` (from a config: nothing is downloaded) and `tiny:HEAD/TYPE`.

## Clipping functions

| function | factor of a record | sensitivity |
|---|---|---|
| `clipping.Flat` | min(1, C/‖g‖) | C |
| `clipping.Automatic` | C/(‖g‖ + γ) | C |
| `clipping.GlobalBound` | C/Z if ‖g‖ ≤ Z, else 0 | C |
| `clipping.PerLayer` | thresholds C/√L for each of L layers | C |

In floating point one record moves the sum by at most C(1 + η). `backend.sensitivity_bound(batch_size)` returns this
bound, and the engine scales its noise to it.

## One of your own

Write a subclass of `clipping.Backend` in a file, and pass it as `path/file.py:Class`; `check --conformance` tests it.
CONTRIBUTING.md has the recipe.
"""
