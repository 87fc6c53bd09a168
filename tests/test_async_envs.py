"""Environments in worker processes: the same bits as in one process, and what happens when a process dies."""

import copy
import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import faulty_envs  # noqa: F401 - registers faulty/...
import numpy as np
import pytest
from cli_helpers import REPO, command_environment, differences, only_run_dir, run_card, run_train, tiny_env, wait_for
from cli_helpers import tiny_run_config as run_config
from toy_envs import Failing

from rl_training.config import EnvConfig
from rl_training.envs.training_envs import TrainingEnvs
from rl_training.errors import EnvironmentFailure, UserError
from rl_training.experiment import registry
from rl_training.runtime.checkpointing import checkpoint_paths
from rl_training.runtime.comparison import first_difference
from rl_training.runtime.workflows import load_run_config, resume_training
from rl_training.spaces import DiscreteActions

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="workers need file descriptors that can be inherited")
ON_LINUX = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")


@pytest.fixture
def training_envs(tiny_config):
    """Return a function that makes training environments, closed after the test."""
    made = []

    def make(env_id, how, num_envs=5, **env):
        algo = "sac" if env_id == "Pendulum-v1" else "ppo"
        made.append(TrainingEnvs(tiny_config(algo, env_id, env={"num_envs": num_envs, "vectorization": how, **env})))
        return made[-1]

    yield make
    for envs in made:
        envs.close()


def actions_for(envs, random):
    spec = envs.action_spec
    if isinstance(spec, DiscreteActions):
        return random.integers(spec.count, size=envs.num_envs) + spec.start
    return random.uniform(spec.low, spec.high, (envs.num_envs, spec.size)).astype(np.float32)


def assert_same_steps(first, second, count, seed=0):
    """Step both with the same actions; returns how many episodes ended."""
    random, ended = np.random.default_rng(seed), 0
    for _ in range(count):
        actions = actions_for(first, random)
        one, other = first.step(actions), second.step(actions)
        for name in ("observations", "next_observations", "rewards", "terminated", "truncated", "valid"):
            assert differences(getattr(one, name), getattr(other, name)) == [], name
        assert one.episodes == other.episodes
        ended += len(one.episodes)
    return ended


# The same bits


@pytest.mark.parametrize(
    ("env_id", "steps", "workers"),
    [("CartPole-v1", 120, 1), ("CartPole-v1", 120, 8), ("Pendulum-v1", 210, 2), ("toy/ReusedArrays-v0", 10, 2)],
)
def test_workers_return_the_bits_of_one_process(training_envs, env_id, steps, workers):
    here, there = training_envs(env_id, "sync"), training_envs(env_id, "async", workers=workers)
    assert differences(here.reset(), there.reset()) == []
    assert assert_same_steps(here, there, steps) >= 5
    assert differences(here.state_dict(), there.state_dict()) == []


def test_what_was_handed_out_is_never_overwritten(training_envs):
    envs = training_envs("toy/Counter-v0", "async", num_envs=1)
    first = envs.reset()
    steps = [envs.step(np.array([0])) for _ in range(4)]
    assert first.tolist() == [[0, 0]]
    assert [step.rewards.tolist() for step in steps] == [[1], [2], [3], [1]]
    assert [step.next_observations.tolist()[0] for step in steps] == [[0, 1], [0, 2], [0, 3], [1, 1]]


@pytest.mark.parametrize(("before", "after"), [("sync", "async"), ("async", "sync"), ("async", "async")])
def test_a_state_of_one_kind_is_restored_by_the_other(training_envs, before, after):
    original = training_envs("CartPole-v1", before, workers=2)
    original.reset()
    random = np.random.default_rng(3)
    for _ in range(37):
        original.step(actions_for(original, random))
    restored = training_envs("CartPole-v1", after, workers=3)
    restored.load_state_dict(copy.deepcopy(original.state_dict()))
    assert (restored.restarted, restored.inexact_reason) == ([], None)
    assert assert_same_steps(original, restored, 60) > 5


def test_an_environment_that_cannot_be_restored_is_named_and_starts_anew(training_envs):
    original = training_envs("toy/Counter-v0", "async", num_envs=3, workers=2)
    original.reset()
    for _ in range(4):  # the episode's number cannot be brought back
        original.step(np.zeros(3, np.int64))
    restored = training_envs("toy/Counter-v0", "async", num_envs=3, workers=2)
    restored.load_state_dict(copy.deepcopy(original.state_dict()))
    assert restored.restarted == [0, 1, 2]
    assert restored.inexact_reason.startswith("environments 0, 1, 2 started new episodes, because its replayed episode")


@pytest.mark.parametrize("algo", ["ppo", "dqn", "sac"])
def test_a_run_may_change_between_one_process_and_several(algo, tmp_path):
    def train(how, run_dir, **settings):
        env = tiny_env(algo, num_envs=3, vectorization=how, workers=2, normalize_observation=True)
        config = run_config(algo, env=env, total_timesteps=192, **settings)
        return registry.get(algo).load_train()(config, run_dir=run_dir)

    train("sync", tmp_path / "straight")
    train("sync", tmp_path / "changed", stop_at_step=60)
    for how, stop in (("async", 120), ("sync", None)):
        config = load_run_config(tmp_path / "changed")
        config.env.vectorization, config.stop_at_step = EnvConfig(vectorization=how).vectorization, stop
        resume_training(tmp_path / "changed", config=config)
    assert first_difference(tmp_path / "straight", tmp_path / "changed") is None
    assert run_card(tmp_path / "changed")["exact"] is True


def test_a_resumed_run_cannot_become_one_of_another_kind(tmp_path):
    config = run_config("ppo", stop_at_step=32)
    registry.get("ppo").load_train()(config, run_dir=tmp_path)
    assert run_card(tmp_path)["vectorization"] == "sync"
    config = load_run_config(tmp_path)
    config.env.vectorization = EnvConfig(vectorization="vector").vectorization
    with pytest.raises(UserError, match=r"cannot change env\.vectorization: sync -> vector"):
        resume_training(tmp_path, config=config)


# What goes wrong in an environment


@pytest.mark.parametrize(("action", "message"), [("raise", "failed in step"), ("bad shape", "of shape .3,. and dtype")])
def test_an_environment_that_fails_is_named_and_the_state_before_it_is_left(training_envs, action, message):
    original, untouched = (training_envs("toy/Failing-v0", "async", num_envs=4, workers=2) for _ in range(2))
    for envs in (original, untouched):
        envs.reset()
        for _ in range(4):  # the fifth ends no episode
            envs.step(np.zeros(4, np.int64))
    with pytest.raises(EnvironmentFailure, match=rf"toy/Failing-v0 .environment 1. .*{message}"):
        original.step(np.array([0, Failing.ACTIONS.index(action), 0, 0]))
    restored = training_envs("toy/Failing-v0", "sync", num_envs=4)
    restored.load_state_dict(copy.deepcopy(original.state_dict()))
    assert restored.inexact_reason is None
    for _ in range(8):
        one, other = untouched.step(np.zeros(4, np.int64)), restored.step(np.zeros(4, np.int64))
        assert differences(one.next_observations, other.next_observations) == []


def test_an_environment_that_cannot_be_made_is_named(tiny_config, tmp_path):
    config = tiny_config("ppo", "CartPole-v1", env={"vectorization": "async", "env_kwargs": {"no_such": 1}})
    with pytest.raises(UserError, match=r"Cannot make env\.id=CartPole-v1: TypeError"):
        TrainingEnvs(config)


# Workers that die or hang


def worker_pids(envs):
    return [worker._process.pid for worker in envs._envs._workers]


@pytest.mark.parametrize("after_restore", [False, True])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_the_state_before_a_worker_died_can_be_restored(training_envs, env_id, after_restore):
    original, untouched = (training_envs(env_id, how, workers=2) for how in ("async", "sync"))
    for envs in (original, untouched):
        envs.reset()
    assert_same_steps(untouched, original, 30)
    if after_restore:
        original.load_state_dict(copy.deepcopy(original.state_dict()))
        assert_same_steps(untouched, original, 12)
    os.kill(worker_pids(original)[1], signal.SIGKILL)
    with pytest.raises(EnvironmentFailure) as raised:
        original.step(actions_for(original, np.random.default_rng(5)))
    assert str(raised.value) == f"Worker 1 of {env_id} (environments 2 to 4) died: SIGKILL"
    restored = training_envs(env_id, "async", workers=3)
    restored.load_state_dict(copy.deepcopy(original.state_dict()))
    assert restored.inexact_reason is None
    assert_same_steps(untouched, restored, 60)


def test_long_records_are_forgotten_as_far_as_no_episode_needs_them(training_envs, monkeypatch):
    from rl_training.envs import async_vector_env

    monkeypatch.setattr(async_vector_env, "_FORGET_EVERY", 10)
    envs = training_envs("toy/Counter-v0", "async", num_envs=2, workers=1)
    envs.reset()
    for _ in range(50):  # episodes of 3 steps: the last began with step 48
        envs.step(np.zeros(2, np.int64))
    assert len(envs._envs._record._log) == 2


def test_a_worker_that_hangs_is_named_and_ended(training_envs, tmp_path):
    kwargs = {"fault": "hang", "at": 3, "env": 0, "mended": str(tmp_path / "mended")}
    envs = training_envs("faulty/Walk-v0", "async", num_envs=2, workers=2, env_kwargs=kwargs)
    envs.reset()
    for _ in range(2):
        envs.step(np.zeros(2, np.int64))
    pids = worker_pids(envs)
    envs._envs._workers[0]._timeout = envs._envs._workers[1]._timeout = 0.2
    with pytest.raises(EnvironmentFailure, match=r"Worker 0 .*environment 0. did not answer for 0.2 seconds"):
        envs.step(np.zeros(2, np.int64))
    state = envs.state_dict()
    envs.close()
    assert not any(alive(pid) for pid in pids)
    (tmp_path / "mended").touch()
    restored = training_envs("faulty/Walk-v0", "sync", num_envs=2, env_kwargs=kwargs)
    restored.load_state_dict(copy.deepcopy(state))
    assert restored.inexact_reason is None


def alive(pid: int) -> bool:
    """Whether a process exists; one that has ended and is not yet waited for does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@ON_LINUX
def test_closing_ends_every_worker_and_may_be_repeated(training_envs):
    training_envs("CartPole-v1", "async").close()  # the first one starts Python's fork server, which stays
    gc.collect()
    files = open_files()
    envs = training_envs("CartPole-v1", "async", workers=3)
    pids = worker_pids(envs)
    envs.reset()
    envs.close()
    envs.close()
    assert not any(alive(pid) for pid in pids)
    assert open_files() == files


# Through the command line


ASYNC_RUN = [
    *("algo=ppo", "env=cartpole", "tuned=none", "env.num_envs=4", "env.vectorization=async", "env.workers=2"),
    *("total_timesteps=100_000_000", "algo.num_steps=64", "algo.hidden_sizes=[8]", "algo.num_epochs=1"),
    *("logging.every=256", "logging.tensorboard=false", "logging.progress=false", "eval.episodes=0"),
]


@pytest.fixture
def started(tmp_path):
    """Return a function that starts the training command, which waits for its first metric row."""
    processes = []

    def start(*arguments):
        process = subprocess.Popen(
            [sys.executable, "-m", "rl_training.train", *ASYNC_RUN, *arguments],
            cwd=tmp_path,
            env=command_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        processes.append(process)
        wait_for(process, lambda: list(tmp_path.rglob("metrics.jsonl")))
        return process, children(process.pid)

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until_gone(pids):
    for _ in range(1200):
        if not any(alive(pid) for pid in pids):
            return
        time.sleep(0.1)
    raise AssertionError("orphans")


@ON_LINUX
def test_a_killed_worker_ends_the_run_with_its_state_saved_and_the_run_goes_on_exactly(started, tmp_path):
    process, workers = started("hydra.run.dir=run")
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert errors.count("\n") == 1, errors
    assert errors.startswith("error: Worker 1 of CartPole-v1 (environments 2 to 3) died: SIGKILL. The state before it")
    assert not any(alive(pid) for pid in workers)
    saved = int(checkpoint_paths(tmp_path / "run")[-1].name.removeprefix("step_"))
    assert f"step_{saved:012d}" in errors
    stop = [f"stop_at_step={saved + 400}", "logging.progress=false"]
    for command in (["resume=run", *stop], [*ASYNC_RUN, "env.vectorization=sync", "hydra.run.dir=straight", *stop]):
        result = run_train(*command, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
    assert run_card(tmp_path / "run")["exact"] is True
    assert first_difference(tmp_path / "straight", tmp_path / "run") is None


@ON_LINUX
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_whole_group_saves_and_leaves_no_process(started, tmp_path, number, code):
    process, workers = started()
    os.killpg(process.pid, number)  # as a terminal does with Ctrl-C
    _, errors = process.communicate(timeout=120)
    assert process.returncode == code
    assert errors.count("\n") == 1, errors
    assert f"{number.name}: saved at step" in errors
    assert not any(alive(pid) for pid in workers)
    assert checkpoint_paths(only_run_dir(tmp_path))


@ON_LINUX
def test_workers_do_not_outlive_a_killed_run(started, tmp_path):
    process, workers = started()
    mapped = Path(f"/proc/{process.pid}/maps").read_text()
    assert "memfd:rl_training" in mapped  # shared memory without a name, which cannot be left behind
    assert "/dev/shm" not in mapped
    process.kill()
    process.communicate()
    wait_until_gone(workers)


def test_a_script_without_a_main_guard_can_use_workers(tmp_path):
    (tmp_path / "script.py").write_text(
        "import gymnasium as gym, rl_training\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "class Mine(CartPoleEnv): pass\n"
        "gym.register('mine/CartPole-v0', Mine, max_episode_steps=50)\n"
        "rl_training.fit(rl_training.PPO(num_steps=32, minibatch_size=32, num_epochs=1), 'mine/CartPole-v0',\n"
        "    env_settings={'num_envs': 2, 'vectorization': 'async'}, total_timesteps=64, eval={'episodes': 0})\n"
    )
    result = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**command_environment(), "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
