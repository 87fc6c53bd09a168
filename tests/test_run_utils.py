"""What every trainer needs around its loop: device, saved config, run directory, run card, checkpoints."""

import gc
import json
import os
import platform
import random
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_helpers import directory_content, metric_rows, names_in, run_card, tiny_env, tiny_run_config
from omegaconf import OmegaConf

import rl_training
from rl_training.config import DeviceKind
from rl_training.config.conversion import load_yaml, typed_config
from rl_training.errors import NonFiniteError, UserError
from rl_training.runtime import exactness
from rl_training.runtime.checkpointing import CheckpointError, read_checkpoint
from rl_training.runtime.exactness import numeric_platform, platform_changes
from rl_training.runtime.run_card import read_run_card, update_run_card
from rl_training.runtime.run_utils import (
    begin_resumed_run,
    create_training_run,
    default_run_dir,
    prepare_process,
    resolve_device,
    restore_training_state,
    save_training_checkpoint,
    saved_config_file,
    serialize_train_config,
)
from rl_training.runtime.system import RunLock


class Part:
    """A part of a run that holds one tensor."""

    def __init__(self, value):
        self.value = torch.tensor(value)

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


@pytest.fixture
def run(tmp_path):
    """Return an open run in tmp_path/run."""
    opened = create_training_run(tiny_run_config("ppo", tags=["a", "b"]), tmp_path / "run")
    yield opened
    opened.close()


def parts_at(step):
    return {"session": StepCounter(step), "agent": Part([1.0, 2.0])}


class StepCounter:
    def __init__(self, step):
        self.step = step

    def state_dict(self):
        return {"global_step": self.step}

    def load_state_dict(self, state):
        self.step = state["global_step"]


# Device


def test_cpu_is_always_there():
    assert resolve_device(DeviceKind.cpu) == torch.device("cpu")


@pytest.mark.parametrize(("cuda", "expected"), [(True, "cuda"), (False, "cpu")])
def test_auto_takes_cuda_if_there_is_one(monkeypatch, cuda, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    assert resolve_device(DeviceKind.auto) == torch.device(expected)


@pytest.mark.parametrize(
    ("kind", "module", "message"),
    [
        (DeviceKind.cuda, torch.cuda, "device=cuda: torch sees no CUDA device here. Use device=cpu or device=auto."),
        (
            DeviceKind.mps,
            torch.backends.mps,
            "device=mps: torch sees no Apple GPU here. Use device=cpu or device=auto.",
        ),
    ],
)
def test_a_device_that_is_asked_for_is_taken_or_refused_by_name(monkeypatch, kind, module, message):
    monkeypatch.setattr(module, "is_available", lambda: True)
    assert resolve_device(kind) == torch.device(kind.name)
    monkeypatch.setattr(module, "is_available", lambda: False)
    with pytest.raises(UserError) as error:
        resolve_device(kind)
    assert str(error.value) == message


# The saved config


def test_a_config_is_serialised_as_json_and_yaml_can_hold_it():
    config = tiny_run_config("ppo", tags=["a"], env=tiny_env("ppo", env_kwargs={"path": Path("x/y"), "pair": (1, 2)}))
    config.env.env_kwargs["path"] = Path("x/y")
    data = serialize_train_config(config)
    assert json.loads(json.dumps(data)) == data
    assert data["env"]["env_kwargs"] == {"path": "x/y", "pair": [1, 2]}
    assert data["algo"]["activation"] == "tanh"
    assert data["device"]["kind"] == "cpu"
    assert OmegaConf.to_container(OmegaConf.create(data)) == data


@pytest.mark.parametrize(
    ("tags", "expected"), [(("b", "a"), ["b", "a"]), ({"b", "a"}, ["a", "b"]), ([1, Path("p")], ["1", "p"]), ([], [])]
)
def test_tags_of_any_kind_become_a_list_of_texts(tags, expected):
    config = tiny_run_config("ppo")
    config.tags = tags
    assert serialize_train_config(config)["tags"] == expected


def test_serialising_leaves_the_config_alone():
    config = tiny_run_config("ppo")
    serialize_train_config(config)["algo"]["hidden_sizes"].append(99)
    assert config.algo.hidden_sizes == [8]


# The run directory


def test_a_run_has_its_config_and_its_card_before_the_first_step(run):
    assert names_in(run.run_dir) == ["config.yaml", "metadata.json"]
    saved = load_yaml(run.run_dir / "config.yaml")
    assert saved == serialize_train_config(run.config)
    assert typed_config(saved, type(run.config.algo)) == run.config
    assert (run.device, run.restored) == (torch.device("cpu"), None)


def test_the_run_card_says_what_runs_where(run):
    card = run_card(run.run_dir)
    assert (card["status"], card["algo"], card["env"]) == ("running", "ppo", "CartPole-v1")
    assert (card["seed"], card["tags"], card["preset"]) == (1, ["a", "b"], None)
    assert (card["device"], card["threads"]) == ("cpu", 1)
    assert card["python"] == platform.python_version()
    assert card["rl_training"] == rl_training.__version__
    assert card["packages"]["torch"] == torch.__version__
    assert card["packages"]["numpy"] == np.__version__
    simulators = {"mujoco", "Box2D", "ale-py", "envpool"}
    assert set(card["packages"]) == {"torch", "gymnasium", "numpy", "hydra-core", "omegaconf", *simulators}
    assert card["wrappers"] == []
    assert isinstance(card["command"], list)
    assert card["cpu"]


@pytest.mark.parametrize("dirty", [False, True])
def test_the_run_card_names_the_commit_and_whether_it_was_changed(tmp_path, monkeypatch, dirty):
    monkeypatch.chdir(tmp_path)
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    (tmp_path / "code.py").write_text("1\n")
    for arguments in (["init", "-q"], ["add", "code.py"], [*identity, "commit", "-q", "-m", "x"]):
        subprocess.run(["git", *arguments], check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    if dirty:
        (tmp_path / "code.py").write_text("2\n")
    opened = create_training_run(tiny_run_config("ppo"), tmp_path / "run")
    opened.close()
    assert run_card(tmp_path / "run")["git"] == {"commit": head, "dirty": dirty}


def test_outside_git_the_run_card_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    opened = create_training_run(tiny_run_config("ppo"), tmp_path / "run")
    opened.close()
    assert run_card(tmp_path / "run")["git"] is None


def test_the_global_generators_are_seeded_by_the_config():
    def draw(seed):
        prepare_process(tiny_run_config("ppo", seed=seed))
        return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002

    first = draw(1)
    assert draw(1) == first
    other = draw(2)
    assert all(one != two for one, two in zip(first, other, strict=True))


def test_new_directories_are_named_by_algorithm_environment_and_time(monkeypatch):
    monkeypatch.setenv("RL_OUTPUTS", "/somewhere")
    config = tiny_run_config("sac")
    first, second = default_run_dir(config), default_run_dir(config)
    assert first.parent == Path("/somewhere/sac/pendulum")
    assert first != second
    monkeypatch.delenv("RL_OUTPUTS")
    assert default_run_dir(config).parent == Path("outputs/sac/pendulum")


def test_a_directory_that_cannot_be_made_is_a_user_error_that_names_it(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=f"Cannot write the run directory {tmp_path}/file/run: Not a directory"):
        create_training_run(tiny_run_config("ppo"), tmp_path / "file" / "run")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written_is_a_user_error_that_names_it(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(UserError, match=f"Cannot write the run directory {tmp_path}/run: Permission denied"):
            create_training_run(tiny_run_config("ppo"), tmp_path / "run")
    finally:
        tmp_path.chmod(0o700)


def test_the_card_is_updated_entry_by_entry(run):
    update_run_card(run.run_dir, status="finished", global_step=5)
    card = read_run_card(run.run_dir)
    assert (card["status"], card["global_step"], card["algo"]) == ("finished", 5, "ppo")
    assert not [name for name in names_in(run.run_dir) if "staging" in name]


@pytest.mark.parametrize("content", ["", "{", "[1]"])
def test_a_card_that_cannot_be_read_is_empty(tmp_path, content):
    (tmp_path / "metadata.json").write_text(content)
    assert read_run_card(tmp_path) == {}
    assert read_run_card(tmp_path / "nowhere") == {}


# Checkpoints


def test_a_saved_checkpoint_holds_every_part_and_loads_again(run):
    run.writer.write(7, {"a": 1.0})
    path = save_training_checkpoint(run, 7, parts_at(7), labels=["best"])
    assert path == run.run_dir / "checkpoints" / "step_000000000007"
    state = read_checkpoint(path)
    assert state["session"] == {"global_step": 7}
    assert torch.equal(state["agent"]["value"], torch.tensor([1.0, 2.0]))
    assert state["metric_files"]["metrics.jsonl"] == (run.run_dir / "metrics.jsonl").stat().st_size > 0
    assert json.loads((path / "manifest.json").read_text())["labels"] == ["best"]


def test_restoring_hands_back_parts_and_global_generators(run):
    random.seed(1)
    np.random.seed(2)  # noqa: NPY002
    torch.manual_seed(3)
    path = save_training_checkpoint(run, 7, parts_at(7))
    expected = random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    parts = {"session": StepCounter(0), "agent": Part([0.0, 0.0])}
    run.restored = read_checkpoint(path)
    restore_training_state(run, parts)
    assert parts["session"].step == 7
    assert parts["agent"].value.tolist() == [1.0, 2.0]
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected  # noqa: NPY002


def interrupted_after(run, *steps):
    """Write a row for each step, save after the first, and close the run; returns the checkpoint."""
    path = None
    for step in steps:
        run.writer.write(step, {"a": float(step)})
        path = path or save_training_checkpoint(run, step, parts_at(step))
    run.close()
    return path


def test_opening_a_run_to_resume_it_changes_nothing_yet(run):
    path = interrupted_after(run, 7, 8)
    before = directory_content(run.run_dir)
    resumed = create_training_run(run.config, run.run_dir, path)
    resumed.close()
    after = directory_content(run.run_dir)
    assert {name: content for name, content in after.items() if name != ".lock"} == {
        name: content for name, content in before.items() if name != ".lock"
    }
    assert resumed.restored["session"] == {"global_step": 7}


def test_a_resumed_run_keeps_its_config_cuts_its_metrics_and_records_the_resume(run):
    path = interrupted_after(run, 7, 8)
    original = (run.run_dir / "config.yaml").read_bytes()

    longer = tiny_run_config("ppo", tags=["a", "b"], total_timesteps=999)
    resumed = create_training_run(longer, run.run_dir, path)
    begin_resumed_run(resumed, reasons=[])
    resumed.close()

    assert metric_rows(run.run_dir) == [{"step": 7, "a": 7.0}]
    assert (run.run_dir / "config.yaml").read_bytes() == original
    assert saved_config_file(run.run_dir) == run.run_dir / "resumes" / "001.yaml"
    assert load_yaml(saved_config_file(run.run_dir))["total_timesteps"] == 999
    card = run_card(run.run_dir)
    (record,) = card["resumes"]
    assert (record["from_step"], record["total_timesteps"], record["exact"]) == (7, 999, True)
    assert card["exact"] is True


def test_a_resume_that_is_not_exact_says_why_in_the_run_card(run):
    path = interrupted_after(run, 7)
    resumed = create_training_run(run.config, run.run_dir, path)
    begin_resumed_run(resumed, reasons=["cpu was a and is b"])
    resumed.close()
    card = run_card(run.run_dir)
    assert (card["exact"], card["inexact_reasons"]) == (False, ["cpu was a and is b"])
    assert card["resumes"][0]["exact"] is False


def test_another_machine_is_noticed(run, monkeypatch):
    path = interrupted_after(run, 7)
    monkeypatch.setattr(exactness, "cpu_name", lambda: "another cpu")
    resumed = create_training_run(run.config, run.run_dir, path)
    resumed.close()
    (change,) = platform_changes(
        resumed.restored["platform"], numeric_platform(resumed.config, resumed.device, object())
    )
    assert change.startswith("cpu changed from ")
    assert change.endswith(" to another cpu (another machine)")


def test_a_torn_checkpoint_is_refused_before_the_run_directory_is_touched(run):
    path = interrupted_after(run, 7, 8)
    (path / "tensors.pt").write_bytes(b"")
    before = directory_content(run.run_dir)
    with pytest.raises(CheckpointError, match=r"step_000000000007 is torn: tensors\.pt is not what was written"):
        create_training_run(run.config, run.run_dir, path)
    assert directory_content(run.run_dir) == before
    gc.collect()  # an open file would be a warning, and warnings are errors
    lock = RunLock(run.run_dir / ".lock")
    assert lock.acquire() is None
    lock.release()


def test_a_directory_in_use_is_refused_with_the_holders_process(run):
    path = save_training_checkpoint(run, 7, parts_at(7))
    with pytest.raises(UserError, match=f"{run.run_dir} is in use by process {os.getpid()}"):
        create_training_run(run.config, run.run_dir, path)


def test_a_checkpoint_with_a_bad_number_is_not_written(run):
    with pytest.raises(NonFiniteError, match="The agent's value is NaN or infinite at step 7"):
        save_training_checkpoint(run, 7, {"session": StepCounter(7), "agent": Part([1.0, float("nan")])})
    assert not list(run.run_dir.glob("checkpoints/*"))
