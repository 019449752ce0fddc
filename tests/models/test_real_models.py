"""Models as their libraries ship them, small, in every tape backend: exact beside autograd, and without a fallback.

Nothing of a model's code is changed but what every run of dpbench changes (BatchNorm for GroupNorm, dropout off).
`python -m dpbench run coverage` does the same for every family of timm, torchvision and transformers.
"""

import pytest
from marks import slow_unless
from torch import Tensor, nn

from clipping import Flat, compare, load_backend
from dpbench.conformance.coverage import CoverageTrial
from dpbench.measure.coverage import run
from dpbench.models.loading import load_workload

TAPE = ("fastgradclip", "ghost", "mixed_ghost", "bk_ghost", "bk_mixed")
SHAPE = "embed_dim=24&depth=2&num_heads=2&patch_size=8"
VIT = f"timm:vit_tiny_patch16_224?{SHAPE}"
EAGER = "experts_implementation=eager"
#: Reference -> pixels; None for text.
QUICK = {
    VIT: 32,
    f"timm:vit_tiny_patch16_224?{SHAPE}&init_values=0.1&qk_norm=true": 32,
    f"timm:deit_tiny_distilled_patch16_224?{SHAPE}": 32,
    f"timm:beit_base_patch16_224?{SHAPE}": 32,
    "timm:swin_tiny_patch4_window7_224?embed_dim=12&depths=(2,2)&num_heads=(1,2)&window_size=4": 32,
    "timm:convnext_atto?depths=(1,1,1,1)&dims=(8,12,16,24)": 32,
    "timm:resnet18?channels=(8,8,16,16)": 64,
    "timm:resnext50_32x4d?layers=(1,1,1,1)&cardinality=8&channels=(16,16,16,16)": 64,
    "timm:densenet121?growth_rate=8&block_config=(2,2)": 32,
    "timm:mobilenetv3_small_050": 32,
    "torchvision:squeezenet1_0": 32,
    "tiny:causal/gpt2": None,
    "tiny:sequence/bert": None,
    "tiny:masked/bert": None,
    "tiny:sequence/roberta": None,
    "tiny:causal/llama": None,
    "tiny:seq2seq/t5": None,
}
#: Models that nobody looked at while the rules were written, and models that route rows.
SLOW = {
    f"timm:xcit_nano_12_p16_224?{SHAPE}": 32,
    f"timm:cait_xxs24_224?{SHAPE}": 32,
    "timm:nf_resnet26": 64,
    "timm:pvt_v2_b0": 32,
    "timm:maxvit_rmlp_pico_rw_256": 64,
    "timm:ghostnet_050": 64,
    f"tiny:causal/mixtral?{EAGER}": None,
    "tiny:causal/mixtral?experts_implementation=batched_mm": None,
    f"tiny:causal/qwen3_moe?{EAGER}": None,
    f"tiny:causal/gpt_oss?{EAGER}": None,
    "tiny:causal/mamba": None,
    "tiny:causal/xlnet": None,
    "tiny:masked/longformer": None,
}


@pytest.mark.parametrize("reference", slow_unless(lambda name: name in QUICK, [*QUICK, *SLOW]))
def test_exact_and_without_a_fallback(reference: str):
    size = (QUICK | SLOW)[reference]
    result = run(CoverageTrial(model=reference, task="test", backends=TAPE, image_size=size))
    assert result["built"], result
    for row in result["rows"]:
        assert row["status"] == "exact", row
        assert sum(row["coverage"].values()) == pytest.approx(1)
        assert row["coverage"]["fallback"] == 0, row


class Adapted(nn.Module):
    """LoRA beside a frozen layer, as PEFT builds it: W x + B A x · scale. (arXiv:2106.09685)"""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x)) * 0.5


def low_rank(model: nn.Module) -> None:
    for block in model.blocks:
        block.attn.qkv, block.mlp.fc1 = Adapted(block.attn.qkv).double(), Adapted(block.mlp.fc1).double()


#: What is trained of a ViT: the beginnings and ends of parameters' names.
TUNED = {
    "low rank": lambda name: "down" in name or "up" in name or name.startswith("head"),
    "biases": lambda name: name.endswith("bias"),
    "head": lambda name: name.startswith("head"),
    "class token and positions": lambda name: name in ("cls_token", "pos_embed"),
}


@pytest.mark.parametrize("tuned", TUNED)
def test_fine_tuning_is_exact(tuned: str):
    workload = load_workload(VIT, dtype="float64")
    model = workload.model
    if tuned == "low rank":
        low_rank(model)
    for name, p in model.named_parameters():
        p.requires_grad_(TUNED[tuned](name))
    batch, clip = workload.batch(3), Flat(0.5)
    with load_backend("microbatch")(model, workload.loss_fn, clip=clip) as backend:
        reference = backend(*batch)
    assert 0 < len(reference.grads) < len(list(model.parameters()))
    for name in ("ghost", "bk_mixed"):
        with load_backend(name)(model, workload.loss_fn, clip=clip) as backend:
            found = compare(backend(*batch), reference)
            assert found.within(1e-9), found
            assert backend.coverage["fallback"] == 0
