"""What the bits of a run depend on besides its config and seed, and what a resume says where that has changed.

Every checkpoint records it; a resumed run keeps what it can keep and compares the rest.
"""

import platform
from collections.abc import Mapping, Sequence

import torch

from rl_training.config import TrainConfig
from rl_training.networks.linear import matmul_library
from rl_training.runtime.system import cpu_name, package_version

# The setting or the fact behind each entry of the platform.
_BEHIND = {
    "python": "another installation",
    "torch": "another installation",
    "numpy": "another installation",
    "gymnasium": "another installation",
    "device": "device.kind",
    "threads": "device.threads",
    "acting": "it follows from device.kind and the version of rl_training",
    "updates": "device.compile",
    "matrix_products": "it follows from the processor",
    "cpu": "another machine",
}


def numeric_paths(agent: object) -> dict[str, str]:
    """Return how an agent computes where there is more than one way; an agent that does not say has the plain one."""
    compiled = getattr(agent, "compiled_update", None)
    return {
        "acting": getattr(agent, "acting_path", "torch"),
        "updates": "eager" if compiled is None else compiled.path,
        "matrix_products": matmul_library(),
    }


def numeric_platform(config: TrainConfig, device: torch.device, agent: object) -> dict[str, str]:
    """Return what the bits of a run depend on besides its config and seed."""
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__,
        **{name: package_version(name) or "?" for name in ("numpy", "gymnasium")},
        "device": torch.cuda.get_device_name() if device.type == "cuda" else str(device),
        "threads": str(config.device.threads),
        **numeric_paths(agent),
        "cpu": cpu_name(),
    }


def platform_changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Say what is different from where a checkpoint was taken, each with the setting or the fact behind it."""
    # The first checkpoints called it "matrix products".
    before = {name.replace(" ", "_"): value for name, value in before.items()}
    return [
        f"{name.replace('_', ' ')} changed from {before.get(name, 'unknown')} to {value} ({_BEHIND[name]})"
        for name, value in now.items()
        if before.get(name) != value
    ]


def keep_update_path(agent: object, before: Mapping[str, str], saved_compile: object) -> None:
    """Have a resumed agent update as before its checkpoint; `saved_compile` is what the run's config says of it."""
    compiled = getattr(agent, "compiled_update", None)
    if compiled is None:
        return
    compiled.required = before.get("updates") == "compiled"
    if before.get("updates") == "eager" and saved_compile is True:
        compiled.run_eagerly()  # compiling failed then; if it worked now, the bits would change


def inexact_warning(reasons: Sequence[str]) -> str:
    """Say in one line why a resume is not exact, and what that means."""
    return (
        f"This resume is not exact: {'; '.join(reasons)}. "
        "The result may differ from that of an uninterrupted run; resume_strict=true would refuse to go on."
    )
