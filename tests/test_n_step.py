"""N-step returns: how far a sample looks ahead, what it sums up, and where it must stop."""

import copy

import numpy as np
import pytest
import torch
from specs import CHOICE
from test_dqn_update import make_agent, one_transition, set_weights

from rl_training.algorithms.dqn import DQNAgent, td_target
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.envs.training_envs import TrainingEnvs
from rl_training.runtime import replay_journal
from rl_training.runtime.dqn_trainer import train_dqn
from rl_training.runtime.replay_journal import ReplayJournal
from rl_training.spaces import ObservationSpec


def make_buffer(capacity: int = 10, num_envs: int = 1, *, n_step: int = 3, seed: int = 0) -> ReplayBuffer:
    return ReplayBuffer(capacity, num_envs, ObservationSpec(1), CHOICE, seed=seed, n_step=n_step, gamma=0.5)


def add(buffer: ReplayBuffer, rewards: list[float], *, terminated: tuple = (), truncated: tuple = ()) -> None:
    """Add transitions of these rewards; transition i goes from observation i to i + 0.5, and ends if it is listed."""
    for start in range(0, len(rewards), buffer.num_envs):
        numbers = buffer.added + np.arange(buffer.num_envs)
        observations = numbers[:, None].astype(np.float32)
        buffer.add(
            observations,
            numbers,
            np.array(rewards[start : start + buffer.num_envs], np.float32),
            observations + 0.5,
            np.isin(numbers, terminated),
            np.isin(numbers, truncated),
        )


def samples(buffer: ReplayBuffer, *scalings) -> dict[float, tuple[float, float, float, float]]:
    """Return (return, next observation, terminated, discount) by first observation; 400 draws miss none of ten."""
    batch = buffer.sample(400, *scalings)
    columns = (batch.rewards, batch.next_observations.squeeze(-1), batch.terminated, batch.discounts)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return dict(sorted(zip(batch.observations.squeeze(-1).tolist(), rows, strict=True)))


def samples_of(rewards: list[float], *, capacity: int = 10, num_envs: int = 1, **ends: tuple) -> dict:
    """Return the samples of a buffer to which transitions of these rewards were added."""
    buffer = make_buffer(capacity, num_envs)
    add(buffer, rewards, **ends)
    return samples(buffer)


def test_three_rewards_are_summed_up_and_fewer_where_the_newest_data_ends():
    # 1 + 0.5 x 2 + 0.25 x 4 = 3, then 2 + 2 + 2 = 6 and 4 + 4 + 4 = 12, each discounted by 0.5^3 afterwards.
    # The fourth knows two rewards, 8 + 8, and the fifth its own; what follows them is discounted by 0.25 and 0.5.
    assert samples_of([1.0, 2.0, 4.0, 8.0, 16.0]) == {
        0: (3.0, 2.5, 0.0, 0.125),
        1: (6.0, 3.5, 0.0, 0.125),
        2: (12.0, 4.5, 0.0, 0.125),
        3: (16.0, 4.5, 0.0, 0.25),
        4: (16.0, 4.5, 0.0, 0.5),
    }


def test_the_action_of_a_sample_is_the_one_taken_at_its_observation():
    buffer = make_buffer()
    add(buffer, [1.0, 2.0, 4.0, 8.0, 16.0])
    batch = buffer.sample(100)
    assert torch.equal(batch.actions, batch.observations.squeeze(-1).long())


def test_a_sample_looks_further_as_soon_as_more_is_known():
    # alone: 4; with its successor: 4 + 0.5 x 8; with both: 4 + 4 + 0.25 x 16
    buffer = make_buffer()
    seen = []
    for reward in (4.0, 8.0, 16.0, 32.0):
        add(buffer, [reward])
        seen.append(samples(buffer)[0])
    assert seen == [(4.0, 0.5, 0.0, 0.5), (8.0, 1.5, 0.0, 0.25), (12.0, 2.5, 0.0, 0.125), (12.0, 2.5, 0.0, 0.125)]


@pytest.mark.parametrize(
    ("ends", "terminated"),
    [
        ({"terminated": (2,)}, 1.0),
        ({"truncated": (2,)}, 0.0),  # cut off, so its last observation 2.5 still has a value
        ({"terminated": (2,), "truncated": (2,)}, 1.0),
    ],
    ids=["terminated", "truncated", "both"],
)
def test_a_return_stops_where_its_episode_ends(ends, terminated):
    # The third transition is the last of its episode: 1 + 1 + 1, 2 + 0.5 x 4 and 4 alone lead to its true last
    # observation 2.5, and none to the next episode, which begins at 3 and has 8 + 0.5 x 16 and 16.
    assert samples_of([1.0, 2.0, 4.0, 8.0, 16.0], **ends) == {
        0: (3.0, 2.5, terminated, 0.125),
        1: (4.0, 2.5, terminated, 0.25),
        2: (4.0, 2.5, terminated, 0.5),
        3: (16.0, 4.5, 0.0, 0.25),
        4: (16.0, 4.5, 0.0, 0.5),
    }


def test_a_return_goes_on_at_the_start_of_the_ring_and_never_from_the_newest_to_the_oldest():
    # A ring of five that took seven: it holds 2 to 6, and 5 and 6 stand before 2. Transition 0 ended its episode, but
    # 5 lies in its place now. 3: 8 + 8 + 8; 4: 16 + 16 + 16; 5: 32 + 32; 6: 64
    assert samples_of([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0], terminated=(0,), capacity=5) == {
        2: (12.0, 4.5, 0.0, 0.125),
        3: (24.0, 5.5, 0.0, 0.125),
        4: (48.0, 6.5, 0.0, 0.125),
        5: (64.0, 6.5, 0.0, 0.25),
        6: (64.0, 6.5, 0.0, 0.5),
    }


def test_an_episode_that_ends_in_the_last_row_of_the_ring_stops_there():
    # 4 is the last row of the ring; 3: 8 + 0.5 x 16, 4: 16
    got = samples_of([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0], terminated=(4,), capacity=5)
    assert [got[2], got[3], got[4]] == [(12.0, 4.5, 1.0, 0.125), (16.0, 4.5, 1.0, 0.25), (16.0, 4.5, 1.0, 0.5)]


def test_a_full_ring_that_was_not_written_over_stops_at_its_end():
    # 2 + 0.5 x 4 and 4: the first transition is no successor of the third
    assert samples_of([1.0, 2.0, 4.0], capacity=3) == {
        0: (3.0, 2.5, 0.0, 0.125),
        1: (4.0, 2.5, 0.0, 0.25),
        2: (4.0, 2.5, 0.0, 0.5),
    }


def test_a_ring_shorter_than_the_return_counts_no_transition_twice():
    # two rows: 2 + 0.5 x 4, and 4
    assert samples_of([1.0, 2.0, 4.0], capacity=2) == {1: (4.0, 2.5, 0.0, 0.25), 2: (4.0, 2.5, 0.0, 0.5)}


def test_each_environment_goes_on_with_its_own_next_step():
    # Two environments by turns: rewards 1 2 4 8 and 10 20 40 80; the second ends its episode in transition 5. The ring
    # of six holds 2 to 7. First: 2 + 2 + 2, 4 + 4, 8. Second: 20 + 20, 40, and in the new episode 80.
    assert samples_of([1.0, 10.0, 2.0, 20.0, 4.0, 40.0, 8.0, 80.0], terminated=(5,), capacity=6, num_envs=2) == {
        2: (6.0, 6.5, 0.0, 0.125),
        3: (40.0, 5.5, 1.0, 0.25),
        4: (8.0, 6.5, 0.0, 0.25),
        5: (40.0, 5.5, 1.0, 0.5),
        6: (8.0, 6.5, 0.0, 0.5),
        7: (80.0, 7.5, 0.0, 0.5),
    }


def test_rewards_are_scaled_one_by_one_before_they_are_summed_up():
    # Cut at 3 the rewards are 1 2 3 3 3: 1 + 1 + 0.75, 2 + 1.5 + 0.75, 3 + 1.5 + 0.75, 3 + 1.5, 3.
    buffer = make_buffer()
    add(buffer, [1.0, 2.0, 4.0, 8.0, 16.0])
    got = samples(buffer, None, lambda rewards: np.minimum(rewards, np.float32(3)))
    assert {start: row[0] for start, row in got.items()} == {0: 2.75, 1: 4.25, 2: 5.25, 3: 4.5, 4: 3.0}


def test_both_observations_of_a_sample_are_scaled():
    buffer = make_buffer()
    add(buffer, [1.0, 2.0, 4.0, 8.0])
    got = samples(buffer, lambda observations: observations * 10)
    assert {start: row[1] for start, row in got.items()} == {0: 25.0, 10: 35.0, 20: 35.0, 30: 35.0}


def test_one_step_samples_have_no_discounts():
    buffer = make_buffer(n_step=1)
    add(buffer, [1.0, 2.0, 4.0], truncated=(1,))
    batch = buffer.sample(100)
    assert batch.discounts is None
    assert batch.weights is None
    assert set(batch.rewards.tolist()) == {1.0, 2.0, 4.0}
    assert torch.equal(batch.next_observations, batch.observations + 0.5)


@pytest.mark.parametrize("ends", ["truncated", "terminated", "both"])
def test_returns_of_a_true_environment_reach_the_true_last_observation(tiny_config, ends):
    # Counter observes (episode, step) and pays the number of the step it leads to, up to 3. From step 0:
    # 1 + 0.5 x 2 + 0.25 x 3 = 2.75; from 1: 2 + 0.5 x 3 = 3.5; from 2: 3. Each leads to step 3 of its own episode.
    config = tiny_config("dqn", "toy/Counter-v0", env={"num_envs": 2, "env_kwargs": {"ends": ends, "length": 3}})
    envs = TrainingEnvs(config)
    buffer = ReplayBuffer(42, 2, ObservationSpec(2), CHOICE, seed=0, n_step=3, gamma=0.5)
    observations = envs.reset()
    for _ in range(21):
        step = envs.step(np.zeros(2, np.int64))
        buffer.add(
            *(observations, np.zeros(2, np.int64), step.rewards, step.next_observations),
            *(step.terminated, step.truncated),
        )
        observations = step.observations
    envs.close()
    batch = buffer.sample(1_000)
    start = batch.observations[:, 1].long()
    assert set(start.tolist()) == {0, 1, 2}
    assert torch.equal(batch.rewards, torch.tensor([2.75, 3.5, 3.0])[start])
    assert torch.equal(batch.discounts, torch.tensor([0.125, 0.25, 0.5])[start])
    assert torch.equal(batch.next_observations[:, 0], batch.observations[:, 0])
    assert (batch.next_observations[:, 1] == 3).all()
    assert torch.equal(batch.terminated, torch.full((1_000,), float(ends != "truncated")))


def test_training_learns_from_n_step_returns(tiny_config, tmp_path, monkeypatch):
    # As above, with gamma 0.5 from the config; the newest steps may also have 1 and 1 + 0.5 x 2 and 2 so far.
    seen = set()
    plain_update = DQNAgent.update

    def update(agent, batch):
        columns = (batch.observations[:, 1], batch.rewards, batch.discounts)
        seen.update(zip(*(column.tolist() for column in columns), strict=True))
        return plain_update(agent, batch)

    monkeypatch.setattr(DQNAgent, "update", update)
    algo = {"n_step": 3, "gamma": 0.5}
    train_dqn(tiny_config("dqn", "toy/Counter-v0", algo=algo), run_dir=tmp_path / "run")
    whole = {(0.0, 2.75, 0.125), (1.0, 3.5, 0.25), (2.0, 3.0, 0.5)}
    assert whole <= seen <= whole | {(0.0, 1.0, 0.5), (0.0, 2.0, 0.25), (1.0, 2.0, 0.5)}


def test_td_target_takes_the_discount_of_each_return():
    # 3 + 0.125 x 8 = 4; 4 + 0.25 x 8 = 6; terminated: 5
    rewards, terminated = torch.tensor([3.0, 4.0, 5.0]), torch.tensor([0.0, 0.0, 1.0])
    targets = td_target(rewards, terminated, torch.full((3,), 8.0), torch.tensor([0.125, 0.25, 0.5]))
    assert targets.tolist() == [4.0, 6.0, 5.0]


@pytest.mark.parametrize(
    ("discounts", "expected_loss"),
    [
        (None, 1.0),  # the agent's own gamma: target 1 + 0.5 x 4 = 3, prediction 2
        (torch.tensor([0.125]), 0.25),  # 1 + 0.125 x 4 = 1.5
    ],
)
def test_update_discounts_what_follows_a_return_by_its_own_discount(discounts, expected_loss):
    agent = make_agent(double_q=False, loss="mse")
    set_weights(agent.q_network, 2.0, 3.0)
    set_weights(agent.target_network, 4.0, 1.0)
    metrics = agent.update(one_transition()._replace(discounts=discounts))
    assert metrics["loss/value"].item() == pytest.approx(expected_loss)


@pytest.mark.parametrize("steps", [0, 3, 8, 13])  # empty, not full, just full, wrapped around
def test_a_restored_buffer_stops_at_the_same_ends_and_goes_on_alike(tmp_path, steps, monkeypatch):
    monkeypatch.setattr(replay_journal, "MIN_SEGMENT_ROWS", 4)
    ends = {"terminated": (1, 6), "truncated": (4, 9, 14)}
    original = make_buffer(capacity=8, seed=1)
    add(original, [float(2**number) for number in range(steps)], **ends)
    if steps:
        original.sample(10)
    state = copy.deepcopy(ReplayJournal(original, tmp_path).state_dict())
    restored = make_buffer(capacity=8, seed=2)
    ReplayJournal(restored, tmp_path).load_state_dict(state)
    oldest = max(0, steps - 8)
    stored_ends = np.flatnonzero(restored.packed(oldest, steps)["ended"]) + oldest
    assert stored_ends.tolist() == [end for end in (1, 4, 6, 9) if oldest <= end < steps]
    for _ in range(3):
        for buffer in (original, restored):
            add(buffer, [3.0], **ends)
        for expected, got in zip(original.sample(64)[:6], restored.sample(64)[:6], strict=True):
            assert torch.equal(expected, got)
