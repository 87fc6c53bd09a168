import itertools
import json

import pytest
import yaml

from rl_training.api.algorithms import train_ppo
from rl_training.runtime.checkpointing import read_checkpoint


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_a_run_leaves_its_config_card_metrics_and_checkpoint(tiny_config, tmp_path, env_id, finite_rows):
    config = tiny_config("ppo", env_id, total_timesteps=300, logging={"every": 64}, seed=4)
    result = train_ppo(config, run_dir=tmp_path)
    assert result.run_dir == tmp_path

    saved = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert (saved["seed"], saved["env"]["id"], saved["algo"]["num_steps"]) == (4, env_id, 32)
    card = json.loads((tmp_path / "metadata.json").read_text())
    # Ten rollouts of 32: the budget of 300 is rounded up.
    assert (card["status"], card["global_step"], card["algo"]) == ("finished", 320, "ppo")
    assert read_checkpoint(result.checkpoint_path)["session"]["global_step"] == 320

    rows = finite_rows(tmp_path)
    assert [row["step"] for row in rows] == [64, 128, 192, 256, 320]
    expected = {
        "loss/policy",
        "loss/value",
        "policy/entropy",
        "policy/kl",
        "policy/clip_fraction",
        "policy/explained_variance",
        "schedule/learning_rate",
        "schedule/clip_range",
        "train/gradient_steps",
    }
    assert all(expected <= set(row) for row in rows)
    assert rows[-1]["train/gradient_steps"] == 20  # ten rollouts, two epochs of one minibatch
    assert result.metrics["eval/return_mean"] == rows[-1]["eval/return_mean"]


def test_the_seed_decides_every_parameter(tiny_config, tmp_path, parameters):
    def train(name, seed):
        config = tiny_config("ppo", "CartPole-v1", seed=seed, env={"num_envs": 2}, algo={"num_steps": 16})
        return parameters(train_ppo(config, run_dir=tmp_path / name))

    first, again, other = train("first", 1), train("again", 1), train("other", 2)
    assert first == again
    assert first != other


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_several_normalised_environments_train(tiny_config, tmp_path, env_id, finite_rows):
    env = {"num_envs": 4, "normalize_observation": True, "normalize_reward": True}
    config = tiny_config("ppo", env_id, env=env, algo={"num_steps": 16, "minibatch_size": 24}, total_timesteps=256)
    result = train_ppo(config, run_dir=tmp_path)
    rows = finite_rows(tmp_path)
    assert rows[-1]["step"] == 256
    # Four rollouts of 64, two epochs of minibatches of 24, 24 and 16.
    assert result.metrics["train/gradient_steps"] == 4 * 2 * 3


def test_schedules_follow_the_budget(tiny_config, tmp_path, finite_rows):
    algo = {"learning_rate": 1e-2, "learning_rate_schedule": "linear", "clip_range_schedule": "linear"}
    config = tiny_config("ppo", "CartPole-v1", algo=algo, total_timesteps=128, logging={"every": 32})
    train_ppo(config, run_dir=tmp_path)
    rows = finite_rows(tmp_path)
    # Four rollouts of 32, so that each takes a quarter of the way from 0.01 (and from 0.2) to zero.
    for key, quarter in (("schedule/learning_rate", 0.0025), ("schedule/clip_range", 0.05)):
        values = [row[key] for row in rows]
        falls = [earlier - later for earlier, later in itertools.pairwise(values)]
        assert falls == pytest.approx([quarter] * 3)


def test_ppo_learns_to_name_the_state(tiny_config, tmp_path):
    # The best return is 10 of 10; guessing brings 1.7.
    config = tiny_config(
        "ppo",
        "toy/Identity-v0",
        env={"num_envs": 4, "env_kwargs": {"observation_start": 2, "action_start": 7}},
        algo={"gamma": 0.0, "learning_rate": 0.01, "minibatch_size": 64, "num_epochs": 4},
        eval={"episodes": 5},
        total_timesteps=5_000,
    )
    metrics = train_ppo(config, run_dir=tmp_path).metrics
    assert metrics["eval/return_mean"] == 10.0
    assert metrics["episode/return_mean"] > 7.0


def test_ppo_learns_to_hit_the_number(tiny_config, tmp_path):
    # The best return is 0; the constant 1 loses E (s - 1)^2 = 4/3 a step, 13.3 an episode; the first policy more.
    config = tiny_config(
        "ppo",
        "toy/ContinuousIdentity-v0",
        env={"num_envs": 4, "env_kwargs": {"low": -1.0, "high": 3.0}},
        algo={"gamma": 0.0, "learning_rate": 0.01, "minibatch_size": 64, "num_epochs": 8},
        eval={"episodes": 5},
        total_timesteps=10_000,
    )
    assert train_ppo(config, run_dir=tmp_path).metrics["eval/return_mean"] > -2.0
