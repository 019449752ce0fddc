"""The benchmark's models as functions in jax, with PyTorch's parameters under PyTorch's names.

Layouts are those of jax: images [B, H, W, C], kernels of convolutions [H, W, in, out]. `to_jax` and `to_torch` convert
arrays. Linear weights stay [out, in], as a product with the transpose is one operation. The constants are PyTorch's:
padding, eps of normalisations, the form of GELU. Whether a function is the same model is checked in every trial, by its
gradients.

Functions take:
    p: name -> array, the parameters.
    array: a parameter, or its gradient.
    name: of a layer; its parameters are NAME.weight and NAME.bias.
    x: its input.
    images: [B, H, W, 3].
"""

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

with contextlib.suppress(ImportError):  # documentation is built without jax; `handed.unavailable` says how to get it
    import jax
    import jax.numpy as jnp
    import optax
    from jax import lax

EPS = 1e-5
GROUPS = 32

Parameters = dict[str, Any]


def to_jax(array: np.ndarray) -> np.ndarray:
    """PyTorch's layout to jax's: kernels [out, in, H, W] to [H, W, in, out]; other arrays unchanged."""
    return array.transpose(2, 3, 1, 0) if array.ndim == 4 else array


def to_torch(array: np.ndarray) -> np.ndarray:
    """The inverse of `to_jax`."""
    return array.transpose(3, 2, 0, 1) if array.ndim == 4 else array


def _linear(p: Parameters, name: str, x: Any) -> Any:
    """nn.Linear."""
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def _convolution(p: Parameters, name: str, x: Any, stride: int = 1) -> Any:
    """nn.Conv2d with padding of half the kernel; its bias is optional."""
    kernel = p[f"{name}.weight"]
    half = kernel.shape[0] // 2
    layout = ("NHWC", "HWIO", "NHWC")
    out = lax.conv_general_dilated(x, kernel, (stride, stride), [(half, half)] * 2, dimension_numbers=layout)
    return out + p[f"{name}.bias"] if f"{name}.bias" in p else out


def _group_norm(p: Parameters, name: str, x: Any) -> Any:
    """nn.GroupNorm in min(32, C) groups, as `dpbench.models.adapt.group_norm`."""
    size, *_, channels = x.shape
    groups = min(GROUPS, channels)
    split = x.reshape(size, -1, groups, channels // groups)
    normal = _normalised(split, (1, 3)).reshape(x.shape)
    return normal * p[f"{name}.weight"] + p[f"{name}.bias"]


def _layer_norm(p: Parameters, name: str, x: Any) -> Any:
    """nn.LayerNorm over the last dimension."""
    return _normalised(x, (-1,)) * p[f"{name}.weight"] + p[f"{name}.bias"]


def _normalised(x: Any, over: tuple[int, ...]) -> Any:
    centred = x - x.mean(over, keepdims=True)
    return centred * lax.rsqrt(jnp.square(centred).mean(over, keepdims=True) + EPS)


def _halved(x: Any) -> Any:
    """nn.MaxPool2d(2)."""
    window = (1, 2, 2, 1)
    return lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID")


def _flat(x: Any) -> Any:
    """nn.Flatten of images in PyTorch's layout."""
    return x.transpose(0, 3, 1, 2).reshape(len(x), -1)


def mlp(p: Parameters, images: Any) -> Any:
    """`dpbench.models.stacks.mlp`: logits [B, classes]."""
    x = _flat(images)
    for name in ("1", "3"):
        x = jax.nn.relu(_linear(p, name, x))
    return _linear(p, "5", x)


def cnn(p: Parameters, images: Any) -> Any:
    """`dpbench.models.stacks.cnn`: logits [B, classes]."""
    x = images
    for first, second in (("0", "2"), ("5", "7"), ("10", "12")):
        for name in (first, second):
            x = jnp.tanh(_convolution(p, name, x))
        x = _halved(x)
    return _linear(p, "18", jnp.tanh(_linear(p, "16", _flat(x))))


def resnet(p: Parameters, images: Any) -> Any:
    """`dpbench.models.resnet` with basic blocks: logits [B, classes]. Blocks with a projection halve the image."""
    x = jax.nn.relu(_group_norm(p, "stem.1", _convolution(p, "stem.0", images)))
    number = 0
    while f"blocks.{number}.conv1.weight" in p:
        at = f"blocks.{number}"
        halves = f"{at}.shortcut.0.weight" in p
        stride = 2 if halves else 1
        out = jax.nn.relu(_group_norm(p, f"{at}.norm1", _convolution(p, f"{at}.conv1", x, stride)))
        out = _group_norm(p, f"{at}.norm2", _convolution(p, f"{at}.conv2", out))
        shortcut = _group_norm(p, f"{at}.shortcut.1", _convolution(p, f"{at}.shortcut.0", x, stride)) if halves else x
        x = jax.nn.relu(out + shortcut)
        number += 1
    return _linear(p, "classifier", x.mean((1, 2)))


def gpt2(p: Parameters, tokens: Any, *, heads: int) -> Any:
    """transformers' GPT-2 with its head tied to the embedding: logits [B, T, vocabulary].

    Args:
        tokens: [B, T].
        heads: of attention.
    """
    embedding = p["transformer.wte.weight"]
    x = embedding[tokens] + p["transformer.wpe.weight"][: tokens.shape[1]]
    number = 0
    while f"transformer.h.{number}.ln_1.weight" in p:
        at = f"transformer.h.{number}"
        x = x + _attention(p, f"{at}.attn", _layer_norm(p, f"{at}.ln_1", x), heads)
        inner = jax.nn.gelu(_conv1d(p, f"{at}.mlp.c_fc", _layer_norm(p, f"{at}.ln_2", x)), approximate=True)
        x = x + _conv1d(p, f"{at}.mlp.c_proj", inner)
        number += 1
    return _layer_norm(p, "transformer.ln_f", x) @ embedding.T


def _conv1d(p: Parameters, name: str, x: Any) -> Any:
    """transformers' Conv1D, a linear layer with its weight [in, out]."""
    return x @ p[f"{name}.weight"] + p[f"{name}.bias"]


def _attention(p: Parameters, name: str, x: Any, heads: int) -> Any:
    """Causal self-attention."""
    size, length, width = x.shape
    parts = jnp.split(_conv1d(p, f"{name}.c_attn", x), 3, axis=-1)
    q, k, v = (part.reshape(size, length, heads, width // heads) for part in parts)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (width // heads) ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return _conv1d(p, f"{name}.c_proj", mixed.reshape(size, length, width))


#: Reference of a model, without options and length -> its function.
MODELS: dict[str, Callable[..., Any]] = {"mlp": mlp, "cnn": cnn, "resnet18": resnet, "transformers:gpt2": gpt2}


def losses(logits: Any, targets: Any) -> Any:
    """Cross entropy [B] of each sample, the mean over its tokens: `dpbench.models.losses`.

    Args:
        logits: [B, classes] or [B, T, vocabulary].
        targets: [B] or [B, T].
    """
    found = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return found.reshape(len(found), -1).mean(1)
