"""References to models of timm, torchvision, transformers, and of a person's own file."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dpbench.errors import UsageError
from dpbench.models.adapt import replace_batch_norm
from dpbench.models.language import SIZES
from dpbench.models.loading import load_workload
from dpbench.models.workload import ModelError

TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.fixture
def tiny(monkeypatch):
    """Small relatives of the models that transformers would take seconds to build."""
    monkeypatch.setitem(SIZES, "tiny-bert", ("bert", TINY | {"vocab_size": 50}))
    monkeypatch.setitem(SIZES, "tiny-roberta", ("roberta", TINY | {"vocab_size": 50, "max_position_embeddings": 40}))
    monkeypatch.setitem(SIZES, "tiny-llama", ("llama", TINY | {"vocab_size": 50}))
    monkeypatch.setitem(SIZES, "tiny-gpt2", ("gpt2", {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 50}))
    layers_dropped = {"layerdrop": 0.9, "ffn_dim": 32, "word_embed_proj_dim": 16, "vocab_size": 50}
    monkeypatch.setitem(SIZES, "tiny-opt", ("opt", TINY | layers_dropped))
    monkeypatch.setitem(SIZES, "tiny-vit", ("vit", TINY))


@pytest.fixture
def file(tmp_path):
    def write(text: str, name: str = "mine.py") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def refusal(ref: str, **options) -> str:
    with pytest.raises(ModelError) as caught:
        load_workload(ref, **options)
    assert isinstance(caught.value, UsageError)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def check_step(workload, batch_size=2):
    """One step: losses [B], a gradient for every parameter, no BatchNorm, samples independent, no randomness."""
    inputs, targets = workload.batch(batch_size)
    losses = workload.loss_fn(workload.model(inputs), targets)
    assert losses.shape == (batch_size,)
    losses.sum().backward()
    assert [n for n, p in workload.model.named_parameters() if p.requires_grad and p.grad is None] == []
    assert workload.model.training
    assert not any(isinstance(m, nn.modules.batchnorm._NormBase) for m in workload.model.modules())
    alone = workload.loss_fn(workload.model(inputs[1:2]), targets[1:2])
    torch.testing.assert_close(losses[1:2], alone, rtol=1e-6, atol=1e-6)
    return inputs, targets


# what each is here for: BatchNorm; BatchNorm that activates; img_size; window attention; dropout; parameters of 0 scale
@pytest.mark.parametrize(
    "ref",
    [
        "timm:resnet18",
        "timm:efficientnet_b0",
        "timm:vit_tiny_patch16_224",
        "torchvision:mobilenet_v3_small",
        "torchvision:squeezenet1_0",
        "torchvision:shufflenet_v2_x0_5",
    ],
)
def test_referenced_image_models_take_32x32(ref):
    inputs, targets = check_step(load_workload(ref, num_classes=7, dtype="float64"))
    assert inputs.shape == (2, 3, 32, 32)
    assert targets.max() < 7


def test_image_size_reaches_the_constructor():
    workload = load_workload("timm:vit_tiny_patch16_224", image_size=48)
    assert workload.model.pos_embed.shape[1] == 3 * 3 + 1
    check_step(workload)


def test_what_cannot_be_built_is_one_line():
    for ref, message in [
        ("timm:resnet18x", "expected a model that timm knows, got 'resnet18x'; did you mean 'resnet18'?"),
        ("timm:hf-hub:some/model", "expected a model that timm knows, got 'hf-hub:some/model'"),
        (
            "torchvision:resnet81",
            "expected a classification model that torchvision knows, got 'resnet81'; did you mean",
        ),
        ("transformers:gtp2", "expected a model type that transformers knows, got 'gtp2'; did you mean 'gpt2'?"),
        ("transformers:t5", "expected a decoder, an encoder or an image classifier of transformers, got 't5'"),
        ("transformers:gpt2@many", "expected transformers:NAME@T with a number of tokens T, got 'gpt2@many'"),
        ("transformers:gpt2@2000", "expected at most 1024 tokens for transformers:gpt2, got 2000"),
        ("transformers:vit@64", "expected transformers:vit without @T, for it reads images, got 'vit@64'"),
        ("transformers:mistral", "expected at most 2,000,000,000 parameters (path/file.py:factory can build a smaller"),
        ("torchvision:alexnet", "expected torchvision:alexnet to take 32x32 images, got 'RuntimeError: "),
        ("torchvision:vit_h_14", "expected torchvision:vit_h_14 to build for 32x32 images, got 'AssertionError: "),
    ]:
        assert refusal(ref).startswith(message)


def test_replacing_batch_norm_keeps_shapes_groups_and_activation():
    class Activated(nn.BatchNorm2d):
        def __init__(self, channels):
            super().__init__(channels)
            self.act = nn.ReLU()

        def forward(self, x):
            return self.act(super().forward(x))

    shared = nn.BatchNorm2d(12)
    model = nn.Sequential(
        shared, nn.Sequential(shared), nn.BatchNorm2d(66), nn.BatchNorm2d(4, affine=False), Activated(8)
    )
    model = replace_batch_norm(model)
    assert model[0] is model[1][0]
    assert (model[0].num_groups, model[0].weight.shape) == (12, (12,))
    assert (model[2].num_groups, model[2].weight.shape) == (22, (66,))
    assert model[3].weight is None
    out = model[4](torch.randn(2, 8, 4, 4))
    assert out.min() == 0 < out.max()
    assert isinstance(replace_batch_norm(nn.BatchNorm2d(64)), nn.GroupNorm)


def test_replaced_batch_norm_1d_does_not_erase_its_input():
    norm = replace_batch_norm(nn.BatchNorm1d(16))
    assert norm(torch.randn(3, 16)).std() > 0.5


@pytest.mark.parametrize("name", ["tiny-bert", "tiny-roberta"])
def test_encoders_classify(tiny, name):
    workload = load_workload(f"transformers:{name}@20", num_classes=3, dtype="float64")
    inputs, targets = check_step(workload, batch_size=40)
    assert inputs.shape == (40, 20)
    assert inputs.dtype == torch.int64
    assert set(targets.tolist()) == {0, 1, 2}
    assert next(workload.model.parameters()).dtype == torch.float64


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2", "tiny-opt"])
def test_decoders_predict_the_next_token(tiny, name):
    workload = load_workload(f"transformers:{name}")
    inputs, targets = check_step(workload, batch_size=3)
    assert inputs.shape == targets.shape == (3, 128)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert workload.model(inputs).logits.shape == (3, 128, 50)


def test_vision_models_of_transformers_read_the_images(tiny):
    workload = load_workload("transformers:tiny-vit", num_classes=5)
    inputs, _ = check_step(workload)
    assert inputs.shape == (2, 3, 32, 32)


def test_text_models_refuse_images_that_were_asked_for(tiny, tmp_path):
    with pytest.raises(
        UsageError, match=r"^expected data 'synthetic' for the text model transformers:tiny-gpt2, which"
    ):
        load_workload("transformers:tiny-gpt2", data=f"cifar10:{tmp_path}")


@pytest.mark.parametrize(
    ("name", "parameters"),
    # published: 124M, 355M, 774M; 110M with a head of ten classes; 125M; llama is our own size
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("bert", 109_489_930),
        ("roberta", 124_653_322),
        ("llama", 134_105_856),
    ],
)
def test_sizes_of_language_models(name, parameters):
    with FakeTensorMode():
        workload = load_workload(f"transformers:{name}@8", data="synthetic")
        inputs, targets = workload.batch(2)
        assert workload.loss_fn(workload.model(inputs), targets).shape == (2,)
    assert sum(p.numel() for p in workload.model.parameters()) == parameters


MODULE = """
from torch import nn

def factory():
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=4), nn.BatchNorm2d(8), nn.ReLU(True), nn.Dropout(0.5),
                         nn.Flatten(), nn.Linear(8 * 8 * 8, 4))

def not_over_images():
    return nn.Linear(5, 2)

def not_a_classifier():
    return nn.Conv2d(3, 8, 3)

def number():
    return 3

def raising():
    raise ValueError("no such layer:\\n9")

def leaving():
    raise SystemExit(3)

def lazy():
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(10))
"""


def test_a_files_module_is_adapted_and_gets_labels_that_it_has(file):
    workload = load_workload(f"{file(MODULE)}:factory", dtype="float64")
    inputs, targets = check_step(workload, batch_size=50)
    assert inputs.shape == (50, 3, 32, 32)
    assert set(targets.tolist()) == {0, 1, 2, 3}
    assert torch.equal(workload.model(inputs), workload.model(inputs))  # no dropout


def test_a_files_workload_is_moved_and_adapted(file):
    path = file(
        """
import torch
from neighbour import WIDTH
from dpbench.models import Workload

class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop = torch.nn.Linear(WIDTH, 1), torch.nn.Dropout(0.5)
    def forward(self, a, b):
        return self.drop(self.first(a) + b)

def factory():
    return Workload(Two(), lambda out, y: (out[:, 0] - y) ** 2,
                    lambda n: ({"a": torch.ones(n, WIDTH), "b": torch.arange(n)[:, None]}, torch.zeros(n)))
"""
    )
    file("WIDTH = 6", "neighbour.py")
    workload = load_workload(f"{path}:factory", dtype="float64")
    inputs, targets = workload.batch(3)
    assert (inputs["a"].dtype, inputs["b"].dtype, targets.dtype) == (torch.float64, torch.int64, torch.float64)
    assert workload.loss_fn(workload.model(**inputs), targets).shape == (3,)
    assert torch.equal(workload.model(**inputs), workload.model(**inputs))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("factori", "expected a function that {path} has, got 'factori'; did you mean 'factory'?"),
        ("number", "expected number() of {path} to return an nn.Module or a Workload, got 'int'"),
        ("raising", "expected raising() of {path} to return a model, got 'ValueError: no such layer: 9 (line 18)'"),
        ("leaving", "expected leaving() of {path} to return a model, got 'SystemExit: 3 (line 21)'"),
        ("lazy", "expected a model whose parameters have shapes, got '1.weight, which is not initialised'"),
        ("not_over_images", "expected {path}:not_over_images to take 32x32 images, got 'RuntimeError: "),
        (
            "not_a_classifier",
            "expected {path}:not_a_classifier to turn one image into logits [1, classes], got (1, 8, ",
        ),
    ],
)
def test_unusable_factories_are_one_line(file, function, message):
    path = file(MODULE)
    assert refusal(f"{path}:{function}").startswith(message.format(path=path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n1 / 0\n", "'ZeroDivisionError: division by zero (line 2)'"),
        ("import no_such_package\n", "\"ModuleNotFoundError: No module named 'no_such_package' (line 1)\""),
        ("def factory(:\n", ", line 1)"),
    ],
)
def test_files_that_raise_are_one_line(file, text, message):
    path = file(text)
    said = refusal(f"{path}:factory")
    assert said.startswith(f"expected {path} to import, got ")
    assert message in said
