"""A compiled update is the update: the same numbers as the plain one, compiled once per shape, or done without."""

import io
import logging
import os
import random
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from cli_helpers import differences, run_card, tiny_algo, tiny_run_config
from torch import nn

from rl_training.algorithms import compilation
from rl_training.algorithms.compilation import CompiledUpdate
from rl_training.algorithms.dqn import DQNAgent
from rl_training.algorithms.optimization import Adam
from rl_training.algorithms.ppo import PPOAgent
from rl_training.algorithms.sac import SACAgent
from rl_training.config import DQNConfig, PPOConfig, SACConfig
from rl_training.data.replay_buffer import Transitions
from rl_training.data.rollout_buffer import RolloutBatch
from rl_training.errors import NonFiniteError, UserError
from rl_training.networks import linear
from rl_training.runtime.automatic import cpp_compiler
from rl_training.runtime.callbacks import Progress
from rl_training.runtime.dqn_trainer import train_dqn
from rl_training.runtime.workflows import resume_training
from rl_training.spaces import ContinuousActions, DiscreteActions, ObservationSpec

# The first import of torch's own compiler uses what torch calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
needs_compiler = pytest.mark.skipif(cpp_compiler() is None, reason="there is no C++ compiler here")

DISCRETE = DiscreteActions(3)
CONTINUOUS = ContinuousActions(low=(-9.0, -9.0), high=(9.0, 9.0))
AGENTS = {PPOConfig: PPOAgent, DQNConfig: DQNAgent, SACConfig: SACAgent}
ROWS, STEPS = 64, 20

# Each of these is compiled once, which takes seconds, so a few of them share all the settings that change the maths.
SMALL = {"hidden_sizes": [16, 16], "learning_rate": 1e-3, "activation": "tanh"}
PPO = PPOConfig(**SMALL)
PPO_CONTINUOUS = PPOConfig(**SMALL, value_clip_range=0.1, normalize_advantage=False, entropy_coef=0.01)
DQN = DQNConfig(**SMALL, max_grad_norm=0.1)
SAC = SACConfig(**SMALL, learn_temperature=False, temperature=0.2, target_update_rate=0.1)
CASES = {
    "ppo": (PPO, DISCRETE),
    "ppo, continuous, value clipping, raw advantages, entropy bonus": (PPO_CONTINUOUS, CONTINUOUS),
    "ppo, shared layers, entropy bonus, no gradient clipping": (
        PPOConfig(**SMALL, share_network=True, entropy_coef=0.01, max_grad_norm=None),
        DISCRETE,
    ),
    "dqn, double Q, huber": (DQN, DISCRETE),
    "dqn, single Q, mse, no gradient clipping, ReLU": (
        DQNConfig(**{**SMALL, "activation": "relu"}, double_q=False, loss="mse", max_grad_norm=None),
        DISCRETE,
    ),
    "sac, fixed temperature": (SAC, CONTINUOUS),
    "sac, learned temperature, wide layers, gradient clipping, ReLU": (
        SACConfig(hidden_sizes=[256, 256], learning_rate=1e-3, target_update_rate=0.1, max_grad_norm=0.5),
        CONTINUOUS,
    ),
}
ONE_OF_EACH = {"ppo": (PPO, DISCRETE), "dqn": (DQN, DISCRETE), "sac": (SAC, CONTINUOUS)}

# How far compiled parameters may lie from eager ones, as a share of the way that training has moved them. Rounding
# gives 1e-5. With ReLU it also decides on which side of zero a few of a million numbers fall, which gave 6e-3. A layer
# without its gradient is 1, one step of the twenty left out is 5e-2.
TOLERANCE = {"tanh": 1e-4, "relu": 3e-2}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_agent(config, actions, *, compiled: bool, seed: int = 5):
    agent_class = AGENTS[type(config)]
    return agent_class(config, ObservationSpec(3), actions, num_envs=2, seed=seed, compile_update=compiled)


def make_batch(config, actions, *, seed: int = 0, rows: int = ROWS):
    """Random transitions, for PPO as if an older policy had collected them."""
    source = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=source)

    if isinstance(actions, DiscreteActions):
        taken = torch.randint(0, actions.count, (rows,), generator=source)
    else:
        taken = torch.rand(rows, actions.size, generator=source) * 2 - 1
    observations = normal(rows, 3)
    if isinstance(config, PPOConfig):
        return RolloutBatch(observations, taken, 0.3 * normal(rows) - 1.5, normal(rows), normal(rows), normal(rows))
    terminated = (torch.rand(rows, generator=source) < 0.2).float()
    return Transitions(observations, taken, normal(rows), normal(rows, 3), terminated)


def update(agent, batch, step: int = 0):
    """One gradient step, for PPO with other scheduled values at every step, for DQN with a target now and then."""
    if isinstance(agent, PPOAgent):
        return agent.update(batch, clip_range=0.2 - 0.005 * step, learning_rate=1e-3 * (1 + step / 10))
    metrics = agent.update(batch)
    if isinstance(agent, DQNAgent) and step % 5 == 4:
        agent.update_target()
    return metrics


def train(agent, config, actions, steps: int = STEPS):
    return [update(agent, make_batch(config, actions, seed=step), step) for step in range(steps)]


def tensors_of(agent) -> dict[str, torch.Tensor]:
    """Every tensor that the agent would save: networks, targets, moments."""
    return {
        f"{part}/{name}": tensor.clone()
        for part, state in agent.state_dict().items()
        for name, tensor in (state.items() if isinstance(state, dict) else [("state", state)])
    }


def distance(first: torch.Tensor, second: torch.Tensor) -> float:
    return torch.linalg.vector_norm(first.double() - second.double()).item()


# The same numbers


@needs_compiler
@pytest.mark.parametrize("case", CASES)
def test_many_compiled_steps_give_what_eager_ones_give(case, monkeypatch):
    if torch.backends.mkldnn.is_available():
        monkeypatch.setattr(linear, "matmul_library", lambda: "onednn")  # whatever processor this is
    config, actions = CASES[case]
    tolerance = TOLERANCE[config.activation.name]
    compiled, eager = (make_agent(config, actions, compiled=value) for value in (True, False))
    start = tensors_of(eager)
    assert differences(start, tensors_of(compiled)) == []
    metrics, expected_metrics = train(compiled, config, actions), train(eager, config, actions)
    assert compiled.compiled_update.path == "compiled"
    assert compiled.compiled_update.compilations == 1

    ours, theirs = tensors_of(compiled), tensors_of(eager)
    moved = {name: distance(theirs[name], start[name]) for name in theirs}
    # Everything has moved, so a tensor that the compiled update forgets lies outside of the tolerance.
    fixed = {name for name in moved if "temperature" in name} if case == "sac, fixed temperature" else set()
    assert {name for name in moved if not moved[name]} == fixed
    relative = {name: distance(ours[name], theirs[name]) / moved[name] for name in moved if name not in fixed}
    assert {name: value for name, value in relative.items() if not value < tolerance} == {}
    assert [name for name in fixed if not torch.equal(ours[name], start[name])] == []

    for step, (got, expected) in enumerate(zip(metrics, expected_metrics, strict=True)):
        assert list(got) == list(expected)
        for name, value in expected.items():
            assert got[name].item() == pytest.approx(value.item(), rel=tolerance, abs=tolerance), (step, name)
            assert not got[name].requires_grad


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_the_wide_case_has_onednn_layers(monkeypatch):
    monkeypatch.setattr(linear, "matmul_library", lambda: "onednn")
    config, actions = CASES["sac, learned temperature, wide layers, gradient clipping, ReLU"]
    agent = make_agent(config, actions, compiled=False)
    for network in (agent.actor.network, agent.critics.first, agent.critics.second):
        assert any(isinstance(layer, linear.OneDNNLinear) for layer in network)


@needs_compiler
@pytest.mark.parametrize("algo", ONE_OF_EACH)
def test_two_compiled_agents_with_the_same_seed_have_the_same_bits(algo):
    config, actions = ONE_OF_EACH[algo]
    first, second, other = (make_agent(config, actions, compiled=True, seed=seed) for seed in (5, 5, 6))
    for agent in (first, second, other):
        train(agent, config, actions)
    assert differences(tensors_of(first), tensors_of(second)) == []
    assert differences(tensors_of(first), tensors_of(other)) != []


@needs_compiler
def test_code_compiled_anew_gives_the_same_bits_as_code_from_the_cache(monkeypatch, tmp_path):
    first, second = (make_agent(DQN, DISCRETE, compiled=True) for _ in range(2))
    train(first, DQN, DISCRETE)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    train(second, DQN, DISCRETE)
    assert (tmp_path / "fxgraph").is_dir()  # nothing was there to be taken
    assert differences(tensors_of(first), tensors_of(second)) == []


@needs_compiler
def test_minibatches_may_begin_anywhere_in_memory():
    # PPO's minibatches are slices of the shuffled rollout; seven rows begin at no multiple of a vector register.
    whole = make_batch(PPO, DISCRETE, rows=ROWS + 7)
    sliced = RolloutBatch(*(column[7:] for column in whole[:6]))
    copied = RolloutBatch(*(column.clone() for column in sliced[:6]))
    results = []
    for batch in (sliced, copied):
        agent = make_agent(PPO, DISCRETE, compiled=True)
        update(agent, batch)
        results.append(tensors_of(agent))
    assert differences(*results) == []


# What is compiled, and when


@needs_compiler
def test_a_shape_is_compiled_once_and_another_one_once_more():
    compiled, eager = (make_agent(DQN, DISCRETE, compiled=value) for value in (True, False))
    announced = []
    compiled.compiled_update.before_compiling = lambda: announced.append(compiled.compiled_update.compilations)
    counts = []
    start = tensors_of(eager)
    for rows in (ROWS, ROWS, 17, ROWS, 17):
        batch = make_batch(DQN, DISCRETE, seed=rows, rows=rows)
        compiled.update(batch)
        eager.update(batch)
        counts.append(compiled.compiled_update.compilations)
    assert counts == [1, 1, 2, 2, 2]
    assert announced == [0, 1]  # before each compilation, and at no other update
    ours, theirs = tensors_of(compiled), tensors_of(eager)
    far = {name for name in ours if distance(ours[name], theirs[name]) > 1e-4 * distance(theirs[name], start[name])}
    assert far == set()


@needs_compiler
def test_scheduled_values_take_effect_without_compiling_again():
    agent = make_agent(PPO, DISCRETE, compiled=True)
    batch = make_batch(PPO, DISCRETE)
    agent.update(batch, clip_range=0.2, learning_rate=1e-3)
    moved, clipped = [], []
    for clip_range, learning_rate in ((0.2, 1e-3), (0.01, 0.0), (1e3, 1e-2)):
        before = tensors_of(agent)["network/critic_head.weight"]
        metrics = agent.update(batch, clip_range=clip_range, learning_rate=learning_rate)
        moved.append(distance(tensors_of(agent)["network/critic_head.weight"], before))
        clipped.append(metrics["policy/clip_fraction"].item())
    assert moved[1] == 0.0 < moved[0] < moved[2]
    assert clipped[1] > clipped[0] > clipped[2] == 0.0
    assert agent.compiled_update.compilations == 1
    assert agent.optimizer.learning_rate == PPO.learning_rate  # a number, and not what stood for it in the trace


@needs_compiler
def test_after_a_trace_the_module_has_its_own_parameters_back():
    agent = make_agent(DQN, DISCRETE, compiled=True)
    networks = {
        agent.q_network: agent.optimizer.parameters,
        agent.target_network: agent._target_parameters,
    }
    before = {network: list(network.parameters()) for network in networks}
    learning_rate = agent.optimizer.learning_rate
    train(agent, DQN, DISCRETE, steps=2)
    assert agent.compiled_update.path == "compiled"
    assert agent.optimizer.learning_rate is learning_rate
    for network, flat in networks.items():
        after = list(network.parameters())
        assert all(now is then for now, then in zip(after, before[network], strict=True))
        assert all(type(parameter) is nn.Parameter for parameter in after)
        assert {parameter.requires_grad for parameter in after} == {network is agent.q_network}
        flat.vector.fill_(0.5)
        assert all((parameter == 0.5).all() for parameter in after)


@needs_compiler
def test_an_agent_acts_with_what_a_compiled_update_has_learned():
    agent = make_agent(PPO_CONTINUOUS, CONTINUOUS, compiled=True)
    observations = np.array([[1.0, -0.5, 0.25], [0.0, 2.0, -1.0]], np.float32)
    assert agent.acting_path == "numpy"
    first = agent.act(observations)
    train(agent, PPO_CONTINUOUS, CONTINUOUS)
    means = agent.network.actor(torch.from_numpy(observations)).detach().numpy()
    deviations = agent.network.log_std.detach().exp().numpy()
    assert np.abs(means - first).max() > 1e-2
    np.testing.assert_allclose(agent.act(observations), means, rtol=1e-5, atol=1e-6)
    explored = means + deviations * agent.noise.at(3)
    np.testing.assert_allclose(agent.explore(observations, 3), explored, rtol=1e-5, atol=1e-6)
    assert np.abs(deviations - 1.0).max() > 1e-2


@needs_compiler
def test_a_restored_agent_goes_on_with_the_same_bits():
    saved, restored = make_agent(SAC, CONTINUOUS, compiled=True), make_agent(SAC, CONTINUOUS, compiled=True, seed=9)
    train(saved, SAC, CONTINUOUS, steps=3)
    train(restored, SAC, CONTINUOUS, steps=1)
    restored.load_state_dict(saved.state_dict())
    for agent in (saved, restored):
        train(agent, SAC, CONTINUOUS, steps=3)
    assert differences(tensors_of(saved), tensors_of(restored)) == []


@needs_compiler
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("algo", ONE_OF_EACH)
def test_a_batch_with_nan_is_refused(algo, compiled):
    config, actions = ONE_OF_EACH[algo]
    agent = make_agent(config, actions, compiled=compiled)
    batch = make_batch(config, actions)
    update(agent, batch)
    column = "returns" if algo == "ppo" else "rewards"
    getattr(batch, column)[3] = float("nan")
    with pytest.raises(NonFiniteError, match="NaN or infinite"):
        update(agent, batch)


# Where compiling fails


@pytest.fixture
def failing_compiler(monkeypatch):
    """No update can be compiled; the list counts the attempts."""
    attempts = []

    def fail(function, tensors):
        attempts.append(len(tensors))
        raise RuntimeError("no headers\nand a page of details")

    monkeypatch.setattr(compilation, "_compiled", fail)
    return attempts


def warnings_in(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("algo", ONE_OF_EACH)
def test_an_update_that_cannot_be_compiled_is_done_eagerly(algo, failing_compiler, caplog):
    config, actions = ONE_OF_EACH[algo]
    compiled, eager = (make_agent(config, actions, compiled=value) for value in (True, False))
    metrics = train(compiled, config, actions)
    assert warnings_in(caplog) == ["cannot compile the update, going on without (RuntimeError: no headers)"]
    assert len(failing_compiler) == 1
    assert compiled.compiled_update.path == "eager"
    expected_metrics = train(eager, config, actions)
    assert [list(entry) for entry in metrics] == [list(entry) for entry in expected_metrics]
    if algo == "ppo":  # its scheduled values come as float32 tensors, which round
        ours, theirs = tensors_of(compiled), tensors_of(eager)
        start = tensors_of(make_agent(config, actions, compiled=False))
        assert all(distance(ours[name], theirs[name]) < 1e-4 * distance(theirs[name], start[name]) for name in ours)
    else:
        assert differences(tensors_of(compiled), tensors_of(eager)) == []


def test_the_warning_comes_once_also_with_batches_of_two_sizes(failing_compiler, caplog):
    agent = make_agent(DQN, DISCRETE, compiled=True)
    for rows in (ROWS, 17, ROWS, 17):
        agent.update(make_batch(DQN, DISCRETE, rows=rows))
    assert len(warnings_in(caplog)) == 1
    assert agent.compiled_update.path == "eager"


def test_an_update_that_looks_at_a_number_cannot_be_traced_and_is_still_done_once(caplog):
    weights = nn.ParameterList([nn.Parameter(torch.tensor([1.0]))])
    own = weights[0]
    optimizer = Adam(weights, learning_rate=0.1)

    def step(slope):
        assert float(slope) > 0  # a trace has no numbers to compare
        return {"norm": optimizer.minimize((weights[0] * slope).sum())}

    compiled = CompiledUpdate(step, [optimizer])
    metrics = compiled(torch.tensor(2.0))
    assert len(warnings_in(caplog)) == 1
    assert compiled.path == "eager"
    assert metrics["norm"].item() == 2.0
    # Adam's first step is the learning rate against the sign of the gradient.
    assert own.item() == pytest.approx(0.9)
    assert weights[0] is own
    assert optimizer.state_dict()["steps"].item() == 1


# In a run


def tiny_dqn(*, compiled: bool, **settings):
    return tiny_run_config("dqn", algo_config=tiny_algo("dqn"), device={"compile": compiled}, **settings)


@needs_compiler
def test_the_progress_says_that_the_update_is_being_compiled(tmp_path):
    shown = {}
    for compiled in (True, False):
        stream = io.StringIO()
        train_dqn(tiny_dqn(compiled=compiled), run_dir=tmp_path / str(compiled), callbacks=[Progress(stream)])
        shown[compiled] = [line for line in stream.getvalue().splitlines() if "compiling" in line]
        assert run_card(tmp_path / str(compiled))["updates"] == ("compiled" if compiled else "eager")
    assert shown == {True: ["compiling the update…"], False: []}


@needs_compiler
def test_a_compiled_run_that_was_paused_ends_with_the_bits_of_one_that_was_not(tmp_path, parameters):
    whole = train_dqn(tiny_dqn(compiled=True), run_dir=tmp_path / "whole")
    train_dqn(tiny_dqn(compiled=True, stop_at_step=45), run_dir=tmp_path / "paused")
    resumed = resume_training(tmp_path / "paused")
    assert parameters(resumed) == parameters(whole)
    card = run_card(tmp_path / "paused")
    assert (card["exact"], card["updates"]) == (True, "compiled")


@needs_compiler
def test_compiling_draws_no_random_number():
    states = []
    for compiled in (True, False):
        random.seed(3)
        torch.manual_seed(3)
        np.random.seed(3)  # noqa: NPY002 - what environments may draw from
        agent = make_agent(DQN, DISCRETE, compiled=compiled)
        agent.update(make_batch(DQN, DISCRETE))
        states.append((random.getstate(), torch.get_rng_state(), np.random.get_state()))  # noqa: NPY002
    assert differences(*states) == []


# What is kept


def test_a_damaged_cache_is_done_without(monkeypatch, caplog):
    calls = []

    def damaged_at_first(function, tensors):
        calls.append(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        if len(calls) == 1:
            raise OSError("file too short")
        return original(function, tensors)

    original = compilation._traced_and_compiled
    monkeypatch.setattr(compilation, "_traced_and_compiled", damaged_at_first)
    agent = make_agent(DQN, DISCRETE, compiled=True)
    agent.update(make_batch(DQN, DISCRETE))
    assert agent.compiled_update.path == "compiled"
    assert len(set(calls)) == 2
    assert warnings_in(caplog) == []


def test_another_processor_or_thread_count_has_a_cache_of_its_own(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    seen = []
    for vendor in ("AuthenticAMD", "GenuineIntel", "AuthenticAMD"):
        monkeypatch.setattr(compilation, "cpu_vendor_and_flags", lambda vendor=vendor: (vendor, frozenset({"avx2"})))
        with compilation._kept_code():
            seen.append(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert seen[0] != seen[1]
    assert seen[0] == seen[2]
    assert all(path.startswith(str(tmp_path)) for path in seen)
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_a_resumed_run_that_was_compiled_does_not_go_on_eagerly(failing_compiler):
    agent = make_agent(DQN, DISCRETE, compiled=True)
    agent.compiled_update.required = True
    with pytest.raises(UserError, match=r"compiling failed here \(RuntimeError: no headers\)"):
        agent.update(make_batch(DQN, DISCRETE))


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="Windows has no signal masks")
def test_ctrl_c_does_not_kill_the_compiler():
    # A terminal sends it to every process of its group; children inherit what is held back.
    question = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    command = [sys.executable, "-c", question]
    with compilation._signals_held_back():
        inside = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    outside = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert (inside, outside) == ("True", "False")
