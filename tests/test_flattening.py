"""What environments give becomes rows, and what agents choose becomes what environments take."""

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from toy_envs import ReusedArrays, Shown

from rl_training.envs.flattening import describe_actions, describe_observations, describe_spaces, flat_env
from rl_training.envs.training_envs import TrainingEnvs
from rl_training.errors import EnvironmentFailure, UserError
from rl_training.spaces import (
    ContinuousActions,
    DiscreteActions,
    MultiDiscreteActions,
    ObservationSpec,
    action_layout,
    choice_counts,
)

INF = float("inf")
CHOICE = Discrete(2)
# 3 x 5 pixels in two channels: channel 0 has 0 to 14, channel 1 has 100 to 114.
CHANNELS = np.stack([np.arange(15, dtype=np.uint8).reshape(3, 5), np.arange(100, 115, dtype=np.uint8).reshape(3, 5)])
IN_CHANNELS = [*range(15), *range(100, 115)]
# 1.0 and -2.0 as the bytes of float32, lowest first.
ONE, MINUS_TWO = [0, 0, 128, 63], [0, 0, 0, 192]


def row_of(space, observation, frame_stack: int = 1):
    env = flat_env(Shown(space, CHOICE, [observation]), "Toy-v0", frame_stack)
    row, _ = env.reset()
    assert env.observation_space.contains(row)
    assert env.observation_space.shape == (describe_observations(space, "Toy-v0", frame_stack).row_size,)
    return row


# Observations


VECTORS = {
    "matrix": (Box(-9, 9, (2, 3), np.float32), np.arange(6, dtype=np.float32).reshape(2, 3), [0, 1, 2, 3, 4, 5]),
    "float64 of three dimensions": (Box(-9, 9, (2, 1, 2)), np.array([[[0.5, -1]], [[2, 8]]]), [0.5, -1, 2, 8]),
    "a single number": (Box(-9, 9, (), np.float64), np.array(2.5), [2.5]),
    "integers in a matrix": (Box(-9, 9, (2, 2), np.int64), np.array([[1, -2], [3, 4]]), [1, -2, 3, 4]),
    "a vector of bytes": (Box(0, 255, (3,), np.uint8), np.array([0, 7, 255], np.uint8), [0, 7, 255]),
    "bytes of four dimensions": (
        *(Box(0, 255, (1, 2, 1, 2), np.uint8), np.array([[[[1, 2]], [[3, 255]]]], np.uint8), [1, 2, 3, 255]),
    ),
    "discrete": (Discrete(4), 2, [0, 0, 1, 0]),
    "discrete from -1": (Discrete(3, start=-1), -1, [1, 0, 0]),
    "multi discrete": (MultiDiscrete([2, 3]), np.array([1, 0]), [0, 1, 1, 0, 0]),
    "multi discrete with starts": (MultiDiscrete([2, 3], start=[4, -1]), np.array([4, 1]), [1, 0, 0, 0, 1]),
    "multi discrete in a matrix": (
        *(MultiDiscrete([[2, 2], [3, 1]]), np.array([[1, 0], [2, 0]]), [0, 1, 1, 0, 0, 0, 1, 1]),
    ),
    "multi binary": (MultiBinary([2, 2]), np.array([[1, 0], [0, 1]], np.int8), [1, 0, 0, 1]),
    # Gymnasium sorts the keys of a dict, a before b, and keeps the order of keyword arguments.
    "dict in key order": (
        *(Dict({"b": Box(-9, 9, (2,)), "a": Discrete(2)}), {"b": np.array([5, 6], np.float32), "a": 1}),
        [0, 1, 5, 6],
    ),
    "tuple": (
        *(spaces.Tuple([Box(-9, 9, (1,)), MultiBinary(2)]), (np.array([0.5]), np.array([1, 0], np.int8))),
        [0.5, 1, 0],
    ),
    "dict of tuple of dict": (
        Dict(x=spaces.Tuple([Dict(q=Discrete(2), p=Box(-9, 9, (1,))), Discrete(3)]), a=MultiBinary(1)),
        {"x": ({"q": 0, "p": np.array([7.0])}, 2), "a": np.array([1], np.int8)},
        [1, 0, 7, 0, 0, 1, 1],  # q and p and the number 2 of 3 in x, then a
    ),
}


@pytest.mark.parametrize("kind", VECTORS)
def test_a_vector_is_a_row_of_float32(kind):
    space, observation, expected = VECTORS[kind]
    row = row_of(space, observation)
    assert row.dtype == np.float32
    assert row.tolist() == expected
    spec = describe_observations(space, "Toy-v0")
    assert spec == ObservationSpec(len(expected))
    assert (spec.row_size, spec.dtype) == (len(expected), np.float32)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
def test_a_flat_vector_needs_no_wrapper(dtype):
    env = Shown(Box(-9, 9, (2,), dtype), CHOICE, [np.zeros(2, dtype)])
    assert flat_env(env, "Toy-v0") is env


IMAGES = {
    "channels first": (Box(0, 255, (2, 3, 5), np.uint8), CHANNELS, (2, 3, 5), IN_CHANNELS),
    "channels last": (Box(0, 255, (3, 5, 2), np.uint8), CHANNELS.transpose(1, 2, 0), (2, 3, 5), IN_CHANNELS),
    "no channels": (Box(0, 255, (3, 5), np.uint8), CHANNELS[0], (1, 3, 5), list(range(15))),
    "one channel, last": (Box(0, 255, (3, 5, 1), np.uint8), CHANNELS[0][..., None], (1, 3, 5), list(range(15))),
    "one channel, first": (Box(0, 255, (1, 3, 5), np.uint8), CHANNELS[:1], (1, 3, 5), list(range(15))),
}


@pytest.mark.parametrize("kind", IMAGES)
def test_an_image_is_a_row_of_bytes_channel_by_channel(kind):
    space, observation, shape, expected = IMAGES[kind]
    row = row_of(space, observation)
    assert row.dtype == np.uint8
    assert row.tolist() == expected
    spec = describe_observations(space, "Toy-v0")
    assert spec == ObservationSpec(0, (shape,))
    assert (spec.row_size, spec.dtype) == (len(expected), np.uint8)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((84, 84, 4), (4, 84, 84)),
        ((4, 84, 84), (4, 84, 84)),
        ((210, 160, 3), (3, 210, 160)),
        ((10, 10, 6), (6, 10, 10)),  # more channels than colours have
        ((12, 10, 10), (12, 10, 10)),  # four stacked frames of three colours
        ((4, 4, 3), (3, 4, 4)),
        ((5, 5, 5), (5, 5, 5)),
    ],
)
def test_the_channels_come_last_if_they_are_fewer_than_rows_and_columns(shape, expected):
    assert describe_observations(Box(0, 255, shape, np.uint8), "Toy-v0").images == (expected,)


def test_vectors_come_first_as_the_bytes_of_their_numbers_and_images_follow():
    space = Dict(
        camera=Box(0, 255, (3, 5, 2), np.uint8),
        flag=Discrete(2),
        inner=spaces.Tuple([Box(0, 255, (2, 2), np.uint8), Box(-9, 9, (1,), np.float64)]),
    )
    small = np.array([[200, 201], [202, 203]], np.uint8)
    observation = {"camera": CHANNELS.transpose(1, 2, 0), "flag": 0, "inner": (small, np.array([-2.0]))}
    row = row_of(space, observation)
    assert row.dtype == np.uint8
    assert row.tolist() == [*ONE, 0, 0, 0, 0, *MINUS_TWO, *IN_CHANNELS, 200, 201, 202, 203]
    spec = describe_observations(space, "Toy-v0")
    assert spec == ObservationSpec(3, ((2, 3, 5), (1, 2, 2)))
    assert spec.row_size == 12 + 30 + 4
    assert spec.vectors(row).tolist() == [1.0, 0.0, -2.0]
    assert spec.vectors(np.stack([row, row])).tolist() == [[1.0, 0.0, -2.0]] * 2


def test_each_row_has_its_own_memory():
    space = Box(-9, 9, (2, 1))
    env = flat_env(Shown(space, CHOICE, [np.array([[1.0], [2.0]]), np.array([[3.0], [4.0]])]), "Toy-v0")
    first, _ = env.reset()
    second = env.step(0)[0]
    assert (first.tolist(), second.tolist()) == ([1, 2], [3, 4])


def test_an_image_of_real_numbers_in_a_space_of_bytes_is_refused():
    # Numbers from 0 to 1 would all become 0.
    env = flat_env(Shown(Box(0, 255, (3, 5), np.uint8), CHOICE, [np.full((3, 5), 0.5)]), "Toy-v0")
    with pytest.raises(ValueError, match="its image has dtype float64 instead of uint8"):
        env.reset()


def test_such_an_environment_is_named_in_training(tiny_config, monkeypatch):
    from toy_envs import Motion

    monkeypatch.setattr(Motion, "_observe", lambda env: np.full((7, 7), 0.5))
    envs = TrainingEnvs(tiny_config("ppo", "toy/Motion-v0"))
    with pytest.raises(EnvironmentFailure, match=r"toy/Motion-v0 \(environment 0\) failed in reset: .*dtype float64"):
        envs.reset()


# Stacked frames


def stacked_rows(space, observations, frames: int):
    env = flat_env(Shown(space, CHOICE, observations), "Toy-v0", frames)
    rows = [env.reset()[0], *(env.step(0)[0] for _ in observations[1:])]
    return rows, env


def test_stacked_vectors_have_the_oldest_first_and_begin_with_copies_of_the_first():
    numbers = [np.array([n, n + 0.5]) for n in (1, 2, 3, 4)]
    rows, env = stacked_rows(Box(-9, 9, (2,), np.float64), numbers, 3)
    assert [row.tolist() for row in rows] == [
        [1, 1.5, 1, 1.5, 1, 1.5],
        [1, 1.5, 1, 1.5, 2, 2.5],
        [1, 1.5, 2, 2.5, 3, 3.5],
        [2, 2.5, 3, 3.5, 4, 4.5],
    ]
    assert env.reset()[0].tolist() == [1, 1.5, 1, 1.5, 1, 1.5]  # nothing of the episode before
    assert describe_observations(Box(-9, 9, (2,)), "Toy-v0", 3) == ObservationSpec(6, (), 3)


def test_other_kinds_of_vectors_are_stacked_as_they_are_flattened():
    rows, _ = stacked_rows(Dict(a=Discrete(2), b=Discrete(2)), [{"a": 0, "b": 1}, {"a": 1, "b": 1}], 2)
    assert [row.tolist() for row in rows] == [[1, 0, 0, 1, 1, 0, 0, 1], [1, 0, 0, 1, 0, 1, 0, 1]]
    assert {row.dtype for row in rows} == {np.dtype(np.float32)}


def test_stacked_images_are_channels_of_one_image():
    pictures = [np.full((2, 2, 1), n, np.uint8) for n in (1, 2, 3)]
    rows, _ = stacked_rows(Box(0, 255, (2, 2, 1), np.uint8), pictures, 2)
    assert [row.tolist() for row in rows] == [[1] * 8, [1] * 4 + [2] * 4, [2] * 4 + [3] * 4]
    assert {row.dtype for row in rows} == {np.dtype(np.uint8)}
    assert describe_observations(Box(0, 255, (3, 5, 2), np.uint8), "Toy-v0", 4) == ObservationSpec(0, ((8, 3, 5),), 4)


def test_stacked_images_of_two_channels_keep_the_channels_of_a_frame_together():
    pictures = [CHANNELS.transpose(1, 2, 0), CHANNELS.transpose(1, 2, 0) + 50]
    rows, _ = stacked_rows(Box(0, 255, (3, 5, 2), np.uint8), pictures, 2)
    assert rows[1].tolist() == [*IN_CHANNELS, *range(50, 65), *range(150, 165)]


def test_a_stack_survives_an_environment_that_writes_into_one_array():
    # (episode, step) of steps 0 to 2
    env = flat_env(ReusedArrays(length=9), "Toy-v0", 3)
    rows = [env.reset()[0], env.step(0)[0], env.step(0)[0]]
    assert [row.tolist() for row in rows] == [[0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1], [0, 0, 0, 1, 0, 2]]


def test_training_sees_the_whole_last_stack_of_an_episode_and_a_new_one_after_it(tiny_config):
    # Counter observes (episode, step), and its episodes have 3 steps.
    env = {"num_envs": 2, "frame_stack": 2, "env_kwargs": {"length": 3}}
    envs = TrainingEnvs(tiny_config("dqn", "toy/Counter-v0", env=env))
    assert envs.reset().tolist() == [[0, 0, 0, 0]] * 2
    steps = [envs.step(np.zeros(2, np.int64)) for _ in range(3)]
    envs.close()
    assert [step.next_observations[1].tolist() for step in steps] == [[0, 0, 0, 1], [0, 1, 0, 2], [0, 2, 0, 3]]
    assert [step.observations[1].tolist() for step in steps] == [[0, 0, 0, 1], [0, 1, 0, 2], [1, 0, 1, 0]]


@pytest.mark.parametrize(
    "space",
    [
        Dict(image=Box(0, 255, (9, 9), np.uint8), vector=Box(-1, 1, (2,))),
        spaces.Tuple([Box(0, 255, (9, 9), np.uint8), Box(0, 255, (9, 9), np.uint8)]),
    ],
    ids=["image and vector", "two images"],
)
def test_a_stack_of_several_parts_with_images_is_refused(space):
    describe_observations(space, "Toy-v0")
    with pytest.raises(UserError) as refusal:
        describe_observations(space, "Toy-v0", 4)
    message = str(refusal.value)
    assert message.startswith("env.frame_stack=4 stacks one image or one vector; Toy-v0 has ")
    assert "Box(0, 255, (9, 9), uint8)" in message
    assert message.endswith("Use env.frame_stack=1.")
    assert "\n" not in message


# Actions


def taken(space, action):
    env = Shown(Box(-1, 1, (1,)), space, [np.zeros(1, np.float32)])
    flat = flat_env(env, "Toy-v0")
    flat.reset()
    assert flat.action_space.contains(action)
    flat.step(action)
    (received,) = env.actions
    assert space.contains(received)
    return received


@pytest.mark.parametrize(
    ("space", "action", "expected", "spec"),
    [
        (MultiDiscrete([3, 2]), [2, 1], [2, 1], MultiDiscreteActions((3, 2))),
        (MultiDiscrete([3, 2], start=[10, -5]), [2, 0], [12, -5], MultiDiscreteActions((3, 2))),
        (
            *(MultiDiscrete([[3, 2], [4, 5]], start=[[1, 0], [0, 7]]), [2, 1, 3, 4], [[3, 1], [3, 11]]),
            MultiDiscreteActions((3, 2, 4, 5)),
        ),
        (MultiDiscrete([3]), [1], [1], MultiDiscreteActions((3,))),
        (MultiBinary(3), [1, 0, 1], [1, 0, 1], MultiDiscreteActions((2, 2, 2))),
        (MultiBinary([2, 2]), [1, 0, 0, 1], [[1, 0], [0, 1]], MultiDiscreteActions((2, 2, 2, 2))),
    ],
)
def test_choices_reach_the_environment_in_its_own_numbers_and_shape(space, action, expected, spec):
    received = taken(space, np.array(action, space.dtype))
    assert received.tolist() == expected
    assert received.dtype == space.dtype
    assert describe_actions(space, "Toy-v0") == spec


def test_agents_choose_in_int64_and_the_environment_gets_its_own_type():
    env = Shown(Box(-1, 1, (1,)), MultiBinary(2), [np.zeros(1, np.float32)])
    flat = flat_env(env, "Toy-v0")
    flat.reset()
    flat.step(np.array([1, 0], np.int64))
    assert env.actions[0].dtype == np.int8


def test_real_numbers_reach_the_environment_in_its_own_shape():
    space = Box(np.array([[-1.0, -2.0], [-3.0, -4.0]]), np.array([[1.0, 2.0], [3.0, INF]]), dtype=np.float64)
    received = taken(space, np.array([0.5, 2, -3, 4], np.float32))
    assert received.tolist() == [[0.5, 2], [-3, 4]]
    assert received.dtype == np.float64
    assert describe_actions(space, "Toy-v0") == ContinuousActions((-1, -2, -3, -4), (1, 2, 3, INF))


def test_a_single_real_number_reaches_the_environment_without_a_shape():
    assert taken(Box(-1, 1, ()), np.array([0.5], np.float32)).shape == ()


@pytest.mark.parametrize("space", [Discrete(3, start=2), Box(-1, 1, (2,))], ids=str)
def test_flat_actions_need_no_wrapper(space):
    env = Shown(Box(-1, 1, (1,)), space, [np.zeros(1, np.float32)])
    assert flat_env(env, "Toy-v0") is env


@pytest.mark.parametrize(
    ("actions", "counts", "layout"),
    [
        (DiscreteActions(3, start=5), (3,), ((), np.int64)),
        (MultiDiscreteActions((3, 2)), (3, 2), ((2,), np.int64)),
        (MultiDiscreteActions((4,)), (4,), ((1,), np.int64)),
        (ContinuousActions((-1.0, 0.0), (1.0, 2.0)), (), ((2,), np.float32)),
    ],
)
def test_buffers_store_one_number_for_each_choice(actions, counts, layout):
    assert choice_counts(actions) == counts
    assert action_layout(actions) == layout


# Refusals


@pytest.mark.parametrize(
    ("space", "named"),
    [
        (spaces.Text(5), "Text(1, 5"),
        (Dict(a=Discrete(2), b=spaces.Sequence(Discrete(2))), "Sequence(Discrete(2)"),
        (spaces.Graph(Box(-1, 1, (2,)), None), "Graph(Box(-1.0, 1.0, (2,), float32)"),
    ],
)
def test_an_observation_that_is_no_row_is_refused(space, named):
    with pytest.raises(UserError) as refusal:
        describe_spaces(space, CHOICE, "Toy-v0")
    message = str(refusal.value)
    assert message.startswith(f"Toy-v0 has observations {named}")
    assert message.endswith(
        "; only Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of them are supported."
    )
    assert "\n" not in message


@pytest.mark.parametrize(
    "space",
    [Dict(a=Discrete(2)), spaces.Tuple([Discrete(2)]), Box(0, 9, (2,), np.int64), spaces.Text(5)],
    ids=lambda space: type(space).__name__,
)
def test_actions_that_nothing_can_choose_are_refused(space):
    with pytest.raises(UserError) as refusal:
        describe_spaces(Box(-1, 1, (2,)), space, "Toy-v0")
    message = str(refusal.value)
    assert message.startswith(f"Toy-v0 has actions {space}")
    assert message.endswith("; only Discrete, MultiDiscrete, MultiBinary and real Box are supported.")
