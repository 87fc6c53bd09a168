"""Prioritised replay: the tree of sums, what is drawn how often, and how much it counts."""

import copy

import numpy as np
import pytest
import torch
from specs import CHOICE
from test_dqn_update import make_agent, one_transition, set_weights

from rl_training.algorithms.dqn import q_loss
from rl_training.algorithms.schedules import rising
from rl_training.config import EnvConfig, QLoss
from rl_training.data.priorities import Priorities, SumTree
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.envs.normalization import Normalizer
from rl_training.runtime.dqn_trainer import train_dqn, update
from rl_training.spaces import ObservationSpec

# The tree


def make_tree(*leaves: float) -> SumTree:
    tree = SumTree(len(leaves))
    tree.set(np.arange(len(leaves)), np.array(leaves))
    return tree


def found(tree: SumTree, *sums: float) -> list[int]:
    return tree.find(np.array(sums)).tolist()


def test_a_number_finds_the_leaf_at_which_the_running_sum_passes_it():
    # running sums 1, 3, 6, 10; a number that equals one of them belongs to the next leaf
    tree = make_tree(1.0, 2.0, 3.0, 4.0)
    assert tree.total == 10.0
    assert found(tree, 0.0, 0.75, 1.0, 2.75, 3.0, 5.75, 6.0, 9.75) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_tree_whose_size_is_no_power_of_two_finds_no_leaf_beyond_it():
    # running sums 1, 3, 3, 7, 10: the third leaf has no share. 10 itself, which only rounding can ask for, is the last.
    tree = make_tree(1.0, 2.0, 0.0, 4.0, 3.0)
    assert tree.total == 10.0
    assert found(tree, 0.5, 1.0, 3.0, 6.75, 7.0, 9.75, 10.0) == [0, 1, 3, 3, 4, 4, 4]


def test_leaves_without_a_share_are_never_found_not_even_at_the_ends():
    assert found(make_tree(0.0, 0.0, 2.0, 0.0, 0.0), 0.0, 1.0, 2.0) == [2, 2, 2]
    assert found(make_tree(1.0, 2.0, 0.0), 2.75, 3.0) == [1, 1]


def test_a_tree_of_one_leaf_always_finds_it():
    tree = make_tree(5.0)
    assert tree.total == 5.0
    assert found(tree, 0.0, 4.75, 5.0) == [0, 0, 0]
    tree.set(np.array([0]), np.array([2.0]))
    assert tree.total == 2.0


def test_an_empty_tree_sums_up_to_nothing():
    assert SumTree(6).total == 0.0


def test_a_changed_leaf_changes_the_sums_above_it_and_no_other_leaf():
    # 1 2 3 4 becomes 1 6 3 0.5: running sums 1, 7, 10, 10.5
    tree = make_tree(1.0, 2.0, 3.0, 4.0)
    tree.set(np.array([3, 1]), np.array([0.5, 6.0]))
    assert tree[:4].tolist() == [1.0, 6.0, 3.0, 0.5]
    assert tree.total == 10.5
    assert found(tree, 0.75, 1.0, 6.75, 7.0, 10.25) == [0, 1, 1, 2, 3]


def test_of_a_leaf_that_comes_twice_the_last_value_stays():
    # 1 7 1 4
    tree = make_tree(1.0, 2.0, 3.0, 4.0)
    tree.set(np.array([1, 2, 1, 1]), np.array([5.0, 1.0, 6.0, 7.0]))
    assert tree[:4].tolist() == [1.0, 7.0, 1.0, 4.0]
    assert tree.total == 13.0


@pytest.mark.parametrize("capacity", [1, 2, 7, 64, 100])
def test_a_tree_built_from_its_leaves_has_the_bits_of_one_that_was_changed_many_times(capacity):
    random = np.random.default_rng(0)
    changed = SumTree(capacity)
    for _ in range(200):
        rows = random.integers(0, capacity, size=5)
        changed.set(rows, random.exponential(size=5) ** 3)
    built = make_tree(*changed[:capacity])
    assert built._nodes.tobytes() == changed._nodes.tobytes()
    # The sums are true ones: as exact as adding up the leaves.
    assert built.total == pytest.approx(float(changed[:capacity].sum()), rel=1e-12)


# What is drawn


def make_priorities(*errors: float, exponent: float = 0.5, capacity: int | None = None) -> Priorities:
    priorities = Priorities(capacity or len(errors), exponent)
    priorities.add(np.arange(len(errors)))
    priorities.update(np.arange(len(errors)), np.array(errors, np.float32))
    return priorities


def leaves(priorities: Priorities, size: int) -> list[float]:
    return priorities.state_dict(size)["leaves"].tolist()


@pytest.mark.parametrize(
    ("exponent", "expected"),
    [
        (0.0, [0.25, 0.25, 0.25, 0.25]),
        (0.5, [0.1, 0.2, 0.3, 0.4]),  # square roots 1 2 3 4 of 10
        (1.0, [1 / 30, 4 / 30, 9 / 30, 16 / 30]),
    ],
)
def test_transitions_are_drawn_as_often_as_the_power_of_their_error_says(exponent, expected):
    priorities = make_priorities(1.0, 4.0, 9.0, 16.0, exponent=exponent)
    random = np.random.default_rng(0)
    drawn = np.concatenate([priorities.draw(random.random(1), 4, 1.0)[0] for _ in range(5_000)])
    # Five standard deviations of a frequency in 5,000 are at most 0.035.
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / 5_000, expected, atol=0.035)


def test_a_batch_has_one_draw_from_each_equal_share_of_the_sum():
    # Priorities 1 2 3 4 in ten shares of 1: whatever is drawn inside the shares, the rows come 1, 2, 3 and 4 times.
    priorities = make_priorities(1.0, 4.0, 9.0, 16.0)
    for uniform in (0.01, 0.5, 0.99):
        rows, _ = priorities.draw(np.full(10, uniform), 4, 1.0)
        assert rows.tolist() == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3]


@pytest.mark.parametrize(
    ("weight_exponent", "expected"),
    [
        (0.0, [1.0, 1.0, 1.0, 1.0]),
        (0.5, [1.0, 0.707107, 0.577350, 0.5]),  # the square roots of what follows
        (1.0, [1.0, 0.5, 0.333333, 0.25]),  # 1 / (4 p) = 2.5, 1.25, 0.8333, 0.625, over the largest
    ],
)
def test_weights_undo_the_preference_as_far_as_their_exponent_says(weight_exponent, expected):
    # Priorities 1 2 3 4: probabilities 0.1, 0.2, 0.3, 0.4
    rows, weights = make_priorities(1.0, 4.0, 9.0, 16.0).draw(np.full(10, 0.5), 4, weight_exponent)
    assert weights.dtype == np.float32
    np.testing.assert_allclose(weights, np.array(expected)[rows], rtol=1e-5)


def test_the_largest_weight_of_each_batch_is_one():
    # Halves of the sum 10, at 0.4 x 5 = 2 in the second and 5 + 0.6 x 5 = 8 in the fourth: weights 1.25 and 0.625
    rows, weights = make_priorities(1.0, 4.0, 9.0, 16.0).draw(np.array([0.4, 0.6]), 4, 1.0)
    assert rows.tolist() == [1, 3]
    assert weights.tolist() == pytest.approx([1.0, 0.5], rel=1e-5)


def test_the_sign_of_an_error_does_not_matter():
    assert leaves(make_priorities(-3.0, 3.0, -9.0, exponent=1.0), 3) == pytest.approx([3.0, 3.0, 9.0], rel=1e-5)


def test_an_error_of_zero_keeps_a_small_chance():
    # (0 + 1e-6)^0.5 = 0.001
    assert leaves(make_priorities(0.0, 4.0), 2) == pytest.approx([0.001, 2.0], rel=1e-5)


def test_new_transitions_get_the_highest_priority_so_far():
    # 1 before there is any error; then 9^0.5 = 3, also after that error itself has fallen
    priorities = Priorities(4, 0.5)
    priorities.add(np.array([0, 1]))
    assert leaves(priorities, 2) == [1.0, 1.0]
    priorities.update(np.array([0, 1]), np.array([9.0, 0.25], np.float32))
    priorities.add(np.array([2]))
    priorities.update(np.array([0]), np.array([0.25], np.float32))
    priorities.add(np.array([3]))
    assert leaves(priorities, 4) == pytest.approx([0.5, 0.5, 3.0, 3.0], rel=1e-5)


def test_errors_below_one_do_not_lower_the_priority_of_new_transitions():
    priorities = make_priorities(0.25, 0.25, capacity=3)
    priorities.add(np.array([2]))
    assert leaves(priorities, 3) == pytest.approx([0.5, 0.5, 1.0], rel=1e-5)


# What the state dict is loaded into: nothing yet, or other priorities, more of them than it has.
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
def test_restored_priorities_draw_the_same_and_go_on_alike(used):
    original = make_priorities(1.0, 4.0, 0.3, exponent=0.6, capacity=6)
    restored = make_priorities(50.0, 2.0, 7.0, 8.0, 9.0, exponent=0.6, capacity=6) if used else Priorities(6, 0.6)
    restored.load_state_dict(copy.deepcopy(original.state_dict(3)))
    random = np.random.default_rng(0)
    for size in (3, 4, 5):
        uniform = random.random(100)
        for expected, got in zip(original.draw(uniform, size, 0.4), restored.draw(uniform, size, 0.4), strict=True):
            assert expected.tobytes() == got.tobytes()
        for priorities in (original, restored):
            priorities.add(np.array([size]))


def test_a_state_dict_is_a_copy():
    priorities = make_priorities(1.0, 4.0)
    state = priorities.state_dict(2)
    priorities.update(np.array([0]), np.array([100.0], np.float32))
    assert state["leaves"].tolist() == pytest.approx([1.0, 2.0], rel=1e-5)


# In the replay buffer


def make_buffer(capacity: int = 10, num_envs: int = 1, *, exponent: float | None = 1.0, seed: int = 0) -> ReplayBuffer:
    return ReplayBuffer(capacity, num_envs, ObservationSpec(1), CHOICE, seed=seed, priority_exponent=exponent)


def add(buffer: ReplayBuffer, steps: int, *, terminated: bool = False) -> None:
    """Add vector steps in which the reward of a transition is its number."""
    for _ in range(steps):
        numbers = buffer.added + np.arange(buffer.num_envs)
        observations = numbers[:, None].astype(np.float32)
        ends = np.full(buffer.num_envs, terminated)
        buffer.add(observations, numbers, numbers.astype(np.float32), observations + 0.5, ends)


@pytest.mark.parametrize("num_envs", [1, 2])
def test_only_what_is_stored_is_drawn(num_envs):
    buffer = make_buffer(6, num_envs)  # which is no power of two
    add(buffer, 4 // num_envs)
    assert set(buffer.sample(200).rewards.tolist()) == {0, 1, 2, 3}
    add(buffer, 10 // num_envs)
    assert set(buffer.sample(200).rewards.tolist()) == {8, 9, 10, 11, 12, 13}


def test_all_fields_of_a_sample_belong_to_the_same_transition():
    buffer = make_buffer(5)
    add(buffer, 8)
    batch = buffer.sample(100)
    assert torch.equal(batch.observations.squeeze(-1), batch.rewards)
    assert torch.equal(batch.next_observations.squeeze(-1), batch.rewards + 0.5)
    assert torch.equal(batch.actions, batch.rewards.long())


def test_transitions_without_errors_yet_are_drawn_alike_and_weigh_one():
    # Four equal shares for four draws: each transition once
    buffer = make_buffer()
    add(buffer, 4)
    batch = buffer.sample(4)
    assert batch.rewards.tolist() == [0, 1, 2, 3]
    assert batch.weights.tolist() == [1, 1, 1, 1]


def test_errors_decide_what_is_drawn_next():
    # Each of the four is drawn once. Errors of 8 and 0 leave the others a chance of 1e-6 in 8.
    buffer = make_buffer()
    add(buffer, 4)
    buffer.sample(4)
    buffer.set_errors(np.array([0.0, 0.0, -8.0, 0.0], np.float32))
    assert set(buffer.sample(100).rewards.tolist()) == {2}
    # Twelve draws of priorities 8, 4, 4 and 8 of 24: four, two, two and four
    buffer = make_buffer()
    add(buffer, 4)
    buffer.sample(4)
    buffer.set_errors(np.array([8.0, 4.0, 4.0, 8.0], np.float32))
    batch = buffer.sample(12, weight_exponent=1.0)
    assert np.bincount(batch.rewards.long().numpy()).tolist() == [4, 2, 2, 4]
    # 1 / (4 x 1/3) = 0.75 and 1 / (4 x 1/6) = 1.5, over the largest
    assert batch.weights.tolist() == pytest.approx([0.5] * 4 + [1.0] * 4 + [0.5] * 4, rel=1e-5)
    assert buffer.sample(12, weight_exponent=0.0).weights.tolist() == [1.0] * 12


def test_errors_belong_to_the_transitions_drawn_last():
    buffer = make_buffer(4)
    add(buffer, 4)
    buffer.sample(4)
    buffer.set_errors(np.array([0.0, 5.0, 0.0, 0.0], np.float32))
    assert buffer.sample(2).rewards.tolist() == [1, 1]
    buffer.set_errors(np.array([0.0, 0.0], np.float32))  # both are of transition 1
    assert set(buffer.sample(100).rewards.tolist()) == {0, 1, 2, 3}


def test_a_transition_that_is_written_over_gives_its_priority_to_the_new_one():
    # The error 0 of transition 0 is forgotten: 4, in its place, has the highest priority so far, 5, beside 5 0 0.
    buffer = make_buffer(4)
    add(buffer, 4)
    buffer.sample(4)
    buffer.set_errors(np.array([0.0, 5.0, 0.0, 0.0], np.float32))
    add(buffer, 1)
    assert np.bincount(buffer.sample(10).rewards.long().numpy()).tolist() == [0, 5, 0, 0, 5]


def test_without_priorities_there_are_no_weights_and_errors_change_nothing():
    buffer, told = make_buffer(exponent=None), make_buffer(exponent=None)
    for each in (buffer, told):
        add(each, 4)
        assert each.sample(4, weight_exponent=0.5).weights is None
    told.set_errors(np.array([9.0, 0.0, 0.0, 0.0], np.float32))
    assert torch.equal(buffer.sample(100).rewards, told.sample(100).rewards)


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("steps", [0, 3, 6, 8])  # empty, not full, just full, wrapped around
def test_a_buffer_with_the_counters_of_another_one_draws_the_same_and_goes_on_alike(steps, used):
    original, restored = make_buffer(6, seed=1), make_buffer(6, seed=2)
    add(original, steps)
    if steps:
        original.sample(5)
        original.set_errors(np.array([3.0, 0.1, 0.5, 2.0, 7.0], np.float32))
    if used:
        add(restored, 5)
        restored.sample(5)
        restored.set_errors(np.array([9.0, 9.0, 20.0, 1.0, 1.0], np.float32))
    restored.set_counters(copy.deepcopy(original.counters()))
    oldest = max(0, steps - 6)
    restored.unpack(oldest, original.packed(oldest, steps))
    for errors in ([1.0, 30.0, 2.0, 0.0], [0.2, 0.3, 0.4, 0.5]):
        for buffer in (original, restored):
            add(buffer, 1)
        for _ in range(2):
            expected, got = (buffer.sample(4, weight_exponent=0.4) for buffer in (original, restored))
            assert torch.equal(expected.rewards, got.rewards)
            assert torch.equal(expected.weights, got.weights)
            for buffer in (original, restored):
                buffer.set_errors(np.array(errors, np.float32))


# In the loss and in training


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (QLoss.huber, 0.5),  # (1 x 0.125 + 0.5 x 1.5 + 0.25 x 2.5) / 3
        (QLoss.mse, 1.5),  # (1 x 0.25 + 0.5 x 4 + 0.25 x 9) / 3
    ],
)
def test_weighted_loss_of_hand_worked_errors(kind, expected):
    loss = q_loss(torch.zeros(3), torch.tensor([0.5, 2.0, -3.0]), kind, torch.tensor([1.0, 0.5, 0.25]))
    assert loss.item() == pytest.approx(expected)


@pytest.mark.parametrize("kind", QLoss)
def test_weights_of_one_give_the_plain_loss(kind):
    errors = torch.tensor([0.5, 2.0, -3.0])
    assert q_loss(torch.zeros(3), errors, kind, torch.ones(3)) == q_loss(torch.zeros(3), errors, kind)


def test_an_update_keeps_the_signed_errors_if_transitions_are_drawn_by_them():
    # Target 1 + 0.5 x 4 = 3, prediction 2: error 1, square 1, weight 0.25.
    agent = make_agent(double_q=False, loss="mse", prioritized=True)
    set_weights(agent.q_network, 2.0, 3.0)
    set_weights(agent.target_network, 4.0, 1.0)
    metrics = agent.update(one_transition()._replace(weights=torch.tensor([0.25])))
    assert metrics["loss/value"].item() == pytest.approx(0.25)
    assert set(metrics) == {"loss/value", "policy/q_value", "loss/gradient_norm"}
    assert agent.td_errors.tolist() == [1.0]
    assert not agent.td_errors.requires_grad


def test_an_update_keeps_no_errors_otherwise():
    agent = make_agent()
    agent.update(one_transition())
    assert agent.td_errors is None


def test_the_trainer_reports_the_errors_of_each_update():
    # Values of 0 and episodes that end at once: the errors are the rewards 0 1 2 3, and each is drawn once.
    agent = make_agent(batch_size=4, prioritized=True, learning_rate=1e-9)
    set_weights(agent.q_network, 0.0, 0.0)
    buffer = ReplayBuffer(4, 1, ObservationSpec(1), CHOICE, seed=0, priority_exponent=1.0)
    for number in range(4):
        value = np.full((1, 1), number, np.float32)
        buffer.add(value, np.zeros(1, np.int64), value[0], value, np.array([True]))
    update(agent, buffer, Normalizer(EnvConfig(id="CartPole-v1"), 1, 0.5), weight_exponent=1.0)
    assert buffer.counters()["priorities"]["leaves"].tolist() == pytest.approx([1e-6, 1.0, 2.0, 3.0], rel=1e-4)


@pytest.mark.parametrize(("progress", "value"), [(0.0, 0.4), (0.25, 0.55), (0.5, 0.7), (1.0, 1.0), (1.5, 1.0)])
def test_a_rising_value_reaches_the_end_of_the_budget_and_stays(progress, value):
    assert rising(progress, initial=0.4, final=1.0) == pytest.approx(value)


def test_training_undoes_the_preference_more_and_more(tiny_config, tmp_path, monkeypatch):
    # The first update is after 36 of 200 steps: 0.4 + 0.6 x 0.18 = 0.508; the last after all of them.
    exponents = []
    plain_sample = ReplayBuffer.sample

    def sample(buffer, *arguments, weight_exponent):
        exponents.append(weight_exponent)
        batch = plain_sample(buffer, *arguments, weight_exponent=weight_exponent)
        assert batch.weights is not None
        return batch

    monkeypatch.setattr(ReplayBuffer, "sample", sample)
    train_dqn(tiny_config("dqn", "CartPole-v1", algo={"prioritized": True}), run_dir=tmp_path / "run")
    assert exponents == sorted(exponents)
    assert exponents[0] == pytest.approx(0.508)
    assert exponents[-1] == pytest.approx(1.0)
