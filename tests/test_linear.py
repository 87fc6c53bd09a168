"""The oneDNN layer computes what nn.Linear computes, forward and backward, and is chosen by processor and size."""

import pytest
import torch
from torch import nn

from rl_training.networks import linear as module
from rl_training.networks.linear import OneDNNLinear, linear, matmul_library

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@needs_onednn
@pytest.mark.parametrize("rows", [1, 64, 256])
def test_outputs_and_gradients_equal_those_of_an_ordinary_layer(rows):
    torch.manual_seed(0)
    fast, plain = OneDNNLinear(128, 160), nn.Linear(128, 160)
    plain.load_state_dict(fast.state_dict())
    inputs = torch.randn(rows, 128)
    results = []
    for layer in (fast, plain):
        x = inputs.clone().requires_grad_()
        output = layer(x)
        gradients = torch.autograd.grad(output.square().mean(), [x, layer.weight, layer.bias])
        results.append([output, *gradients])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@needs_onednn
def test_frozen_parameters_get_no_gradient():
    layer = OneDNNLinear(128, 128).requires_grad_(False)
    inputs = torch.randn(64, 128, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(inputs).sum(), inputs)
    torch.testing.assert_close(gradient, layer.weight.sum(0).expand(64, -1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("vendor", "flags", "library"),
    [
        ("AuthenticAMD", {"avx2", "avx512f"}, "onednn"),
        ("AuthenticAMD", {"avx2"}, "default"),
        ("GenuineIntel", {"avx512f"}, "default"),
        ("", set(), "default"),
    ],
)
def test_the_library_depends_on_the_processor_alone(vendor, flags, library, monkeypatch):
    monkeypatch.setattr(module, "cpu_vendor_and_flags", lambda: (vendor, flags))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert matmul_library() == library
    assert isinstance(linear(256, 256), OneDNNLinear) == (library == "onednn")
    assert type(linear(17, 256)) is nn.Linear
    assert type(linear(256, 6)) is nn.Linear
