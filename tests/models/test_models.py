"""The built-in models, references, and what `load_workload` promises."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from waiting import python

from dpbench.errors import UsageError
from dpbench.models.loading import load_workload
from dpbench.models.losses import classification_loss, token_loss
from dpbench.models.references import BUILTIN, validate_reference
from dpbench.models.workload import ModelError
from dpbench.trials.packages import required_modules
from dpbench.trials.reference import load_object

# Parameters with ten classes at 32x32. ResNets and VGGs: as published for the same networks with BatchNorm, whose
# affine parameters have the same shapes; cnn: Table 4 of arXiv:2205.10683 says 0.551M; the others: counted.
PARAMETERS = {
    "cnn": 550_570,
    "mlp": 4_206_602,
    "resnet18": 11_173_962,
    "resnet34": 21_282_122,
    "resnet50": 23_520_842,
    "resnet101": 42_512_970,
    "resnet152": 58_156_618,
    "wide_resnet": 2_748_890,
    "resnext": 4_775_754,
    "vgg11": 9_231_114,
    "vgg13": 9_416_010,
    "vgg16": 14_728_266,
    "vgg19": 20_040_522,
}
SMALL = ["cnn", "resnet18", "wide_resnet", "resnext", "vgg11"]


def build(name: str, **sizes: int) -> nn.Module:
    return load_object(BUILTIN[name][0])(**sizes)


def meta(name: str, batch_size: int = 2, image_size: int = 32, num_classes: int = 10) -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        model = build(name, num_classes=num_classes, image_size=image_size)
        return model, model(torch.empty(batch_size, 3, image_size, image_size))


def test_builtin_has_the_published_size_and_no_batch_norm():
    assert set(PARAMETERS) == set(BUILTIN)
    for name in BUILTIN:
        model, logits = meta(name)
        assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
        assert logits.shape == (2, 10)
        assert not any(isinstance(m, nn.modules.batchnorm._NormBase) for m in model.modules())


@pytest.mark.parametrize("name", SMALL)
def test_builtin_takes_other_image_sizes_and_class_counts(name):
    assert meta(name, image_size=64, num_classes=100)[1].shape == (2, 100)


@pytest.mark.parametrize(("name", "smallest"), [("cnn", 8), ("vgg11", 32), ("vgg19", 32)])
def test_too_small_images_are_refused_in_one_line(name, smallest):
    assert meta(name, image_size=smallest)[1].shape == (2, 10)
    with pytest.raises(
        ModelError, match=rf"^expected image_size of at least {smallest} for {name}, got {smallest - 1}$"
    ):
        build(name, num_classes=10, image_size=smallest - 1)


@pytest.mark.parametrize("name", SMALL)
def test_every_parameter_gets_a_gradient_under_module_backward_hooks(name):
    # the hooks of other libraries do not bear a module's output being changed in place: they switch it off
    workload = load_workload(name)
    for module in workload.model.modules():
        if hasattr(module, "inplace"):
            module.inplace = False
        module.register_full_backward_hook(lambda *_: None)
    inputs, targets = workload.batch(2)
    inputs.requires_grad_()
    workload.loss_fn(workload.model(inputs), targets).sum().backward()
    silent = [n for n, p in workload.model.named_parameters() if p.grad is None or not p.grad.any()]
    assert silent == []


def test_unusable_reference_is_one_line():
    for ref, message in [
        ("resnet18x", "did you mean 'resnet18'?"),
        ("vgg", "got 'vgg'; did you mean 'vgg1"),
        ("zzz", "or timm:NAME, torchvision:NAME, transformers:NAME, tiny:HEAD/TYPE or path/file.py:factory, got 'zzz'"),
        ("tim:resnet18", "got 'tim:resnet18'; did you mean 'timm'?"),
        ("timm:", "expected a model's name after timm:, got 'timm:'"),
        ("nowhere.py:factory", "expected path/file.py:factory of an existing file, got 'nowhere.py:factory'"),
        ("nowhere.py", "expected path/file.py:factory, got 'nowhere.py'"),
        ("resnet18?depth=3", "got 'resnet18?depth=3'; did you mean 'resnet18'?"),
    ]:
        with pytest.raises(UsageError) as caught:
            validate_reference(ref)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
        with pytest.raises(UsageError):
            load_workload(ref)


def test_required_modules_can_be_imported_and_builtins_require_none():
    assert required_modules("cnn") == ()
    assert required_modules("timm:resnet18") == ("timm",)
    for module in (*required_modules("torchvision:resnet18"), *required_modules("transformers:gpt2")):
        __import__(module)


def test_names_are_listed_and_checked_without_torch():
    code = (
        "import sys; from dpbench.models import data, references; from dpbench.trials.packages import required_modules;"
        "references.validate_reference('cnn'); data.validate_data('digits'); required_modules('timm:x');"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    python("-c", code)


def test_weights_and_batches_follow_the_seed_and_leave_the_global_random_state():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = (load_workload("cnn", seed=seed) for seed in (1, 1, 2))
    for workload in (first, again, other):
        workload.batch(4)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), again.model.parameters(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first.model.parameters(), other.model.parameters(), strict=True))
    assert torch.equal(first.batch(4)[0], again.batch(4)[0])
    assert not torch.equal(first.batch(4)[0], other.batch(4)[0])


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_dtype_is_of_the_model_and_the_images(dtype):
    workload = load_workload("cnn", dtype=dtype)
    inputs, targets = workload.batch(2)
    assert {p.dtype for p in workload.model.parameters()} == {inputs.dtype} == {getattr(torch, dtype)}
    assert targets.dtype == torch.int64


def test_unknown_dtype_is_one_line():
    with pytest.raises(UsageError, match=r"^expected a dtype, got 'float23'; did you mean 'float32'\? \(one of .*\)$"):
        load_workload("cnn", dtype="float23")


def test_token_loss_is_the_mean_over_each_samples_tokens():
    logits = torch.randn(2, 3, 5, dtype=torch.float64)
    targets = torch.tensor([[0, 4, 2], [1, 1, 3]])
    expected = torch.stack([classification_loss(logits[i], targets[i]).mean() for i in range(2)])
    torch.testing.assert_close(token_loss(logits, targets), expected)


@pytest.mark.parametrize(
    ("name", "dtype"), [("cnn", "float64"), ("resnet18", "float32"), ("timm:vit_tiny_patch16_224", "float32")]
)
def test_a_step_on_synthetic_data_works_under_fake_tensors(name, dtype):
    with FakeTensorMode():
        workload = load_workload(name, data="synthetic", dtype=dtype)
        inputs, targets = workload.batch(100_000)  # 1 GiB and more, if it were real
        losses = workload.loss_fn(workload.model(inputs), targets)
        losses.sum().backward()
    assert losses.shape == (100_000,)
    assert {str(p.dtype) for p in workload.model.parameters()} == {f"torch.{dtype}"}
    assert all(p.grad is not None for p in workload.model.parameters())


@pytest.mark.gpu
def test_cuda_gets_the_same_weights_and_batches():
    here, there = (load_workload("cnn", device=device, data="synthetic") for device in ("cpu", "cuda"))
    for a, b in zip(
        [*here.model.parameters(), *here.batch(3)], [*there.model.parameters(), *there.batch(3)], strict=True
    ):
        assert b.is_cuda
        assert torch.equal(a, b.cpu())
