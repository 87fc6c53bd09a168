"""What the bits of a run depend on besides config and seed, and how a resume speaks of what has changed."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from cli_helpers import TINY_PPO, directory_content, only_run_dir, run_card, run_train, tiny_run_config

from rl_training.runtime import exactness
from rl_training.runtime.exactness import (
    inexact_warning,
    keep_update_path,
    numeric_platform,
    platform_changes,
)

BEFORE = {
    "python": "3.11",
    "torch": "2.6.0",
    "numpy": "2.1.0",
    "gymnasium": "1.1.0",
    "device": "cpu",
    "threads": "1",
    "acting": "numpy",
    "updates": "compiled",
    "matrix_products": "onednn",
    "cpu": "a processor",
}


@pytest.mark.parametrize(
    ("name", "now", "message"),
    [
        ("python", "3.12", "python changed from 3.11 to 3.12 (another installation)"),
        ("torch", "2.7.0", "torch changed from 2.6.0 to 2.7.0 (another installation)"),
        ("numpy", "2.2.0", "numpy changed from 2.1.0 to 2.2.0 (another installation)"),
        ("gymnasium", "1.2.0", "gymnasium changed from 1.1.0 to 1.2.0 (another installation)"),
        ("device", "a GPU", "device changed from cpu to a GPU (device.kind)"),
        ("threads", "2", "threads changed from 1 to 2 (device.threads)"),
        (
            "acting",
            "torch",
            "acting changed from numpy to torch (it follows from device.kind and the version of rl_training)",
        ),
        ("updates", "eager", "updates changed from compiled to eager (device.compile)"),
        (
            "matrix_products",
            "default",
            "matrix products changed from onednn to default (it follows from the processor)",
        ),
        ("cpu", "another", "cpu changed from a processor to another (another machine)"),
    ],
)
def test_a_change_is_named_with_the_setting_or_the_fact_behind_it(name, now, message):
    assert platform_changes(BEFORE, {**BEFORE, name: now}) == [message]


def test_the_words_cover_what_a_checkpoint_records():
    recorded = numeric_platform(tiny_run_config("ppo"), torch.device("cpu"), object())
    assert list(recorded) == list(BEFORE)
    assert (recorded["device"], recorded["acting"], recorded["updates"]) == ("cpu", "torch", "eager")


def test_nothing_changed_means_nothing_to_say():
    assert platform_changes(BEFORE, BEFORE) == []


def test_a_checkpoint_that_has_matrix_products_with_a_space_is_understood():
    old = {("matrix products" if name == "matrix_products" else name): value for name, value in BEFORE.items()}
    assert platform_changes(old, BEFORE) == []
    assert platform_changes({**old, "matrix products": "default"}, BEFORE) == [
        "matrix products changed from default to onednn (it follows from the processor)"
    ]


def test_what_a_checkpoint_does_not_record_was_unknown():
    old = {name: value for name, value in BEFORE.items() if name != "updates"}
    assert platform_changes(old, BEFORE) == ["updates changed from unknown to compiled (device.compile)"]


def test_the_warning_is_one_line_with_all_reasons_and_what_they_mean():
    assert inexact_warning(["threads changed from 1 to 2 (device.threads)", "environment 0 started a new episode"]) == (
        "This resume is not exact: threads changed from 1 to 2 (device.threads); environment 0 started a new episode. "
        "The result may differ from that of an uninterrupted run; resume_strict=true would refuse to go on."
    )


@pytest.mark.parametrize(
    ("before", "saved_compile", "expected"),
    [
        ("compiled", True, "compiled, required"),
        ("eager", True, "eager"),  # compiling had failed
        ("eager", False, "compiled"),  # asked for on resume
    ],
)
def test_a_resumed_agent_updates_as_before_unless_it_was_asked_to_change(before, saved_compile, expected):
    update = SimpleNamespace(path="compiled", required=False)
    update.run_eagerly = lambda: setattr(update, "path", "eager")
    keep_update_path(SimpleNamespace(compiled_update=update), {"updates": before}, saved_compile)
    assert update.path + (", required" if update.required else "") == expected


def test_an_agent_without_compiled_updates_is_left_alone():
    agent = SimpleNamespace(compiled_update=None)
    keep_update_path(agent, {"updates": "compiled"}, True)
    assert agent == SimpleNamespace(compiled_update=None)


# As a user meets it


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    cwd = tmp_path_factory.mktemp("finished")
    result = run_train(*TINY_PPO, "device.threads=1", cwd=cwd)
    assert result.returncode == 0, result.stderr
    return only_run_dir(cwd)


def test_the_run_card_names_how_the_agent_computes_in_keys_without_spaces(finished):
    card = run_card(finished)
    assert (card["acting"], card["updates"]) == ("numpy", "eager")
    assert card["matrix_products"] in ("default", "onednn")
    assert [key for key in card if " " in key] == []


def test_a_resume_that_is_not_exact_says_so_in_one_plain_line(finished, tmp_path):
    run_dir = shutil.copytree(finished, tmp_path / "run")
    result = run_train("resume=run", "total_timesteps=160", "device.threads=2", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, "")
    assert result.stderr == (
        "WARNING: This resume is not exact: threads changed from 1 to 2 (device.threads). "
        "The result may differ from that of an uninterrupted run; resume_strict=true would refuse to go on.\n"
    )
    card = run_card(run_dir)
    assert (card["exact"], card["inexact_reasons"]) == (False, ["threads changed from 1 to 2 (device.threads)"])


def test_a_strict_resume_refuses_in_one_line_and_changes_nothing(finished, tmp_path):
    run_dir = shutil.copytree(finished, tmp_path / "run")
    before = directory_content(run_dir / "checkpoints")
    settings = ["total_timesteps=160", "device.threads=2", "resume_strict=true"]
    result = run_train("resume=run", *settings, cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (
        1,
        "",
        "error: resume_strict=true: threads changed from 1 to 2 (device.threads). Nothing was changed.\n",
    )
    assert directory_content(run_dir / "checkpoints") == before
    assert "resumes" not in run_card(run_dir)


def test_a_resume_of_an_old_checkpoint_with_a_space_in_its_key_is_exact(tmp_path, monkeypatch):
    from rl_training.runtime.ppo_trainer import train_ppo
    from rl_training.runtime.workflows import resume_training

    paths = exactness.numeric_paths

    def old_paths(agent):
        return {name.replace("_", " "): value for name, value in paths(agent).items()}

    with monkeypatch.context() as patch:
        patch.setattr(exactness, "numeric_paths", old_paths)
        train_ppo(tiny_run_config("ppo", stop_at_step=32), run_dir=tmp_path / "run")
    resume_training(tmp_path / "run")
    assert run_card(tmp_path / "run")["exact"] is True
