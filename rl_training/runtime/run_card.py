"""The run card (metadata.json): what was run, where, with which versions, whether it is exact, and how it ended."""

import json
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from rl_training import __version__
from rl_training.config import TrainConfig
from rl_training.networks.linear import matmul_library
from rl_training.runtime.system import cpu_name, write_durably

METADATA_FILE = "metadata.json"
_PACKAGES = ("gymnasium", "numpy", "hydra-core", "omegaconf", "mujoco", "Box2D")


def new_run_card(run_dir: Path, config: TrainConfig, device: torch.device) -> None:
    """Write the card of a run that begins."""
    card = {
        "status": "running",
        "exact": True,
        "command": _command(),
        "started": _now(),
        "algo": config.algo.name,
        "env": config.env.id,
        "preset": config.preset,
        "seed": config.seed,
        "tags": list(config.tags),
        "device": str(device),
        "threads": config.device.threads,
        "vectorization": config.env.vectorization.name,
        "git": _git_state(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "rl_training": __version__,
        "packages": {"torch": torch.__version__, **{name: _version(name) for name in _PACKAGES}},
    }
    _write_run_card(run_dir, card)


def add_resume(run_dir: Path, *, from_step: int, total_timesteps: int, reasons: Sequence[str]) -> None:
    """Note that a run goes on; `reasons` say why its result may differ from that of an uninterrupted run."""
    card = read_run_card(run_dir)
    record = {
        "from_step": from_step,
        "total_timesteps": total_timesteps,
        "started": _now(),
        "command": _command(),
        "exact": not reasons,
    }
    card.setdefault("resumes", []).append(record)
    card["status"] = "running"
    if reasons:
        card["exact"] = False
        card["inexact_reasons"] = [*card.get("inexact_reasons", []), *reasons]
    _write_run_card(run_dir, card)


def _command() -> list[str]:
    return [Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]]


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_state() -> dict[str, Any] | None:
    """Return commit and dirty flag of the directory the run was started in, or None outside git."""
    try:
        commit, status = (
            subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=5, check=True).stdout.strip()
            for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "dirty": bool(status)}


def read_run_card(run_dir: Path) -> dict[str, Any]:
    """Return the run card (metadata.json), empty if there is none."""
    try:
        card = json.loads((run_dir / METADATA_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return card if isinstance(card, dict) else {}


def update_run_card(run_dir: Path, **entries: Any) -> None:
    """Add to or replace entries of the run card."""
    _write_run_card(run_dir, {**read_run_card(run_dir), **entries})


def _write_run_card(run_dir: Path, card: dict[str, Any]) -> None:
    write_durably(run_dir / METADATA_FILE, json.dumps(card, indent=2) + "\n")


def numeric_paths(agent: object) -> dict[str, str]:
    """Return how an agent computes where there is more than one way; an agent that does not say has the plain one."""
    compiled = getattr(agent, "compiled_update", None)
    return {
        "acting": getattr(agent, "acting_path", "torch"),
        "updates": "eager" if compiled is None else compiled.path,
        "matrix products": matmul_library(),
    }


def numeric_platform(config: TrainConfig, device: torch.device, agent: object) -> dict[str, str]:
    """Return what the bits of a run depend on besides its config and seed."""
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__,
        **{name: _version(name) or "?" for name in ("numpy", "gymnasium")},
        "device": torch.cuda.get_device_name() if device.type == "cuda" else str(device),
        "threads": str(config.device.threads),
        **numeric_paths(agent),
        "cpu": cpu_name(),
    }


def platform_changes(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Return what is different on this machine from where a checkpoint was taken."""
    return [f"{name} was {before.get(name)} and is {now[name]}" for name in now if before.get(name) != now[name]]
