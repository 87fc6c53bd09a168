"""The commands as a user meets them: run directories, one-line errors, sweeps, signals, resume, evaluate."""

import json
import logging
import os
import re
import shutil
import signal
import sys

import pytest
import torch
from cli_helpers import (
    REPO,
    TINY_PPO,
    checkpoint_steps,
    command_environment,
    comparable_rows,
    differences,
    directory_content,
    metric_rows,
    names_in,
    only_run_dir,
    run_card,
    run_dirs,
    run_evaluate,
    run_module,
    run_train,
    start_train,
    tensorboard_steps,
    wait_for,
)

from rl_training import cli, evaluate
from rl_training.config.conversion import load_yaml
from rl_training.runtime.checkpointing import read_checkpoint
from rl_training.runtime.system import RunLock

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
ENDLESS = [argument for argument in TINY_PPO if not argument.startswith("total_timesteps")] + [
    "total_timesteps=100_000_000",
    "eval.every=null",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the directory of a run of 128 steps that the command has trained; tests that change it copy it."""
    cwd = tmp_path_factory.mktemp("finished")
    result = run_train(*TINY_PPO, "logging.progress=true", cwd=cwd)
    assert result.returncode == 0, result.stderr
    return only_run_dir(cwd), result


@pytest.fixture
def run_copy(finished, tmp_path):
    """Return a copy of the finished run."""
    return shutil.copytree(finished[0], tmp_path / "run")


@pytest.fixture
def in_process(tmp_path, monkeypatch, capsys):
    """Return `run(command, *arguments)`: calls a command in this process and returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RL_OUTPUTS", raising=False)
    for variable in ("HYDRA_FULL_ERROR", *THREAD_VARIABLES):  # what the command sets is undone with the test
        monkeypatch.setenv(variable, os.environ.get(variable, "1"))
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def run(command, *arguments):
        monkeypatch.setattr(sys, "argv", [command.__module__, *arguments])
        try:
            command()
        except SystemExit as leaving:
            code = leaving.code or 0
        else:
            code = 0
        return code, *capsys.readouterr()

    yield run
    root.handlers[:] = handlers
    root.setLevel(level)


# A run and its directory


def test_a_run_leaves_the_directory_that_the_design_describes(finished):
    run_dir, _ = finished
    assert re.fullmatch(r"outputs/ppo/cartpole/\d{8}-\d{6}-[0-9a-f]{6}", str(run_dir.relative_to(run_dir.parents[3])))
    assert names_in(run_dir) == [
        ".hydra",
        "checkpoints",
        "config.yaml",
        "evaluations.jsonl",
        "metadata.json",
        "metrics.jsonl",
        "tensorboard",
        "train.log",
    ]
    assert checkpoint_steps(run_dir) == [128]
    assert names_in(run_dir / ".hydra") == ["config.yaml", "hydra.yaml", "overrides.yaml"]
    assert "checkpoint step_000000000128" in (run_dir / "train.log").read_text()


def test_the_saved_config_is_resolved_and_whole(finished):
    saved = load_yaml(finished[0] / "config.yaml")
    assert list(saved)[:4] == ["algo", "env", "device", "logging"]
    assert saved["algo"]["num_steps"] == 32
    assert saved["algo"]["hidden_sizes"] == [8]
    assert saved["env"]["id"] == "CartPole-v1"
    assert "hydra" not in saved
    assert "$" not in (finished[0] / "config.yaml").read_text()


def test_the_run_card_says_what_ran_and_how_it_ended(finished):
    card = run_card(finished[0])
    assert (card["status"], card["global_step"], card["stop_reason"]) == ("finished", 128, None)
    assert (card["algo"], card["env"], card["seed"], card["preset"]) == ("ppo", "CartPole-v1", 1, None)
    assert card["command"][-len(TINY_PPO) - 1 :] == [*TINY_PPO, "logging.progress=true"]
    assert card["result"]["eval/return_mean"] == metric_rows(finished[0])[-1]["eval/return_mean"]


def test_metric_rows_stand_at_the_logging_cadence_and_in_tensorboard_too(finished):
    rows = metric_rows(finished[0])
    assert [row["step"] for row in rows] == [32, 64, 96, 128]
    assert [row["train/gradient_steps"] for row in rows] == [1, 2, 3, 4]
    assert ["eval/return_mean" in row for row in rows] == [False, False, False, True]
    steps = tensorboard_steps(finished[0])
    assert steps["train/gradient_steps"] == [32, 64, 96, 128]
    assert steps["eval/return_mean"] == [128]


def test_tensorboard_itself_reads_the_events(finished):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(finished[0] / "tensorboard"))
    accumulator.Reload()
    assert [event.step for event in accumulator.Scalars("train/episodes")] == [32, 64, 96, 128]


def test_a_run_tells_its_name_its_place_its_return_and_its_end(finished):
    run_dir, result = finished
    assert result.stdout == ""
    first, second, *_, evaluation, last = result.stderr.splitlines()
    assert first == "ppo on CartPole-v1, seed 1, no preset"
    assert second.endswith(str(run_dir.relative_to(run_dir.parents[3])))
    assert re.fullmatch(r"step 128: return \d+\.\d over 1 episodes?", evaluation)
    assert last.startswith("finished at step 128 in 0:")


def test_total_timesteps_takes_1e3_and_rl_outputs_moves_the_outputs(tmp_path):
    elsewhere = tmp_path / "else where"
    settings = [*TINY_PPO, "total_timesteps=1e3", "algo.num_steps=100", "algo.minibatch_size=100"]
    result = run_train(*settings, cwd=tmp_path, environment=command_environment(RL_OUTPUTS=str(elsewhere)))
    assert result.returncode == 0, result.stderr
    assert names_in(tmp_path) == ["else where"]
    run_dir = only_run_dir(elsewhere)
    assert run_dir.parent == elsewhere / "ppo" / "cartpole"
    assert load_yaml(run_dir / "config.yaml")["total_timesteps"] == 1000
    assert run_card(run_dir)["global_step"] == 1000


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("total_timesteps=1e5", "total_timesteps=100000"),
        ("total_timesteps=2.5E+3", "total_timesteps=2500"),
        ("seed=1e1,2", "seed=10,2"),
        ("algo.learning_rate=1e-4", "algo.learning_rate=1e-4"),
        ("algo.gamma=0.5", "algo.gamma=0.5"),
        ("+env.env_kwargs.version=1e5", "+env.env_kwargs.version=1e5"),
        ("-m", "-m"),
    ],
)
def test_only_whole_numbers_in_scientific_notation_are_rewritten(argument, expected):
    assert cli.whole_number_override(argument) == expected


def test_two_launches_at_once_get_directories_of_their_own(tmp_path):
    processes = [start_train(*TINY_PPO, f"seed={seed}", cwd=tmp_path) for seed in (1, 2)]
    for process in processes:
        _, stderr = process.communicate(timeout=300)
        assert process.returncode == 0, stderr
    found = run_dirs(tmp_path / "outputs")
    assert sorted(run_card(run_dir)["seed"] for run_dir in found) == [1, 2]
    assert [checkpoint_steps(run_dir) for run_dir in found] == [[128], [128]]


# Errors: one line, a suggestion, and nothing left behind

MISTAKES = {
    "misspelt key": (["algo.learning_rte=1"], "Unknown key algo.learning_rte. Did you mean 'algo.learning_rate'?"),
    "misspelt section": (["alg.gamma=0.9"], "Unknown key alg.gamma. Did you mean 'algo.gamma'?"),
    "misspelt group": (["algoo=ppo"], "Unknown key algoo. Did you mean 'algo'?"),
    "section left out": (["learning_rate=1"], "Unknown key learning_rate. Did you mean 'algo.learning_rate'?"),
    "wrong section": (["algo.num_env=8"], "Unknown key algo.num_env. Did you mean 'env.num_envs'?"),
    "name in two sections": (["env.seed=3"], "Unknown key env.seed. Did you mean 'eval.seed' or 'seed'?"),
    "misspelt key of Hydra": (["hydra.run.dri=x"], "Unknown key hydra.run.dri. Did you mean 'hydra.run.dir'?"),
    "unknown key": (
        ["nonsense=1"],
        "Unknown key nonsense. Choose from algo, env, device, logging, eval, checkpoint, seed,",
    ),
    "unknown key in a section": (
        ["eval.foo=1"],
        "Unknown key eval.foo. Choose from eval.every, eval.episodes, eval.seed,",
    ),
    "misspelt top-level key": (["seeed=3"], "Unknown key seeed. Did you mean 'seed'?"),
    "misspelt key with plus": (["+seeed=3"], "Unknown key seeed. Did you mean 'seed'?"),
    "unknown key with plus": (["+algo.foo=1"], "Unknown key algo.foo. Choose from algo.name, algo.gamma,"),
    "out of range": (["algo.gamma=2"], "algo.gamma must be at least 0 and at most 1, got 2.0."),
    "not a number": (["algo.gamma=abc"], "algo.gamma: Value 'abc' of type 'str' could not be converted to Float."),
    "not a whole number": (["algo.num_steps=1.5"], "algo.num_steps: Value '1.5' of type 'float'"),
    "not a list": (["algo.hidden_sizes=x"], "algo.hidden_sizes: "),
    "unknown choice": (["algo.activation=tahn"], "algo.activation: Invalid value 'tahn', expected one of [tanh, relu]"),
    "misspelt algorithm": (
        ["algo=sacc"],
        "algo=sacc does not exist. Did you mean 'sac'? Choose from dqn, ppo, sac, sac_efficient.",
    ),
    "misspelt environment": (["env=cartpol"], "env=cartpol does not exist. Did you mean 'cartpole'? Choose from"),
    "unknown device": (
        ["device=gpu"],
        "device=gpu does not exist. Did you mean 'cpu'? Choose from auto, cpu, cuda, mps.",
    ),
    "unknown preset": (["tuned=foo"], "tuned=foo does not exist. Choose from "),
    "misspelt preset": (["tuned=ppo_cartpol"], "tuned=ppo_cartpol does not exist. Did you mean 'ppo_cartpole'?"),
    "dqn on continuous actions": (
        ["algo=dqn", "env=pendulum"],
        "algo=dqn cannot train on Pendulum-v1, which has continuous actions. Use algo=ppo or algo=sac.",
    ),
    "sac on discrete actions": (
        ["algo=sac", "env=cartpole"],
        "algo=sac cannot train on CartPole-v1, which has 2 discrete actions. Use algo=dqn or algo=ppo.",
    ),
    "algorithm changed by its name": (["algo.name=sac"], "algo.name=sac does not match the other algo settings"),
    "misspelt Gymnasium id": (
        ["env=gym", "env.id=CartPol-v1"],
        "Unknown environment env.id=CartPol-v1. Did you mean 'CartPole-v1'?",
    ),
    "no Gymnasium id": (
        ["env=gym"],
        "env.id is empty: name a Gymnasium environment, such as env=gym env.id=CartPole-v1.",
    ),
    "unknown env argument": (["+env.env_kwargs.foo=1"], "Cannot make env.id=CartPole-v1: TypeError: "),
    "env module that is not there": (["env.import_module=no_such_module"], "env.import_module=no_such_module"),
    "minibatch too large": (
        ["tuned=none", "algo.num_steps=8", "algo.minibatch_size=64"],
        "8 x 1 = 8 transitions. Try algo.minibatch_size=8.",
    ),
    "resume from nowhere": (["resume=nowhere"], "nowhere does not exist; name a run directory such as outputs/"),
    "resume and sweep": (["-m", "resume=nowhere", "seed=1,2"], "resume= takes one directory, and no sweep."),
    "sweep without -m": (["seed=1,2"], "add -m to sweep over them"),
    "no equals sign": (["nonsense"], "Write key=value"),
    "negative budget": (["total_timesteps=-1"], "total_timesteps must be at least 0, got -1."),
    "key without a name": (["=3"], "=3"),
}


@pytest.mark.parametrize("arguments", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_answered_with_one_line_and_leaves_nothing(in_process, tmp_path, arguments):
    overrides, message = arguments
    code, out, err = in_process(cli.train_main, *overrides)
    assert code != 0
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_cuda_is_refused_before_anything_is_made(in_process, tmp_path):
    code, _, err = in_process(cli.train_main, "device=cuda")
    assert (code, err) == (
        1,
        "error: device=cuda: torch sees no CUDA device here. Use device=cpu or device=auto.\n",
    )
    assert list(tmp_path.iterdir()) == []


def test_an_env_argument_without_plus_is_told_to_use_one(in_process):
    _, _, err = in_process(cli.train_main, "env.env_kwargs.foo=1")
    assert "+env.env_kwargs.foo=" in err


@pytest.mark.parametrize(
    "mistake", ["misspelt key", "misspelt algorithm", "dqn on continuous actions", "misspelt Gymnasium id"]
)
def test_a_mistake_ends_the_real_process_with_one_line(tmp_path, mistake):
    overrides, message = MISTAKES[mistake]
    result = run_train(*overrides, cwd=tmp_path)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr == f"error: {message}\n"
    assert list(tmp_path.iterdir()) == []


# Sweeps


def test_a_sweep_makes_one_directory_for_each_job(tmp_path):
    result = run_train("-m", *TINY_PPO, "seed=1,2", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    first, second = run_dirs(tmp_path / "outputs" / "sweeps")
    assert (first.name, second.name) == ("0-ppo-cartpole-s1", "1-ppo-cartpole-s2")
    assert (run_card(first)["seed"], run_card(second)["seed"]) == (1, 2)
    assert [checkpoint_steps(run_dir) for run_dir in (first, second)] == [[128], [128]]
    assert metric_rows(first)[-1]["loss/value"] != metric_rows(second)[-1]["loss/value"]


def test_a_bad_job_does_not_keep_the_others_of_a_sweep_from_running(tmp_path):
    result = run_train("-m", *TINY_PPO, "algo.gamma=2,0.9", cwd=tmp_path)
    assert result.returncode != 0
    assert "algo.gamma must be at least 0 and at most 1, got 2.0." in result.stderr
    assert "Traceback" not in result.stderr
    (good,) = run_dirs(tmp_path / "outputs" / "sweeps")
    assert good.name == "1-ppo-cartpole-s1"
    assert run_card(good)["status"] == "finished"


def test_a_sweep_refuses_a_preset_that_does_not_exist(tmp_path):
    result = run_train("-m", *TINY_PPO[1:], "tuned=foo", "seed=1", cwd=tmp_path)
    assert result.returncode != 0
    assert "tuned=foo does not exist." in result.stderr
    assert run_dirs(tmp_path) == []


# Signals and resume


def start_and_wait_for_rows(cwd, *arguments, rows=3):
    process = start_train(*arguments, cwd=cwd)

    def enough_rows():
        found = run_dirs(cwd)
        return found[0] if found and len(metric_rows_so_far(found[0])) >= rows else None

    return process, wait_for(process, enough_rows)


def metric_rows_so_far(run_dir):
    path = run_dir / "metrics.jsonl"
    return path.read_text().split("\n")[:-1] if path.exists() else []


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """Return the directory of an endless run that SIGINT ended, and how the process left."""
    cwd = tmp_path_factory.mktemp("interrupted")
    process, run_dir = start_and_wait_for_rows(cwd, *ENDLESS)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    return run_dir, process.returncode, out, err


def test_ctrl_c_saves_says_how_to_go_on_and_leaves_with_130(interrupted):
    run_dir, code, out, err = interrupted
    card = run_card(run_dir)
    assert (code, out) == (130, "")
    assert err == (
        f"SIGINT: saved at step {card['global_step']:,}. Continue with: python -m rl_training.train "
        f"resume={run_dir.relative_to(run_dir.parents[3])}\n"
    )
    assert card["status"] == "interrupted"
    assert checkpoint_steps(run_dir) == [card["global_step"]]


def test_resume_goes_on_in_the_same_directory_and_writes_no_step_twice(interrupted, tmp_path):
    run_dir = shutil.copytree(interrupted[0], tmp_path / "run")
    config, rows, step = (run_dir / "config.yaml").read_bytes(), metric_rows(run_dir), run_card(run_dir)["global_step"]
    target = step + 320 - step % 32

    result = run_train("resume=run", f"total_timesteps={target}", cwd=tmp_path)

    assert result.returncode == 0, result.stderr
    assert run_dirs(tmp_path) == [run_dir]
    assert (run_dir / "config.yaml").read_bytes() == config
    assert (run_card(run_dir)["status"], run_card(run_dir)["global_step"]) == ("finished", target)
    assert [entry["from_step"] for entry in run_card(run_dir)["resumes"]] == [step]
    assert checkpoint_steps(run_dir)[-1] == target
    after = metric_rows(run_dir)
    assert after[: len(rows)] == rows
    assert [row["step"] for row in after] == list(range(32, target + 1, 32))
    assert [row["train/gradient_steps"] for row in after] == list(range(1, target // 32 + 1))
    assert tensorboard_steps(run_dir)["train/gradient_steps"] == list(range(32, target + 1, 32))


def test_sigterm_saves_and_leaves_with_143_and_nobody_else_may_have_the_run_before(tmp_path):
    process, run_dir = start_and_wait_for_rows(tmp_path, "algo=dqn", *dqn_settings())
    assert RunLock(run_dir / ".lock").acquire() == process.pid
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    card = run_card(run_dir)
    assert (process.returncode, out) == (143, "")
    assert err.startswith(f"SIGTERM: saved at step {card['global_step']:,}. Continue with: ")
    assert err.count("\n") == 1
    assert checkpoint_steps(run_dir)[-1] == card["global_step"]


def dqn_settings():
    shared = [argument for argument in ENDLESS if not argument.startswith("algo.") or "hidden" in argument]
    return [*shared, "algo.learning_starts=32", "algo.buffer_size=10000"]


DOOMED = """
import os, signal
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

class Doomed(CartPoleEnv):
    steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps == 110 and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)

gym.register("Doomed-v0", Doomed, max_episode_steps=50)
"""


def test_a_run_that_kill_9_ended_resumes_and_ends_with_the_bits_of_one_that_was_not(tmp_path):
    """The environment kills the first process at step 110, after the checkpoint of step 80 and the row of step 96."""
    shared = [argument for argument in TINY_PPO if not argument.startswith(("algo.", "eval", "logging.every"))]
    settings = [
        "algo=dqn",
        *shared,
        "total_timesteps=192",
        "env=gym",
        "env.id=Doomed-v0",
        "env.import_module=doomed",
        "algo.hidden_sizes=[8]",
        "algo.learning_starts=32",
        "algo.buffer_size=1000",
        "logging.every=16",
        "eval.episodes=0",
        "checkpoint.every=40",
    ]
    killed, spared = tmp_path / "killed once", tmp_path / "spared"
    for cwd in (killed, spared):
        cwd.mkdir()
        (cwd / "doomed.py").write_text(DOOMED)
    (spared / "killed").touch()

    assert run_train(*settings, cwd=killed).returncode == -signal.SIGKILL
    run_dir = only_run_dir(killed)
    assert checkpoint_steps(run_dir) == [40, 80]
    assert [row["step"] for row in metric_rows(run_dir)] == [16, 32, 48, 64, 80, 96]
    result = run_train(f"resume={run_dir}", cwd=killed)
    assert result.returncode == 0, result.stderr
    assert [entry["from_step"] for entry in run_card(run_dir)["resumes"]] == [80]

    result = run_train(*settings, cwd=spared)
    assert result.returncode == 0, result.stderr
    straight = only_run_dir(spared)
    assert comparable_rows(run_dir) == comparable_rows(straight)
    steps = list(range(16, 193, 16))
    assert tensorboard_steps(run_dir)["train/episodes"] == tensorboard_steps(straight)["train/episodes"] == steps
    states = [read_checkpoint(directory / "checkpoints" / "step_000000000192") for directory in (run_dir, straight)]
    for part in ("agent", "data", "envs", "normalizer", "global_generators"):
        assert differences(states[0][part], states[1][part]) == []


def test_resume_of_a_finished_run_says_so_and_changes_nothing(in_process, run_copy):
    before = directory_content(run_copy)
    code, out, err = in_process(cli.train_main, f"resume={run_copy}")
    assert (code, out) == (0, "")
    assert err == f"{run_copy} is finished at step 128; total_timesteps=<more> goes further.\n"
    assert directory_content(run_copy) == before


def test_resume_with_a_larger_budget_goes_on(run_copy, tmp_path):
    result = run_train(f"resume={run_copy}/checkpoints/step_000000000128", "total_timesteps=192", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert run_dirs(tmp_path) == [run_copy]
    assert [row["step"] for row in metric_rows(run_copy)] == [32, 64, 96, 128, 160, 192]
    assert run_card(run_copy)["global_step"] == 192
    assert load_yaml(run_copy / "config.yaml")["total_timesteps"] == 128
    assert load_yaml(run_copy / "resumes" / "001.yaml")["total_timesteps"] == 192
    assert names_in(run_copy / ".hydra") == ["config.yaml", "hydra.yaml", "overrides.yaml", "resume_1"]


@pytest.mark.parametrize(
    ("override", "difference"),
    [
        ("algo.gamma=0.5", "algo.gamma: 0.99 -> 0.5"),
        ("seed=2", "seed: 1 -> 2"),
        ("env.num_envs=2", "env.num_envs: 1 -> 2"),
        ("algo.hidden_sizes=[16]", "algo.hidden_sizes: [8] -> [16]"),
    ],
)
def test_resume_refuses_what_would_make_it_another_run(in_process, run_copy, override, difference):
    before = directory_content(run_copy)
    code, _, err = in_process(cli.train_main, f"resume={run_copy}", override, "total_timesteps=256")
    assert code == 1
    assert err.startswith(f"error: A resumed run cannot change {difference}. ")
    assert err.count("\n") == 1
    assert directory_content(run_copy) == before


@pytest.mark.parametrize("override", ["device=cpu", "logging=none", "logging.every=64", "eval.episodes=3", "tags=[a]"])
def test_resume_accepts_what_may_change(in_process, run_copy, override):
    code, _, err = in_process(cli.train_main, f"resume={run_copy}", override)
    assert (code, err) == (0, f"{run_copy} is finished at step 128; total_timesteps=<more> goes further.\n")


@pytest.mark.parametrize("override", ["algo=dqn", "env=pendulum", "tuned=none"])
def test_resume_refuses_another_group_in_words_that_help(in_process, run_copy, override):
    code, _, err = in_process(cli.train_main, f"resume={run_copy}", override)
    assert code == 1
    assert "resume" in err
    assert "+" not in err
    assert err.count("\n") == 1


def test_resume_of_a_run_whose_checkpoints_are_all_torn_changes_nothing(run_copy, tmp_path):
    (run_copy / "checkpoints" / "step_000000000128" / "state.json").write_text("{}")
    before = directory_content(run_copy)
    result = run_train("resume=run", "total_timesteps=256", cwd=tmp_path)
    assert result.returncode == 1
    assert "has no intact checkpoint" in result.stderr.splitlines()[-1]
    assert "step_000000000128 is torn: state.json is not what was written" in result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert directory_content(run_copy) == before


@pytest.mark.parametrize("name", ["lr=0.1, seeds 1,2", "a 'quoted' name", "sweep,1e4", "dollar ${seed}", "[x] {y}"])
def test_a_directory_of_any_name_can_be_resumed_and_evaluated(in_process, finished, tmp_path, name):
    shutil.copytree(finished[0], tmp_path / name)
    code, _, err = in_process(cli.train_main, f"resume={name}")
    assert (code, err) == (
        0,
        f"{tmp_path / name} is finished at step 128; total_timesteps=<more> goes further.\n",
    )
    code, out, _ = in_process(evaluate.cli, f"run={name}", "episodes=2")
    assert code == 0
    assert out.startswith(f"{name} at step 128: return ")


def test_a_directory_of_an_odd_name_really_trains_on(finished, tmp_path):
    run_dir = shutil.copytree(finished[0], tmp_path / "lr=0.1, seeds 1,2")
    result = run_train("resume=lr=0.1, seeds 1,2", "total_timesteps=160", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert run_dirs(tmp_path) == [run_dir]
    assert [row["step"] for row in metric_rows(run_dir)] == [32, 64, 96, 128, 160]


def test_a_run_directory_that_has_moved_is_resumed_where_it_is_now(in_process, run_copy, tmp_path):
    moved = run_copy.rename(tmp_path / "moved")
    code, _, err = in_process(cli.train_main, "resume=moved")
    assert (code, err) == (0, f"{moved} is finished at step 128; total_timesteps=<more> goes further.\n")


# What a look at the help must not load

LOADED = """
import runpy, sys
code = 0
try:
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
except SystemExit as leaving:
    code = leaving.code
names = [name for name in ("torch", "gymnasium", "tensorboard", "hydra") if name in sys.modules]
print("loaded", code or 0, *names)
"""


def loaded_modules(cwd, *arguments):
    """Run a command as `python -m` does and return its output and which of the large packages it loaded."""
    script = cwd / "loaded.py"
    script.write_text(LOADED)
    result = run_module("loaded", *arguments, cwd=cwd)
    script.unlink()
    assert "Traceback" not in result.stderr, result.stderr
    *output, last = result.stdout.splitlines()
    return "\n".join(output), last


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--help"], "train algo=sac env=pendulum"),
        (["algo=sac", "env=pendulum", "--cfg", "job"], "id: Pendulum-v1"),
    ],
)
def test_help_and_cfg_load_neither_torch_nor_gymnasium_nor_tensorboard(tmp_path, arguments, shown):
    output, loaded = loaded_modules(tmp_path, "rl_training.train", *arguments)
    assert shown in output
    assert loaded == "loaded 0 hydra"
    assert not (tmp_path / "outputs").exists()


def test_the_check_of_loaded_modules_sees_a_command_that_needs_them(tmp_path):
    _, loaded = loaded_modules(tmp_path, "rl_training.train", "env=gym", "env.id=CartPol-v1")
    assert loaded.startswith("loaded 1 ")
    assert "gymnasium" in loaded.split()


def test_help_of_evaluate_loads_nothing_large_not_even_hydra(tmp_path):
    output, loaded = loaded_modules(tmp_path, "rl_training.evaluate", "--help")
    assert "usage: python -m rl_training.evaluate run=<run directory>" in output
    assert loaded == "loaded 0"


# evaluate


def test_evaluate_prints_mean_deviation_and_interval(finished):
    run_dir, _ = finished
    result = run_evaluate(f"run={run_dir}", "episodes=3", cwd=run_dir)
    assert (result.returncode, result.stderr) == (0, "")
    match = re.fullmatch(
        r"(.+) at step 128: return (\S+), standard deviation (\S+), 95 % interval \[(\S+), (\S+)\], "
        r"3 episodes from seed 200000\n",
        result.stdout,
    )
    assert match is not None, result.stdout
    mean, deviation, low, high = (float(match[group]) for group in range(2, 6))
    assert match[1] == str(run_dir)
    assert low < mean < high
    # Student's t for two degrees of freedom is 4.303; the numbers are printed with two digits.
    assert high - mean == pytest.approx(4.303 * deviation / 3**0.5, abs=0.03)
    assert mean - low == pytest.approx(4.303 * deviation / 3**0.5, abs=0.03)


def test_evaluate_leaves_no_directory_and_does_not_touch_the_run(in_process, run_copy, tmp_path):
    before = directory_content(run_copy)
    assert in_process(evaluate.cli, "run=run", "episodes=1")[0] == 0
    assert directory_content(run_copy) == before
    assert names_in(tmp_path) == ["run"]


@pytest.mark.parametrize("which", ["best", "last", "128", "step_000000000128"])
def test_evaluate_finds_a_checkpoint_by_name_and_by_step(in_process, run_copy, which):
    code, out, err = in_process(evaluate.cli, "run=run", f"checkpoint={which}", "episodes=1")
    assert (code, err) == (0, "")
    assert out.startswith("run at step 128: return ")


def test_evaluate_plays_the_recorded_episodes_again_and_finds_the_same_returns(in_process, run_copy):
    code, out, err = in_process(evaluate.cli, "run=run", "episodes_from=recorded")
    assert (code, err) == (0, "")
    summary, verdict = out.splitlines()
    assert summary.endswith("1 episode from seed 100000")
    assert verdict == "every return is the same as in training"


def test_evaluate_says_so_when_the_recorded_returns_are_others(in_process, run_copy):
    recorded = json.loads((run_copy / "evaluations.jsonl").read_text())
    (run_copy / "evaluations.jsonl").write_text(json.dumps({**recorded, "returns": [-1.0]}) + "\n")
    code, _, err = in_process(evaluate.cli, "run=run", "episodes_from=recorded")
    assert (code, err) == (1, "error: run: the returns are not those that training logged: [-1.0]\n")


def test_evaluate_takes_several_runs_and_seeds_of_its_own(in_process, run_copy, tmp_path):
    shutil.copytree(run_copy, tmp_path / "other")
    code, out, _ = in_process(evaluate.cli, "run=run", "run=other", "episodes=2", "seed=7")
    assert code == 0
    first, second = out.splitlines()
    assert first.startswith("run at step 128")
    assert first.endswith("2 episodes from seed 7")
    assert second.removeprefix("other") == first.removeprefix("run")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run=run", "episods=2"], "Unknown argument 'episods=2'. Did you mean 'episodes'?"),
        (["run=run", "nonsense"], "Unknown argument 'nonsense'."),
        (["run=run", "checkpoint=5"], "run has no checkpoint '5'. Choose best, last or one of the steps 128."),
        (["run=run", "episodes=0"], "episodes must be at least 1, got 0."),
        (["run=run", "episodes=two"], "episodes=two is not valid"),
        (["run=run", "seed=-4"], "seed must be at least 0, got -4."),
        (["run=run", "episodes_from=recorded", "seed=3"], "episodes_from=recorded stands alone"),
        (["run=run", "episodes_from=elsewhere"], "episodes_from=recorded"),
        (["episodes=2"], "Name a run: python -m rl_training.evaluate run=outputs/"),
        (["run=nowhere"], "nowhere does not exist; name a run directory"),
        (["run=."], "is not a run directory: it has no config.yaml."),
    ],
)
def test_a_mistake_in_evaluate_is_answered_with_one_line(in_process, run_copy, arguments, message):
    code, out, err = in_process(evaluate.cli, *arguments)
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def test_evaluate_help_explains_every_argument(in_process):
    code, out, err = in_process(evaluate.cli, "--help")
    assert (code, err) == (0, "")
    explained = re.findall(r"^  (\w+)  ", out, re.MULTILINE)
    assert explained == ["run", "checkpoint", "episodes", "seed", "episodes_from"]


def test_the_package_in_these_tests_is_the_one_of_this_checkout():
    assert cli.__file__ == str(REPO / "rl_training" / "cli.py")
