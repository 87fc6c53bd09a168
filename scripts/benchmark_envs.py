"""Measures how fast environments step in each way that `env.vectorization` knows, and how fast PPO trains on 512.

    python scripts/benchmark_envs.py                    # both tables, as in docs/performance.md
    python scripts/benchmark_envs.py tables=envs envs=CartPole-v1 counts=1,8 kinds=sync,async rounds=5
    python scripts/benchmark_envs.py tables=ppo         # on one core: taskset -c 0 python scripts/benchmark_envs.py ...

Environments step through `TrainingEnvs`, as trainers step them, with random actions; each number is the median of
`rounds` rounds of at least half a second. What is not installed, or what an environment does not have, is left out.
Steps with which an environment of vector or envpool only resets count as steps, as they do in a run.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from rl_training.api.algorithms import make_config
from rl_training.config import EnvConfig, PPOConfig
from rl_training.config.conversion import shipped_env
from rl_training.envs.training_envs import TrainingEnvs
from rl_training.errors import UserError
from rl_training.experiment import registry
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.run_utils import limit_threads
from rl_training.spaces import ContinuousActions, choice_counts

SECONDS = 0.5
DEFAULTS = {
    "tables": "envs,ppo",
    "envs": "CartPole-v1,Pendulum-v1,HalfCheetah-v5,ALE/Pong-v5",
    "counts": "1,8,64,512",
    "kinds": "sync,async,vector,envpool",
    "rounds": "3",
    "workers": "",
    "compile": "true",
    "total_timesteps": "2_000_000",
}


def main() -> None:
    """Print the tables that were asked for."""
    settings = {**DEFAULTS, **dict(argument.split("=", 1) for argument in sys.argv[1:])}
    if unknown := set(settings) - set(DEFAULTS):
        raise SystemExit(f"Unknown: {', '.join(sorted(unknown))}. Choose from {', '.join(DEFAULTS)}.")
    limit_threads(1)
    if "envs" in settings["tables"].split(","):
        _environments_table(settings)
    if "ppo" in settings["tables"].split(","):
        _ppo_table(settings)


def _environments_table(settings: dict[str, str]) -> None:
    counts = [int(count) for count in settings["counts"].split(",")]
    print("| env steps/s | vectorization |", " | ".join(f"{count} envs" for count in counts), "|")
    print("|---|---|", "---|" * len(counts), sep="")
    for env_id in settings["envs"].split(","):
        for kind in settings["kinds"].split(","):
            speeds = [_speed(env_id, kind, count, settings) for count in counts]
            if any(speed is not None for speed in speeds):
                cells = " | ".join("-" if speed is None else f"{speed:,.0f}" for speed in speeds)
                print(f"| {env_id} | {kind} | {cells} |", flush=True)


def _env_config(env_id: str, kind: str, count: int, workers: int | None) -> EnvConfig:
    settings: dict[str, Any] = dict(shipped_env(env_id) or {"id": env_id})
    if kind in ("vector", "envpool") and settings.pop("wrappers", None):
        # These have the preprocessing and the frame stack of our Atari groups built in.
        settings["env_kwargs"], settings["frame_stack"] = {}, 4 if kind == "envpool" else 1
    return EnvConfig(**{**settings, "num_envs": count, "vectorization": kind, "workers": workers})


def _speed(env_id: str, kind: str, count: int, settings: dict[str, str]) -> float | None:
    """Return env steps per second, or None where this cannot be run."""
    workers = int(settings["workers"]) if settings["workers"] else None
    config = make_config(PPOConfig(minibatch_size=1), _env_config(env_id, kind, count, workers), device={"threads": 1})
    try:
        envs = TrainingEnvs(config)
    except UserError as error:
        print(f"{env_id}, {kind}: {error}", file=sys.stderr)
        return None
    try:
        envs.reset()
        actions = _random_actions(envs)
        _steps_per_second(envs, actions, SECONDS / 5)
        return statistics.median(_steps_per_second(envs, actions, SECONDS) for _ in range(int(settings["rounds"])))
    finally:
        envs.close()


def _random_actions(envs: TrainingEnvs) -> list[Any]:
    random, spec = np.random.default_rng(0), envs.action_spec
    if isinstance(spec, ContinuousActions):
        shape = (envs.num_envs, spec.size)
        return [random.uniform(spec.low, spec.high, shape).astype(np.float32) for _ in range(64)]
    (alternatives,) = choice_counts(spec)
    return [random.integers(alternatives, size=envs.num_envs) for _ in range(64)]


def _steps_per_second(envs: TrainingEnvs, actions: list[Any], seconds: float) -> float:
    steps, start = 0, time.perf_counter()
    while True:
        for chosen in actions[: max(1, 1024 // envs.num_envs)]:
            envs.step(chosen)
            steps += envs.num_envs
        if (passed := time.perf_counter() - start) >= seconds:
            return steps / passed


def _ppo_table(settings: dict[str, str]) -> None:
    """Train PPO as users do, with the default logging, and read its speed from its own metric rows."""
    print("\n| PPO CartPole-v1, 512 vector environments, 64x64 | env steps/s | per second of processor time |")
    print("|---|---|---|")
    for num_steps in (32, 128):
        measured = [_ppo_speed(num_steps, settings) for _ in range(int(settings["rounds"]))]
        wall, cpu = (statistics.median(values) for values in zip(*measured, strict=True))
        print(f"| rollouts of {num_steps} steps | {wall:,.0f} | {cpu:,.0f} |", flush=True)


def _ppo_speed(num_steps: int, settings: dict[str, str]) -> tuple[float, float]:
    """Return env steps per second of wall-clock time, and of the processor's time that the run got.

    Compiling, which happens once, is left out: both are counted from the first metric row on.
    """
    config = make_config(
        PPOConfig(num_steps=num_steps, minibatch_size=512 * num_steps // 4, num_epochs=4, hidden_sizes=[64, 64]),
        EnvConfig(id="CartPole-v1", num_envs=512, vectorization="vector"),  # type: ignore[arg-type]
        total_timesteps=int(settings["total_timesteps"]),
        eval={"episodes": 0},
        device={"kind": "cpu", "threads": 1, "compile": settings["compile"] == "true"},
        logging={"progress": False},
    )
    with tempfile.TemporaryDirectory() as directory:
        clock = _CpuTimes()
        registry.get("ppo").load_train()(config, run_dir=Path(directory) / "run", callbacks=[clock])
        lines = (Path(directory) / "run" / "metrics.jsonl").read_text().splitlines()
    first, last = json.loads(lines[0]), json.loads(lines[-1])
    steps = last["step"] - first["step"]
    return steps / (last["time/seconds"] - first["time/seconds"]), steps / (clock.times[-1] - clock.times[0])


class _CpuTimes(Callback):
    """Notes the processor's time after each update."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_update_end(self, state: Any, result: Any) -> None:
        """Note it."""
        self.times.append(time.process_time())


if __name__ == "__main__":
    main()
