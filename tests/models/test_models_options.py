"""Models with options in their reference: values, what reaches the constructor, and refusals of one line."""

import pytest
import torch

from dpbench.execution.selection import parse_only
from dpbench.models.loading import load_workload
from dpbench.models.options import parse_value, split_options
from dpbench.models.references import validate_reference
from dpbench.models.workload import ModelError

VIT = "timm:vit_tiny_patch16_224?patch_size=4&depth=1&embed_dim=24&num_heads=3"
GPT2 = "transformers:gpt2?n_layer=2&n_embd=16&n_head=2&vocab_size=50"
BERT = "transformers:bert?num_hidden_layers=1&hidden_size=16&num_attention_heads=2&intermediate_size=32&vocab_size=50"


def test_a_value_is_what_it_looks_like():
    for text, value in [
        ("6", 6),
        ("-0.5", -0.5),
        ("1e-3", 1e-3),
        ("true", True),
        ("False", False),
        ("none", None),
        ("(3,3,9,3)", (3, 3, 9, 3)),
        ("[2, 0.5]", (2, 0.5)),
        ("(7)", (7,)),
        ("gelu", "gelu"),
        ("1x1", "1x1"),
        ("'6'", "'6'"),
    ]:
        assert parse_value(text) == value and type(parse_value(text)) is type(value)


def test_options_stand_between_the_name_and_the_length():
    assert split_options("gpt2?n_layer=6&act=relu@1024") == ("gpt2@1024", {"n_layer": 6, "act": "relu"})
    assert split_options("gpt2@1024") == ("gpt2@1024", {})
    assert split_options("vit_tiny") == ("vit_tiny", {})


@pytest.mark.parametrize("ref", ["timm:resnet18?", "timm:resnet18?a", "timm:resnet18?a=", "timm:resnet18?a=1&&b=2"])
def test_options_of_another_form_are_refused_before_torch_is_imported(ref):
    name = ref.partition(":")[2]
    with pytest.raises(ModelError) as caught:
        validate_reference(ref)
    assert str(caught.value) == f"expected a model's options as NAME?option=value&option=value, got {name!r}"


def test_keyword_arguments_reach_timm():
    model = load_workload(VIT).model
    assert model.pos_embed.shape == (1, 65, 24) and len(model.blocks) == 1
    model = load_workload("timm:convnext_atto?depths=(1,1,2,1)&dims=(8,16,24,32)").model
    assert [len(stage.blocks) for stage in model.stages] == [1, 1, 2, 1]


def test_keyword_arguments_reach_torchvision():
    model = load_workload("torchvision:mobilenet_v3_small?reduced_tail=true").model
    assert model.classifier[0].out_features == 512  # 1024 without it


def test_fields_reach_the_configuration_of_transformers():
    workload = load_workload(f"{GPT2}&max_position_embeddings=2048@1500")
    config = workload.model.config
    assert (config.n_layer, config.n_embd, config.n_positions, config.eos_token_id) == (2, 16, 2048, None)
    assert workload.batch(2)[0].shape == (2, 1500) and workload.batch(2)[0].max() < 50
    assert load_workload(f"{BERT}@16").model.config.num_hidden_layers == 1


def test_what_cannot_be_built_is_one_line():
    for ref, message in [
        ("timm:convnext_atto?foo=3", "expected an option that timm:convnext_atto takes, got 'foo'"),
        ("timm:vit_tiny_patch16_224?foo=3", "expected an option that timm:vit_tiny_patch16_224 takes, got 'foo'"),
        ("torchvision:resnet18?foo=3", "expected an option that torchvision:resnet18 takes, got 'foo'"),
        ("torchvision:resnet18?num_classes=3", "expected an option of torchvision:resnet18 that is not set already"),
        ("timm:resnet18?img_size=64", "expected an option of timm:resnet18 that is not set already by the trial"),
        ("timm:resnet18?drop_rate=0.1", "expected an option of timm:resnet18 other than dropout, which is off in"),
        ("timm:resnet18?block=3", "expected timm:resnet18 to build for 32x32 images, got "),
        (
            "transformers:gpt2?n_layr=3",
            "expected a field of transformers:gpt2's configuration, got 'n_layr'; did you mean 'n_layer'?",
        ),
        ("transformers:gpt2?n_layer=two", "expected transformers:gpt2 to build from its configuration, got "),
        ("transformers:gpt2?n_embd=16&n_head=3", "expected transformers:gpt2 to build from its configuration, got "),
        ("transformers:gpt2?use_cache=true", "expected an option of transformers:gpt2 that is not set already by"),
        (f"{GPT2}&n_positions=64@65", "expected at most 64 tokens for transformers:gpt2, got 65"),
        ("transformers:gpt2-xl?n_embd=6400", "expected at most 2,000,000,000 parameters"),
        ("timm:resnet18?a=1&a=2", "expected the option a once, got 'resnet18?a=1&a=2'"),
        (f"{VIT}&frozen=cls", f"expected a parameter of {VIT}&frozen=cls to freeze, got 'cls'; did you mean 'cls_tok"),
        (f"{VIT}&positions=true", "expected positions=true for a text model that takes position_ids, got "),
    ]:
        with pytest.raises(ModelError) as caught:
            load_workload(ref)
        assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_a_tuple_among_options_can_be_selected():
    chosen = parse_only(["model=timm:convnext_atto?depths=(1,1,2,1)&x=2,cnn", "backend=a,b"])
    assert chosen == {"model": ["timm:convnext_atto?depths=(1,1,2,1)&x=2", "cnn"], "backend": ["a", "b"]}


@pytest.mark.parametrize("ref", [GPT2, BERT])
def test_positions_are_an_input_and_change_nothing(ref: str):
    given, plain = (load_workload(f"{ref}{option}@16") for option in ("&positions=true", ""))
    inputs, targets = given.batch(3)
    assert list(inputs) == ["input_ids", "position_ids"] and inputs["position_ids"].shape == (3, 16)
    own, labels = plain.batch(3)
    assert torch.equal(inputs["input_ids"], own) and torch.equal(targets, labels)
    with torch.no_grad():
        assert torch.equal(given.loss_fn(given.model(**inputs), targets), plain.loss_fn(plain.model(own), labels))


def test_frozen_parameters_are_named_by_themselves_or_by_their_module():
    of_module = {"patch_embed.proj.weight", "patch_embed.proj.bias"}
    for names, frozen in (("(cls_token,pos_embed)", {"cls_token", "pos_embed"}), ("patch_embed", of_module)):
        named = load_workload(f"{VIT}&frozen={names}").model.named_parameters()
        assert {name for name, p in named if not p.requires_grad} == frozen
