"""Small models of transformers: ``tiny:HEAD/TYPE``, every model type under every common training head.

A type's default configuration is shrunk by one rule (`dpbench.models.tiny_config`). Random weights, no download. A
model that does not build, or does not accept a batch, is a `ModelError` with the reason. TYPE may be followed by
options, fields of the configuration: ``tiny:causal/mixtral?experts_implementation=eager``.

========  ==================================================  =================================================
`HEAD`    inputs                                              loss of a sample
========  ==================================================  =================================================
causal    tokens [B, 16]                                      mean cross entropy of the next token
masked    tokens [B, 16]                                      mean cross entropy of a token at each place
sequence  tokens [B, 16], the last one the end token          cross entropy of 5 classes
seq2seq   tokens [B, 16] for encoder and decoder each         mean cross entropy of a token at each place
image     pixels [B, channels, 64, 64]                        cross entropy of 5 classes
audio     wave [B, 4000] or spectrum                          cross entropy of 5 classes
ctc       the same                                            `torch.nn.functional.ctc_loss` of two labels
========  ==================================================  =================================================

Functions take:
    head: one of `HEADS`.
    model: of transformers.
"""

import inspect
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from dpbench.errors import in_words, nearest, one_of
from dpbench.models.adapt import adapt, to_fake
from dpbench.models.language import refuse_fields, without_dropout
from dpbench.models.losses import alignment_loss, classification_loss, token_loss
from dpbench.models.own import one_line
from dpbench.models.tiny_config import CLASSES, FIRST_TOKEN, FRAMES, HEADS, IMAGE, LENGTH, VOCABULARY, WAVE, shrunk
from dpbench.models.workload import ModelError, Workload
from dpbench.trials.packages import to_be_installed

MAX_PARAMETERS = 120_000_000
END = 2
"""The end token, as `dpbench.models.tiny_config.marks` sets it."""
OF_TOKENS = ("causal", "masked", "seq2seq")


def tiny_model(name: str, options: dict[str, Any], *, num_classes: int, image_size: int) -> Workload:
    """The model and its batches for HEAD/TYPE.

    Args:
        name: HEAD/TYPE.
        options: fields of its configuration.
        num_classes, image_size: ignored; tiny models have their own.

    Raises:
        ModelError: transformers is missing, no such head or type, it does not build, or does not accept a batch.
    """
    del num_classes, image_size
    with one_line(to_be_installed("transformers")):
        from transformers import AutoConfig
        from transformers.models.auto import modeling_auto as auto
    head, _, kind = name.partition("/")
    mapping, make = (getattr(auto, each) for each in HEADS[one_of("a head", head, HEADS)])
    if kind not in mapping:
        raise ModelError(f"a model type that transformers has for the head {head}", kind, nearest(kind, mapping))
    with unset_fake_temporarily() as mode, one_line(f"transformers:{name} to build from its configuration"):
        default = AutoConfig.for_model(kind)
        refuse_fields(f"tiny:{name}", default, options, "attn_implementation", "experts_implementation")
        fixed = ({"decoder_start_token_id": 0} if default.is_encoder_decoder else {}) | options
        config = shrunk(default, num_labels=CLASSES, **fixed)
        found = mapping[kind]
        config.architectures = [found if isinstance(found, str) else found[0]]
        without_dropout(config)
        with torch.device("meta"):
            count = sum(p.numel() for p in make.from_config(config).parameters())
        if count > MAX_PARAMETERS:
            raise ModelError(f"at most {MAX_PARAMETERS:,} parameters once it is made small", f"{count:,}")
        model = adapt(make.from_config(config))
        batch = _taken(name, head, model)
    return Workload(to_fake(model, mode), _loss_of(head), batch)


def _taken(name: str, head: str, model: nn.Module) -> Callable[[int], tuple[Any, Any]]:
    """batch(B) with the first form of inputs that the model accepts.

    Raises:
        ModelError: it accepts none; the reason is that of the first form.
    """
    reasons: list[str] = []
    for inputs in _forms(head, model):

        def batch(batch_size: int, inputs: Any = inputs) -> tuple[Any, Any]:
            generator = torch.Generator().manual_seed(1)
            return inputs(batch_size, generator), _targets(head, batch_size, generator)

        try:
            with torch.no_grad():
                given, wanted = batch(2)
                losses = _loss_of(head)(model(**given), wanted)
            if losses.shape == (2,):
                return batch
            reasons.append(f"losses of shape {list(losses.shape)}")
        except Exception as error:
            reasons.append(in_words(error)[:300])
    raise ModelError(f"tiny:{name} to take a batch", reasons[0] if reasons else "no form of inputs is known")


Inputs = Callable[[int, torch.Generator], dict[str, Tensor]]
"""(B, generator) -> keyword arguments of the model."""


def _forms(head: str, model: nn.Module) -> Iterator[Inputs]:
    """Possible forms of a model's inputs, the likeliest first."""
    if head == "image":
        yield from _of_images(model)
    elif head in ("audio", "ctc"):
        yield from _of_sound(model)
    else:
        yield _of_text(head, model)


def _of_text(head: str, model: nn.Module) -> Inputs:
    """Tokens; if a label is read from the last one, it is the end token; the decoder gets as many."""
    name = "input_ids" if "input_ids" in _parameters_of(model) else "inputs"

    def inputs(b: int, generator: torch.Generator) -> dict[str, Tensor]:
        given = {name: _tokens(b, generator)}
        if head == "sequence":
            given[name][:, -1] = END
        if head == "seq2seq":
            given["decoder_input_ids"] = _tokens(b, generator)
        return given

    return inputs


def _of_images(model: nn.Module) -> Iterator[Inputs]:
    """Pixels; patches, for models that do not cut them; or a token for each pixel."""
    taken: Any = _parameters_of(model)
    vision = getattr(model.config, "vision_config", model.config)
    name = next((name for name in ("pixel_values", "inputs") if name in taken), "input_ids")
    channels, size = getattr(vision, "num_channels", 3), getattr(vision, "image_size", IMAGE)
    patch = getattr(vision, "patch_size", None)
    if name == "input_ids":
        yield lambda b, generator: {name: _tokens(b, generator)}
        return
    yield _noise(name, channels, *((size, size) if isinstance(size, int) else size))
    if "spatial_shapes" in taken and isinstance(patch, int):
        side = IMAGE // patch
        patches = _noise(name, side * side, channels * patch**2)
        yield lambda b, generator: {
            **patches(b, generator),
            "pixel_attention_mask": torch.ones(b, side * side, dtype=torch.long),
            "spatial_shapes": torch.tensor([[side, side]] * b),
        }


def _of_sound(model: nn.Module) -> Iterator[Inputs]:
    """A wave, or a spectrum in one of three shapes."""
    config: Any = model.config
    name = str(model.main_input_name)
    bands = getattr(config, "num_mel_bins", getattr(getattr(config, "encoder_config", config), "num_mel_bins", 80))
    wide = getattr(config, "feature_projection_input_dim", None) or bands
    if name == "input_values":
        yield _noise(name, WAVE)
    yield _noise(name, FRAMES, wide)
    yield _noise(name, wide, FRAMES)
    yield _noise(name, wide, 2 * getattr(config, "max_source_positions", FRAMES))


def _noise(name: str, *shape: int) -> Inputs:
    """Normal values [B, *shape]."""
    return lambda b, generator: {name: torch.randn(b, *shape, generator=generator)}


def _tokens(b: int, generator: torch.Generator) -> Tensor:
    """Ids [b, LENGTH] without special tokens."""
    return torch.randint(FIRST_TOKEN, VOCABULARY, (b, LENGTH), generator=generator)


def _parameters_of(model: nn.Module) -> Container[str]:
    """The argument names of its forward method."""
    return inspect.signature(model.forward).parameters


def _targets(head: str, batch_size: int, generator: torch.Generator) -> Tensor:
    """Tokens [B, T], labels [B] of `CLASSES`, or two labels [B, 2] without the blank (0)."""
    if head in OF_TOKENS:
        return _tokens(batch_size, generator)
    if head == "ctc":
        return torch.randint(1, 4, (batch_size, 2), generator=generator)
    return torch.randint(CLASSES, (batch_size,), generator=generator)


def _loss_of(head: str) -> Callable[[Any, Any], Tensor]:
    """loss_fn(outputs, targets) -> [B] of the head; see the module's docstring."""
    return token_loss if head in OF_TOKENS else alignment_loss if head == "ctc" else classification_loss
