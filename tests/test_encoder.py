"""From rows of bytes to features: convolutions for images, numbers as they are for the vector beside them."""

import numpy as np
import pytest
import torch
from cli_helpers import differences
from compilation_helpers import AGENTS, CONTINUOUS, DISCRETE, distance, needs_compiler, tensors_of, update

from rl_training.config import AlgoConfig, Cnn, DQNConfig, PPOConfig, SACConfig
from rl_training.data.replay_buffer import Transitions
from rl_training.data.rollout_buffer import RolloutBatch, RolloutBuffer
from rl_training.errors import NonFiniteError, UserError
from rl_training.networks.encoder import Encoder, encoder, observation_body
from rl_training.runtime.ppo_trainer import update_epochs
from rl_training.spaces import ContinuousActions, MultiDiscreteActions, ObservationSpec

# The first import of torch's own compiler uses what torch calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")

SMALL_IMAGE = ObservationSpec(0, ((1, 7, 7),))
# 2 numbers and 1 x 7 x 9 pixels: 71 bytes, so that the second row begins where no number may begin.
ODD = ObservationSpec(2, ((1, 7, 9),))


def rows_of(spec: ObservationSpec, count: int, seed: int = 0) -> np.ndarray:
    """Return rows of standard normal numbers and random pixels."""
    random = np.random.default_rng(seed)
    rows = random.integers(0, 256, (count, spec.row_size), dtype=np.uint8)
    rows[:, : 4 * spec.size] = random.normal(size=(count, spec.size)).astype(np.float32).view(np.uint8)
    return rows


# The features


def sums_of(layer: torch.nn.Conv2d, scale: float) -> None:
    """Let every output channel be `scale` times the sum of what the kernel sees, but the first minus that."""
    with torch.no_grad():
        layer.weight.fill_(scale)
        layer.weight[0].fill_(-scale)
        layer.bias.zero_()


def test_features_of_a_hand_worked_image():
    # 7 x 7 pixels of 51, which is 0.2, and one of 255, which is 1, in the middle. 3 x 3 kernels at every second pixel
    # give 3 x 3 sums: 1.8, but 2.6 in the centre alone, since the centre pixel (3, 3) is seen from rows 2 to 4 only.
    # Their second channel to the 16th are these, the first is cut off at 0. Summed up over 15 channels:
    # 15 x (8 x 1.8 + 2.6) = 255; times 0.01 in the second layer. Its first output is negative, and cut off.
    layer = Encoder(SMALL_IMAGE, Cnn.small)
    convolutions = [module for module in layer.modules() if isinstance(module, torch.nn.Conv2d)]
    assert [tuple(module.weight.shape) for module in convolutions] == [(16, 1, 3, 3), (32, 16, 3, 3)]
    sums_of(convolutions[0], 1.0)
    sums_of(convolutions[1], 0.01)
    picture = np.full((7, 7), 51, np.uint8)
    picture[3, 3] = 255
    features = layer(torch.from_numpy(picture.reshape(1, -1)))
    assert features.shape == (1, 32)
    torch.testing.assert_close(features[0], torch.tensor([0.0] + [2.55] * 31))


def test_the_channels_of_a_row_are_those_of_the_image():
    # Two channels of 7 x 7: the kernels of the first layer see the second one only, which is 1 everywhere.
    layer = Encoder(ObservationSpec(0, ((2, 7, 7),)), Cnn.small)
    first, second = (module for module in layer.modules() if isinstance(module, torch.nn.Conv2d))
    sums_of(first, 1.0)
    sums_of(second, 1.0)
    with torch.no_grad():
        first.weight[:, 0] = 0.0
    row = torch.tensor([[100] * 49 + [255] * 49], dtype=torch.uint8)
    assert layer(row)[0, 1].item() == pytest.approx(15 * 9 * 9)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_numbers_beside_an_image_come_through_to_the_bit(rows):
    # 3.4e38, 1e-45 and -0.0 lose a bit in almost any arithmetic.
    numbers = np.array([[3.4e38, 1e-45], [-0.0, 0.1], [1 / 3, -2.5], [7.0, 8.0], [-1e-20, 9.0]], np.float32)[:rows]
    batch = rows_of(ODD, rows)
    batch[:, :8] = numbers.view(np.uint8)
    features = Encoder(ODD, Cnn.small)(torch.from_numpy(batch))
    assert features[:, :2].detach().numpy().tobytes() == numbers.tobytes()


def test_a_single_row_from_the_middle_of_many_is_read_right():
    # Row 3 of 71 bytes begins at byte 213: no multiple of the four bytes of a number.
    batch = torch.from_numpy(rows_of(ODD, 5))
    layer = Encoder(ODD, Cnn.small)
    torch.testing.assert_close(layer(batch[3:4]), layer(batch)[3:4])


def test_each_image_has_its_own_convolutions_and_the_vector_comes_first():
    spec = ObservationSpec(2, ((1, 7, 7), (3, 9, 7)))
    layer = Encoder(spec, Cnn.small)
    assert layer.output_size == 2 + 32 + 32
    batch = torch.from_numpy(rows_of(spec, 3))
    before = layer(batch)
    changed = batch.clone()
    changed[:, 8 + 49 :] = 255 - changed[:, 8 + 49 :]  # the second image
    after = layer(changed)
    assert torch.equal(before[:, :34], after[:, :34])
    assert not torch.equal(before[:, 34:], after[:, 34:])


@pytest.mark.parametrize(
    ("cnn", "image", "features"),
    [
        (Cnn.nature, (4, 84, 84), 3_136),  # 84 -> 20 -> 9 -> 7, 64 x 7 x 7
        (Cnn.nature, (3, 36, 36), 64),  # 36 -> 8 -> 3 -> 1
        (Cnn.small, (1, 7, 7), 32),  # 7 -> 3 -> 1
        (Cnn.small, (1, 16, 12), 192),  # 16 -> 7 -> 3, 12 -> 5 -> 2, 32 x 3 x 2
    ],
)
def test_the_number_of_features(cnn, image, features):
    assert Encoder(ObservationSpec(0, (image,)), cnn).output_size == features


def test_the_layers_of_the_nature_network():
    # Mnih et al., 2015: 32 of 8x8, 64 of 4x4, 64 of 3x3; then 512 hidden units here.
    config = AlgoConfig(hidden_sizes=[512])
    body, size = observation_body(ObservationSpec(0, ((4, 84, 84),), 4), config)
    assert size == 512
    assert sorted(parameter.numel() for parameter in body.parameters()) == sorted(
        [4 * 32 * 64, 32, 32 * 64 * 16, 64, 64 * 64 * 9, 64, 3_136 * 512, 512]
    )


def test_a_vector_has_no_encoder():
    layers, inputs = encoder(ObservationSpec(5), AlgoConfig())
    assert (len(layers), inputs) == (0, 5)


@pytest.mark.parametrize(
    ("cnn", "height", "width", "advice"),
    [
        ("nature", 35, 84, "Try algo.cnn=small."),
        ("nature", 7, 7, "Try algo.cnn=small."),
        ("nature", 6, 84, "Observations of a dtype other than uint8 are vectors."),
        ("small", 6, 84, "Observations of a dtype other than uint8 are vectors."),
    ],
)
def test_an_image_that_is_too_small_is_refused_with_what_to_do(cnn, height, width, advice):
    with pytest.raises(UserError) as refusal:
        encoder(ObservationSpec(0, ((3, height, width),)), AlgoConfig(cnn=cnn))
    message = f"Images of {height} x {width} pixels are too small for algo.cnn={cnn}. {advice}"
    assert str(refusal.value) == message


# Agents

SETTINGS = {"hidden_sizes": [16], "learning_rate": 1e-3, "activation": "tanh", "cnn": "small"}
CHOICES = MultiDiscreteActions((2, 3))
STACKED = ObservationSpec(0, ((3, 8, 8),), 3)
CASES = {
    "ppo, image and vector, several choices": (PPOConfig(**SETTINGS, entropy_coef=0.01), ODD, CHOICES),
    "dqn, stacked images": (DQNConfig(**SETTINGS, dueling=True), STACKED, DISCRETE),
    "sac, image and vector": (SACConfig(**SETTINGS, target_update_rate=0.1), ODD, CONTINUOUS),
}


def make_agent(case, *, compiled: bool = False, num_envs: int = 2):
    config, observation, actions = CASES[case]
    return AGENTS[type(config)](
        config, observation, actions, num_envs=num_envs, seed=5, device=torch.device("cpu"), compile_update=compiled
    )


def make_batch(case, *, seed: int = 0, rows: int = 64):
    config, observation, actions = CASES[case]
    source = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(rows, generator=source)

    if isinstance(actions, ContinuousActions):
        taken = torch.rand(rows, actions.size, generator=source) * 2 - 1
    elif actions is CHOICES:
        taken = torch.stack([torch.randint(0, count, (rows,), generator=source) for count in actions.counts], dim=-1)
    else:
        taken = torch.randint(0, actions.count, (rows,), generator=source)
    observations, following = (torch.from_numpy(rows_of(observation, rows, 2 * seed + n)) for n in (0, 1))
    if isinstance(config, PPOConfig):
        return RolloutBatch(observations, taken, 0.3 * normal() - 1.5, normal(), normal(), normal())
    terminated = (torch.rand(rows, generator=source) < 0.2).float()
    return Transitions(observations, taken, normal(), following, terminated)


# As in test_compiled_options. The convolutions are followed by ReLU, and rounding decides on which side of zero a few
# numbers fall; one step of the ten left out is 0.1.
TOLERANCE = 3e-2


@needs_compiler
@pytest.mark.parametrize("case", CASES)
def test_compiled_steps_give_what_eager_ones_give(case):
    compiled, eager = (make_agent(case, compiled=value) for value in (True, False))
    start = tensors_of(eager)
    assert differences(start, tensors_of(compiled)) == []
    for agent in (compiled, eager):
        for step in range(10):
            update(agent, make_batch(case, seed=step), step)
    assert compiled.compiled_update.path == "compiled"
    assert compiled.compiled_update.compilations == 1
    ours, theirs = tensors_of(compiled), tensors_of(eager)
    moved = {name: distance(theirs[name], start[name]) for name in theirs}
    assert [name for name in moved if not moved[name]] == []  # so whatever is forgotten lies outside of the tolerance
    far = {name: distance(ours[name], theirs[name]) / moved[name] for name in moved}
    assert {name: value for name, value in far.items() if not value < TOLERANCE} == {}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_envs", [1, 3])
def test_acting_on_images_is_done_by_torch_and_is_what_the_network_says(case, num_envs):
    config, observation, _ = CASES[case]
    agent = make_agent(case, num_envs=num_envs)
    assert agent.acting_path == "torch"
    for step in range(3):  # so that what acts has the newest parameters
        update(agent, make_batch(case, seed=step), step)
    rows = rows_of(observation, num_envs, seed=7)
    assert rows.dtype == np.uint8
    with torch.no_grad():
        seen = torch.from_numpy(rows)
        if isinstance(config, SACConfig):
            expected = 9.0 * torch.tanh(agent.actor(seen)[0])
        elif isinstance(config, DQNConfig):
            expected = agent.q_network(seen).argmax(-1)
        else:
            logits = agent.network.actor(seen)
            expected = torch.stack([logits[:, :2].argmax(-1), logits[:, 2:].argmax(-1)], dim=-1)
    np.testing.assert_allclose(agent.act(rows), expected.numpy(), rtol=1e-5)


def test_actor_and_critic_have_their_own_convolutions_unless_they_share_all_layers():
    apart = AGENTS[PPOConfig](PPOConfig(**SETTINGS), SMALL_IMAGE, DISCRETE)
    shared = AGENTS[PPOConfig](PPOConfig(**SETTINGS, share_network=True), SMALL_IMAGE, DISCRETE)
    # 9 x 16 + 16 and 144 x 32 + 32 in the convolutions, 32 x 16 + 16 after them; heads of 3 and 1
    body, heads = 160 + 4_640 + 528, 17 * 3 + 17
    assert sum(parameter.numel() for parameter in apart.network.parameters()) == 2 * body + heads
    assert sum(parameter.numel() for parameter in shared.network.parameters()) == body + heads


def test_both_critics_of_sac_share_the_convolutions_and_the_actor_has_its_own():
    agent = AGENTS[SACConfig](SACConfig(**SETTINGS), SMALL_IMAGE, CONTINUOUS)
    convolutions = 160 + 4_640
    # 32 features and 2 actions to 16 hidden units to 1
    assert sum(parameter.numel() for parameter in agent.critics.parameters()) == convolutions + 2 * (35 * 16 + 17)
    # 32 features to 16 to mean and deviation of 2
    assert sum(parameter.numel() for parameter in agent.actor.parameters()) == convolutions + 33 * 16 + 17 * 4


@pytest.mark.parametrize("rows", [1_023, 1_024, 1_025, 2_500])
def test_values_and_log_probs_of_many_images_are_those_of_each(rows):
    # They are computed in pieces of 1,024.
    case = "ppo, image and vector, several choices"
    agent, batch = make_agent(case), make_batch(case, rows=rows)
    with torch.no_grad():
        values = agent.network.values(batch.observations)
        log_probs, _ = agent.network.log_probs_and_entropy(batch.observations, batch.actions)
    torch.testing.assert_close(agent.values(batch.observations), values)
    torch.testing.assert_close(agent.log_probs(batch.observations, batch.actions), log_probs)


# Rollouts of images


def filled_rollout(num_steps: int, *, number: float = 0.5) -> RolloutBuffer:
    """One environment whose first episode is cut off after the second step, at the number given."""
    rollout = RolloutBuffer(num_steps, 1, ODD, DISCRETE, seed=0)
    for step in range(num_steps):
        rows, following = rows_of(ODD, 1, seed=step), rows_of(ODD, 1, seed=step + 1)
        if step == 1:
            following[:, :4] = np.frombuffer(np.float32(number).tobytes(), np.uint8)
        no = np.zeros(1, np.bool_)
        rollout.add(rows, np.zeros(1, np.int64), np.ones(1, np.float32), no, np.array([step == 1]), following)
    return rollout


def test_a_rollout_keeps_rows_of_bytes():
    rollout = filled_rollout(4)
    assert rollout.obs.dtype == torch.uint8
    assert rollout.obs.shape == (4, 1, 71)
    assert rollout.obs[2, 0].tolist() == rows_of(ODD, 1, seed=2)[0].tolist()
    assert ODD.vectors(rollout.truncated_observations().numpy())[0, 0] == 0.5
    restored = RolloutBuffer(4, 1, ODD, DISCRETE, seed=1)
    restored.load_state_dict(rollout.state_dict())
    assert torch.equal(restored.obs, rollout.obs)
    assert torch.equal(restored.truncated_observations(), rollout.truncated_observations())


def test_a_last_minibatch_of_a_single_row_is_learned_from():
    # 4 rows in minibatches of 3: the last one begins at byte 213.
    config = PPOConfig(**SETTINGS, num_steps=4, minibatch_size=3, num_epochs=1)
    agent = AGENTS[PPOConfig](config, ODD, DISCRETE)
    rollout = filled_rollout(4)
    metrics = update_epochs(agent, rollout, torch.from_numpy(rows_of(ODD, 1)), clip_range=0.2, learning_rate=1e-3)
    assert len(metrics) == 2


def test_a_bad_number_beside_an_image_of_a_rollout_is_refused():
    filled_rollout(4).check_finite(since=0)
    # What the second step led to, which was cut off there.
    with pytest.raises(NonFiniteError, match=r"The last observation of environment 0 is NaN or infinite at step 2\."):
        filled_rollout(4, number=float("nan")).check_finite(since=0)
    rollout = filled_rollout(4)
    rollout.obs[3, 0, 4:8] = torch.tensor([0, 0, 192, 127], dtype=torch.uint8)  # NaN
    with pytest.raises(NonFiniteError, match=r"The observation of environment 0 is NaN or infinite at step 3\."):
        rollout.check_finite(since=0)
