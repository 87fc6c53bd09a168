import json

import pytest
import yaml

from rl_training.api.algorithms import train_dqn
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.runtime import dqn_trainer
from rl_training.runtime.checkpointing import read_checkpoint


def test_a_run_leaves_its_config_card_metrics_and_checkpoint(tiny_config, tmp_path, finite_rows):
    config = tiny_config("dqn", "CartPole-v1", total_timesteps=300, logging={"every": 100}, seed=4)
    result = train_dqn(config, run_dir=tmp_path)
    assert result.run_dir == tmp_path

    saved = yaml.safe_load((tmp_path / "config.yaml").read_text())
    assert (saved["seed"], saved["env"]["id"], saved["algo"]["learning_starts"]) == (4, "CartPole-v1", 32)
    card = json.loads((tmp_path / "metadata.json").read_text())
    assert (card["status"], card["global_step"], card["algo"]) == ("finished", 300, "dqn")
    assert read_checkpoint(result.checkpoint_path)["session"]["global_step"] == 300

    rows = finite_rows(tmp_path)
    assert [row["step"] for row in rows] == [100, 200, 300]
    expected = {"loss/value", "policy/q_value", "schedule/epsilon", "schedule/learning_rate", "episode/return_mean"}
    assert all(expected <= set(row) for row in rows)
    # An update every 4 steps after step 32: at 36, 40, ..., 300.
    assert rows[-1]["train/gradient_steps"] == 67
    assert result.metrics["eval/return_mean"] == rows[-1]["eval/return_mean"]


def test_epsilon_follows_the_budget(tiny_config, tmp_path, finite_rows):
    # Epsilon falls from 1 to 0.2 over the first half of 400 steps, with updates at every step: the update of step t
    # reports the epsilon of the action before it, taken at step t - 1. 1 - 0.8 x 99 / 200 = 0.604.
    algo = {"train_every": 1, "exploration_fraction": 0.5, "final_epsilon": 0.2}
    config = tiny_config("dqn", "CartPole-v1", algo=algo, total_timesteps=400, logging={"every": 100})
    train_dqn(config, run_dir=tmp_path)
    epsilons = [row["schedule/epsilon"] for row in finite_rows(tmp_path)]
    assert epsilons == pytest.approx([0.604, 0.204, 0.2, 0.2])


def test_the_seed_decides_every_parameter(tiny_config, tmp_path, parameters):
    def train(name, seed):
        config = tiny_config("dqn", "CartPole-v1", seed=seed, env={"num_envs": 2})
        return parameters(train_dqn(config, run_dir=tmp_path / name))

    first, again, other = train("first", 1), train("again", 1), train("other", 2)
    assert first == again
    assert first != other


def test_several_normalised_environments_train(tiny_config, tmp_path, finite_rows):
    env = {"num_envs": 4, "normalize_observation": True, "normalize_reward": True}
    # A buffer of 98 holds 24 vector steps of 4 and wraps around; 3 updates for every 8 env steps.
    algo = {"buffer_size": 98, "train_every": 8, "gradient_steps": 3}
    config = tiny_config("dqn", "CartPole-v1", env=env, algo=algo, total_timesteps=400)
    result = train_dqn(config, run_dir=tmp_path)
    rows = finite_rows(tmp_path)
    assert rows[-1]["step"] == 400
    # at 40, 48, ..., 400
    assert result.metrics["train/gradient_steps"] == 3 * 46


def test_a_vector_step_that_crosses_several_cadences_owes_several_updates(tiny_config, tmp_path):
    # Four environments and an update for every env step: 4 at each vector step that ends at 36, 40, ..., 80.
    config = tiny_config("dqn", "CartPole-v1", env={"num_envs": 4}, algo={"train_every": 1}, total_timesteps=80)
    assert train_dqn(config, run_dir=tmp_path).metrics["train/gradient_steps"] == 4 * 12


def test_all_actions_are_random_before_learning_starts(tiny_config, tmp_path, monkeypatch):
    # With an epsilon of 0 from the start, a greedy policy in an environment of one state would never change its mind.
    taken = []

    class Recording(ReplayBuffer):
        def add(self, observations, actions, *rest):
            taken.append(int(actions[0]))
            super().add(observations, actions, *rest)

    monkeypatch.setattr(dqn_trainer, "ReplayBuffer", Recording)
    algo = {"learning_starts": 50, "initial_epsilon": 0.0, "final_epsilon": 0.0, "learning_rate": 1e-9}
    train_dqn(tiny_config("dqn", "toy/ConstantReward-v0", algo=algo, total_timesteps=100), run_dir=tmp_path)
    assert 10 < sum(taken[:50]) < 40
    assert len(set(taken[50:])) == 1


def test_dqn_learns_to_name_the_state(tiny_config, tmp_path):
    # The best return is 10 of 10; guessing brings 1.7. The last training episodes still explore now and then.
    config = tiny_config(
        "dqn",
        "toy/Identity-v0",
        env={"env_kwargs": {"observation_start": 2, "action_start": 7}},
        algo={"gamma": 0.0, "learning_rate": 0.01, "train_every": 1, "exploration_fraction": 0.5},
        eval={"episodes": 5},
        total_timesteps=2_000,
    )
    metrics = train_dqn(config, run_dir=tmp_path).metrics
    assert metrics["eval/return_mean"] == 10.0
    assert metrics["episode/return_mean"] > 7.0
