"""The verify command says exact where a run is, and names what is not."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli_helpers import command_environment, tiny_run_config

from rl_training.experiment import registry
from rl_training.runtime.comparison import first_difference

SMALL = ["tuned=none", "algo.hidden_sizes=[8]"]


def verify(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rl_training.verify", *arguments],
        cwd=cwd,
        env=command_environment(PYTHONPATH=f"{Path(__file__).parent.parent}:{Path(__file__).parent}"),
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_an_ordinary_run_is_exact(tmp_path):
    process = verify("algo=dqn", "env=cartpole", *SMALL, "verify.steps=6000", "verify.kills=1", cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert "exact: dqn on CartPole-v1, 6,000 steps, killed 1 times" in process.stdout
    assert not list(tmp_path.iterdir())  # the runs are made elsewhere and removed


def test_an_environment_that_cannot_be_brought_back_is_named(tmp_path):
    process = verify(
        *("algo=ppo", "env=gym", "env.id=forgetful/Walk-v0", "env.import_module=forgetful_env", *SMALL),
        *("algo.num_steps=64", "algo.minibatch_size=64", "algo.num_epochs=1", "verify.steps=4000", "verify.kills=1"),
        cwd=tmp_path,
    )
    assert process.returncode == 1
    assert "not exact: environment 0 started a new episode, because its replayed episode" in process.stdout


def test_bad_arguments_end_in_one_line(tmp_path):
    process = verify("algo=sacc", cwd=tmp_path)
    assert process.returncode == 1
    assert (
        process.stderr.strip()
        == "error: algo=sacc does not exist. Did you mean 'sac'? Choose from dqn, ppo, sac, sac_efficient."
    )
    process = verify("verify.stepps=3", cwd=tmp_path)
    assert process.returncode == 1
    assert "Did you mean 'verify.steps'?" in process.stderr


@pytest.fixture
def two_runs(tmp_path):
    config = tiny_run_config("sac", checkpoint={"every": 16, "keep_last": 9})
    registry.get("sac").load_train()(config, run_dir=tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    return tmp_path / "first", tmp_path / "second"


def test_comparison_finds_no_difference_in_a_copy(two_runs):
    assert first_difference(*two_runs) is None


def test_comparison_names_the_first_row_that_differs(two_runs):
    first, second = two_runs
    lines = (second / "metrics.jsonl").read_text().splitlines()
    assert '"train/episodes": 0' in lines[1]
    lines[1] = lines[1].replace('"train/episodes": 0', '"train/episodes": 7')
    (second / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert first_difference(first, second) == "metrics.jsonl at step 32: train/episodes is 0 and 7"


def test_comparison_names_the_tensor_that_differs(two_runs, monkeypatch):
    first, second = two_runs
    from rl_training.runtime import comparison

    read = comparison.read_checkpoint

    def altered(path):
        state = read(path)
        if second in path.parents:
            state["agent"]["actor"]["network.0.bias"] += torch.tensor(0.25)
        return state

    monkeypatch.setattr(comparison, "read_checkpoint", altered)
    expected = "agent/actor/network.0.bias of step_000000000064 differs by up to 0.25"
    assert first_difference(first, second) == expected


def test_comparison_finds_a_transition_that_differs(two_runs):
    first, second = two_runs
    (segment,) = (second / "replay").iterdir()
    data = bytearray(segment.read_bytes())
    data[5 * (len(data) // 64)] ^= 1
    segment.write_bytes(data)
    assert first_difference(first, second) == "transition 5 of the replay buffer of step_000000000064 differs"
