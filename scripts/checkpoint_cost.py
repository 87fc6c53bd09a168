"""Measures what a checkpoint costs at the default cadence.

Run it as `python scripts/checkpoint_cost.py`. For each workload it makes the parts of a real run, fills the replay
buffer, and times `save_training_checkpoint` with as many new transitions as a minute of training brings.
"""

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from rl_training.api.algorithms import make_config
from rl_training.config import OffPolicyConfig
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.envs.training_envs import TrainingEnvs
from rl_training.experiment import registry
from rl_training.runtime.replay_journal import ReplayJournal
from rl_training.runtime.run_utils import create_training_run, save_training_checkpoint

ROUNDS = 7
# (algorithm, environment, env steps per second to assume, transitions in the buffer)
WORKLOADS = (
    ("ppo", "cartpole", 30_000, 0),
    ("ppo", "halfcheetah", 8_000, 0),
    ("dqn", "cartpole", 20_000, 10_000),
    ("sac", "pendulum", 300, 20_000),
    ("sac", "halfcheetah", 300, 1_000_000),
)


class Nothing:
    """A part without state."""

    def state_dict(self) -> dict[str, object]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Take nothing."""


def main() -> None:
    """Print the table."""
    print("| run | new transitions | in the buffer | checkpoint, median of 7 (ms) | share of a minute |")
    print("|---|---|---|---|---|")
    for algo, env, speed, stored in WORKLOADS:
        with tempfile.TemporaryDirectory() as directory:
            milliseconds = 1000 * _cost(algo, env, speed * 60, stored, Path(directory))
        new = min(speed * 60, stored)
        print(f"| {algo} {env} | {new:,} | {stored:,} | {milliseconds:.1f} | {milliseconds / 600:.2f} % |")


def _cost(algo: str, env: str, new_steps: int, stored: int, directory: Path) -> float:
    """Return the median seconds of a checkpoint."""
    hyperparameters = {"buffer_size": stored} if stored else {}
    config = make_config(algo, env, hyperparameters=hyperparameters, device={"kind": "cpu"})
    run = create_training_run(config, directory)
    envs = TrainingEnvs(config)
    envs.reset()
    build_agent = registry.get(algo).load_build_agent()
    agent = build_agent(config, envs.observation_spec, envs.action_spec, run.device)
    parts = {"agent": agent, "envs": envs, "session": Nothing()}
    replay = None
    if isinstance(config.algo, OffPolicyConfig):
        replay = ReplayBuffer(stored, 1, envs.observation_spec, envs.action_spec, seed=1)
        _add(replay, stored)
        parts["data"] = ReplayJournal(replay, directory)
        save_training_checkpoint(run, 0, parts)
    seconds = []
    for step in range(1, ROUNDS + 1):
        if replay is not None:
            _add(replay, new_steps)
        start = time.perf_counter()
        save_training_checkpoint(run, step, parts)
        seconds.append(time.perf_counter() - start)
    envs.close()
    run.close()
    return statistics.median(seconds)


def _add(replay: ReplayBuffer, count: int) -> None:
    """Add random transitions as fast as the ring allows."""
    generator = np.random.default_rng(0)
    rows = np.zeros(min(count, replay.capacity), replay.row_dtype)
    rows["observations"] = generator.standard_normal(rows["observations"].shape, dtype=np.float32)
    replay.added += count
    replay.unpack(replay.added - len(rows), rows)


if __name__ == "__main__":
    main()
