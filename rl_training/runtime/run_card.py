"""The run card (metadata.json): what was run, where, with which versions, whether it is exact, and how it ended."""

import json
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rl_training import __version__
from rl_training.config import TrainConfig
from rl_training.envs.wrappers import named_wrappers
from rl_training.runtime.system import cpu_name, package_version, write_durably

METADATA_FILE = "metadata.json"
_PACKAGES = ("gymnasium", "numpy", "hydra-core", "omegaconf", "mujoco", "Box2D", "ale-py", "envpool")


def new_run_card(run_dir: Path, config: TrainConfig, device: torch.device) -> None:
    """Write the card of a run that begins."""
    card = {
        "status": "running",
        "exact": True,
        "command": _command(),
        "started": _now(),
        "algo": config.algo.name,
        "env": config.env.id,
        "wrappers": [wrapper.described() for wrapper in named_wrappers(config.env.wrappers)],
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
        "packages": {"torch": torch.__version__, **{name: package_version(name) for name in _PACKAGES}},
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
