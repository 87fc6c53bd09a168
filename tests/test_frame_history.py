"""A replay buffer of images stores each frame once, and gives what one that stores everything would give."""

import copy

import numpy as np
import pytest
import torch
from specs import CHOICE, numbers

from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.errors import NonFiniteError
from rl_training.runtime import replay_journal
from rl_training.runtime.checkpointing import read_checkpoint, write_checkpoint
from rl_training.runtime.replay_journal import ReplayJournal
from rl_training.spaces import ObservationSpec

PIXELS = 4


def spec_of(stack: int) -> ObservationSpec:
    return ObservationSpec(0, ((stack, 2, 2),), stack)


def make_buffer(capacity: int, num_envs: int, stack: int, *, seed: int = 0, **settings) -> ReplayBuffer:
    return ReplayBuffer(capacity, num_envs, spec_of(stack), CHOICE, seed=seed, **settings)


class Story:
    """Environments that end their episodes at random, either way; every frame is recognisable by its number.

    Frame n is four bytes: n % 256, n // 256 and twice the environment. `steps` keeps all that happened: for each vector
    step a list of (observation, reward, next observation, terminated, truncated), one for each environment.
    """

    def __init__(self, num_envs: int, stack: int, seed: int = 0):
        self.num_envs, self.stack = num_envs, stack
        self.random = np.random.default_rng(seed)
        self.frames = 0
        self.stacks = [self._first(env) for env in range(num_envs)]
        self.steps = []

    def _frame(self, env):
        self.frames += 1
        return [self.frames % 256, self.frames // 256, env, env]

    def _first(self, env):
        return self._frame(env) * self.stack

    def step(self):
        """Return one vector step as a buffer takes it: the reward of transition i is i."""
        happened = []
        for env in range(self.num_envs):
            before = self.stacks[env]
            after = before[PIXELS:] + self._frame(env)
            terminated, truncated = (bool(flag) for flag in self.random.random(2) < (0.2, 0.25))
            happened.append((before, len(self.steps) * self.num_envs + env, after, terminated, truncated))
            self.stacks[env] = self._first(env) if terminated or truncated else after
        self.steps.append(happened)
        before, rewards, after, terminated, truncated = zip(*happened, strict=True)
        return (
            *(np.array(before, np.uint8), np.array(rewards) % 2, np.array(rewards, np.float32)),
            *(np.array(after, np.uint8), np.array(terminated), np.array(truncated)),
        )

    def sample(self, number, n_step, gamma):
        """Return what a sample of transition `number` must be: observation, reward, next one, terminated, discount."""
        step, env = divmod(number, self.num_envs)
        observation, total, discount = self.steps[step][env][0], 0.0, 1.0
        for _ in range(n_step):
            _, reward, following, terminated, truncated = self.steps[step][env]
            total, discount = total + discount * reward, discount * gamma
            step += 1
            if terminated or truncated or step == len(self.steps):
                break
        return observation, total, following, float(terminated), discount


def check_samples(buffer, story, *, n_step=1):
    """Compare many samples with the story; returns the transitions that were drawn."""
    batch = buffer.sample(600)
    assert batch.observations.dtype == batch.next_observations.dtype == torch.uint8
    known = {
        tuple(happened[env][0]): step * story.num_envs + env
        for step, happened in enumerate(story.steps)
        for env in range(story.num_envs)
    }
    drawn = set()
    discounts = torch.full((600,), 0.5) if batch.discounts is None else batch.discounts
    columns = (batch.observations, batch.actions, batch.rewards, batch.next_observations, batch.terminated, discounts)
    for observation, action, reward, following, terminated, discount in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        assert tuple(observation) in known, "a stack that no one has seen"
        number = known[tuple(observation)]
        expected = story.sample(number, n_step, 0.5)
        assert (action, observation, reward, terminated, discount) == (number % 2, *expected[:2], *expected[3:])
        if not terminated:  # nothing looks at what follows a termination
            assert following == expected[2]
        drawn.add(number)
    return sorted(drawn)


@pytest.mark.parametrize("priority_exponent", [None, 0.5], ids=["uniform", "priorities"])
@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("stack", [1, 3, 4])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_samples_are_what_happened(num_envs, stack, n_step, priority_exponent):
    capacity = 20 * num_envs
    buffer = make_buffer(
        capacity, num_envs, stack, n_step=n_step, gamma=0.5, priority_exponent=priority_exponent, seed=3
    )
    story = Story(num_envs, stack, seed=stack)
    ends = set()
    for step in range(1, 91):
        buffer.add(*story.step())
        ends.update((terminated, truncated) for *_, terminated, truncated in story.steps[-1])
        if step not in (1, 2, 7, 19, 20, 21, 22, 39, 40, 41, 63, 90):
            continue
        drawn = check_samples(buffer, story, n_step=n_step)
        # All that is stored, but for the first stack - 1 vector steps once the ring is written over.
        added = step * num_envs
        first = added - capacity + (stack - 1) * num_envs if step > 20 else 0
        assert drawn == list(range(first, added))
        assert len(buffer) == added - first
        if priority_exponent:
            buffer.set_errors(np.linspace(0.5, 2.0, 600, dtype=np.float32))
    assert ends == {(False, False), (True, False), (False, True), (True, True)}


def test_hand_worked_stacks_of_one_environment():
    # Frames 1 to 5 of an episode that is cut off, then 10 and 11 of the next; stacks of three.
    buffer = ReplayBuffer(10, 1, ObservationSpec(0, ((3, 1, 1),), 3), CHOICE, seed=0)
    for before, after, truncated in [
        ([1, 1, 1], [1, 1, 2], False),
        ([1, 1, 2], [1, 2, 3], False),
        ([1, 2, 3], [2, 3, 4], False),
        ([2, 3, 4], [3, 4, 5], True),
        ([10, 10, 10], [10, 10, 11], False),
    ]:
        rows = (np.array([row], np.uint8) for row in (before, after))
        before_row, after_row = rows
        buffer.add(
            *(before_row, np.zeros(1, np.int64), np.zeros(1, np.float32), after_row),
            *(np.array([False]), np.array([truncated])),
        )
    batch = buffer.sample(200)
    seen = {
        (tuple(a), tuple(b)) for a, b in zip(batch.observations.tolist(), batch.next_observations.tolist(), strict=True)
    }
    assert seen == {
        ((1, 1, 1), (1, 1, 2)),
        ((1, 1, 2), (1, 2, 3)),
        ((1, 2, 3), (2, 3, 4)),
        ((2, 3, 4), (3, 4, 5)),
        ((10, 10, 10), (10, 10, 11)),
    }
    # One byte for each of the five: the stored frames are those that the observations end with.
    assert buffer.packed(0, 5)["frames"].tolist() == [[1], [2], [3], [4], [10]]
    assert buffer.packed(0, 5)["ages"].tolist() == [0, 1, 2, 2, 0]


@pytest.mark.parametrize(
    ("stack", "n_step", "actions", "expected"),
    [
        # 84 x 84 = 7,056 pixels of one frame; age 1, action 8, reward 4, terminated 4, ended 1
        (4, 1, CHOICE, 7_074),
        (4, 3, CHOICE, 7_074),
        (1, 1, CHOICE, 7_074),
        (4, 1, numbers(2), 7_074),  # two real numbers
    ],
)
def test_a_transition_costs_one_frame(stack, n_step, actions, expected):
    buffer = ReplayBuffer(10, 1, ObservationSpec(0, ((stack, 84, 84),), stack), actions, seed=0, n_step=n_step)
    assert buffer.row_dtype.itemsize == expected
    # What is allocated for 10 transitions: those bytes and no second copy.
    assert sum(array.nbytes for name, array in buffer._columns.items() if name == "frames") == 70_560


def test_cut_frames_are_forgotten_with_their_transitions():
    buffer, story = make_buffer(12, 2, 3), Story(2, 3)
    cut = []
    for step in range(100):
        buffer.add(*story.step())
        cut += [2 * step + env for env in range(2) if story.steps[step][env][3:] == (False, True)]
        stored = [number for number in cut if number >= 2 * (step + 1) - 12]
        assert buffer.counters()["frames"]["cut"].tolist() == stored
    assert len(cut) > 20


def test_real_actions_are_stored_with_images():
    buffer = ReplayBuffer(6, 2, spec_of(3), numbers(2), seed=0)
    story = Story(2, 3)
    for _ in range(5):
        before, _, rewards, after, *ends = story.step()
        buffer.add(before, np.stack([rewards, rewards + 0.5], axis=1), rewards, after, *ends)
    batch = buffer.sample(50)
    assert torch.equal(batch.actions, torch.stack([batch.rewards, batch.rewards + 0.5], dim=1))
    assert set(batch.rewards.tolist()) == {8, 9}  # three vector steps, of which two are needed by the last one's stack


# Priorities


def test_transitions_that_lost_their_frames_are_never_drawn_and_do_not_weigh():
    # A ring of 6, stacks of 3: of 2 to 7 only 4 to 7 are whole. Eight draws from four equal shares: each twice.
    buffer, story = make_buffer(6, 1, 3, priority_exponent=1.0), Story(1, 3)
    for _ in range(8):
        buffer.add(*story.step())
    batch = buffer.sample(8)
    assert sorted(batch.rewards.tolist()) == [4, 4, 5, 5, 6, 6, 7, 7]
    assert batch.weights.tolist() == [1.0] * 8
    assert buffer.counters()["priorities"]["leaves"].tolist() == [1, 1, 0, 0, 1, 1]  # rows 2 and 3 have 2 and 3
    # An error of 5 goes with transition 4 until that is too old.
    buffer.set_errors(np.where(batch.rewards.numpy() == 4, 5.0, 1.0).astype(np.float32))
    buffer.add(*story.step())
    assert set(buffer.sample(200).rewards.tolist()) == {5, 6, 7, 8}


# Saving and going on


@pytest.mark.parametrize("steps", [0, 3, 8, 13, 40])  # empty, not full, just full, wrapped around once and often
@pytest.mark.parametrize("priority_exponent", [None, 0.6], ids=["uniform", "priorities"])
def test_a_restored_buffer_gives_the_same_and_goes_on_alike(tmp_path, monkeypatch, steps, priority_exponent):
    monkeypatch.setattr(replay_journal, "MIN_SEGMENT_ROWS", 4)
    settings = {"n_step": 2, "gamma": 0.5, "priority_exponent": priority_exponent}
    story = Story(2, 3, seed=1)
    original, restored = (make_buffer(16, 2, 3, seed=seed, **settings) for seed in (1, 2))
    journal = ReplayJournal(original, tmp_path)
    for step in range(steps):
        original.add(*story.step())
        if step % 5 == 4:
            journal.state_dict()
    if steps:
        original.sample(6)
        original.set_errors(np.array([3.0, 0.1, 0.5, 2.0, 7.0, 1.0], np.float32))
    other = Story(2, 3, seed=9)  # what the restored one forgets
    for _ in range(11):
        restored.add(*other.step())
    # Through the files of a checkpoint: what is not a plain value or an array cannot be saved.
    checkpoint = write_checkpoint(tmp_path, 1, {"data": copy.deepcopy(journal.state_dict())}, [], journal.files())
    ReplayJournal(restored, tmp_path).load_state_dict(read_checkpoint(checkpoint)["data"])
    for _ in range(12):
        step = story.step()
        for buffer in (original, restored):
            buffer.add(*step)
        expected, got = (buffer.sample(64) for buffer in (original, restored))
        for field, ours, theirs in zip(expected._fields, got, expected, strict=True):
            assert (ours is None and theirs is None) or torch.equal(ours, theirs), field
        for buffer in (original, restored):
            buffer.set_errors(np.linspace(0.1, 3.0, 64, dtype=np.float32))
    check_samples(restored, story, n_step=2)


def test_saving_leaves_the_buffer_alone():
    buffer, story = make_buffer(8, 2, 3), Story(2, 3)
    for _ in range(3):
        buffer.add(*story.step())
    state = buffer.counters()["frames"]
    kept = copy.deepcopy(state)
    for _ in range(6):
        buffer.add(*story.step())
    for name in kept:
        assert state[name].tobytes() == kept[name].tobytes()


# An environment that could not be brought back begins a new episode: the old one counts as cut off.


@pytest.mark.parametrize("n_step", [1, 3])
def test_nothing_crosses_the_resume_of_an_environment_that_could_not_be_rebuilt(n_step):
    # Two environments, stacks of two, frames of one pixel. The second one saw 51 52 53, which led to 54, and begins
    # anew at 90; the first one goes on from 3 to 4, 5.
    buffer = ReplayBuffer(20, 2, ObservationSpec(0, ((2, 1, 1),), 2), CHOICE, seed=0, n_step=n_step, gamma=1.0)

    def add(before, after, reward):
        no = np.zeros(2, np.bool_)
        rewards = np.array([reward, 10 * reward], np.float32)
        buffer.add(np.array(before, np.uint8), np.zeros(2, np.int64), rewards, np.array(after, np.uint8), no, no)

    add([[1, 1], [51, 51]], [[1, 2], [51, 52]], 1.0)
    add([[1, 2], [51, 52]], [[2, 3], [52, 53]], 2.0)
    add([[2, 3], [52, 53]], [[3, 4], [53, 54]], 4.0)
    buffer.end_episodes([1])
    add([[3, 4], [90, 90]], [[4, 5], [90, 91]], 8.0)
    batch = buffer.sample(400)
    got = {
        tuple(start): (reward, tuple(following))
        for start, reward, following in zip(
            *(batch.observations.tolist(), batch.rewards.tolist(), batch.next_observations.tolist()), strict=True
        )
    }
    assert batch.terminated.sum() == 0
    assert (
        got
        == {
            1: {
                (1, 1): (1, (1, 2)),
                (1, 2): (2, (2, 3)),
                (2, 3): (4, (3, 4)),
                (3, 4): (8, (4, 5)),
                (51, 51): (10, (51, 52)),
                (51, 52): (20, (52, 53)),
                (52, 53): (40, (53, 54)),
                (90, 90): (80, (90, 91)),
            },
            3: {
                (1, 1): (7, (3, 4)),
                (1, 2): (14, (4, 5)),
                (2, 3): (12, (4, 5)),
                (3, 4): (8, (4, 5)),
                (51, 51): (70, (53, 54)),
                (51, 52): (60, (53, 54)),
                (52, 53): (40, (53, 54)),
                (90, 90): (80, (90, 91)),
            },
        }[n_step]
    )


def test_an_empty_buffer_can_be_told_of_new_episodes():
    buffer = make_buffer(8, 2, 3)
    buffer.end_episodes([0, 1])
    story = Story(2, 3)
    for _ in range(6):
        buffer.add(*story.step())
    assert check_samples(buffer, story) == list(range(8, 12))


# Numbers beside pixels


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("capacity", [40, 8])  # also in a ring that has wrapped around
def test_a_bad_number_beside_an_image_is_refused_with_its_step_and_environment(number, capacity):
    # Transition 9 is environment 1 in the fifth vector step of two: it began at step 8.
    buffer = ReplayBuffer(capacity, 2, ObservationSpec(2, ((1, 1, 3),)), CHOICE, seed=0)
    for step in range(5):
        rows = np.zeros((2, 11), np.uint8)
        rows[:, 8:] = 255  # pixels, which as numbers would be NaN
        if step == 4:
            rows[1, 4:8] = np.frombuffer(np.float32(number).tobytes(), np.uint8)
        buffer.add(rows, np.zeros(2), np.zeros(2), rows, np.zeros(2, np.bool_))
    with pytest.raises(NonFiniteError, match=r"The observation of environment 1 is NaN or infinite at step 8\."):
        buffer.check_finite(since=6)
    buffer.check_finite(since=10)


def test_a_bad_reward_beside_an_image_is_refused():
    buffer, story = make_buffer(8, 2, 3), Story(2, 3)
    for _ in range(5):
        before, actions, rewards, after, *ends = story.step()
        buffer.add(before, actions, rewards, after, *ends)
    buffer.check_finite(since=0)
    buffer.add(before, actions, np.array([0.0, np.nan], np.float32), after, *ends)
    with pytest.raises(NonFiniteError, match=r"The reward of environment 1 is NaN or infinite at step 12\."):
        buffer.check_finite(since=8)
