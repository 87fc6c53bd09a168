import copy

import numpy as np
import pytest
import torch
from specs import CHOICE, numbers

from rl_training.data import replay_buffer
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.envs.training_envs import TrainingEnvs
from rl_training.errors import NonFiniteError, UserError
from rl_training.runtime.replay_journal import ReplayJournal
from rl_training.spaces import ObservationSpec


def add_identifiable(buffer: ReplayBuffer, first: int, steps: int, action_size: int | None = None) -> None:
    """Add vector steps in which every field of transition i holds the number i; odd ones are terminated."""
    for step in range(steps):
        ids = first + step * buffer.num_envs + np.arange(buffer.num_envs)
        observations = ids[:, None].astype(np.float32)
        actions = ids if action_size is None else np.repeat(observations, action_size, axis=1)
        buffer.add(observations, actions, ids.astype(np.float32), observations + 0.5, ids % 2 == 1)


def stored_ids(buffer: ReplayBuffer) -> set[float]:
    """Every transition that can be sampled; 400 draws of at most 24 miss one with probability 1e-6."""
    return set(buffer.sample(400).rewards.tolist())


def test_an_unfilled_buffer_gives_only_what_was_added():
    buffer = ReplayBuffer(100, 2, ObservationSpec(1), CHOICE, seed=0)
    assert len(buffer) == 0
    add_identifiable(buffer, first=10, steps=3)
    assert len(buffer) == 6
    assert stored_ids(buffer) == {10, 11, 12, 13, 14, 15}


@pytest.mark.parametrize("num_envs", [1, 2, 3])
def test_the_oldest_transitions_are_overwritten_first(num_envs):
    buffer = ReplayBuffer(6, num_envs, ObservationSpec(1), CHOICE, seed=0)
    add_identifiable(buffer, first=0, steps=30 // num_envs)
    assert len(buffer) == 6
    assert stored_ids(buffer) == {24, 25, 26, 27, 28, 29}
    add_identifiable(buffer, first=30, steps=1)
    assert stored_ids(buffer) == set(range(24 + num_envs, 30 + num_envs))


@pytest.mark.parametrize("action_size", [None, 2])
def test_all_fields_of_a_sample_belong_to_the_same_transition(action_size):
    buffer = ReplayBuffer(12, 3, ObservationSpec(1), CHOICE if action_size is None else numbers(action_size), seed=0)
    add_identifiable(buffer, first=0, steps=7, action_size=action_size)
    batch = buffer.sample(100)
    ids = batch.rewards
    assert torch.equal(batch.observations, ids.unsqueeze(-1))
    assert torch.equal(batch.next_observations, ids.unsqueeze(-1) + 0.5)
    assert torch.equal(batch.terminated, ids % 2)
    expected_actions = ids.long() if action_size is None else ids.unsqueeze(-1).expand(-1, 2)
    assert torch.equal(batch.actions, expected_actions)


def test_a_sample_is_a_copy():
    buffer = ReplayBuffer(4, 1, ObservationSpec(1), CHOICE, seed=0)
    add_identifiable(buffer, first=0, steps=4)
    buffer.sample(50).rewards.fill_(99.0)
    assert stored_ids(buffer) == {0, 1, 2, 3}


def test_capacity_is_rounded_down_to_whole_vector_steps():
    buffer = ReplayBuffer(10, 4, ObservationSpec(1), CHOICE, seed=0)
    assert buffer.capacity == 8
    add_identifiable(buffer, first=0, steps=3)
    assert len(buffer) == 8
    assert stored_ids(buffer) == {4, 5, 6, 7, 8, 9, 10, 11}


def test_every_transition_is_equally_likely():
    buffer = ReplayBuffer(50, 1, ObservationSpec(1), CHOICE, seed=0)
    add_identifiable(buffer, first=0, steps=50)
    counts = np.bincount(buffer.sample(50_000).rewards.long().numpy(), minlength=50)
    # Pearson's statistic has mean 49 and deviation 9.9 if all 50 are equally likely, each expected 1,000 times.
    assert np.square(counts - 1_000).sum() / 1_000 < 49 + 5 * 9.9


def test_scaling_applies_to_what_is_sampled_and_not_to_what_is_stored():
    buffer = ReplayBuffer(4, 1, ObservationSpec(1), CHOICE, seed=0)
    add_identifiable(buffer, first=1, steps=4)
    scaled = buffer.sample(100, lambda observations: observations * 10, lambda rewards: -rewards)
    assert torch.equal(scaled.observations.squeeze(-1), -10 * scaled.rewards)
    assert torch.equal(scaled.next_observations.squeeze(-1), -10 * scaled.rewards + 5)
    assert stored_ids(buffer) == {1, 2, 3, 4}


def test_the_seed_decides_the_samples():
    def samples(seed):
        buffer = ReplayBuffer(100, 1, ObservationSpec(1), CHOICE, seed=seed)
        add_identifiable(buffer, first=0, steps=100)
        return buffer.sample(20).rewards.tolist()

    assert samples(1) == samples(1)
    assert samples(1) != samples(2)


@pytest.mark.parametrize("steps", [0, 2, 4, 7])  # empty, not full, just full, wrapped around
def test_a_restored_buffer_samples_and_overwrites_like_the_original(tmp_path, steps):
    original = ReplayBuffer(8, 2, ObservationSpec(1), CHOICE, seed=1)
    add_identifiable(original, first=0, steps=steps)
    if steps:
        original.sample(10)
    state = copy.deepcopy(ReplayJournal(original, tmp_path).state_dict())
    # The other one has another seed and holds other data.
    restored = ReplayBuffer(8, 2, ObservationSpec(1), CHOICE, seed=2)
    add_identifiable(restored, first=1_000, steps=3)
    ReplayJournal(restored, tmp_path).load_state_dict(state)
    for added in (500, 600):
        for buffer in (original, restored):
            add_identifiable(buffer, first=added, steps=1)
        for expected, got in zip(original.sample(64)[:5], restored.sample(64)[:5], strict=True):
            assert torch.equal(expected, got)


def test_a_run_that_goes_on_from_an_earlier_state_replaces_what_no_longer_happened(tmp_path):
    original = ReplayBuffer(24, 2, ObservationSpec(1), CHOICE, seed=1)
    journal = ReplayJournal(original, tmp_path)
    add_identifiable(original, first=0, steps=5)
    earlier = copy.deepcopy(journal.state_dict())
    add_identifiable(original, first=10, steps=3)
    journal.state_dict()

    continued, restored = (ReplayBuffer(24, 2, ObservationSpec(1), CHOICE, seed=2) for _ in range(2))
    second_journal = ReplayJournal(continued, tmp_path)
    second_journal.load_state_dict(earlier)
    assert stored_ids(continued) == set(range(10))
    add_identifiable(continued, first=700, steps=4)
    ReplayJournal(restored, tmp_path).load_state_dict(copy.deepcopy(second_journal.state_dict()))
    assert stored_ids(restored) == {*range(10), *range(700, 708)}


@pytest.mark.parametrize(
    ("name", "step"),
    # Transition 9 is environment 1 in the fifth vector step of two: it led to step 10 and began at step 8.
    [("rewards", 10), ("next_observations", 10), ("observations", 8)],
)
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("capacity", [40, 8])  # also in a ring that has wrapped around
def test_a_bad_number_is_refused_with_its_step_and_environment(name, step, number, capacity):
    buffer = ReplayBuffer(capacity, 2, ObservationSpec(1), CHOICE, seed=0)
    add_identifiable(buffer, first=0, steps=4)
    arrays = {"observations": np.zeros((2, 1)), "rewards": np.zeros(2), "next_observations": np.zeros((2, 1))}
    arrays[name][1] = number
    buffer.add(arrays["observations"], np.zeros(2), arrays["rewards"], arrays["next_observations"], np.zeros(2, bool))
    with pytest.raises(NonFiniteError, match=rf"of environment 1 is NaN or infinite at step {step}\."):
        buffer.check_finite(since=6)
    buffer.check_finite(since=10)  # nothing is newer than that


def test_a_buffer_that_does_not_fit_into_memory_is_refused_by_its_key(monkeypatch):
    # Each transition: 2 x 10 observations and 1 reward and 1 flag of 4 bytes, one action of 8: 96 bytes; 1,000 of them.
    monkeypatch.setattr(replay_buffer, "available_memory", lambda: 95_999)
    with pytest.raises(UserError, match=r"algo\.buffer_size=1000 ") as refusal:
        ReplayBuffer(1_000, 1, ObservationSpec(10), CHOICE, seed=0)
    assert "\n" not in str(refusal.value)
    # The suggestion, four fifths of what is free, fits.
    suggested = int(str(refusal.value).rpartition("algo.buffer_size=")[2].rstrip("."))
    assert suggested == 799
    ReplayBuffer(suggested, 1, ObservationSpec(10), CHOICE, seed=0)


@pytest.mark.parametrize("free", [96_000, None])
def test_a_buffer_that_fits_or_an_unknown_memory_is_accepted(monkeypatch, free):
    monkeypatch.setattr(replay_buffer, "available_memory", lambda: free)
    assert ReplayBuffer(1_000, 1, ObservationSpec(10), CHOICE, seed=0).capacity == 1_000


@pytest.mark.parametrize("ends", ["truncated", "terminated", "both"])
def test_stored_transitions_have_the_true_next_observation(tiny_config, ends):
    # Counter observes (episode, step) and its reward is the number of the step that it leads to, so a true transition
    # goes from (e, reward - 1) to (e, reward) of the same episode, also where the episode ends after 3 steps.
    config = tiny_config("dqn", "toy/Counter-v0", env={"num_envs": 2, "env_kwargs": {"ends": ends, "length": 3}})
    envs = TrainingEnvs(config)
    buffer = ReplayBuffer(40, 2, ObservationSpec(2), CHOICE, seed=0)
    observations = envs.reset()
    for _ in range(20):
        step = envs.step(np.zeros(2, np.int64))
        buffer.add(observations, np.zeros(2, np.int64), step.rewards, step.next_observations, step.terminated)
        observations = step.observations
    envs.close()
    batch = buffer.sample(1_000)
    assert torch.equal(batch.next_observations[:, 0], batch.observations[:, 0])
    assert torch.equal(batch.observations[:, 1], batch.rewards - 1)
    assert torch.equal(batch.next_observations[:, 1], batch.rewards)
    assert set(batch.rewards.tolist()) == {1.0, 2.0, 3.0}
    # A truncated step is stored as one that goes on.
    assert torch.equal(batch.terminated, ((batch.rewards == 3) & (ends != "truncated")).float())
