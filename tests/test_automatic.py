"""What `auto` means for threads and compiling: decided from config and equipment, recorded, and never decided twice."""

import dataclasses
import logging
import os
import stat

import pytest
import torch
from cli_helpers import run_card, run_train, tiny_algo, tiny_env, tiny_run_config

from rl_training.api.algorithms import make_config
from rl_training.config import AlgoConfig, DeviceConfig, DQNConfig, EnvConfig, PPOConfig, SACConfig, TrainConfig
from rl_training.config.conversion import load_yaml
from rl_training.errors import ConfigError
from rl_training.experiment import registry
from rl_training.runtime import automatic
from rl_training.runtime.automatic import compiles, cpp_compiler, settled, thread_count
from rl_training.runtime.run_utils import saved_config_file
from rl_training.runtime.workflows import resume_training

# The first import of torch's own compiler uses what torch calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")

ALGOS = ["dqn", "ppo", "sac"]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _threads_as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def compiler(monkeypatch):
    """Return a function that makes the C++ compiler be there, or not; at first it is."""

    def there(value: bool) -> None:
        monkeypatch.setattr(automatic, "cpp_compiler", lambda: "/usr/bin/g++" if value else None)

    there(True)
    return there


def config_of(algo: str | AlgoConfig, *, total_timesteps: int = 100_000, num_envs: int = 1, **device) -> TrainConfig:
    name = algo if isinstance(algo, str) else algo.name
    env = EnvConfig(id=tiny_env(name).id, num_envs=num_envs)
    algo_config = registry.get(algo).config_class() if isinstance(algo, str) else algo
    return make_config(algo_config, env, total_timesteps=total_timesteps, device=device)


def warnings_in(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# Gradient steps


@pytest.mark.parametrize(
    ("algo", "total_timesteps", "num_envs", "steps"),
    [
        # 100,000 / 2048 is 49 rollouts, each of 10 epochs of 2048 / 64 = 32 minibatches
        (PPOConfig(), 100_000, 1, 15_680),
        # a rollout holds 100 x 3 = 300, of which 4 take 1,000 steps; its minibatches are 128, 128 and 44
        (PPOConfig(num_steps=100, minibatch_size=128, num_epochs=2), 1_000, 3, 24),
        (PPOConfig(), 0, 1, 0),
        # (100,000 - 100) / 4
        (DQNConfig(), 100_000, 1, 24_975),
        # (1,000 - 200) / 5 = 160 updates of 2 steps, however many environments there are
        (DQNConfig(learning_starts=200, train_every=5, gradient_steps=2), 1_000, 1, 320),
        (DQNConfig(learning_starts=200, train_every=5, gradient_steps=2), 1_000, 4, 320),
        (DQNConfig(learning_starts=200), 150, 1, 0),
        # 20,000 - 100
        (SACConfig(), 20_000, 1, 19_900),
        (SACConfig(learning_starts=1_000, train_every=64, gradient_steps=64), 65_000, 1, 64_000),
    ],
)
def test_planned_gradient_steps_of_hand_worked_budgets(algo, total_timesteps, num_envs, steps):
    assert algo.planned_gradient_steps(config_of(algo, total_timesteps=total_timesteps, num_envs=num_envs)) == steps


@pytest.mark.parametrize("algo", ALGOS)
def test_a_run_takes_the_planned_gradient_steps(algo, tmp_path):
    config = tiny_run_config(algo)
    result = registry.get(algo).load_train()(config, run_dir=tmp_path)
    assert result.metrics["train/gradient_steps"] == config.algo.planned_gradient_steps(config) > 0


# Compiling


@pytest.mark.parametrize("algo", ALGOS)
def test_a_short_run_is_eager_and_a_long_one_compiled(algo, compiler):
    assert compiles(config_of(algo, total_timesteps=10_000), CPU) is False
    assert compiles(config_of(algo, total_timesteps=10_000_000), CPU) is True


@pytest.mark.parametrize("algo", ALGOS)
def test_the_planned_gradient_steps_decide(algo, compiler, monkeypatch):
    config = config_of(algo, total_timesteps=10_000)
    planned = config.algo.planned_gradient_steps(config)
    for pays_after, expected in ((planned - 1, True), (planned, True), (planned + 1, False), (None, False)):
        monkeypatch.setattr(type(config.algo), "compiling_pays_after", pays_after)
        assert compiles(config, CPU) is expected


@pytest.mark.parametrize("algo", ALGOS)
def test_a_long_run_is_eager_without_a_compiler_and_says_nothing_about_it(algo, compiler, caplog):
    compiler(False)
    assert compiles(config_of(algo, total_timesteps=10_000_000), CPU) is False
    assert warnings_in(caplog) == []


@pytest.mark.parametrize("algo", ALGOS)
def test_auto_does_not_compile_on_a_gpu(algo, compiler):
    assert compiles(config_of(algo, total_timesteps=10_000_000), CUDA) is False


def test_auto_does_not_compile_for_images(compiler):
    long_run = config_of("dqn", total_timesteps=10_000_000)
    images = dataclasses.replace(long_run, env=EnvConfig(id="toy/Motion-v0"))
    assert (compiles(long_run, CPU), compiles(images, CPU)) == (True, False)
    asked = dataclasses.replace(images, device=dataclasses.replace(images.device, compile=True))
    assert compiles(asked, CPU) is True


@pytest.mark.parametrize("algo", ALGOS)
def test_true_and_false_win_over_the_length_of_the_run(algo, compiler):
    assert compiles(config_of(algo, total_timesteps=100, compile=True), CPU) is True
    assert compiles(config_of(algo, total_timesteps=10_000_000, compile=False), CPU) is False


def test_true_without_a_compiler_warns_once_and_is_false(compiler, caplog):
    compiler(False)
    config = settled(config_of("ppo", compile=True), CPU)
    assert config.device.compile is False
    (warning,) = warnings_in(caplog)
    assert warning.startswith("device.compile=true: it needs a C++ compiler")
    assert "\n" not in warning
    assert settled(config, CPU) == config
    assert len(warnings_in(caplog)) == 1


def test_true_is_false_on_a_gpu_and_for_an_algorithm_without_a_compiled_update(compiler, caplog):
    compiler(True)
    assert settled(config_of("ppo", compile=True), torch.device("cuda")).device.compile is False
    config = dataclasses.replace(config_of("ppo", compile=True), algo=AlgoConfig(name="mine"))
    assert settled(config, CPU).device.compile is False
    assert [warning.split(": ")[1] for warning in warnings_in(caplog)] == [
        "updates are compiled on the CPU only, not on cuda; going on without.",
        "algo=mine has no compiled update; going on without.",
    ]


def test_the_compiler_is_the_one_that_cxx_names(tmp_path, monkeypatch):
    path = tmp_path / "my-compiler"
    path.write_text("#!/bin/sh\n")
    monkeypatch.setenv("CXX", str(path))
    assert cpp_compiler() is None
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    assert cpp_compiler() == str(path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert cpp_compiler() is None


def test_without_cxx_the_compiler_is_searched_in_the_path(tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cpp_compiler() is None
    for name in ("g++", "clang++"):
        (tmp_path / name).touch(mode=0o755)
    assert cpp_compiler() in (str(tmp_path / "g++"), str(tmp_path / "clang++"))


# Threads


@pytest.mark.parametrize(
    ("hidden_sizes", "cores", "threads"),
    [
        ([64, 64], 8, 1),
        ([256, 256], 8, 1),
        ([511], 8, 1),
        ([512], 8, 2),
        ([64, 1024], 8, 2),
        ([1024, 1024], 2, 2),
        ([1024, 1024], 1, 1),
        ([], 8, 1),
    ],
)
def test_wide_layers_get_a_second_thread_where_there_is_a_second_core(hidden_sizes, cores, threads, monkeypatch):
    monkeypatch.setattr(automatic, "_cores", lambda: cores)
    assert thread_count(config_of(SACConfig(hidden_sizes=hidden_sizes))) == threads


def test_a_number_of_threads_wins(monkeypatch):
    monkeypatch.setattr(automatic, "_cores", lambda: 8)
    assert thread_count(config_of(SACConfig(hidden_sizes=[1024]), threads=1)) == 1
    assert thread_count(config_of("ppo", threads=3)) == 3


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not bind processes to cores")
def test_the_cores_are_those_that_the_process_may_use():
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert thread_count(config_of(SACConfig(hidden_sizes=[1024]))) == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert thread_count(config_of(SACConfig(hidden_sizes=[1024]))) == min(2, len(allowed))


# What the config accepts


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compile": "maybe"}, "device.compile must be auto, true or false, got 'maybe'."),
        ({"threads": "many"}, "device.threads must be auto or a whole number, got 'many'."),
        ({"threads": "atuo"}, "device.threads must be auto or a whole number, got 'atuo'. Did you mean 'auto'?"),
        ({"threads": 0}, "device.threads must be at least 1, got 0."),
    ],
)
def test_a_value_that_means_nothing_is_refused_in_one_line(settings, message):
    for refused in (lambda: DeviceConfig(**settings), lambda: config_of("ppo", **settings)):
        with pytest.raises(ConfigError) as caught:
            refused()
        assert str(caught.value) == message


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("device.compile=maybe", "error: device.compile must be auto, true or false, got 'maybe'.\n"),
        ("device.threads=many", "error: device.threads must be auto or a whole number, got 'many'.\n"),
    ],
)
def test_the_command_refuses_it_too_and_leaves_nothing(argument, message, tmp_path):
    result = run_train(argument, cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (1, "", message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("threads", ["auto", 1, 3])
@pytest.mark.parametrize("compile_updates", ["auto", True, False])
def test_every_value_keeps_its_type(threads, compile_updates):
    device = config_of("ppo", threads=threads, compile=compile_updates).device
    assert (device.threads, type(device.threads)) == (threads, type(threads))
    assert (device.compile, type(device.compile)) == (compile_updates, type(compile_updates))


# What a run records


def train(config, run_dir):
    return registry.get(config.algo.name).load_train()(config, run_dir=run_dir)


def recorded(run_dir):
    """The device section that the run last used, and what its card says."""
    device, card = load_yaml(saved_config_file(run_dir))["device"], run_card(run_dir)
    return (device["threads"], device["compile"]), (card["threads"], card["updates"])


@pytest.mark.parametrize("algo", ALGOS)
def test_a_run_records_what_was_chosen(algo, tmp_path):
    config = tiny_run_config(algo)
    assert (config.device.threads, config.device.compile) == ("auto", "auto")
    train(config, tmp_path)
    assert recorded(tmp_path) == ((1, False), (1, "eager"))
    assert torch.get_num_threads() == 1


@pytest.mark.skipif(cpp_compiler() is None, reason="there is no C++ compiler here")
def test_a_run_that_is_long_enough_is_compiled_and_records_it(tmp_path, monkeypatch):
    monkeypatch.setattr(DQNConfig, "compiling_pays_after", 5)
    train(tiny_run_config("dqn"), tmp_path)
    assert recorded(tmp_path) == ((1, True), (1, "compiled"))


def test_a_wide_run_records_its_two_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(automatic, "_cores", lambda: 2)
    train(tiny_run_config("dqn", algo_config=dataclasses.replace(tiny_algo("dqn"), hidden_sizes=[512])), tmp_path)
    assert recorded(tmp_path) == ((2, False), (2, "eager"))
    assert torch.get_num_threads() == 2


def test_a_run_that_cannot_compile_warns_once_and_records_that_it_did_not(tmp_path, compiler, caplog):
    compiler(False)
    train(tiny_run_config("dqn", device={"compile": True}), tmp_path)
    assert len([warning for warning in warnings_in(caplog) if "C++ compiler" in warning]) == 1
    assert recorded(tmp_path) == ((1, False), (1, "eager"))


@pytest.mark.parametrize("given", ["the same settings", "the saved settings"])
def test_a_resume_with_a_longer_budget_keeps_what_was_chosen(given, tmp_path, compiler, monkeypatch):
    monkeypatch.setattr(automatic, "_cores", lambda: 1)
    # 64 env steps are 8 gradient steps, 192 are 24.
    monkeypatch.setattr(PPOConfig, "compiling_pays_after", 20)
    config = tiny_run_config("ppo")
    train(config, tmp_path)
    assert recorded(tmp_path)[0] == (1, False)

    monkeypatch.setattr(automatic, "_cores", lambda: 8)
    monkeypatch.setattr(automatic, "WIDE_LAYER", 8)
    longer = dataclasses.replace(config, total_timesteps=192)
    fresh = settled(longer, CPU).device
    assert (fresh.threads, fresh.compile) == (2, True)  # a new run would choose otherwise
    if given == "the saved settings":
        saved = load_yaml(saved_config_file(tmp_path))["device"]
        longer = dataclasses.replace(
            longer, device=dataclasses.replace(config.device, threads=saved["threads"], compile=saved["compile"])
        )
    resume_training(tmp_path, config=longer)
    assert (tmp_path / "resumes" / "001.yaml").is_file()
    assert recorded(tmp_path) == ((1, False), (1, "eager"))
    card = run_card(tmp_path)
    assert (card["global_step"], card["exact"]) == (192, True)


def test_a_resume_may_ask_for_something_else_and_is_then_not_exact(tmp_path):
    config = tiny_run_config("ppo")
    train(config, tmp_path)
    other = dataclasses.replace(
        config, total_timesteps=128, device=dataclasses.replace(config.device, threads=2, compile="auto")
    )
    resume_training(tmp_path, config=other)
    assert recorded(tmp_path)[0] == (2, False)
    card = run_card(tmp_path)
    assert (card["exact"], card["inexact_reasons"]) == (False, ["threads changed from 1 to 2 (device.threads)"])
