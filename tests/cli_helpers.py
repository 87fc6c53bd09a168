"""What the tests of commands, configs, runs and checkpoints share: tiny runs, subprocesses, reading run directories."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_training.api.algorithms import make_config
from rl_training.config import DQNConfig, EnvConfig, PPOConfig, SACConfig, TrainConfig
from rl_training.runtime.session import TrainingInterrupted, TrainingSession

REPO = Path(__file__).resolve().parent.parent

# Settings for a run of a second: no preset, a small network, one evaluation episode.
TINY_PPO = [
    "tuned=none",
    "total_timesteps=128",
    "algo.num_steps=32",
    "algo.minibatch_size=32",
    "algo.num_epochs=1",
    "algo.hidden_sizes=[8]",
    "logging.every=32",
    "logging.progress=false",
    "eval.episodes=1",
    "checkpoint.every_seconds=null",
]

_ALGOS: dict[str, Any] = {
    "ppo": (PPOConfig, {"num_steps": 16, "minibatch_size": 16, "num_epochs": 2}),
    "dqn": (DQNConfig, {"learning_starts": 20, "train_every": 4, "batch_size": 8, "target_update_every": 40}),
    "sac": (SACConfig, {"learning_starts": 20, "train_every": 4, "batch_size": 8}),
}
_ENVS = {
    "ppo": ("cartpole", "CartPole-v1"),
    "dqn": ("cartpole", "CartPole-v1"),
    "sac": ("pendulum", "Pendulum-v1"),
}


def tiny_algo(name: str, **changes: Any) -> Any:
    """Return small settings of an algorithm."""
    config_class, settings = _ALGOS[name]
    if name != "ppo":
        settings = {**settings, "buffer_size": 500}
    return config_class(hidden_sizes=[8], **{**settings, **changes})


def tiny_env(algo: str, **changes: Any) -> EnvConfig:
    """Return an environment that the algorithm can learn in."""
    name, env_id = _ENVS[algo]
    return EnvConfig(**{"name": name, "id": env_id, **changes})


def tiny_run_config(
    algo: str, *, env: EnvConfig | None = None, algo_config: Any = None, **settings: Any
) -> TrainConfig:
    """Return the config of a silent run of 64 env steps that writes metrics.jsonl and no TensorBoard events."""
    sections: dict[str, dict[str, Any]] = {
        "logging": {"every": 16, "progress": False, "tensorboard": False},
        "eval": {"every": 32, "episodes": 1},
        "checkpoint": {"every_seconds": None},
        "device": {"kind": "cpu"},
    }
    for name, defaults in sections.items():
        settings[name] = {**defaults, **settings.get(name, {})}
    settings.setdefault("total_timesteps", 64)
    return make_config(algo_config or tiny_algo(algo), env or tiny_env(algo), **settings)


def command_environment(**changes: str) -> dict[str, str]:
    """Return the environment of a subprocess that finds the package in this checkout."""
    inherited = {key: value for key, value in os.environ.items() if key not in ("RL_OUTPUTS", "HYDRA_FULL_ERROR")}
    return {**inherited, "PYTHONPATH": str(REPO), **changes}


def run_module(
    module: str, *arguments: str, cwd: Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run python -m <module> and return its exit code and what it said."""
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=cwd,
        env=environment or command_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def run_train(
    *arguments: str, cwd: Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the training command."""
    return run_module("rl_training.train", *arguments, cwd=cwd, environment=environment)


def run_evaluate(
    *arguments: str, cwd: Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the evaluation command."""
    return run_module("rl_training.evaluate", *arguments, cwd=cwd, environment=environment)


def start_train(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    """Start the training command and return without waiting."""
    return subprocess.Popen(
        [sys.executable, "-m", "rl_training.train", *arguments],
        cwd=cwd,
        env=command_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(process: subprocess.Popen[str], condition: Any) -> Any:
    """Wait until `condition()` is true and return its value; a process that ends first, or hangs, fails the test."""
    for _ in range(1200):  # a safety net of two minutes
        if value := condition():
            return value
        if process.poll() is not None:
            raise AssertionError(f"ended early with {process.returncode}: {process.communicate()[1]}")
        time.sleep(0.1)
    process.kill()
    raise AssertionError("waited in vain")


def run_dirs(root: Path) -> list[Path]:
    """Return the run directories below `root`, by name."""
    return sorted(path.parent for path in root.rglob("config.yaml") if ".hydra" not in path.parts)


def only_run_dir(root: Path) -> Path:
    """Return the one run directory below `root`."""
    (run_dir,) = run_dirs(root)
    return run_dir


def metric_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl; every line must be whole."""
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def comparable_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows without what depends on the clock."""
    return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in metric_rows(run_dir)]


def run_card(run_dir: Path) -> dict[str, Any]:
    """Return metadata.json."""
    return json.loads((run_dir / "metadata.json").read_text())


def checkpoint_steps(run_dir: Path) -> list[int]:
    """Return the steps of the checkpoints that are there, in order."""
    return sorted(int(path.name.removeprefix("step_")) for path in (run_dir / "checkpoints").glob("step_*"))


def tensorboard_steps(run_dir: Path) -> dict[str, list[int]]:
    """Return the steps of every TensorBoard tag, in the order in which the events stand in the files."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    steps: dict[str, list[int]] = {}
    for path in sorted((run_dir / "tensorboard").iterdir()):
        for record in RawEventFileLoader(str(path)).Load():
            event = Event.FromString(record)
            for value in event.summary.value:
                steps.setdefault(value.tag, []).append(event.step)
    return steps


def names_in(directory: Path) -> list[str]:
    """Return the sorted names in a directory, without the lock that a run may hold on it."""
    return sorted(path.name for path in directory.iterdir() if not path.name.endswith("lock"))


def directory_content(directory: Path) -> dict[str, bytes]:
    """Return every file below a directory with its bytes."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def train_until_interrupted(monkeypatch: Any, start: Any, global_step: int) -> int:
    """Call `start()`, send this process SIGINT as soon as the run has counted `global_step` env steps, and return the
    exit code that a shell would see.
    """
    original = TrainingSession.record_step

    def record_step(session: TrainingSession, *arguments: Any) -> None:
        before = session.state.global_step
        original(session, *arguments)
        if before < global_step <= session.state.global_step:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingSession, "record_step", record_step)
        try:
            start()
        except TrainingInterrupted as error:
            return error.exit_code
    raise AssertionError("the run was not interrupted")


def differences(first: Any, second: Any, path: str = "") -> list[str]:
    """Return the paths at which two trees of state differ in a single bit, a shape or a type."""
    if type(first) is not type(second):
        return [path]
    if isinstance(first, dict):
        keys = sorted({*first, *second}, key=str)
        return [
            found
            for key in keys
            for found in (
                differences(first[key], second[key], f"{path}/{key}")
                if key in first and key in second
                else [f"{path}/{key}"]
            )
        ]
    if isinstance(first, (list, tuple)):
        if len(first) != len(second):
            return [path]
        return [
            found
            for i, pair in enumerate(zip(first, second, strict=True))
            for found in differences(*pair, f"{path}/{i}")
        ]
    if isinstance(first, torch.Tensor):
        first, second = first.numpy(), second.numpy()
    if isinstance(first, np.ndarray):
        same = first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()
        return [] if same else [path]
    return [] if first == second else [path]
