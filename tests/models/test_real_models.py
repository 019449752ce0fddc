"""Models as their libraries ship them, all parameters trained, in every tape backend: float64, beside the oracle.

Small configurations of the published architectures, so that the whole file takes a minute or two; nothing of the code
of a model is changed but what every run of dpbench changes (BatchNorm for GroupNorm, dropout off).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from marks import name_of, slow_unless
from torch import Tensor, nn

from clipping import ClippedGradient, Flat, compare, load_backend
from dpbench.conformance.cases import cross_entropy
from dpbench.models.adapt import adapt

TAPE = ["fastgradclip", "ghost", "mixed_ghost", "bk_ghost", "bk_mixed"]
BATCH, CLASSES, VOCABULARY, TOKENS = 3, 5, 31, 7
IN_FLOAT32 = 1e-6
"""Of a model that casts to float32 in its own forward pass (a norm, a softmax), whatever its parameters are."""

TRANSFORMER = {"embed_dim": 24, "depth": 2, "num_heads": 2, "patch_size": 8, "img_size": 32}


def timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        create_model = pytest.importorskip("timm").create_model
        return create_model(name, pretrained=False, num_classes=CLASSES, **options)

    return make


def torchvision_vit() -> nn.Module:
    models = pytest.importorskip("torchvision").models
    return models.VisionTransformer(32, 8, num_layers=2, num_heads=2, hidden_dim=24, mlp_dim=48, num_classes=CLASSES)


def torchvision_vgg11() -> nn.Module:
    """Its layers in their order, narrow: the published classifier alone has 120M parameters."""
    vgg = pytest.importorskip("torchvision").models.vgg
    narrow = [width if width == "M" else width // 16 for width in vgg.cfgs["A"]]
    model = vgg.VGG(vgg.make_layers(narrow), num_classes=CLASSES)
    rest = model.classifier[1:]
    model.classifier = nn.Sequential(
        nn.Linear(32 * 49, 16), *rest[:2], nn.Linear(16, 16), *rest[3:5], nn.Linear(16, CLASSES)
    )
    return model


def transformers(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        library = pytest.importorskip("transformers")
        settings = getattr(library, config)(vocab_size=VOCABULARY, use_cache=False, num_labels=CLASSES, **options)
        for key, value in settings.to_dict().items():
            if "drop" in key and isinstance(value, float):
                setattr(settings, key, 0.0)
        return getattr(library, model)(settings)

    return make


ENCODER = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 16,
}

LLAMA = {**ENCODER, "num_key_value_heads": 1}
T5 = {"d_model": 24, "d_kv": 12, "d_ff": 48, "num_layers": 2, "num_heads": 2}


def in_float64(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The same model with its RMSNorms' cast to float32 taken out: what is left of an error is then the method's."""

    def patched() -> nn.Module:
        model = make()
        norms = [m for m in model.modules() if type(m).__name__ in ("LlamaRMSNorm", "T5LayerNorm")]
        assert norms
        for norm in norms:
            norm.forward = RMSNorm(norm)
        return model

    return patched


class RMSNorm:
    def __init__(self, norm: Any) -> None:
        self.norm = norm

    def __call__(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.norm.variance_epsilon)
        return self.norm.weight * x


def images(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, 3, size, size).double(), torch.tensor([0, 1, 2])


def classified_text() -> tuple[Any, Tensor]:
    """Token 1, which RoBERTa takes for padding, at the end of one; the mask says so."""
    ids = torch.randint(2, VOCABULARY, (BATCH, TOKENS))
    mask = torch.ones_like(ids)
    ids[1, 4:], mask[1, 4:] = 1, 0
    return {"input_ids": ids, "attention_mask": mask}, torch.tensor([0, 1, 2])


def next_tokens() -> tuple[Any, Tensor]:
    ids = torch.randint(0, VOCABULARY, (BATCH, TOKENS + 1))
    ids[:, 1] = ids[:, 0]
    return {"input_ids": ids[:, :-1]}, ids[:, 1:].clone()


def translation() -> tuple[Any, Tensor]:
    source, (target, labels) = torch.randint(0, VOCABULARY, (BATCH, 4)), next_tokens()
    return {"input_ids": source, "decoder_input_ids": target["input_ids"]}, labels


def on_logits(outputs: Any, targets: Tensor) -> Tensor:
    logits = getattr(outputs, "logits", outputs)
    if targets.dim() == 1:
        return cross_entropy(logits, targets)
    return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(1)


@dataclass(frozen=True)
class Real:
    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Any, Tensor]] = lambda: images(32)
    tolerance: float = 1e-9
    by_fallback: str = "nothing"
    """Part of the names of the parameters that are allowed to take the fallback."""


MODELS = [
    Real("timm vit", timm("vit_tiny_patch16_224", **TRANSFORMER)),
    Real("timm vit with everything", timm("vit_tiny_patch16_224", **TRANSFORMER, init_values=0.1, qk_norm=True)),
    Real("timm deit", timm("deit_tiny_distilled_patch16_224", **TRANSFORMER)),
    # the biases of attention reach it as the mask of a fused operation, for which only the fallback is exact
    Real("timm beit", timm("beit_base_patch16_224", **TRANSFORMER), by_fallback="relative_position_bias_table"),
    Real(
        "timm swin",
        timm("swin_tiny_patch4_window7_224", img_size=32, embed_dim=12, depths=(2, 2), num_heads=(1, 2), window_size=4),
    ),
    Real("timm convnext", timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 12, 16, 24))),
    Real("timm resnet18", timm("resnet18", channels=(8, 8, 16, 16)), lambda: images(64)),
    Real(
        "timm resnext",
        timm("resnext50_32x4d", layers=(1, 1, 1, 1), cardinality=8, channels=(16, 16, 16, 16)),
        lambda: images(64),
    ),
    Real("timm wide resnet", timm("wide_resnet50_2", layers=(1, 1, 1, 1), channels=(8, 8, 16, 16)), lambda: images(64)),
    Real("timm densenet", timm("densenet121", growth_rate=8, block_config=(2, 2))),
    Real("timm efficientnet", timm("efficientnet_b0")),
    Real("timm mobilenetv3", timm("mobilenetv3_small_050")),
    Real("torchvision vit", torchvision_vit),
    Real("torchvision vgg11", torchvision_vgg11),
    Real(
        "gpt2, tied head",
        transformers("GPT2LMHeadModel", "GPT2Config", n_layer=2, n_head=2, n_embd=24, n_positions=16),
        next_tokens,
    ),
    Real("bert", transformers("BertForSequenceClassification", "BertConfig", **ENCODER), classified_text),
    Real("bert, masked tokens, tied head", transformers("BertForMaskedLM", "BertConfig", **ENCODER), next_tokens),
    Real("roberta", transformers("RobertaForSequenceClassification", "RobertaConfig", **ENCODER), classified_text),
    Real(
        "llama",  # its RMSNorm normalises in float32
        transformers("LlamaForCausalLM", "LlamaConfig", **LLAMA),
        next_tokens,
        IN_FLOAT32,
    ),
    Real(
        "t5, tied embeddings",  # the same, and its relative positions are biases of attention
        transformers("T5ForConditionalGeneration", "T5Config", **T5),
        translation,
        IN_FLOAT32,
        "relative_attention_bias",
    ),
    Real("llama in float64", in_float64(transformers("LlamaForCausalLM", "LlamaConfig", **LLAMA)), next_tokens),
    Real(
        "t5 in float64",
        in_float64(transformers("T5ForConditionalGeneration", "T5Config", **T5)),
        translation,
        by_fallback="relative_attention_bias",
    ),
]

#: Seconds long, and made of the blocks of mobilenetv3.
LARGE = ("timm efficientnet",)


@cache
def answer_of(real: Real) -> tuple[nn.Module, Any, Tensor, Flat, ClippedGradient]:
    """Model, batch and clipping function, C between the norms, and what the oracle says."""
    torch.manual_seed(0)
    model = adapt(real.make()).double()
    for p in model.parameters():
        if not p.any():  # LayerScale's and the bias tables' zeros would hide what multiplies them
            nn.init.normal_(p, std=0.1)
    inputs, targets = real.batch()
    with load_backend("microbatch")(model, on_logits, clip=Flat(float("inf"))) as b:
        norms = b(inputs, targets).norms
    clip = Flat(float(norms.median()))
    with load_backend("microbatch")(model, on_logits, clip=clip) as b:
        return model, inputs, targets, clip, b(inputs, targets)


def held(real: Real, backend: str, **options: Any) -> dict[str, float]:
    """The coverage, if it is exact."""
    model, inputs, targets, clip, reference = answer_of(real)
    with load_backend(backend)(model, on_logits, clip=clip, **options) as b:
        agreement = compare(b(inputs, targets), reference)
        assert agreement.within(real.tolerance), agreement
        return b.coverage


#: bk_mixed, which may take any way, and for every third model another backend in turn.
TURNS = [(real, name) for n, real in enumerate(MODELS) for name in ("bk_mixed", TAPE[n // 3 % 4])[: 1 + (n % 3 == 0)]]


@pytest.mark.parametrize(
    ("real", "backend"),
    slow_unless(lambda real, name: (real, name) in TURNS and real.name not in LARGE, product(MODELS, TAPE)),
    ids=name_of,
)
def test_exact_unmodified_and_without_a_fallback(real: Real, backend: str):
    options = {"timing": False} if backend == "bk_mixed" else {}
    coverage = held(real, backend, **options)
    sizes = {name: p.numel() for name, p in answer_of(real)[0].named_parameters()}
    allowed = sum(size for name, size in sizes.items() if real.by_fallback in name) / sum(sizes.values())
    assert sum(coverage.values()) == pytest.approx(1)
    assert coverage["fallback"] <= allowed * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("real", MODELS, ids=lambda real: real.name)
def test_exact_by_the_routes_that_are_fastest_here(real: Real):
    held(real, "bk_mixed")


@pytest.mark.parametrize("real", slow_unless(lambda real: real.name not in LARGE, MODELS), ids=name_of)
def test_every_parameter_is_trained_and_has_a_gradient(real: Real):
    """Else the test above would show nothing of it."""
    model, _, _, clip, reference = answer_of(real)
    assert all(p.requires_grad for p in model.parameters())
    assert [name for name, g in reference.grads.items() if not g.any()] == []
    assert 0 < int((reference.norms > clip.max_grad_norm).sum()) < BATCH


# Fine-tuning


class Adapted(nn.Module):
    """LoRA beside a frozen layer, as PEFT builds it: W x + B A x · scale. (arXiv:2106.09685)"""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x)) * 0.5


def low_rank() -> nn.Module:
    """A ViT whose attention and MLP have adapters; its head is trained too."""
    model = timm("vit_tiny_patch16_224", **TRANSFORMER)().requires_grad_(False)
    for block in model.blocks:
        block.attn.qkv, block.mlp.fc1 = Adapted(block.attn.qkv), Adapted(block.mlp.fc1)
    model.head.requires_grad_(True)
    return model


def bias_only() -> nn.Module:
    model = timm("vit_tiny_patch16_224", **TRANSFORMER)()
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    return model


def head_only() -> nn.Module:
    model = timm("vit_tiny_patch16_224", **TRANSFORMER)().requires_grad_(False)
    model.head.requires_grad_(True)
    return model


def prompts() -> nn.Module:
    """Only what vision transformers keep as bare parameters: class token and positions."""
    model = timm("vit_tiny_patch16_224", **TRANSFORMER)().requires_grad_(False)
    model.cls_token.requires_grad_(True)
    model.pos_embed.requires_grad_(True)
    return model


TUNED = [
    Real("low rank", low_rank),
    Real("bias only", bias_only),
    Real("head only", head_only),
    Real("class token and positions only", prompts),
]


@pytest.mark.parametrize("backend", ["ghost", "bk_mixed"])
def test_fine_tuning_is_exact(backend: str):
    for real in TUNED:
        model, _, _, _, reference = answer_of(real)
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        assert held(real, backend)["fallback"] == 0
        assert reference.grads.keys() == trained and 0 < len(trained) < len(list(model.parameters()))


# Models that nobody looked at while the rules were written


def mixer() -> nn.Module:
    pytest.importorskip("timm")
    from timm.models.mlp_mixer import MlpMixer

    return MlpMixer(CLASSES, img_size=32, patch_size=8, embed_dim=24, num_blocks=2)


UNSEEN = [
    Real("xcit", timm("xcit_nano_12_p16_224", img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=2)),
    Real("cait", timm("cait_xxs24_224", **TRANSFORMER)),
    Real("mixer", mixer),
    Real("nfnet", timm("nf_resnet26"), lambda: images(64)),
    Real("normaliser-free", timm("eca_nfnet_l0"), lambda: images(64)),
    Real("coat", timm("coat_tiny", img_size=32)),
    Real("pvt", timm("pvt_v2_b0")),
    Real("poolformer", timm("poolformer_s12")),
    Real("maxvit", timm("maxvit_rmlp_pico_rw_256", img_size=64), lambda: images(64)),
    Real("regnet", timm("regnetx_002"), lambda: images(64)),
    Real("ghostnet", timm("ghostnet_050"), lambda: images(64)),
]


@pytest.mark.slow
@pytest.mark.parametrize("backend", TAPE)
@pytest.mark.parametrize("real", UNSEEN, ids=lambda real: real.name)
def test_unseen_models_are_exact(real: Real, backend: str):
    assert sum(held(real, backend).values()) == pytest.approx(1)


# Rows in another order than the batch's, and weights in products of other layouts

EXPERTS = {**LLAMA, "num_experts_per_tok": 2, "experts_implementation": "eager"}
SMALL = {"hidden_size": 24, "num_hidden_layers": 2, "state_size": 4}


def encoded_text() -> tuple[Any, Tensor]:
    source, labels = next_tokens()
    first = torch.zeros_like(labels)
    first[:, 0] = 1
    return {**source, "global_attention_mask": first}, labels


def on_float32_too(real: Real) -> Real:
    return replace(real, tolerance=max(real.tolerance, IN_FLOAT32))


ROUTED = [
    Real("mixtral", transformers("MixtralForCausalLM", "MixtralConfig", num_local_experts=3, **EXPERTS), next_tokens),
    Real(
        "mixtral, a matrix for each token",
        transformers(
            "MixtralForCausalLM",
            "MixtralConfig",
            num_local_experts=3,
            **(EXPERTS | {"experts_implementation": "batched_mm"}),
        ),
        next_tokens,
    ),
    Real(
        "qwen3-moe",
        transformers("Qwen3MoeForCausalLM", "Qwen3MoeConfig", num_experts=3, moe_intermediate_size=12, **EXPERTS),
        next_tokens,
    ),
    Real("gpt-oss", transformers("GptOssForCausalLM", "GptOssConfig", num_local_experts=3, **EXPERTS), next_tokens),
    Real(
        "llama 4",
        transformers(
            "Llama4ForCausalLM",
            "Llama4TextConfig",
            num_local_experts=3,
            intermediate_size_mlp=24,
            head_dim=8,
            **(LLAMA | {"num_experts_per_tok": 1}),
        ),
        next_tokens,
    ),
    Real(
        "switch",
        transformers(
            "SwitchTransformersForConditionalGeneration",
            "SwitchTransformersConfig",
            num_experts=3,
            num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1,
            router_jitter_noise=0.0,
            **T5,
        ),
        translation,
        by_fallback="relative_attention_bias",
    ),
    Real(  # factors allow for norms found in float32 of gradients that add up over positions
        "mamba", transformers("MambaForCausalLM", "MambaConfig", **SMALL), next_tokens, 20 * IN_FLOAT32
    ),
    Real(
        "xlnet",
        transformers("XLNetLMHeadModel", "XLNetConfig", n_layer=2, n_head=2, d_model=24, d_inner=24),
        next_tokens,
    ),
    Real(
        "longformer, globally",
        transformers("LongformerForMaskedLM", "LongformerConfig", attention_window=4, **ENCODER),
        encoded_text,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("backend", TAPE)
@pytest.mark.parametrize("real", map(on_float32_too, ROUTED), ids=lambda real: real.name)
def test_models_that_route_rows_are_exact(real: Real, backend: str):
    coverage = held(real, backend, **({"timing": False} if backend == "bk_mixed" else {}))
    assert coverage["fallback"] <= (0.1 if real.by_fallback != "nothing" else 0)
