"""Faults that a run must survive or name, injected for real: bad numbers, broken environments, full disks, kills."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import faulty_envs
import pytest
import torch
from cli_helpers import REPO, command_environment, tiny_algo, tiny_run_config

from rl_training.config import EnvConfig
from rl_training.errors import EnvironmentFailure, NonFiniteError, UserError
from rl_training.experiment import registry
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.checkpointing import (
    MANIFEST,
    CheckpointError,
    check_checkpoint,
    checkpoint_paths,
    read_checkpoint,
)
from rl_training.runtime.comparison import first_difference
from rl_training.runtime.run_card import read_run_card
from rl_training.runtime.workflows import resume_training

ALGORITHMS = ["ppo", "dqn", "sac"]


def faulty_config(algo: str, *, num_envs: int = 3, env: dict[str, Any] | None = None, **kwargs: Any):
    """Return the config of a run whose environment 1 has a fault."""
    faulty_envs.MADE.clear()
    env_kwargs = {"continuous": algo == "sac", "env": 2, **kwargs}  # index 0 is the probe of the setup
    settings = EnvConfig(id="faulty/Walk-v0", num_envs=num_envs, env_kwargs=env_kwargs, **(env or {}))
    return tiny_run_config(
        algo,
        env=settings,
        total_timesteps=180,
        checkpoint={"every": 15, "keep_last": 20},
        eval={"every": None, "episodes": 0},
    )


def train(config, run_dir: Path):
    # The probe counts as environment 0 of the process, so that training environment i is number i + 1.
    faulty_envs.MADE.clear()
    faulty_envs.Faulty()
    return registry.get(config.algo.name).load_train()(config, run_dir=run_dir)


@pytest.mark.parametrize("fault", ["nan observation", "inf observation", "nan reward"])
@pytest.mark.parametrize("normalize", [False, True], ids=["raw", "normalised"])
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_a_bad_number_stops_the_run_naming_environment_and_step(algo, normalize, fault, tmp_path):
    env = {"normalize_observation": normalize, "normalize_reward": normalize}
    config = faulty_config(algo, fault=fault, at=20, env=env)
    kind = fault.split()[1]
    # Environment 1 goes wrong at its 20th step, which is env step 20 x 3.
    with pytest.raises(NonFiniteError, match=rf"{kind} of environment 1 is NaN or infinite at step 60\."):
        train(config, tmp_path)
    last = checkpoint_paths(tmp_path)[-1]
    state = read_checkpoint(last)
    assert state["session"]["global_step"] < 60
    for row in (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()):
        assert row["step"] < 60
    assert read_run_card(tmp_path)["status"] == "failed"
    assert "NaN" in read_run_card(tmp_path)["error"]


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_a_run_without_faults_is_not_stopped(algo, tmp_path):
    result = train(faulty_config(algo), tmp_path)
    assert read_run_card(result.run_dir)["status"] == "finished"


def test_a_parameter_that_is_not_finite_is_never_saved(tmp_path):
    class Spoil(Callback):
        def on_collect_end(self, state, result):
            if state.global_step == 48:
                next(iter(state.agent.network.parameters())).data[0] = float("inf")
                state.request_checkpoint()

    config = tiny_run_config("ppo", algo_config=tiny_algo("ppo", learning_rate=1e-30), checkpoint={"every": 16})
    with pytest.raises(NonFiniteError, match="NaN or infinite"):
        registry.get("ppo").load_train()(config, run_dir=tmp_path, callbacks=[Spoil()])
    for path in checkpoint_paths(tmp_path):
        assert all(torch.isfinite(tensor).all() for tensor in read_checkpoint(path)["agent"]["network"].values())


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise in step", "environment 1. failed in step: RuntimeError: the simulator broke"),
        ("raise in reset", "environment 1. failed in reset: RuntimeError: the simulator did not start"),
        ("wrong shape", r"environment 1. returned an observation of shape \(4,\)"),
        ("wrong dtype", r"environment 1. returned an observation of shape \(3,\) and dtype <U1"),
    ],
)
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_a_broken_environment_is_named_and_the_run_goes_on_exactly_once_it_is_mended(algo, fault, message, tmp_path):
    mended = tmp_path / "mended"
    settings: dict[str, Any] = {"fault": fault, "at": 25, "mended": str(mended)}
    broken = tmp_path / "broken"
    with pytest.raises(EnvironmentFailure, match=message) as raised:
        train(faulty_config(algo, **settings), broken)
    saved = read_checkpoint(checkpoint_paths(broken)[-1])["session"]["global_step"]
    assert 24 * 3 <= saved < 40 * 3
    assert f"step_{saved:012d}" in str(raised.value)

    mended.touch()
    faulty_envs.MADE.clear()
    faulty_envs.Faulty()
    resume_training(broken)
    assert read_run_card(broken)["exact"] is True
    train(faulty_config(algo, **settings), tmp_path / "straight")
    assert first_difference(tmp_path / "straight", broken) is None


def test_a_moved_run_directory_resumes(tmp_path):
    config = tiny_run_config("dqn", stop_at_step=40)
    registry.get("dqn").load_train()(config, run_dir=tmp_path / "here")
    shutil.move(tmp_path / "here", tmp_path / "there, with = and ünïcode")
    from rl_training.runtime.workflows import load_run_config

    moved = tmp_path / "there, with = and ünïcode"
    config = load_run_config(moved)
    config.stop_at_step = None
    result = resume_training(moved, config=config)
    assert result.run_dir == moved
    assert read_run_card(moved)["global_step"] == 64


def test_resuming_an_older_checkpoint_puts_the_newer_ones_aside_and_is_exact(tmp_path):
    config = tiny_run_config("sac", checkpoint={"every": 16, "keep_last": 10})
    registry.get("sac").load_train()(config, run_dir=tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "straight")
    resume_training(tmp_path / "run" / "checkpoints" / "step_000000000032")
    assert first_difference(tmp_path / "straight", tmp_path / "run") is None
    aside = sorted((tmp_path / "run" / "checkpoints" / "superseded").iterdir())
    assert len(aside) == 2
    with pytest.raises(UserError, match="was put aside"):
        resume_training(aside[0])


def test_strict_resume_refuses_another_thread_count_and_changes_nothing(tmp_path):
    from rl_training.runtime.workflows import load_run_config

    config = tiny_run_config("dqn", stop_at_step=40)
    registry.get("dqn").load_train()(config, run_dir=tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"}
    config = load_run_config(tmp_path)
    config.device.threads, config.resume_strict, config.stop_at_step = 2, True, None
    with pytest.raises(UserError, match=r"threads changed from 1 to 2 \(device\.threads\)"):
        resume_training(tmp_path, config=config)
    assert {path: path.read_bytes() for path in before} == before

    config.resume_strict = False
    resume_training(tmp_path, config=config)
    card = read_run_card(tmp_path)
    assert card["exact"] is False
    assert card["inexact_reasons"] == ["threads changed from 1 to 2 (device.threads)"]
    torch.set_num_threads(1)


def test_a_journal_name_cannot_leave_the_run_directory(tmp_path):
    config = tiny_run_config("dqn")
    result = registry.get("dqn").load_train()(config, run_dir=tmp_path)
    manifest_file = result.checkpoint_path / MANIFEST
    manifest = json.loads(manifest_file.read_text())
    (entry,) = manifest["journal"].values()
    for name in ("../outside.bin", "/etc/hosts", "replay/../../rows_1.bin"):
        manifest["journal"] = {name: entry}
        manifest_file.write_text(json.dumps(manifest))
        with pytest.raises(CheckpointError, match="outside the run directory"):
            check_checkpoint(result.checkpoint_path)


def test_a_torn_replay_journal_is_named_and_an_older_checkpoint_used(tmp_path):
    config = tiny_run_config("dqn", checkpoint={"every": 20, "keep_last": 5}, total_timesteps=60)
    registry.get("dqn").load_train()(config, run_dir=tmp_path)
    (segment,) = (tmp_path / "replay").iterdir()
    row_bytes = segment.stat().st_size // 60
    data = bytearray(segment.read_bytes())
    data[50 * row_bytes] ^= 1  # in a transition that only the last checkpoint has
    segment.write_bytes(data)
    from rl_training.runtime.workflows import load_run_config

    config = load_run_config(tmp_path)
    config.total_timesteps = 80
    result = resume_training(tmp_path, config=config)
    card = read_run_card(result.run_dir)
    assert card["resumes"][0]["from_step"] == 40
    assert card["global_step"] == 80
    assert len(list((tmp_path / "checkpoints" / "torn").iterdir())) == 1


@pytest.fixture
def start(tmp_path):
    """Return a function that starts the training command in tmp_path; what still runs after the test is killed."""
    started: list[subprocess.Popen[str]] = []

    def start_command(*arguments: str, preamble: str = "pass") -> subprocess.Popen[str]:
        code = f"import sys; sys.argv[0] = 'train'; {preamble}; from rl_training.cli import train_main; train_main()"
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments, "logging.progress=false"],
            cwd=tmp_path,
            env=command_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start_command
    for process in started:
        process.kill()
        process.communicate()


def wait_for(condition, process: subprocess.Popen[str]) -> None:
    """Wait until the condition holds; a process that ends before fails the test."""
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


LONG_DQN = [
    *("algo=dqn", "env=cartpole", "tuned=none", "total_timesteps=10_000_000", "algo.hidden_sizes=[8]"),
    *("logging.every=500", "logging.tensorboard=false", "checkpoint.every=1000", "eval.episodes=0"),
    "hydra.run.dir=run",
]


def test_a_run_directory_has_one_owner_and_a_killed_owner_leaves_no_lock(tmp_path, start):
    owner = start(*LONG_DQN)
    wait_for(lambda: checkpoint_paths(tmp_path / "run"), owner)
    second = start("resume=run")
    _, errors = second.communicate(timeout=120)
    assert second.returncode == 1
    assert f"in use by process {owner.pid}" in errors
    assert "Traceback" not in errors

    owner.kill()
    owner.communicate()
    step = read_checkpoint(checkpoint_paths(tmp_path / "run")[-1])["session"]["global_step"]
    third = start("resume=run", f"stop_at_step={step + 1500}")
    _, errors = third.communicate(timeout=120)
    assert third.returncode == 0, errors
    assert read_run_card(tmp_path / "run")["global_step"] == step + 1500


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="this system has no SIGUSR1")
def test_sigusr1_saves_and_goes_on(tmp_path, start):
    process = start(*LONG_DQN, "checkpoint.every=null", "checkpoint.every_seconds=null")
    wait_for((tmp_path / "run" / "metrics.jsonl").exists, process)
    assert not checkpoint_paths(tmp_path / "run")
    process.send_signal(signal.SIGUSR1)
    wait_for(lambda: checkpoint_paths(tmp_path / "run"), process)
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().count("\n")
    wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") > rows, process)
    process.kill()
    process.communicate()


@pytest.mark.skipif(sys.platform == "win32", reason="limits file sizes with setrlimit")
def test_a_full_disk_is_named_and_the_run_resumes_exactly_once_there_is_room(tmp_path, start):
    arguments = [
        *("algo=sac", "env=pendulum", "tuned=none", "total_timesteps=2000", "algo.hidden_sizes=[8]"),
        *("algo.batch_size=8", "logging.every=100", "logging.tensorboard=false", "checkpoint.every=300"),
        *("checkpoint.every_seconds=null", "eval.episodes=0"),
    ]
    # 36 bytes a transition: the journal outgrows 48 kB between steps 1200 and 1500; every other file stays smaller.
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (48_000, resource.RLIM_INFINITY))"
    full = start(*arguments, "hydra.run.dir=full", preamble=limit)
    _, errors = full.communicate(timeout=300)
    assert full.returncode == 1
    assert "Cannot save step 1,500" in errors
    assert "Traceback" not in errors
    assert [path.name for path in checkpoint_paths(tmp_path / "full")] == ["step_000000000900", "step_000000001200"]
    assert not list((tmp_path / "full" / "checkpoints").glob(".staging*"))

    for command in (["resume=full"], [*arguments, "hydra.run.dir=straight"]):
        process = start(*command)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    assert first_difference(tmp_path / "straight", tmp_path / "full") is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked children")
def test_a_save_killed_at_every_write_sync_and_rename_leaves_a_checkpoint_that_loads(tmp_path):
    script = textwrap.dedent("""
        import os, signal, sys
        from pathlib import Path
        import numpy as np, torch
        from rl_training.runtime import checkpointing, system
        from rl_training.data.replay_buffer import ReplayBuffer
        from rl_training.spaces import DiscreteActions, ObservationSpec
        from rl_training.runtime.replay_journal import ReplayJournal

        root, reached = Path(sys.argv[1]), 0

        def killing(function, at):
            def call(*arguments, **options):
                global reached
                for moment in ("before", "after"):
                    reached += 1
                    if reached == at:
                        os.kill(os.getpid(), signal.SIGKILL)
                    if moment == "before":
                        result = function(*arguments, **options)
                return result
            return call

        def save(run_dir, replay, journal, step):
            rows = np.full((1, 2), step, np.float32)
            for _ in range(3):
                replay.add(rows, np.zeros(1, np.int64), rows[:, 0], rows, np.zeros(1, bool))
            state = {"agent": {"weight": torch.full((4,), float(step))}, "data": journal.state_dict(), "a": np.ones(2)}
            checkpointing.write_checkpoint(run_dir, step, state, (), journal.files())
            checkpointing.prune(run_dir, 1)

        point = 0
        while True:
            point += 1
            run_dir = root / f"point_{point}"
            run_dir.mkdir()
            child = os.fork()
            if child == 0:
                replay = ReplayBuffer(4, 1, ObservationSpec(2), DiscreteActions(2), seed=0)
                journal = ReplayJournal(replay, run_dir)
                save(run_dir, replay, journal, 1)
                for owner, name in ((os, "fsync"), (Path, "write_text"), (Path, "rename"), (Path, "mkdir"),
                                    (Path, "unlink"), (torch, "save"), (np, "savez"),
                                    (checkpointing.shutil, "rmtree"), (checkpointing, "fsync_directory")):
                    setattr(owner, name, killing(getattr(owner, name), point))
                save(run_dir, replay, journal, 2)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            if not os.WIFSIGNALED(status):
                assert os.WEXITSTATUS(status) == 0
                break
        print(point)
    """)
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(tmp_path)],
        cwd=REPO,
        env=command_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    points = int(process.stdout)
    assert points > 30  # several files, each opened, written, synced; directories; renames; removals

    from rl_training.runtime.checkpointing import find_checkpoint

    seen = set()
    for point in range(1, points):
        path = find_checkpoint(tmp_path / f"point_{point}", to_train=True)
        state = read_checkpoint(path)
        step = int(path.name.removeprefix("step_"))
        assert state["agent"]["weight"].tolist() == [float(step)] * 4
        assert state["data"]["added"] == 3 * step
        seen.add(step)
    assert seen == {1, 2}


def at_step(step: int, action) -> Callback:
    """Return a callback that acts once after the env step `step`, wherever in the iteration that is."""

    class AtStep(Callback):
        def on_train_start(self, state):
            # The trainer reads the signals between two steps; a step is counted by setting global_step.
            counted = type("Counted", (type(state),), {})

            def set_step(self, value, done=[]):  # noqa: B006 - remembers that it has acted
                self.__dict__["global_step"] = value
                if value >= step and not done:
                    done.append(True)
                    action()

            counted.global_step = property(lambda self: self.__dict__["global_step"], set_step)
            state.__class__ = counted

    return AtStep()


PPO_TAIL = {"algo_config": tiny_algo("ppo", num_steps=100, minibatch_size=50), "total_timesteps": 150}


def interrupt() -> None:
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("step", [130, 150, 170, 199, 200])
def test_ppo_interrupted_in_its_last_rollout_still_makes_its_last_update(step, tmp_path):
    from rl_training.runtime.session import TrainingInterrupted

    train_ppo = registry.get("ppo").load_train()
    config = tiny_run_config("ppo", **PPO_TAIL)
    train_ppo(config, run_dir=tmp_path / "straight")
    try:
        train_ppo(config, run_dir=tmp_path / "stopped", callbacks=[at_step(step, interrupt)])
        assert step == 200  # the rollout was full: the run was over
    except TrainingInterrupted:
        resume_training(tmp_path / "stopped")
    assert read_run_card(tmp_path / "stopped")["global_step"] == 200
    assert first_difference(tmp_path / "straight", tmp_path / "stopped") is None


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="this system has no SIGUSR1")
@pytest.mark.parametrize("step", [70, 100, 170, 200])
def test_a_warning_signal_at_any_step_changes_no_result(step, tmp_path):
    train_ppo = registry.get("ppo").load_train()
    config = tiny_run_config("ppo", **PPO_TAIL)
    train_ppo(config, run_dir=tmp_path / "straight")
    warn = at_step(step, lambda: signal.raise_signal(signal.SIGUSR1))
    train_ppo(config, run_dir=tmp_path / "warned", callbacks=[warn])
    assert first_difference(tmp_path / "straight", tmp_path / "warned") is None


def test_a_bad_number_does_not_reach_the_checkpoint_of_an_interrupted_rollout(tmp_path):
    config = faulty_config("ppo", fault="nan reward", at=20)
    config.algo.num_steps = 60
    faulty_envs.MADE.clear()
    faulty_envs.Faulty()
    with pytest.raises(NonFiniteError, match="reward of environment 1 is NaN or infinite at step 60"):
        registry.get("ppo").load_train()(config, run_dir=tmp_path, callbacks=[at_step(90, interrupt)])
    assert not checkpoint_paths(tmp_path)


def test_wide_networks_resume_exactly_in_a_process_that_had_more_threads(tmp_path):
    # numpy's products of these shapes give other bits on two threads than on one.
    arguments = [
        *("algo=sac", "env=pendulum", "tuned=none", "env.num_envs=4", "algo.hidden_sizes=[512,512]"),
        *("algo.batch_size=8", "total_timesteps=400", "logging.every=40", "logging.tensorboard=false"),
        *("eval.episodes=1", "logging.progress=false"),
    ]
    environment = command_environment(OPENBLAS_NUM_THREADS="2", OMP_NUM_THREADS="2")
    for command in (
        [*arguments, "hydra.run.dir=straight"],
        [*arguments, "hydra.run.dir=split", "stop_at_step=200"],
        ["resume=split"],
    ):
        process = subprocess.run(
            [sys.executable, "-m", "rl_training.train", *command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert process.returncode == 0, process.stderr
    assert first_difference(tmp_path / "straight", tmp_path / "split") is None


def test_an_environment_that_breaks_in_an_evaluation_loses_no_row(tmp_path):
    """The checkpoint before it stands, and the resumed run evaluates where it would have."""
    mended = tmp_path / "mended"
    faulty_envs.MADE.clear()
    # Environments of the process: 0 to 2 train, 3 tells the spaces, 4 is the first evaluation's, 5 the second's, which
    # breaks.
    env_kwargs = {"fault": "raise in step", "at": 5, "env": 5, "mended": str(mended)}
    config = tiny_run_config(
        "dqn",
        env=EnvConfig(id="faulty/Walk-v0", num_envs=3, env_kwargs=env_kwargs),
        total_timesteps=180,
        eval={"every": 60, "episodes": 2},
        checkpoint={"every": 30},
    )
    train_dqn = registry.get("dqn").load_train()
    with pytest.raises(UserError, match="In the evaluation at step 120: faulty/Walk-v0"):
        train_dqn(config, run_dir=tmp_path / "broken")
    mended.touch()
    resume_training(tmp_path / "broken")
    train_dqn(config, run_dir=tmp_path / "straight")
    assert first_difference(tmp_path / "straight", tmp_path / "broken") is None


def test_a_run_that_a_callback_stopped_is_finished_until_it_gets_a_larger_budget(tmp_path):
    from rl_training.runtime.workflows import load_run_config

    config = tiny_run_config("dqn", total_timesteps=200, eval={"every": 40, "episodes": 1, "stop_at_return": 1.0})
    registry.get("dqn").load_train()(config, run_dir=tmp_path)
    assert read_run_card(tmp_path)["global_step"] == 40
    with pytest.raises(UserError, match="is finished at step 40"):
        resume_training(tmp_path)
    config = load_run_config(tmp_path)
    config.total_timesteps, config.eval.stop_at_return = 240, None
    resume_training(tmp_path, config=config)
    assert read_run_card(tmp_path)["global_step"] == 240


def test_a_budget_before_the_current_step_is_refused(tmp_path):
    from rl_training.runtime.workflows import load_run_config

    registry.get("dqn").load_train()(tiny_run_config("dqn", stop_at_step=40), run_dir=tmp_path)
    config = load_run_config(tmp_path)
    config.total_timesteps = 20
    with pytest.raises(UserError, match="lies before step 40"):
        resume_training(tmp_path, config=config)
