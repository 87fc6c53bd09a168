"""What a trainer stores must have happened: each transition goes from what the policy saw to what the step led to."""

import numpy as np
import pytest

from rl_training.api.algorithms import train_dqn, train_ppo, train_sac
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.runtime import dqn_trainer, ppo_trainer, sac_trainer

STEPS = 96  # vector steps; a multiple of the tiny rollout

# Counter observes (episode, step), both from 0; episodes have 3 steps and the reward is the number of the step.
SEEN = [[step // 3, step % 3] for step in range(STEPS)]
LED_TO = [[step // 3, step % 3 + 1] for step in range(STEPS)]
REWARDS = [step % 3 + 1 for step in range(STEPS)]
ENDS = [step % 3 == 2 for step in range(STEPS)]


def train_and_record(tiny_config, tmp_path, monkeypatch, algo, *, ends="truncated", samples=None, **env) -> list[tuple]:
    """Train on two Counters and return the arguments of every `add`; what is sampled is appended to `samples`."""
    module, name, buffer, train = {
        "ppo": (ppo_trainer, "RolloutBuffer", RolloutBuffer, train_ppo),
        "dqn": (dqn_trainer, "ReplayBuffer", ReplayBuffer, train_dqn),
        "sac": (sac_trainer, "ReplayBuffer", ReplayBuffer, train_sac),
    }[algo]
    recorded = []

    class Recording(buffer):
        def add(self, *arguments):
            recorded.append(tuple(np.array(argument) for argument in arguments))
            super().add(*arguments)

        def sample(self, *arguments, **options):
            batch = super().sample(*arguments, **options)
            if samples is not None:
                samples.append(batch)
            return batch

    monkeypatch.setattr(module, name, Recording)
    config = tiny_config(
        algo,
        "toy/Counter-v0",
        env={"num_envs": 2, "env_kwargs": {"ends": ends, "continuous": algo == "sac"}, **env},
        total_timesteps=2 * STEPS,
        eval={"episodes": 0},
    )
    train(config, run_dir=tmp_path)
    assert len(recorded) == STEPS
    return recorded


@pytest.mark.parametrize("ends", ["truncated", "terminated"])
@pytest.mark.parametrize("algo", ["dqn", "sac"])
def test_the_replay_buffer_gets_transitions_that_happened(tiny_config, tmp_path, monkeypatch, algo, ends):
    recorded = train_and_record(tiny_config, tmp_path, monkeypatch, algo, ends=ends)
    for env in range(2):
        observations, _, rewards, next_observations, terminated = (
            [arguments[field][env].tolist() for arguments in recorded] for field in range(5)
        )
        assert observations == SEEN
        assert rewards == REWARDS
        assert next_observations == LED_TO
        assert terminated == [ended and ends == "terminated" for ended in ENDS]


@pytest.mark.parametrize("ends", ["truncated", "terminated"])
def test_the_rollout_gets_transitions_that_happened(tiny_config, tmp_path, monkeypatch, ends):
    recorded = train_and_record(tiny_config, tmp_path, monkeypatch, "ppo", ends=ends)
    for env in range(2):
        observations, _, rewards, terminated, truncated, next_observations = (
            [arguments[field][env].tolist() for arguments in recorded] for field in range(6)
        )
        assert observations == SEEN
        assert rewards == REWARDS
        assert next_observations == LED_TO
        assert terminated == [ended and ends == "terminated" for ended in ENDS]
        assert truncated == [ended and ends == "truncated" for ended in ENDS]


@pytest.mark.parametrize("algo", ["dqn", "sac"])
def test_replay_stores_raw_numbers_also_with_normalisation(tiny_config, tmp_path, monkeypatch, algo):
    scaling = {"normalize_observation": True, "normalize_reward": True}
    recorded = train_and_record(tiny_config, tmp_path, monkeypatch, algo, **scaling)
    assert [arguments[0][0].tolist() for arguments in recorded] == SEEN
    assert [arguments[2][0].tolist() for arguments in recorded] == REWARDS
    assert [arguments[3][0].tolist() for arguments in recorded] == LED_TO


@pytest.mark.parametrize("algo", ["dqn", "sac"])
def test_agents_learn_from_normalised_samples(tiny_config, tmp_path, monkeypatch, algo):
    # Raw, the episode's number grows to 31 and a reward is 1, 2 or 3.
    scaling = {"normalize_observation": True, "normalize_reward": True, "clip_observation": 1.0, "clip_reward": 0.5}
    samples = []
    train_and_record(tiny_config, tmp_path, monkeypatch, algo, samples=samples, **scaling)
    assert max(batch.observations.abs().max() for batch in samples) == 1.0
    assert max(batch.next_observations.abs().max() for batch in samples) == 1.0
    assert max(batch.rewards.abs().max() for batch in samples) == 0.5


def test_the_rollout_stores_normalised_numbers(tiny_config, tmp_path, monkeypatch):
    # Raw, the episode's number grows to 31 and the rewards have mean 2; normalised, nothing is beyond the limit of 2.
    scaling = {"normalize_observation": True, "normalize_reward": True, "clip_observation": 2.0, "clip_reward": 1.5}
    recorded = train_and_record(tiny_config, tmp_path, monkeypatch, "ppo", **scaling)
    observations, rewards, finals = (np.stack([arguments[field] for arguments in recorded]) for field in (0, 2, 5))
    assert np.abs(observations).max() <= 2.0
    assert np.abs(finals).max() <= 2.0
    assert np.abs(rewards).max() <= 1.5
    assert observations[:, :, 1].mean() == pytest.approx(0.0, abs=0.1)
    assert observations[:, :, 1].std() == pytest.approx(1.0, abs=0.1)
