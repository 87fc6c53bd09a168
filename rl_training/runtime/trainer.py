"""The words and types that trainers, callbacks and users share.

Glossary, used in code, config and metric keys alike:

env step        one transition of one environment, or one late reset (see `EnvStep.valid`), which is no transition
global_step     env steps so far, over all environments; every schedule and every cadence counts in it
vector step     one step of all `num_envs` environments
rollout         what PPO collects between updates
gradient step   one step of the optimizers
iteration       one collect phase and the updates that follow it

Metric keys, the same for every algorithm: `episode/…` training episodes, `eval/…` evaluations, `loss/…`, `policy/…`,
`schedule/…` values that move over the budget, `time/…` everything that depends on the clock.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rl_training.config import TrainConfig
from rl_training.envs.training_envs import Episode
from rl_training.runtime.statistics import Summary, summarize


class Agent(Protocol):
    """What evaluation and checkpoints need of an agent; each algorithm adds its own ways to explore and update."""

    def act(self, observations: NDArray[np.float32]) -> NDArray[Any]:
        """Return the deterministic action for each observation [N, D], as the environment takes it."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return all that changes while the agent learns."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        ...


class Stateful(Protocol):
    """A part of a run that goes into the checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain containers, numbers, tensors and arrays."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        ...


@runtime_checkable
class Experience(Protocol):
    """A rollout or replay buffer that can look for bad numbers in itself."""

    def check_finite(self, since: int) -> None:
        """Refuse NaN and infinity in what was collected since env step `since`."""
        ...


@runtime_checkable
class Journaled(Protocol):
    """A part whose state lies partly in append-only files of the run directory."""

    def files(self) -> dict[str, dict[str, int]]:
        """Return the files that the last `state_dict` relies on: how many bytes of each, and their crc32."""
        ...


@runtime_checkable
class Trainer(Protocol):
    """A run that is ready to go."""

    def train(self) -> "TrainResult":
        """Train to the end of the budget, or until a callback or a signal stops it."""
        ...


@dataclass
class TrainerState:
    """Where a run stands; what callbacks see, and through which they ask for a checkpoint or a stop."""

    config: TrainConfig
    run_dir: Path
    agent: Agent
    global_step: int = 0
    gradient_steps: int = 0
    episodes: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    """The newest value of every metric."""
    stop_reason: str | None = None
    paused: bool = False
    """Whether the run leaves before its end because of `stop_at_step`."""
    checkpoint_labels: set[str] = field(default_factory=set)
    checkpoint_requested: bool = False

    @property
    def progress(self) -> float:
        """Return the share of the budget that is spent, in [0, 1]."""
        total = self.config.total_timesteps
        return min(1.0, self.global_step / total) if total else 1.0

    def request_stop(self, reason: str) -> None:
        """Ask the trainer to finish after this iteration; the first reason is kept."""
        self.stop_reason = self.stop_reason or reason

    def request_checkpoint(self, label: str | None = None) -> None:
        """Ask the trainer to save after this iteration, under a label if one is given."""
        self.checkpoint_requested = True
        if label is not None:
            self.checkpoint_labels.add(label)


@dataclass(frozen=True)
class CollectResult:
    """What one collect phase brought."""

    env_steps: int
    episodes: tuple[Episode, ...]


@dataclass(frozen=True)
class UpdateResult:
    """What one update did; metrics are detached tensors, so that looking at them is the caller's choice."""

    gradient_steps: int
    metrics: Mapping[str, Tensor]


@dataclass(frozen=True)
class EvalResult:
    """The episodes of one evaluation."""

    global_step: int
    returns: tuple[float, ...]
    lengths: tuple[int, ...]
    first_seed: int
    acting_path: str = "custom"
    """Whether the agent acted in numpy or in torch, whose last bits differ; custom if it does not say."""

    @property
    def summary(self) -> Summary:
        """Return mean, deviation and interval of the returns."""
        return summarize(self.returns)

    def record(self) -> dict[str, Any]:
        """Return how the episodes were played and what they gave, so that they can be played again."""
        return {
            "seeds": [self.first_seed + episode for episode in range(len(self.returns))],
            "num_envs": 1,
            "acting_path": self.acting_path,
            "returns": list(self.returns),
            "lengths": list(self.lengths),
        }

    def metrics(self) -> dict[str, float]:
        """Return the evaluation as metric values."""
        summary = self.summary
        return {
            "eval/return_mean": summary.mean,
            "eval/return_std": summary.std,
            "eval/length_mean": float(np.mean(self.lengths)),
        }


@dataclass(frozen=True)
class TrainResult:
    """What a run leaves: its directory, its last checkpoint, and the last value of every metric."""

    run_dir: Path
    checkpoint_path: Path
    metrics: dict[str, float]


TrainFunction = Callable[..., TrainResult]
