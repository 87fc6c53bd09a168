import json

import pytest
import yaml

from rl_training.algorithms.sac import SACAgent
from rl_training.api.algorithms import train_sac
from rl_training.runtime.checkpointing import read_checkpoint


def test_a_run_leaves_its_config_card_metrics_and_checkpoint(tiny_config, tmp_path, finite_rows):
    config = tiny_config("sac", "Pendulum-v1", total_timesteps=300, logging={"every": 100}, seed=4)
    result = train_sac(config, run_dir=tmp_path)
    assert result.run_dir == tmp_path

    saved = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert (saved["seed"], saved["env"]["id"], saved["algo"]["learning_starts"]) == (4, "Pendulum-v1", 32)
    card = json.loads((tmp_path / "metadata.json").read_text())
    assert (card["status"], card["global_step"], card["algo"]) == ("finished", 300, "sac")
    assert read_checkpoint(result.checkpoint_path)["session"]["global_step"] == 300

    rows = finite_rows(tmp_path)
    assert [row["step"] for row in rows] == [100, 200, 300]
    expected = {
        "loss/value",
        "loss/policy",
        "policy/entropy",
        "policy/q_value",
        "policy/temperature",
        "schedule/learning_rate",
    }
    assert all(expected <= set(row) for row in rows)
    assert rows[-1]["train/gradient_steps"] == 300 - 32
    assert result.metrics["eval/return_mean"] == rows[-1]["eval/return_mean"]


def test_the_seed_decides_every_parameter(tiny_config, tmp_path, parameters):
    def train(name, seed):
        config = tiny_config("sac", "Pendulum-v1", seed=seed, env={"num_envs": 2})
        return parameters(train_sac(config, run_dir=tmp_path / name))

    first, again, other = train("first", 1), train("again", 1), train("other", 2)
    assert first == again
    assert first != other


def test_several_normalised_environments_train(tiny_config, tmp_path, finite_rows):
    env = {"num_envs": 4, "normalize_observation": True, "normalize_reward": True}
    # A buffer of 98 holds 24 vector steps of 4 and wraps around; 3 updates for every 8 env steps.
    algo = {"buffer_size": 98, "train_every": 8, "gradient_steps": 3}
    config = tiny_config("sac", "Pendulum-v1", env=env, algo=algo, total_timesteps=400)
    result = train_sac(config, run_dir=tmp_path)
    rows = finite_rows(tmp_path)
    assert rows[-1]["step"] == 400
    # at 40, 48, ..., 400
    assert result.metrics["train/gradient_steps"] == 3 * 46


@pytest.mark.parametrize(("learning_starts", "forbidden"), [(50, "explore"), (0, "random_actions")])
def test_actions_are_random_before_learning_starts_and_of_the_policy_after(
    tiny_config, tmp_path, monkeypatch, learning_starts, forbidden
):
    def fail(*arguments):
        raise AssertionError(f"{forbidden} was called")

    monkeypatch.setattr(SACAgent, forbidden, fail)
    config = tiny_config("sac", "Pendulum-v1", algo={"learning_starts": learning_starts}, total_timesteps=50)
    assert train_sac(config, run_dir=tmp_path).metrics["train/gradient_steps"] == 50 - learning_starts


def test_sac_learns_to_hit_the_number(tiny_config, tmp_path):
    # The best return is 0; the constant 1 loses E (s - 1)^2 = 4/3 a step, 13.3 an episode; random actions twice that.
    config = tiny_config(
        "sac",
        "toy/ContinuousIdentity-v0",
        env={"env_kwargs": {"low": -1.0, "high": 3.0}},
        algo={"gamma": 0.0, "learning_rate": 0.01, "hidden_sizes": [32, 32], "batch_size": 64},
        eval={"episodes": 5},
        total_timesteps=1_500,
    )
    assert train_sac(config, run_dir=tmp_path).metrics["eval/return_mean"] > -2.0
