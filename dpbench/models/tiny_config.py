"""Shrinks any transformers configuration by one rule. Imports no torch.

Each field of a known name gets a small value (`SMALL`), also in nested configurations; lists of widths are divided,
lists of depths become ones, and special tokens beyond a small vocabulary move into it. A few types with interdependent
fields have entries in `FITTING`.

Functions take:
    default: a configuration of transformers.
"""

from collections.abc import Sequence
from typing import Any

#: Head -> the name of its mapping of model types in `transformers.models.auto.modeling_auto`, and the auto class.
HEADS = {
    "causal": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "AutoModelForCausalLM"),
    "masked": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", "AutoModelForMaskedLM"),
    "sequence": ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", "AutoModelForSequenceClassification"),
    "seq2seq": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "AutoModelForSeq2SeqLM"),
    "image": ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", "AutoModelForImageClassification"),
    "audio": ("MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES", "AutoModelForAudioClassification"),
    "ctc": ("MODEL_FOR_CTC_MAPPING_NAMES", "AutoModelForCTC"),
}
LENGTH, CLASSES, IMAGE, WAVE, FRAMES = 16, 5, 64, 4000, 64
VOCABULARY = 99
FIRST_TOKEN = 10
"""The first ordinary token; special tokens (padding, an image's place, ...) are below."""

_SMALL = (
    (
        2,
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers "
        "num_encoder_layers max_window_layers conf_num_hidden_layers num_layers_per_stack num_lstm_layers "
        "speech_encoder_layers t2u_encoder_layers t2u_decoder_layers num_key_value_heads swa_num_key_value_heads "
        "num_kv_heads kv_n_heads linear_num_key_heads num_query_groups num_experts_per_tok num_experts_per_token "
        "moe_topk moe_top_k moe_k top_k attn_layer_period expert_layer_period full_attention_interval "
        "global_attn_every_n_layers sliding_window_pattern _sliding_window_pattern no_rope_layer_interval "
        "layer_group_size num_conv_pos_embedding_groups num_self_attends_per_block",
    ),
    (
        32,
        "hidden_size d_model n_embd embed_dim dim emb_dim embedding_size embedding_dim decoder_hidden_size "
        "cross_attention_hidden_size word_embed_proj_dim attention_hidden_size input_embedding_size lru_width "
        "output_embedding_size output_hidden_size projection_dim classifier_proj_size pooler_hidden_size "
        "pooler_output_size entity_emb_size backbone_hidden_size prediction_head_size pronunciation_embed_dim "
        "shape_embed_dim d_latents out_hidden_size projection_size dim_model_base router_hidden_size "
        "hidden_size_global ple_embed_dim embedding_rank encoder_hidden_size audio_hidden_size",
    ),
    (
        64,
        "intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim moe_intermediate_size hidden_dim d_inner "
        "shared_expert_intermediate_size dff dim_ff ffn_hidden_size feed_forward_size mlp_dim n_inner "
        "expert_ffn_hidden_size intermediate_size_mlp shared_experts_intermediate_size "
        "speech_encoder_intermediate_size dense_intermediate_size moe_shared_expert_intermediate_size "
        "t2u_encoder_ffn_dim t2u_decoder_ffn_dim mamba_d_ssm",
    ),
    (
        4,
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads "
        "num_encoder_attention_heads num_decoder_attention_heads num_self_attention_heads index_n_heads "
        "num_cross_attention_heads conf_num_attention_heads swa_num_attention_heads linear_num_heads "
        "speech_encoder_attention_heads t2u_encoder_attention_heads t2u_decoder_attention_heads "
        "linear_num_value_heads num_experts n_routed_experts num_local_experts moe_num_experts zero_expert_num "
        "mamba_n_heads mamba_num_heads",
    ),
    (
        8,
        "head_dim d_kv dim_head attention_head_size d_head qk_nope_head_dim qk_rope_head_dim v_head_dim swa_head_dim "
        "index_head_dim linear_key_head_dim linear_value_head_dim kv_channels linear_head_dim query_pre_attn_scalar "
        "rotary_dim d_rel sliding_window attention_window_size local_attention sliding_window_size chunk_size "
        "mamba_chunk_size attention_chunk_size keep_window_size index_topk local_radius local_attention_window_len "
        "mamba_d_state state_size ssm_state_size mamba_dt_rank time_step_rank hidden_size_per_layer_input",
    ),
    (
        16,
        "qk_head_dim kv_lora_rank q_lora_rank o_lora_rank laurel_rank hc_lowrank adapter_rank mamba_d_head "
        "mamba_head_dim mamba_headdim num_mel_bins num_latents codevector_dim proj_codevector_dim xvector_output_dim",
    ),
    (
        1,
        "n_shared_experts num_shared_experts moe_num_shared_experts n_group topk_group num_expert_group "
        "first_k_dense_replace num_dense_layers moe_layer_start_index decoder_sparse_step encoder_sparse_step "
        "num_sparse_encoder_layers num_sparse_decoder_layers o_groups num_kv_shared_layers attn_layer_offset "
        "expert_layer_offset mamba_n_groups n_groups mamba_ngroups",
    ),
    (
        VOCABULARY,
        "vocab_size src_vocab_size tgt_vocab_size decoder_vocab_size entity_vocab_size char_vocab_size "
        "vocab_size_per_layer_input audio_vocab_size shape_vocab_size pronunciation_vocab_size unpadded_vocab_size "
        "t2u_vocab_size unit_hifi_gan_vocab_size prompt_types encoder_hash_byte_group_vocab",
    ),
    (
        128,
        "max_position_embeddings n_positions n_ctx max_source_positions max_seq_len context_length model_max_length "
        "max_encoder_position_embeddings max_decoder_position_embeddings max_target_positions "
        "original_max_position_embeddings",
    ),
    (0, "num_nextn_predict_layers"),
    (0.0, "mask_time_prob mask_feature_prob router_jitter_noise input_jitter_noise"),
    (False, "apply_spec_augment use_cache"),
    (IMAGE, "image_size input_size"),
    (FRAMES, "max_length"),
)
SMALL: dict[str, Any] = {name: value for value, names in _SMALL for name in names.split()}
"""Field of a configuration -> its value; ignored if the configuration has no such number."""

NEEDED = ("vocab_size", "num_experts_per_tok", "n_routed_experts", "n_shared_experts", "num_key_value_heads")
"""Fields that are set even if the default is None, since no model builds from None."""

#: Lists with a number for each stage.
WIDTHS = {
    "hidden_sizes",
    "conv_dim",
    "embed_dims",
    "tdnn_dim",
    "stem_channels",
    "neck_hidden_sizes",
    "sscp_conv_channel_size",
}
DEPTHS = {
    "depths",
    "num_block_repeats",
    "depth",
    "n_attn_blocks",
    "stage_num_blocks",
    "stage_numb_of_layers",
    "block_repeats",
}

WINDOWS = {"depths": [2, 2], "num_heads": [3, 6], "window_size": 4}
HYBRID = {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "hybrid"]}
HYBRID |= {"attention_head_dim": 16, "attention_hidden_size": 64}
EXPERTS: dict[str, Any] = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64}
HASHED: dict[str, Any] = {"local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "num_buckets": 2}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
#: Type -> fields that depend on each other, or lists of another kind.
FITTING: dict[str, dict[str, Any]] = {
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "bit": {"num_groups": 4},
    "cohere_compass_text": {"layer_types": ["full_attention"] * 2, "rope_parameters": {"full_attention": ROPE}},
    "cvt": {"depth": [1, 2, 3]},
    "donut-swin": WINDOWS,
    "efficientnet": {"hidden_dim": 320, "width_coefficient": 0.25, "depth_coefficient": 0.25},
    "flint": {"mlp_only_layers": []},
    "funnel": {"block_sizes": [1, 1], "block_repeats": [1, 1], "num_decoder_layers": 1},
    "gemma4_text": EXPERTS | {"num_kv_shared_layers": 0, "enable_moe_block": True},
    "gemma4_unified_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "hgnet_v2": {"hidden_sizes": (128, 512, 1024, 2048)},
    "hunyuan_v1_dense": {"rope_parameters": ROPE, "head_dim": 8},
    "hunyuan_v1_moe": {"rope_parameters": ROPE, "head_dim": 8},
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8},
    "led": {"attention_window": [4, 4]},
    "lilt": {"hidden_size": 48},
    "longformer": {"attention_window": [4, 4]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "reformer": HASHED | {"attn_layers": ["local", "lsh"], "axial_pos_shape": [4, 4], "axial_pos_embds_dim": [16, 16]},
    "ministral": {"head_dim": 8},
    "mistral4": {"head_dim": 16},
    "neomme": {"head_dim": 16},
    "swin": WINDOWS,
    "textnet": {"stem_out_channels": 16, "image_size": IMAGE},
    "xmod": {"default_language": "en_XX"},
    "zamba": HYBRID,
    "zamba2": HYBRID | {"n_mamba_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}


def shrunk(default: Any, **fixed: Any) -> Any:
    """The configuration of the same type with small fields.

    Args:
        fixed: field -> value, used as given.
    """
    return type(default)(**_changes(default) | fixed)


def _changes(default: Any) -> dict[str, Any]:
    """Changes to `default`: field -> value."""
    from transformers.configuration_utils import PreTrainedConfig

    fields = vars(default)
    found: dict[str, Any] = {}
    for key, value in fields.items():
        if isinstance(value, PreTrainedConfig):
            found[key] = shrunk(value)
        elif (value is None and key in NEEDED) or (isinstance(value, (int, float)) and key in SMALL):
            found[key] = SMALL[key]
        elif isinstance(value, (list, tuple)) and value and all(isinstance(v, int) for v in value):
            if key in WIDTHS:
                found[key] = type(value)(divided(value))
            elif key in DEPTHS:
                found[key] = type(value)(1 for _ in value)
    heads = fields.get("num_attention_heads", fields.get("num_heads"))
    if fields.get("num_key_value_heads") == heads and "num_key_value_heads" in found:
        found["num_key_value_heads"] = SMALL["num_attention_heads"]
    if isinstance(heads, (list, tuple)) and "embed_dim" in found:
        found["embed_dim"] = 8 * heads[0]
    return found | marks(default) | FITTING.get(default.model_type, {})


def divided(widths: Sequence[int]) -> list[int]:
    """Widths in the same proportion, as multiples of 8 with the smallest at least 16, if possible.

    Args:
        widths: of the stages of a model.
    """
    fits = (d for d in (16, 8, 4, 2) if min(widths) // d >= 16 and all(w % (8 * d) == 0 for w in widths))
    by = next(fits, 1)
    return [w // by for w in widths]


def marks(default: Any) -> dict[str, Any]:
    """Special tokens: padding, begin, end are 0, 1, 2; the others follow from 3 on, below `FIRST_TOKEN`."""
    usual = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    found = {key: value for key, value in usual.items() if hasattr(default, key)}
    others = [k for k, v in vars(default).items() if k.endswith(("_token_id", "_token_index")) and isinstance(v, int)]
    rest = sorted(set(others) - set(usual))
    return found | {key: 3 + i % (FIRST_TOKEN - 3) for i, key in enumerate(rest)}
