"""Per-sample losses of transformers' models, from their logits.

The loss of a sequence is the mean over its own counted tokens (label not -100, and not padding, whose amount depends on
the other samples of the batch). transformers divides by the batch's tokens instead, which would make each loss depend
on the others. In a batch of equal lengths the mean of these losses is that loss.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from clipping.checks.rerun import TOLERANCE
from dpbench.engine import Misuse

IGNORED = -100
"""The label that does not count, as everywhere in transformers."""
ROUNDED = 5e-3
"""Relative difference of two float32 losses of one model under autocast to half precision, which rounding explains."""
TOKENS = ("ForMaskedLM", "ForTokenClassification")
WHOLE = (
    "ForSequenceClassification",
    "ForImageClassification",
    "ForVideoClassification",
    "ForAudioClassification",
    "ForMultipleChoice",
)
KINDS = ("ForCausalLM", "ForConditionalGeneration", "ForQuestionAnswering", *TOKENS, *WHOLE)
OWN = "override compute_loss, or give compute_loss_func, and return one loss a sample, [B]"


def per_sample_losses(model: Any, inputs: Mapping[str, Any]) -> tuple[Tensor, Any]:
    """Return ([B], the model's outputs).

    Args:
        model: of transformers, or of peft around one; not its wrapper for several processes.
        inputs: of its forward, each [B, ...], with labels.

    Raises:
        Misuse: a model whose kind of loss is unknown here, or inputs without labels.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    kind = _kind(base)
    if kind not in KINDS:
        raise Misuse(
            f"expected a model with a head of {', '.join(KINDS)}, got {type(base).__name__}, whose loss a sample is "
            f"not known: {OWN}"
        )
    names = ("start_positions", "end_positions") if kind == "ForQuestionAnswering" else ("labels",)
    missing = [name for name in names if inputs.get(name) is None]
    if missing:
        raise Misuse(
            f"expected {', '.join(names)} in the inputs of {type(base).__name__}, got {', '.join(inputs)}: {OWN}"
        )
    labels = [inputs[name] for name in names]
    rest = {name: x for name, x in inputs.items() if name not in names}
    if base.config.is_encoder_decoder and rest.get("decoder_input_ids") is None and kind == "ForConditionalGeneration":
        rest["decoder_input_ids"] = base.prepare_decoder_input_ids_from_labels(labels[0])
    outputs = model(**rest)
    if kind == "ForQuestionAnswering":
        ends = (_of(outputs, "start_logits", 0), _of(outputs, "end_logits", 1))
        return sum(_position(x, at) for x, at in zip(ends, labels, strict=True)) / 2, outputs  # type: ignore[return-value]
    logits = _wide(_of(outputs, "logits", 0))
    if kind in WHOLE:
        return _classes(logits, labels[0], base.config), outputs
    wanted = _counted(inputs, base)
    if kind in TOKENS or base.config.is_encoder_decoder:
        return _tokens(logits, wanted), outputs
    wanted = F.pad(wanted, (logits.shape[1] - wanted.shape[1], 0), value=IGNORED)  # tokens that peft puts in front
    return _tokens(logits[:, :-1], wanted[:, 1:]), outputs


def require_own_loss(model: Any, inputs: Mapping[str, Any], *, mixed: bool) -> bool:
    """Raise a Misuse if the model itself has another loss for a record than `per_sample_losses`.

    Args:
        model: in evaluation mode.
        inputs: of one record.
        mixed: the model computes in half precision, by autocast.

    Returns:
        Whether the model has a finite loss for the record; it has none without labels that count.
    """
    ours, _ = per_sample_losses(model, inputs)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    several = "labels" in inputs and inputs["labels"].dim() > 1 and _kind(base) not in WHOLE
    own = _of(model(**{**inputs, **({"labels": _counted(inputs, base)} if several else {})}), "loss", 0)
    if (
        not torch.allclose(own.double(), ours.double(), rtol=ROUNDED if mixed else TOLERANCE[own.dtype], atol=0)
        and own.isfinite()
    ):
        raise Misuse(
            f"expected the loss of {type(base).__name__} to be the standard one of its kind, got {float(own):.6g} for "
            f"a record in place of {float(ours):.6g}: give compute_loss_func, which returns one loss a sample, [B]"
        )
    return bool(own.isfinite())


def _counted(inputs: Mapping[str, Any], base: Any) -> Tensor:
    """Labels [B, T], `IGNORED` at padding."""
    labels: Tensor = inputs["labels"]
    mask = inputs.get("decoder_attention_mask" if base.config.is_encoder_decoder else "attention_mask")
    return labels if mask is None or mask.shape != labels.shape else labels.where(mask != 0, IGNORED)


def _kind(base: Any) -> str | None:
    """The kind of its loss; by its class for older language models and multiple choice, whose loss has no name."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    if any(cls.__name__ in names for cls in type(base).__mro__):
        return "ForCausalLM"
    kind: str | None = getattr(base, "loss_type", "no model of transformers")
    return next((each for each in KINDS if type(base).__name__.endswith(each)), None) if kind is None else kind


def _of(outputs: Any, name: str, place: int) -> Any:
    return outputs[name] if isinstance(outputs, Mapping) else outputs[place]


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _tokens(logits: Tensor, labels: Tensor) -> Tensor:
    """Losses [B] of logits [B, T, classes] and labels [B, T]."""
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED)
    counts = (labels != IGNORED).sum(1).clamp(min=1)
    return each.view(labels.shape).sum(1) / counts


def _classes(logits: Tensor, labels: Tensor, config: Any) -> Tensor:
    """Losses [B] of logits [B, classes], for a class, several classes or numbers, decided as transformers does."""
    kind = config.problem_type
    if kind is None:
        several = "multi_label_classification" if labels.is_floating_point() else "single_label_classification"
        kind = "regression" if config.num_labels == 1 else several
    if kind == "single_label_classification":
        return F.cross_entropy(logits, labels.view(-1), reduction="none", ignore_index=IGNORED)
    flat = logits.flatten(1)
    wanted = labels.to(flat.dtype).view(flat.shape)
    if kind == "regression":
        return F.mse_loss(flat, wanted, reduction="none").mean(1)
    return F.binary_cross_entropy_with_logits(flat, wanted, reduction="none").mean(1)


def _position(logits: Tensor, at: Tensor) -> Tensor:
    """Losses [B] of logits [B, T]; positions beyond the sequence do not count."""
    length = logits.shape[1]
    return F.cross_entropy(_wide(logits), at.view(-1).clamp(0, length), reduction="none", ignore_index=length)
