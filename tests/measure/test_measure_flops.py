"""Model FLOPs: by hand for what is simple, in proportion to the batch, and nothing where torch's counter is blind."""

import pytest
import torch
from torch import nn

from dpbench.conformance.modules import Net
from dpbench.measure.flops import model_flops
from dpbench.models.loading import load_workload
from dpbench.models.own import own_workload


def counted(model, inputs, targets, batch_size=6):
    workload = own_workload("build", (model, (inputs, targets)))
    return model_flops(workload, *workload.batch(batch_size), batch_size)


def test_a_linear_layer_by_hand():
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3))
    # forward and weight gradients of both layers, the input gradient of the second alone; 2 for each multiplication
    by_hand = 2 * (2 * 20 * 64 + 3 * 64 * 3)
    inputs, targets = torch.randn(4, 20), torch.randint(0, 3, (4,))
    assert [counted(model, inputs, targets, size) for size in (1, 6, 64)] == [by_hand, 6 * by_hand, 64 * by_hand]
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(("groups", "layer"), [(1, nn.Conv2d), (4, nn.Conv2d), (4, nn.ConvTranspose2d)])
def test_a_convolution_of_groups_by_hand(groups, layer):
    model = nn.Sequential(layer(4, 8, 3, groups=groups), nn.Flatten(), nn.LazyLinear(2))
    inputs, targets = torch.randn(4, 4, 6, 6), torch.randint(0, 2, (4,))
    pixels = model[0](inputs).shape[2:].numel() if layer is nn.Conv2d else 36
    features = model(inputs) is not None and model[2].in_features
    wanted = 2 * 2 * model[0].weight.numel() * pixels + 3 * 2 * 2 * features  # the input needs no gradient
    assert counted(model, inputs, targets, 1) == wanted


def test_attention_counts_on_a_cpu():
    attend = nn.functional.scaled_dot_product_attention
    attends = Net(lambda net, x: attend(*[net.out(x)[:, None]] * 3)[:, 0], out=nn.Linear(8, 8))
    found = counted(attends, torch.randn(2, 5, 8), torch.randn(2, 5, 8), 1)
    layer = 2 * 2 * 5 * 8 * 8  # forward, and the weight's gradient; the input needs none
    attention = 6 * 2 * 5 * 5 * 8  # two products, and two for each of them backward
    assert found == layer + attention


def test_what_is_not_counted_has_no_number():
    forecast = Net(lambda net, x: net.layer(x)[0][:, -1], layer=nn.LSTM(3, 1, batch_first=True))
    assert counted(forecast, torch.randn(2, 5, 3), torch.randn(2)) is None


@pytest.mark.parametrize(("name", "forward"), [("cnn", None), ("resnet18", 1.1e9)])
def test_a_step_costs_three_forward_passes_at_most(name, forward):
    workload = load_workload(name, data="synthetic")
    found = model_flops(workload, *workload.batch(2), 2)
    assert found > 0
    if forward is not None:  # ResNet-18 in its CIFAR form: 0.56 G multiplications and additions forward
        assert 2.8 * forward < found / 2 < 3.05 * forward
