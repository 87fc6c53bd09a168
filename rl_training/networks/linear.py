"""Linear layers that use the faster of torch's two matrix libraries, chosen from the processor and the layer's size.

torch multiplies matrices with MKL, which runs an AVX2 path on AMD processors; oneDNN, which torch also carries, uses
AVX-512 there. One product of 256x256x256 on one AMD core with AVX-512 takes, in us:

    product     MKL     oneDNN
    forward     446     194
    d weight    312     166
    d input     304     141

The choice depends on the processor and the shapes alone, never on a timing, because the same seed must give the same
bits. Small layers stay with MKL: there the call costs more than the product.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rl_training.runtime.system import cpu_vendor_and_flags

MIN_FEATURES, MIN_ROWS = 128, 64


def matmul_library() -> str:
    """Return "onednn" where large layers use it on the CPU, else "default"."""
    vendor, flags = cpu_vendor_and_flags()
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return "onednn" if available and vendor == "AuthenticAMD" and "avx512f" in flags else "default"


def linear(in_features: int, out_features: int) -> nn.Linear:
    """Make a linear layer that multiplies in the fastest way known for its size."""
    if min(in_features, out_features) >= MIN_FEATURES and matmul_library() == "onednn":
        return OneDNNLinear(in_features, out_features)
    return nn.Linear(in_features, out_features)


class OneDNNLinear(nn.Linear):
    """A linear layer whose three matrix products go to oneDNN when it is on the CPU and the batch is large enough."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Return inputs @ weight.T + bias."""
        if inputs.device.type == "cpu" and inputs.ndim == 2 and len(inputs) >= MIN_ROWS:
            return _OneDNNProduct.apply(inputs, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return super().forward(inputs)


def _product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return left @ right.T + bias by oneDNN."""
    return torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")


class _OneDNNProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return _product(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        inputs, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (
            _product(gradient, weight.t()) if wanted[0] else None,
            _product(gradient.t(), inputs.t()) if wanted[1] else None,
            gradient.sum(0) if wanted[2] else None,
        )
