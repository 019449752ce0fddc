"""Models to measure: the built-in CIFAR-size networks, and references to models defined elsewhere.

A reference is one string:

=======================  ==========================================================================================
``resnet18``             a built-in, one of `BUILTIN`
``timm:NAME``            ``timm.create_model``, random weights
``torchvision:NAME``     a classification model of torchvision, random weights
``transformers:NAME``    a model built from its configuration; ``transformers:NAME@T`` for sequences of T tokens
``tiny:HEAD/TYPE``       a small model of a transformers type, with the head of a task (`dpbench.models.tiny`)
``path/file.py:factory`` ``factory()`` returns an ``nn.Module`` over images [B, 3, H, W], or with it (inputs, targets)
                         of a few records and perhaps a loss function (``dpbench template mine.py``), or a `Workload`
=======================  ==========================================================================================

A NAME may be followed by options, ``?option=value&option=value``: keyword arguments of the constructor for timm and
torchvision and fields of the configuration for transformers.
Examples: ``timm:vit_tiny_patch16_224?patch_size=4`` and ``transformers:gpt2?n_layer=6&n_embd=384&n_head=6@1024``.
Values are numbers, ``true``, ``false``, ``none``, tuples like ``(3,3,9,3)``, and otherwise text (see
`dpbench.models.options`).

Two options are the harness' own, as other libraries need them: ``frozen=(cls_token,pos_embed)`` freezes parameters or
modules by name, and ``positions=true`` passes a text model the position ids [B, T] of each sample.

Nothing is ever downloaded. `dpbench.models.references` checks a reference without torch, for the parent process, which
must not import it; `dpbench.models.loading` builds the model.

Functions take:
    num_classes: number of classes; labels are 0 .. num_classes-1.
    image_size: S, height and width of images in pixels.
    device: "cpu" or "cuda", for the model and its batches.
    dtype: of parameters and floating-point inputs.
    seed: of random numbers.
    outputs: of the model.
    ref: of a model.
    model: the module, changed in place.
    package: its name to import.
    spec: the data, KIND or KIND:ROOT (see `dpbench.models.data`).
"""

from dpbench.models.workload import Workload

__all__ = ["Workload"]
