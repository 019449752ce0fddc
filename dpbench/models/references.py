"""Checks references to models without torch. For their forms see `dpbench.models`."""

from dpbench.errors import UsageError, nearest
from dpbench.models.options import split_options
from dpbench.trials.packages import SCHEMES
from dpbench.trials.reference import split_file

BUILTIN: dict[str, tuple[str, str]] = {
    "cnn": (
        "dpbench.models.stacks:cnn",
        "CNN of Tramèr & Boneh 2021, tanh, 0.55M parameters (Table 4 of arXiv:2205.10683)",
    ),
    "mlp": ("dpbench.models.stacks:mlp", "MLP, two hidden layers of 1024 units, ReLU, 4.2M parameters"),
    "resnet18": ("dpbench.models.resnet:resnet18", "ResNet-18, CIFAR form, GroupNorm, 11.2M parameters"),
    "resnet34": ("dpbench.models.resnet:resnet34", "ResNet-34, CIFAR form, GroupNorm, 21.3M parameters"),
    "resnet50": ("dpbench.models.resnet:resnet50", "ResNet-50, CIFAR form, GroupNorm, 23.5M parameters"),
    "resnet101": ("dpbench.models.resnet:resnet101", "ResNet-101, CIFAR form, GroupNorm, 42.5M parameters"),
    "resnet152": ("dpbench.models.resnet:resnet152", "ResNet-152, CIFAR form, GroupNorm, 58.2M parameters"),
    "wide_resnet": ("dpbench.models.resnet:wide_resnet", "WRN-16-4 of De et al. 2022, GroupNorm, 2.7M parameters"),
    "resnext": ("dpbench.models.resnet:resnext", "ResNeXt-29 32x4d, grouped convolutions, GroupNorm, 4.8M parameters"),
    "vgg11": ("dpbench.models.stacks:vgg11", "VGG-11, CIFAR form, GroupNorm, 9.2M parameters"),
    "vgg13": ("dpbench.models.stacks:vgg13", "VGG-13, CIFAR form, GroupNorm, 9.4M parameters"),
    "vgg16": ("dpbench.models.stacks:vgg16", "VGG-16, CIFAR form, GroupNorm, 14.7M parameters"),
    "vgg19": ("dpbench.models.stacks:vgg19", "VGG-19, CIFAR form, GroupNorm, 20.0M parameters"),
}

FACTORY = "path/file.py:factory"
_FORMS = f"timm:NAME, torchvision:NAME, transformers:NAME, tiny:HEAD/TYPE or {FACTORY}"


def split_reference(ref: str) -> tuple[str, str]:
    """(scheme, name) of a reference: scheme is "builtin", "timm", "torchvision", "transformers" or "file".

    Raises:
        UsageError: an unknown built-in or scheme, with the nearest known name.
    """
    scheme, colon, name = ref.partition(":")
    path = ref.rpartition(":")[0] or ref
    if path.endswith(".py"):
        return "file", ref
    if not colon:
        if ref not in BUILTIN:
            raise UsageError("a model", ref, nearest(ref, BUILTIN), [*BUILTIN, f"or {_FORMS}"])
        return "builtin", ref
    if scheme not in SCHEMES:
        raise UsageError("a model reference", ref, nearest(scheme, SCHEMES), [_FORMS])
    if not name:
        raise UsageError(f"a model's name after {scheme}:", ref)
    return scheme, name


def validate_reference(ref: str) -> None:
    """Check a reference as far as possible without torch: the built-in, the scheme, the file, the form of options.

    Building the model (`dpbench.models.loading.load_workload`) checks whether timm, torchvision or transformers know
    the name and the options, and whether the file has such a function.

    Raises:
        UsageError: with the nearest known name, if any.
    """
    scheme, name = split_reference(ref)
    if scheme == "file":
        if name.endswith(".py"):
            raise UsageError(FACTORY, name, f"{name}:build")
        try:
            split_file(name, FACTORY)
        except UsageError as error:
            error.args = (f"{error}; `python -m dpbench template {name.partition(':')[0]}` writes such a file",)
            raise
    elif scheme != "builtin":
        split_options(name)
