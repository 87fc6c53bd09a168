"""Compiled updates: the update that an agent has, traced once and turned into one native function.

The trace records every operation of the plain update, its backward pass and its optimizer steps included, so there is
no second version of the maths. What changes between two calls (parameters, moments, the batch) are the inputs of the
trace; inductor compiles it for their shapes, once, and keeps the result on disk for later runs. `torch.compile` is not
used: it would look at the state of the agent before every call, and it does not see through `torch.autograd.grad`.
"""

import contextlib
import functools
import hashlib
import logging
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import torch
from torch import Tensor

from rl_training.errors import UserError
from rl_training.runtime.system import cpu_vendor_and_flags

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
        self._names: dict[tuple[bool, ...], list[str]] = {}
        self._compiled: dict[tuple[torch.Size | None, ...], Callable[[list[Tensor]], Any]] = {}
        self._state = [tensor for part in parts for tensor in part.changing_tensors()]
        self.path = "compiled"
        """How updates are done: "compiled", or "eager" where compiling failed."""
        self.required = False
        """Whether a failure to compile is an error: a resumed run must not go on with other bits."""
        self.before_compiling: Callable[[], None] = lambda: None
        """Called before the seconds that a compilation takes."""

    def __call__(self, *inputs: Tensor | None) -> dict[str, Tensor]:
        """Do one update; returns its metrics. An input that is None stays None."""
        shapes = tuple(None if tensor is None else tensor.shape for tensor in inputs)
        function = self._compiled.get(shapes)
        if function is None:
            self.before_compiling()
            function = self._compiled[shapes] = self._compile(inputs)
        values = function([*self._state, *(tensor for tensor in inputs if tensor is not None)])
        names = self._names[tuple(tensor is not None for tensor in inputs)]
        return dict(zip(names, values, strict=True))

    @property
    def compilations(self) -> int:
        """How often a new shape of inputs was compiled."""
        return len(self._compiled)

    def _compile(self, inputs: Sequence[Tensor | None]) -> Callable[[list[Tensor]], Any]:
        """Return the native function for these shapes, or the update itself where it cannot be compiled."""
        given = tuple(tensor is not None for tensor in inputs)
        if self.path == "eager":
            return functools.partial(self._run_eagerly, given)
        try:
            function = functools.partial(self._functional, given)
            return _compiled(function, [*self._state, *(tensor for tensor in inputs if tensor is not None)])
        except Exception as error:  # a compiler, its headers or an internal of torch: training must go on
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            if self.required:
                raise UserError(
                    f"The checkpoint has compiled updates, and compiling failed here ({reason}). "
                    "device.compile=false goes on without, with other bits."
                ) from error
            log.warning("cannot compile the update, going on without (%s)", reason)
            self.run_eagerly()
            return functools.partial(self._run_eagerly, given)

    def run_eagerly(self) -> None:
        """Do without compiling from now on."""
        self.path = "eager"
        self._compiled.clear()

    def _run_eagerly(self, given: tuple[bool, ...], tensors: list[Tensor]) -> list[Tensor]:
        return list(self._named(given, tensors[len(self._state) :]))

    def _named(self, given: tuple[bool, ...], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Update, with None where nothing is given, and remember the names of the metrics."""
        tensors = iter(inputs)
        metrics = self._update(*(next(tensors) if present else None for present in given))
        self._names[given] = list(metrics)
        return tuple(metrics.values())

    def _functional(self, given: tuple[bool, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        """The update with everything it touches as arguments."""
        remaining = list(tensors)
        with contextlib.ExitStack() as stack:
            for part in self._parts:
                count = len(part.changing_tensors())
                stack.enter_context(part.replaced_by(remaining[:count]))
                del remaining[:count]
            return self._named(given, remaining)


def _compiled(function: Callable[..., Any], tensors: list[Tensor]) -> Callable[[list[Tensor]], Any]:
    """Compile, with what is kept from earlier runs or, should that be damaged, without."""
    with _signals_held_back():
        try:
            with _kept_code():
                return _traced_and_compiled(function, tensors)
        except Exception as error:
            log.info("compiling again without the cache, after %s: %s", type(error).__name__, error)
            with tempfile.TemporaryDirectory() as directory, _cache_directory(directory):
                return _traced_and_compiled(function, tensors)


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Keep Ctrl-C, which a terminal sends to every process, from killing the C++ compiler, which inherits the mask."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _kept_code() -> Iterator[None]:
    """Keep compiled code where it outlives a reboot, apart for each kind of processor and number of threads.

    torch's own choice is a temporary directory, and its key leaves the processor out: a home directory that machines
    share must not hand one the code of another.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        yield
        return
    vendor, flags = cpu_vendor_and_flags()
    kind = f"{torch.__version__} {vendor} {sorted(flags)} {torch.get_num_threads()} threads"
    key = hashlib.sha256(kind.encode()).hexdigest()[:16]
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        directory = root / "rl_training" / "compiled" / key
        directory.mkdir(parents=True, exist_ok=True)
        usable = os.access(directory, os.W_OK)
    except (OSError, RuntimeError):  # no home, or one that cannot be written
        usable = False
    with _cache_directory(str(directory)) if usable else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _cache_directory(directory: str) -> Iterator[None]:
    with mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": directory}):
        yield


def _traced_and_compiled(function: Callable[..., Any], tensors: list[Tensor]) -> Callable[[list[Tensor]], Any]:
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
    (parameter,), (gradient,), (first,), (second,) = parameters, gradients, first_moments, second_moments
    (step,) = steps
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
