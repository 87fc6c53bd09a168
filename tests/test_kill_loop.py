"""Runs killed with SIGKILL at random moments, again and again, end in the same bits as one that never stopped.

A few kills per run by default; the full loop (`-m endurance`) makes at least fifty.
"""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_helpers import command_environment

from rl_training.runtime.checkpointing import checkpoint_paths
from rl_training.runtime.comparison import first_difference
from rl_training.runtime.run_card import read_run_card

# Each trains for some seconds; checkpoints are frequent so that kills fall into every part of a save as well.
RUNS = {
    "ppo, 8 environments": [
        *("algo=ppo", "env=cartpole", "env.num_envs=8", "total_timesteps=150_000", "algo.num_steps=128"),
        *("checkpoint.every=2000", "logging.every=1000", "eval.every=30_000", "eval.episodes=2"),
    ],
    "dqn, 2 environments": [
        *("algo=dqn", "env=mountaincar", "env.num_envs=2", "total_timesteps=24_000", "algo.buffer_size=5_000"),
        *(
            "algo.learning_starts=500",
            "checkpoint.every=700",
            "logging.every=300",
            "eval.every=6000",
            "eval.episodes=1",
        ),
    ],
    "sac on MuJoCo, normalised": [
        *("algo=sac", "env=hopper", "total_timesteps=3_000", "algo.hidden_sizes=[64,64]", "algo.batch_size=64"),
        *("env.normalize_observation=true", "env.normalize_reward=true", "algo.buffer_size=2_000"),
        *("checkpoint.every=150", "logging.every=50", "eval.every=900", "eval.episodes=1"),
    ],
    "ppo on Box2D, normalised": [
        *("algo=ppo", "env=lunarlander", "env.num_envs=2", "total_timesteps=16_000", "algo.num_steps=256"),
        *("env.normalize_observation=true", "env.normalize_reward=true"),
        *("checkpoint.every=500", "logging.every=500", "eval.every=5000", "eval.episodes=1"),
    ],
}


def start(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "rl_training.train", *arguments],
        cwd=directory,
        env=command_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_to_the_end(directory: Path, *arguments: str) -> None:
    process = start(directory, *arguments)
    _, errors = process.communicate()
    assert process.returncode == 0, errors


def newest_checkpoint(run_dir: Path) -> str:
    paths = checkpoint_paths(run_dir)
    return paths[-1].name if paths else ""


def kill_at_random(directory: Path, name: str, kills: int) -> None:
    """Train in directory/killed, killing the process a random moment after it has made progress."""
    moments = random.Random(f"{name} {kills}")
    run_dir = directory / "killed"
    arguments = [*RUNS[name], "tuned=none", "logging.progress=false", "hydra.run.dir=killed"]
    done = 0
    while done < kills:
        before = newest_checkpoint(run_dir)
        process = start(directory, *arguments)
        while process.poll() is None and newest_checkpoint(run_dir) <= before:
            time.sleep(0.001)
        time.sleep(moments.uniform(0.0, 0.05 if kills > 10 else 0.5))
        if process.poll() is not None:
            pytest.fail(f"the run ended after {done} kills: {process.communicate()[1]}")
        process.kill()
        process.communicate()
        done += 1
        arguments = ["resume=killed"]
    run_to_the_end(directory, *arguments)


def assert_exact(directory: Path, name: str, kills: int) -> None:
    kill_at_random(directory, name, kills)
    run_to_the_end(directory, *RUNS[name], "tuned=none", "logging.progress=false", "hydra.run.dir=straight")
    card = read_run_card(directory / "killed")
    assert len(card["resumes"]) == kills
    assert [record["from_step"] > 0 for record in card["resumes"]] == [True] * kills
    assert card["exact"] is True
    assert first_difference(directory / "straight", directory / "killed") is None


@pytest.mark.parametrize("name", RUNS)
def test_a_run_killed_a_few_times_is_exact(name, tmp_path):
    assert_exact(tmp_path, name, kills=3)


@pytest.mark.endurance
@pytest.mark.parametrize("name", RUNS)
def test_a_run_killed_many_times_is_exact(name, tmp_path):
    assert_exact(tmp_path, name, kills=15)
