"""What `auto` means for `device.threads`, `device.compile` and `env.vectorization`.

All change the bits of a run, or may, so all follow from the config and the machine's equipment, never from a timing,
and the run records what was chosen: a resumed run does not choose again.
"""

import dataclasses
import logging
import os
import shutil
import sys
from typing import TYPE_CHECKING

from rl_training.config import TrainConfig, Vectorization
from rl_training.runtime.system import usable_cores

if TYPE_CHECKING:
    import torch

AUTO = "auto"
# From this width on a second thread pays: with 256, 400, 512 and 1024 units SAC gains a factor of 1.1, 1.2, 1.4, 1.6.
WIDE_LAYER = 512

log = logging.getLogger(__name__)


def settled(config: TrainConfig, device: "torch.device") -> TrainConfig:
    """Return the config with every `auto` replaced by what it means here."""
    settings = dataclasses.replace(config.device, threads=thread_count(config), compile=compiles(config, device))
    env = dataclasses.replace(config.env, vectorization=vectorization(config))
    return dataclasses.replace(config, device=settings, env=env)


def vectorization(config: TrainConfig) -> Vectorization:
    """Return how environments step: one after the other, unless the config says otherwise.

    Whether processes pay depends on how long the simulator takes, which only a timing could tell; and the environments
    that step all at once draw other random numbers, so that they must be asked for.
    """
    asked = config.env.vectorization
    return Vectorization.sync if asked is Vectorization.auto else asked


def thread_count(config: TrainConfig) -> int:
    """Return the threads of torch: one for the usual networks, two for wide layers where there are two cores."""
    if isinstance(config.device.threads, int):
        return config.device.threads
    widths = [*config.algo.hidden_sizes, *(getattr(config.algo, "critic_hidden_sizes", None) or [])]
    wide = max(widths, default=0) >= WIDE_LAYER
    return 2 if wide and _cores() >= 2 else 1


def compiles(config: TrainConfig, device: "torch.device") -> bool:
    """Whether updates are compiled: on the CPU, for a run long enough to win back what compiling costs.

    Not those on images: a Nature DQN update took 34 ms compiled and 32 as it is.
    """
    if config.device.compile == AUTO:
        pays = config.algo.compiling_pays_after
        long_enough = pays is not None and config.algo.planned_gradient_steps(config) >= pays
        return long_enough and _obstacle(config, device) is None and not _sees_images(config)
    if not config.device.compile:
        return False
    obstacle = _obstacle(config, device)
    if obstacle is not None:
        log.warning("device.compile=true: %s; going on without.", obstacle)
    return obstacle is None


def _sees_images(config: TrainConfig) -> bool:
    """Convolutions are most of such an update, and the compiler calls the same library for them as torch does."""
    from rl_training.envs.factory import probe_spaces

    observation, _ = probe_spaces(config.env)
    return bool(observation.images)


def _obstacle(config: TrainConfig, device: "torch.device") -> str | None:
    if config.algo.compiling_pays_after is None:
        return f"algo={config.algo.name} has no compiled update"
    if device.type != "cpu":
        return f"updates are compiled on the CPU only, not on {device.type}"
    if cpp_compiler() is None:
        return "it needs a C++ compiler (g++, or the one that CXX names)"
    return None


def cpp_compiler() -> str | None:
    """Return the compiler that torch would use, or None if it is not there."""
    return shutil.which(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++"))


def _cores() -> int:
    return usable_cores()
