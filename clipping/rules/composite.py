"""Composite torch functions, run as their parts, so that the tape sees each operation."""

import torch
import torch.nn.functional as F
from torch import Tensor

from clipping.rules.base import Refused


def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """torch.nn.functional.multi_head_attention_forward: [T, B, E] in, [T, B, E] out, computed with the batch first."""
    given = [x for x in (bias_k, bias_v, static_k, static_v) if x is not None]
    if query.dim() != 3 or add_zero_attn or given:
        raise Refused(
            "unbatched input, add_bias_kv, add_zero_attn and static keys have no rule",
            "construct nn.MultiheadAttention without them",
        )
    same = key is query and value is query
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    if not use_separate_proj_weight and same:
        q, k, v = F.linear(q, in_proj_weight, in_proj_bias).chunk(3, dim=-1)  # type: ignore[arg-type]
    else:
        weights = (q_proj_weight, k_proj_weight, v_proj_weight)
        if not use_separate_proj_weight:
            weights = in_proj_weight.chunk(3)  # type: ignore[union-attr, assignment]
        biases = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
        q, k, v = (F.linear(x, w, b) for x, w, b in zip((q, k, v), weights, biases, strict=True))  # type: ignore[arg-type]
    q, k, v = (x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in (q, k, v))
    mask = _merged_mask(attn_mask, key_padding_mask, q)
    if need_weights:
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        weights_out = torch.softmax(scores if mask is None else scores + mask, dim=-1)
        weights_out = F.dropout(weights_out, dropout_p, training)
        context = weights_out @ v
        attention = weights_out.mean(1) if average_attn_weights else weights_out
    else:
        causal = is_causal and mask is None
        context = F.scaled_dot_product_attention(q, k, v, mask, dropout_p if training else 0.0, causal)
        attention = None
    out = F.linear(context.transpose(1, 2).flatten(2), out_proj_weight, out_proj_bias)
    return out.transpose(0, 1).contiguous(), attention  # in torch's layout: dropout draws in memory order


def _merged_mask(attn_mask: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
    """Merge a float or boolean attention mask and a padding mask [B, S] to an additive [B or 1, heads or 1, T, S]."""
    merged = None
    if attn_mask is not None:
        additive = _additive(attn_mask, q)
        merged = additive if additive.dim() == 2 else additive.unflatten(0, (q.shape[0], -1))
    if padding is not None:
        rows = _additive(padding, q)[:, None, None, :]
        merged = rows if merged is None else merged + rows
    return merged


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, float("-inf"))


def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch.nn.functional.bilinear as a linear layer of all products of two features."""
    return F.linear((input1[..., :, None] * input2[..., None, :]).flatten(-2), weight.flatten(1), bias)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention with a mask made of parameters (a relative position bias).

    Fused kernels compute no gradient of the mask; torch, too, uses this path then.
    """
    if attn_mask is None or is_causal:  # torch refuses both together
        return NotImplemented
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
    weights = torch.softmax(scores + attn_mask, dim=-1)
    return F.dropout(weights, dropout_p) @ value
