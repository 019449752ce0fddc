"""Builds transformers models from a configuration: random weights, no download.

The type determines the head: causal language modelling for decoders (gpt2, llama), sequence classification for encoders
(bert, roberta: types with a masked language model), image classification for vision models. The configuration is the
type's default, except for the names in `SIZES`. Dropout is off (see `dpbench.models.adapt`).
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dpbench.errors import nearest
from dpbench.models.adapt import adapt
from dpbench.models.external import Classifier, classifier
from dpbench.models.options import refuse_taken
from dpbench.models.own import one_line
from dpbench.models.workload import ModelError
from dpbench.trials.packages import to_be_installed

LENGTH = 128  # default number of tokens in a sequence
MAX_PARAMETERS = 2_000_000_000  # a default of 7 billion (llama, mistral) would kill the process

_ROBERTA = {"max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}

# name -> (model type, changes to the type's default configuration)
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2-medium": ("gpt2", {"n_layer": 24, "n_head": 16, "n_embd": 1024}),
    "gpt2-large": ("gpt2", {"n_layer": 36, "n_head": 20, "n_embd": 1280}),
    "gpt2-xl": ("gpt2", {"n_layer": 48, "n_head": 25, "n_embd": 1600}),
    "bert-large": ("bert", _LARGE),
    "roberta": ("roberta", _ROBERTA),  # the published model's exact sizes
    "roberta-large": ("roberta", _ROBERTA | _LARGE),
    # Llama's architecture in the size of GPT-2 small, 134M parameters; its default is 7B
    "llama": (
        "llama",
        {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 2048},
    ),
    "llama-block": ("llama", {"num_hidden_layers": 1, "vocab_size": 64}),  # one block of the 7B
}


@dataclass
class TextModel:
    """A model over token ids [B, length], below `vocabulary`; `classes` is None for causal language modelling."""

    model: nn.Module
    vocabulary: int
    length: int
    classes: int | None


def transformers_model(
    name: str, options: dict[str, Any], *, num_classes: int, image_size: int
) -> TextModel | Classifier:
    """Build NAME, or NAME@T for sequences of T tokens.

    Args:
        name: NAME or NAME@T.
        options: fields of its configuration.

    Raises:
        ModelError: transformers is missing or does not know the name or an option; the model is an encoder-decoder, of
            another modality, or larger than `MAX_PARAMETERS`; or it cannot read T tokens.
    """
    with one_line(to_be_installed("transformers")):
        from transformers import AutoConfig
        from transformers.models.auto import modeling_auto as auto
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    plain, at, length_text = name.partition("@")
    if at and not (length_text.isdecimal() and int(length_text) > 0):
        raise ModelError("transformers:NAME@T with a number of tokens T", name)
    kind, changes = SIZES.get(plain, (plain, {}))
    known = [*SIZES, *CONFIG_MAPPING.keys()]
    if kind not in known:
        raise ModelError("a model type that transformers knows", plain, nearest(plain, known))
    ours = {"num_labels": num_classes, "use_cache": False}
    refuse_taken(f"transformers:{plain}", options, ours)
    with one_line(f"transformers:{plain} to build from its configuration"):
        config = AutoConfig.for_model(kind, **ours, **changes | _checked(plain, AutoConfig.for_model(kind), options))
    without_dropout(config)

    heads = (auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING)
    is_encoder = type(config) in auto.MODEL_FOR_MASKED_LM_MAPPING
    causal, sequence = (type(config) in mapping for mapping in heads)
    if getattr(config, "is_encoder_decoder", False) or not (
        causal or sequence or type(config) in auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
    ):
        raise ModelError("a decoder, an encoder or an image classifier of transformers", plain)
    if not (causal or sequence):
        if at:
            raise ModelError(f"transformers:{plain} without @T, for it reads images", name)
        if hasattr(config, "image_size"):
            config.image_size = image_size
        build = auto.AutoModelForImageClassification.from_config
        _refuse_large(plain, build, config, options)
        return classifier(
            f"transformers:{plain}", lambda: build(config), num_classes=num_classes, image_size=image_size
        )
    language = causal and not (is_encoder and sequence)
    length = int(length_text) if at else LENGTH
    longest = getattr(config, "max_position_embeddings", None)
    if isinstance(longest, int) and 0 < longest < length:  # -1 means no limit
        raise ModelError(f"at most {longest} tokens for transformers:{plain}", length)
    build = (auto.AutoModelForCausalLM if language else auto.AutoModelForSequenceClassification).from_config
    _refuse_large(plain, build, config, options)
    with one_line(f"transformers:{plain} to build from its configuration"):
        model = adapt(build(config))
    return TextModel(model, config.vocab_size, length, None if language else num_classes)


def without_dropout(config: Any) -> None:
    """Set every dropout probability to 0, whatever the type's name for it (attn_pdrop, layerdrop, ...), also in parts.

    Some types read it from the configuration in each forward pass, where `remove_dropout` cannot see it.

    Args:
        config: a configuration, changed in place.
    """
    from transformers.configuration_utils import PreTrainedConfig

    for key, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            without_dropout(value)
        elif "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)


def _checked(name: str, default: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The options, checked, without begin and end tokens beyond a smaller vocabulary."""
    refuse_fields(f"transformers:{name}", default, options)
    vocabulary = options.get("vocab_size")
    marks = ("bos_token_id", "eos_token_id", "pad_token_id") if isinstance(vocabulary, int) else ()
    beyond = [key for key in marks if isinstance(getattr(default, key, None), int)]
    return {key: None for key in beyond if getattr(default, key) >= vocabulary} | options


def refuse_fields(name: str, default: Any, options: Collection[str], *more: str) -> None:
    """Refuse options that are no fields of the `default` configuration, which itself would accept any.

    Args:
        name: of the model, for the error.
        default: a configuration.
        options: names of the given options.
        more: further names to accept.

    Raises:
        ModelError: naming the first.
    """
    known = {*default.to_dict(), *default.attribute_map, *more}
    for key in options:
        if key not in known:
            raise ModelError(f"a field of {name}'s configuration", key, nearest(key, known))


def _refuse_large(name: str, build: Any, config: Any, options: dict[str, Any]) -> None:
    if name in SIZES and not options:
        return
    with torch.device("meta"), one_line(f"transformers:{name} to build from its configuration"):
        parameters = sum(p.numel() for p in build(config).parameters())
    if parameters > MAX_PARAMETERS:
        raise ModelError(
            f"at most {MAX_PARAMETERS:,} parameters (path/file.py:factory can build a smaller {name})", parameters
        )
