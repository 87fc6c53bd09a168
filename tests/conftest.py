"""What several test files share: a config small enough for a test, and the toy environments."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_envs  # noqa: F401 - registers toy/...

from rl_training.api.algorithms import make_config
from rl_training.config import EnvConfig, TrainConfig
from rl_training.experiment import registry
from rl_training.runtime.checkpointing import read_checkpoint
from rl_training.runtime.trainer import TrainResult

_TINY_ALGO: dict[str, dict[str, Any]] = {
    "ppo": {"hidden_sizes": [16], "num_steps": 32, "minibatch_size": 32, "num_epochs": 2},
    "dqn": {"hidden_sizes": [16], "buffer_size": 1_000, "learning_starts": 32, "target_update_every": 50},
    "sac": {"hidden_sizes": [16], "buffer_size": 1_000, "learning_starts": 32, "batch_size": 32},
}


def _tiny_config(algo: str, env: str, /, **settings: Any) -> TrainConfig:
    algo_settings = {**_TINY_ALGO[algo], **settings.pop("algo", {})}
    env_settings = {"id": env, **settings.pop("env", {})}
    sections: dict[str, dict[str, Any]] = {
        "device": {"kind": "cpu"},
        "logging": {"progress": False, "tensorboard": False},
        "eval": {"episodes": 1, "every": None},
        "checkpoint": {"every_seconds": None},
    }
    for name, defaults in sections.items():
        settings[name] = {**defaults, **settings.get(name, {})}
    settings.setdefault("total_timesteps", 200)
    return make_config(registry.get(algo).config_class(**algo_settings), EnvConfig(**env_settings), **settings)


# Its failures then show their values, as those in test files do.
pytest.register_assert_rewrite("compilation_helpers")


@pytest.fixture
def one_thread():
    """Compute with one thread, whatever an earlier test has set."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny_config():
    """Return `tiny_config(algo, env_id, **settings)`: a config with small networks and nothing on the clock.

    Settings are fields of TrainConfig; sections are dicts, also `algo` and `env`: tiny_config("ppo", "CartPole-v1",
    env={"num_envs": 2}, algo={"num_steps": 8}).
    """
    return _tiny_config


@pytest.fixture
def finite_rows():
    """Return a function that reads metrics.jsonl and checks that every value in it is a finite number."""

    def read(run_dir: Path) -> list[dict[str, float]]:
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        for row in rows:
            for key, value in row.items():
                assert isinstance(value, (int, float)), f"{key} = {value!r} at step {row['step']}"
                assert math.isfinite(value), f"{key} = {value!r} at step {row['step']}"
        return rows

    return read


@pytest.fixture
def parameters():
    """Return a function that gives the bytes of every network parameter in a result's checkpoint."""

    def read(result: TrainResult) -> dict[str, bytes]:
        tensors: dict[str, bytes] = {}

        def collect(node: Any, path: str) -> None:
            if isinstance(node, torch.Tensor):
                tensors[path] = node.numpy().tobytes()
            elif isinstance(node, dict):
                for key, value in node.items():
                    collect(value, f"{path}/{key}")

        collect(read_checkpoint(result.checkpoint_path)["agent"], "")
        assert tensors
        return tensors

    return read
