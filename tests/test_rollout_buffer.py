import numpy as np
import pytest
import torch
from specs import CHOICE, numbers

from rl_training.data.rollout_buffer import RolloutBuffer, generalized_advantages
from rl_training.errors import NonFiniteError
from rl_training.spaces import ObservationSpec

NOT_ENDED = np.zeros(1, bool)
ENDED = np.ones(1, bool)


def collected(rewards, values, *, terminated_at=(), truncated_at=(), final_observation=9.0) -> RolloutBuffer:
    """A full rollout of one environment, with the critic's values filled in."""
    rollout = RolloutBuffer(len(rewards), 1, ObservationSpec(1), CHOICE, seed=0)
    for step, reward in enumerate(rewards):
        rollout.add(
            np.array([[float(step)]], np.float32),
            np.array([0]),
            np.array([reward], np.float32),
            ENDED if step in terminated_at else NOT_ENDED,
            ENDED if step in truncated_at else NOT_ENDED,
            np.array([[final_observation]], np.float32),
        )
    rollout.values = torch.tensor(values).unsqueeze(-1)
    return rollout


# Rewards 1, 2, 3, values 0.5, 1, 1.5, then 2; gamma 0.5.
#   delta_0 = 1 + 0.5 x 1   - 0.5 = 1
#   delta_1 = 2 + 0.5 x 1.5 - 1   = 1.75
#   delta_2 = 3 + 0.5 x 2   - 1.5 = 2.5
#   A_t = delta_t + 0.5 lambda A_{t+1}
@pytest.mark.parametrize(
    ("gae_lambda", "advantages"),
    [
        (0.0, [1.0, 1.75, 2.5]),  # one step: the deltas
        (0.5, [1.59375, 2.375, 2.5]),  # 1.75 + 0.25 x 2.5 = 2.375; 1 + 0.25 x 2.375 = 1.59375
        # Monte Carlo: returns 1 + 0.5x2 + 0.25x3 + 0.125x2 = 3, 2 + 0.5x3 + 0.25x2 = 4, 3 + 0.5x2 = 4, less the values
        (1.0, [2.5, 3.0, 2.5]),
    ],
)
def test_advantages_of_a_hand_worked_rollout(gae_lambda, advantages):
    rollout = collected([1.0, 2.0, 3.0], [0.5, 1.0, 1.5])
    rollout.compute_returns_and_advantages(torch.tensor([2.0]), gamma=0.5, gae_lambda=gae_lambda)
    assert rollout.advantages.flatten().tolist() == advantages
    # A return is the advantage plus the value.
    expected = [advantage + value for advantage, value in zip(advantages, [0.5, 1.0, 1.5], strict=True)]
    assert rollout.returns.flatten().tolist() == expected


def test_nothing_follows_a_terminated_step():
    # delta_1 = 2 - 1 = 1 and carries nothing over; A_0 = 1 + 0.25 x 1 = 1.25; A_2 as before
    rollout = collected([1.0, 2.0, 3.0], [0.5, 1.0, 1.5], terminated_at=[1])
    rollout.compute_returns_and_advantages(torch.tensor([2.0]), gamma=0.5, gae_lambda=0.5)
    assert rollout.advantages.flatten().tolist() == [1.25, 1.0, 2.5]


def test_a_truncated_step_is_worth_the_value_of_its_true_last_observation():
    # the last observation is worth 4: delta_1 = 2 + 0.5 x 4 - 1 = 3; A_0 = 1 + 0.25 x 3 = 1.75; A_2 as before, because
    # it belongs to the next episode
    rollout = collected([1.0, 2.0, 3.0], [0.5, 1.0, 1.5], truncated_at=[1])
    assert rollout.truncated_observations().tolist() == [[9.0]]
    rollout.compute_returns_and_advantages(
        torch.tensor([2.0]), gamma=0.5, gae_lambda=0.5, truncated_values=torch.tensor([4.0])
    )
    assert rollout.advantages.flatten().tolist() == [1.75, 3.0, 2.5]


def test_truncation_in_the_last_step_does_not_use_the_value_of_the_new_episode():
    # delta_2 = 3 + 0.5 x 4 - 1.5 = 3.5, whatever the first observation of the next episode is worth
    rollout = collected([1.0, 2.0, 3.0], [0.5, 1.0, 1.5], truncated_at=[2])
    rollout.compute_returns_and_advantages(
        torch.tensor([1e6]), gamma=0.5, gae_lambda=0.0, truncated_values=torch.tensor([4.0])
    )
    assert rollout.advantages.flatten().tolist() == [1.0, 1.75, 3.5]


def test_a_step_that_is_both_terminated_and_truncated_counts_as_terminated():
    rollout = collected([1.0, 2.0, 3.0], [0.5, 1.0, 1.5], terminated_at=[1], truncated_at=[1])
    assert rollout.truncated_observations().shape == (0, 1)
    rollout.compute_returns_and_advantages(
        torch.tensor([2.0]), gamma=0.5, gae_lambda=0.5, truncated_values=torch.zeros(0)
    )
    assert rollout.advantages.flatten().tolist() == [1.25, 1.0, 2.5]


def test_environments_of_a_rollout_do_not_mix():
    # Three copies of the hand-worked rollout: one goes on, one is terminated and one truncated at the second step.
    rewards = torch.tensor([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [3.0, 3.0, 3.0]])
    rollout = RolloutBuffer(3, 3, ObservationSpec(1), CHOICE, seed=0)
    for step in range(3):
        rollout.add(
            np.zeros((3, 1), np.float32),
            np.zeros(3, np.int64),
            rewards[step].numpy(),
            np.array([False, step == 1, False]),
            np.array([False, False, step == 1]),
            np.array([[7.0], [8.0], [9.0]], np.float32),
        )
    rollout.values = torch.tensor([[0.5] * 3, [1.0] * 3, [1.5] * 3])
    assert rollout.truncated_observations().tolist() == [[9.0]]
    rollout.compute_returns_and_advantages(
        torch.full((3,), 2.0), gamma=0.5, gae_lambda=0.5, truncated_values=torch.tensor([4.0])
    )
    assert rollout.advantages.T.tolist() == [[1.59375, 2.375, 2.5], [1.25, 1.0, 2.5], [1.75, 3.0, 2.5]]


def test_several_truncations_get_their_own_values():
    # lambda 0: delta_0 = 1 + 0.5 x 10 - 0.5 = 5.5, delta_1 = 1.75, delta_2 = 3 + 0.5 x 20 - 1.5 = 11.5
    rollout = RolloutBuffer(3, 1, ObservationSpec(1), CHOICE, seed=0)
    for step, (reward, truncated) in enumerate([(1.0, True), (2.0, False), (3.0, True)]):
        final = np.array([[100.0 + step]], np.float32)
        rollout.add(
            np.zeros((1, 1), np.float32), np.array([0]), np.float32([reward]), NOT_ENDED, np.array([truncated]), final
        )
    rollout.values = torch.tensor([[0.5], [1.0], [1.5]])
    assert rollout.truncated_observations().tolist() == [[100.0], [102.0]]
    rollout.compute_returns_and_advantages(
        torch.tensor([2.0]), gamma=0.5, gae_lambda=0.0, truncated_values=torch.tensor([10.0, 20.0])
    )
    assert rollout.advantages.flatten().tolist() == [5.5, 1.75, 11.5]


def test_generalized_advantages_at_lambda_one_are_discounted_returns_less_values():
    # One episode of 50 rewards of 1 that terminates: the return at step t is (1 - 0.9^(50 - t)) / 0.1.
    steps = 50
    values = torch.linspace(-3, 3, steps).unsqueeze(-1)
    dones = torch.zeros(steps, 1)
    dones[-1] = 1.0
    next_values = torch.cat([values[1:], torch.zeros(1, 1)])
    advantages = generalized_advantages(torch.ones(steps, 1), values, next_values, dones, 0.9, 1.0)
    returns = (1 - 0.9 ** torch.arange(steps, 0, -1)) / 0.1
    torch.testing.assert_close((advantages + values).flatten(), returns)


def identifiable(num_steps: int = 4, num_envs: int = 3, action_size: int | None = None, seed: int = 0) -> RolloutBuffer:
    """A full rollout in which every field of transition i holds the number i."""
    actions = CHOICE if action_size is None else numbers(action_size)
    rollout = RolloutBuffer(num_steps, num_envs, ObservationSpec(2), actions, seed=seed)
    ids = torch.arange(float(num_steps * num_envs)).view(num_steps, num_envs)
    ended = np.zeros(num_envs, bool)
    for row in ids.numpy():
        observations = np.repeat(row[:, None], 2, axis=1)
        actions = row.astype(np.int64) if action_size is None else np.repeat(row[:, None], action_size, axis=1)
        rollout.add(observations, actions, row, ended, ended, observations)
    rollout.logprobs, rollout.values, rollout.advantages, rollout.returns = (ids.clone() for _ in range(4))
    return rollout


@pytest.mark.parametrize("action_size", [None, 3])
@pytest.mark.parametrize(("minibatch_size", "sizes"), [(4, [4, 4, 4]), (5, [5, 5, 2]), (12, [12]), (100, [12])])
def test_minibatches_hold_every_transition_exactly_once_with_its_own_fields(action_size, minibatch_size, sizes):
    minibatches = list(identifiable(action_size=action_size).iter_minibatches(minibatch_size))
    assert [len(batch.returns) for batch in minibatches] == sizes
    assert sorted(torch.cat([batch.returns for batch in minibatches]).tolist()) == list(range(12))
    for batch in minibatches:
        assert batch.valid is None
        for field in batch[:6]:
            rows = field.reshape(len(batch.returns), -1).float()
            assert torch.equal(rows, batch.returns.unsqueeze(-1).expand_as(rows))
        assert batch.actions.dtype == (torch.int64 if action_size is None else torch.float32)


def order(rollout: RolloutBuffer) -> list[float]:
    return torch.cat([batch.returns for batch in rollout.iter_minibatches(5)]).tolist()


def test_minibatches_are_shuffled_anew_each_time():
    rollout = identifiable()
    first, second = order(rollout), order(rollout)
    assert first != list(range(12))
    assert first != second


def test_the_seed_decides_the_order():
    assert order(identifiable(seed=1)) == order(identifiable(seed=1))
    assert order(identifiable(seed=1)) != order(identifiable(seed=2))


def step_arrays(number: int):
    """The arguments of `add` for a step of two environments, the second truncated at odd steps."""
    value = float(number)
    return (
        np.full((2, 1), value, np.float32),
        np.array([number, number + 1]),
        np.array([value, -value], np.float32),
        np.array([number == 2, False]),
        np.array([False, number % 2 == 1]),
        np.full((2, 1), 100 + value, np.float32),
    )


def finished(rollout: RolloutBuffer) -> list[torch.Tensor]:
    """Fill the rest of the rollout and return all it knows."""
    for number in range(rollout.position, rollout.num_steps):
        rollout.add(*step_arrays(number))
    rollout.compute_returns_and_advantages(torch.ones(2), 0.9, 0.95, torch.arange(2.0))
    minibatches = [field for batch in rollout.iter_minibatches(3) for field in batch[:6]]
    return [*minibatches, rollout.truncated_observations()]


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_a_partial_rollout_survives_a_state_dict_round_trip(steps):
    original = RolloutBuffer(4, 2, ObservationSpec(1), CHOICE, seed=1)
    for number in range(steps):
        original.add(*step_arrays(number))
    # The other one has another seed and holds a whole rollout of other data.
    restored = RolloutBuffer(4, 2, ObservationSpec(1), CHOICE, seed=2)
    for number in range(4):
        restored.add(*step_arrays(number + 11))
    restored.load_state_dict(original.state_dict())
    assert restored.position == steps
    assert restored.full is (steps == 4)
    for expected, got in zip(finished(original), finished(restored), strict=True):
        assert torch.equal(expected, got)


def test_a_state_dict_does_not_change_with_the_rollout_it_came_from():
    rollout = RolloutBuffer(4, 2, ObservationSpec(1), CHOICE, seed=1)
    for number in range(2):
        rollout.add(*step_arrays(number))
    state = rollout.state_dict()
    rollout.reset()
    for number in range(4):
        rollout.add(*step_arrays(number + 11))
    restored = RolloutBuffer(4, 2, ObservationSpec(1), CHOICE, seed=1)
    restored.load_state_dict(state)
    assert restored.obs[:2].flatten().tolist() == [0.0, 0.0, 1.0, 1.0]
    assert restored.truncated_observations().tolist() == [[101.0]]


def test_reset_starts_an_empty_rollout():
    rollout = RolloutBuffer(4, 2, ObservationSpec(1), CHOICE, seed=1)
    for number in range(4):
        rollout.add(*step_arrays(number))
    assert rollout.full
    rollout.reset()
    assert not rollout.full
    assert rollout.position == 0
    assert len(rollout.truncated_observations()) == 0


def test_a_rollout_of_good_numbers_passes_the_check():
    identifiable().check_finite(since=0)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("name", "step"),
    # A rollout that began after 10 vector steps of 3 environments. Its row 2 is vector step 13, env step 39; the
    # observation in it came from the step before.
    [("rewards", 39), ("obs", 36)],
)
def test_a_bad_number_is_refused_with_its_step_and_environment(name, step, number):
    rollout = identifiable()
    getattr(rollout, name)[2, 1] = number
    with pytest.raises(NonFiniteError, match=rf"of environment 1 is NaN or infinite at step {step}\."):
        rollout.check_finite(since=10 * 3)


def test_a_bad_last_observation_of_a_truncated_episode_is_refused():
    # Row 1 of a rollout that began with the run, two environments: env step 4.
    rollout = RolloutBuffer(2, 2, ObservationSpec(1), CHOICE, seed=0)
    for step in range(2):
        final = np.full((2, 1), np.nan, np.float32)
        observations, ended = np.zeros((2, 1), np.float32), np.array([step == 1, False])
        rollout.add(observations, np.zeros(2), np.zeros(2, np.float32), np.zeros(2, bool), ended, final)
    with pytest.raises(NonFiniteError, match=r"of environment 0 is NaN or infinite at step 4\."):
        rollout.check_finite(since=0)


def test_an_environment_that_began_anew_is_cut_after_the_newest_step():
    # Values 1 everywhere, rewards 0: uncut, the last step of environment 1 would be carried into the next episode.
    rollout = RolloutBuffer(2, 2, ObservationSpec(1), CHOICE, seed=0)
    nothing = np.zeros(2, np.bool_)
    row = np.zeros((2, 1), np.float32)
    rollout.add(row, np.zeros(2, np.int64), np.zeros(2, np.float32), nothing, nothing, row)
    rollout.end_episodes([1], np.array([[7.0]], np.float32))
    rollout.add(row, np.zeros(2, np.int64), np.ones(2, np.float32), nothing, nothing, row)
    assert rollout.dones.tolist() == [[0, 1], [0, 0]]
    assert rollout.truncated_observations().tolist() == [[7.0]]
    rollout.compute_returns_and_advantages(torch.zeros(2), 1.0, 1.0, torch.tensor([5.0]))
    assert rollout.returns.tolist() == [[1.0, 5.0], [1.0, 1.0]]
