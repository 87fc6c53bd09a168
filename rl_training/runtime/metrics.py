"""What the next metric row says about training: the last episodes, the last update, the schedules in force."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_training.envs.training_envs import Episode

EPISODE_WINDOW = 100


class TrainingMetrics:
    """Gathers values between two rows; tensors become numbers only when a row is written, so no GPU is waited for."""

    def __init__(self) -> None:
        self._episodes: deque[Episode] = deque(maxlen=EPISODE_WINDOW)
        self._update: Sequence[Mapping[str, Tensor]] | dict[str, float] = {}
        self._schedule: dict[str, float] = {}

    def add_episodes(self, episodes: Iterable[Episode]) -> None:
        """Take in finished episodes; the last hundred count."""
        self._episodes.extend(episodes)

    def set_update(self, metrics: Sequence[Mapping[str, Tensor]], schedule: dict[str, float]) -> None:
        """Take in an update: one mapping for each gradient step, and the scheduled values it used."""
        self._update, self._schedule = metrics, schedule

    def values(self) -> dict[str, float]:
        """Return the values of a row."""
        row: dict[str, float] = {}
        if self._episodes:
            count = len(self._episodes)
            row["episode/return_mean"] = sum(episode.episode_return for episode in self._episodes) / count
            row["episode/length_mean"] = sum(episode.length for episode in self._episodes) / count
        row.update(self._update_values())
        row.update({f"schedule/{name}": value for name, value in self._schedule.items()})
        return row

    def _update_values(self) -> dict[str, float]:
        if not isinstance(self._update, dict):
            self._update = {key: float(value) for key, value in mean_metrics(self._update).items()}
        return self._update

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next row depends on."""
        return {
            "episodes": [[episode.episode_return, episode.length] for episode in self._episodes],
            "update": self._update_values(),
            "schedule": self._schedule,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._episodes.extend(Episode(*values) for values in state["episodes"])
        self._update, self._schedule = state["update"], state["schedule"]


def mean_metrics(metrics: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return each metric's mean over gradient steps; not every step has every metric."""
    names = dict.fromkeys(name for entry in metrics for name in entry)
    return {name: torch.stack([entry[name] for entry in metrics if name in entry]).mean() for name in names}
