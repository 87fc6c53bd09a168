"""Compiled updates: the update that an agent has, traced once and turned into one native function.

The trace records every operation of the plain update, its backward pass and its optimizer steps included, so there is
no second version of the maths. What changes between two calls (parameters, moments, the batch) are the inputs of the
trace; inductor compiles it for their shapes, once, and keeps the result on disk for later runs. `torch.compile` is not
used: it would look at the state of the agent before every call, and it does not see through `torch.autograd.grad`.
"""

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import torch
from torch import Tensor

Update = Callable[..., Mapping[str, Tensor]]

log = logging.getLogger(__name__)


class Changing(Protocol):
    """A part of an agent whose tensors an update reads and writes."""

    def changing_tensors(self) -> list[Tensor]:
        """Return those tensors."""
        ...

    def replaced_by(self, tensors: Sequence[Tensor]) -> contextlib.AbstractContextManager[None]:
        """Compute with others instead, for the time of a trace."""
        ...


class CompiledUpdate:
    """An update as one native function for each shape of its inputs; without a compiler, the update itself."""

    def __init__(self, update: Update, parts: Sequence[Changing]) -> None:
        """Take an update that maps tensors to named scalars and changes nothing but the tensors of `parts`."""
        self._update, self._parts = update, parts
        self._names: list[str] = []
        self._compiled: dict[tuple[torch.Size | None, ...], Callable[[list[Tensor]], Any]] = {}
        self._state = [tensor for part in parts for tensor in part.changing_tensors()]
        self.path = "compiled"
        """How updates are done: "compiled", or "eager" where compiling failed."""
        self.before_compiling: Callable[[], None] = lambda: None
        """Called before the seconds that a compilation takes."""

    def __call__(self, *inputs: Tensor | None) -> dict[str, Tensor]:
        """Do one update; returns its metrics. An input that is None stays None."""
        shapes = tuple(None if tensor is None else tensor.shape for tensor in inputs)
        function = self._compiled.get(shapes)
        if function is None:
            self.before_compiling()
            function = self._compiled[shapes] = self._compile(inputs)
        given = [tensor for tensor in inputs if tensor is not None]
        values = function([*self._state, *given])
        return dict(zip(self._names, values, strict=True))

    @property
    def compilations(self) -> int:
        """How often a new shape of inputs was compiled."""
        return len(self._compiled)

    def _compile(self, inputs: Sequence[Tensor | None]) -> Callable[[list[Tensor]], Any]:
        """Return the native function for these shapes, or the update itself where it cannot be compiled."""
        given = [tensor is not None for tensor in inputs]
        if self.path == "eager":
            return functools.partial(self._run_eagerly, given)
        try:
            function = functools.partial(self._functional, given)
            return _compiled(function, [*self._state, *(tensor for tensor in inputs if tensor is not None)])
        except Exception as error:  # a compiler, its headers or an internal of torch: training must go on
            reason = str(error).strip().partition("\n")[0]
            log.warning("cannot compile the update, going on without (%s: %s)", type(error).__name__, reason)
            self.path = "eager"
            return functools.partial(self._run_eagerly, given)

    def _run_eagerly(self, given: Sequence[bool], tensors: list[Tensor]) -> list[Tensor]:
        return list(self._named(given, tensors[len(self._state) :]))

    def _named(self, given: Sequence[bool], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Update, with None where nothing is given, and remember the names of the metrics."""
        tensors = iter(inputs)
        metrics = self._update(*(next(tensors) if present else None for present in given))
        self._names = list(metrics)
        return tuple(metrics.values())

    def _functional(self, given: Sequence[bool], *tensors: Tensor) -> tuple[Tensor, ...]:
        """The update with everything it touches as arguments."""
        remaining = list(tensors)
        with contextlib.ExitStack() as stack:
            for part in self._parts:
                count = len(part.changing_tensors())
                stack.enter_context(part.replaced_by(remaining[:count]))
                del remaining[:count]
            return self._named(given, remaining)


def _compiled(function: Callable[..., Any], tensors: list[Tensor]) -> Callable[[list[Tensor]], Any]:
    _keep_compiled_code()
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.lowering import lowerings
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(function, decomposition_table=_DECOMPOSITIONS, tracing_mode="fake")(*tensors)
    # The C++ wrapper saves 30 us per call; one compile thread leaves no worker processes behind.
    settings = config.patch(cpp_wrapper=True, compile_threads=1)
    with torch.no_grad(), settings, mock.patch.dict(lowerings, {_ONEDNN_LINEAR: _lower_onednn_linear}):
        compiled: Any = compile_fx(graph, tensors)
    return lambda values: compiled(*values)


def _keep_compiled_code() -> None:
    """Let compiled code outlive a reboot, which torch's default, a temporary directory, does not."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rl_training" / "compiled"
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))


def _adam_step(
    parameters: list[Tensor],
    gradients: list[Tensor],
    first_moments: list[Tensor],
    second_moments: list[Tensor],
    _: list[Tensor],
    steps: list[Tensor],
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    **rest: Any,
) -> None:
    """The fused kernel as formulas, which the compiler fuses with what comes before."""
    (parameter,), (gradient,), (first,), (second,), (step,) = (
        parameters,
        gradients,
        first_moments,
        second_moments,
        steps,
    )
    first.lerp_(gradient, 1.0 - beta1)
    second.mul_(beta2).add_(gradient.square() * (1.0 - beta2))
    step_size = lr / (1.0 - beta1**step)
    parameter.sub_(step_size * first / (second.sqrt() / (1.0 - beta2**step).sqrt() + eps))


def _lower_onednn_linear(*arguments: Any) -> Any:
    """Call oneDNN as it is: inductor's own way expects weights that never change."""
    from torch._inductor import ir, mkldnn_ir

    return ir.TensorBox.create(mkldnn_ir.LinearUnary.create(*arguments))  # type: ignore[no-untyped-call]


_DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._fused_adam_.default: _adam_step,
    torch.ops.aten._fused_adam_.tensor_lr: _adam_step,
}
_ONEDNN_LINEAR: Any = torch.ops.mkldnn._linear_pointwise.default
