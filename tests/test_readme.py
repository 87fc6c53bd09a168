"""What the README tells users to type is accepted."""

import re
import shlex
from pathlib import Path

import pytest

from rl_training.cli import compose_config

README = (Path(__file__).parent.parent / "README.md").read_text()
COMMANDS = re.findall(r"^(?:python -m rl_training\.(?:train|verify)|scripts/train)\b([^#\n]*)", README, re.MULTILINE)
# A placeholder, not a real package; sweeps and resumes have tests of their own.
CHECKED = [arguments for arguments in COMMANDS if not re.search(r"my_package| -m |resume=", arguments)]


def test_the_readme_has_commands():
    assert len(CHECKED) >= 4


@pytest.mark.parametrize("arguments", CHECKED)
def test_a_command_of_the_readme_composes_and_fits_its_environment(arguments):
    config = compose_config(shlex.split(arguments))
    assert config.env.id


def test_every_file_that_the_readme_names_exists():
    root = Path(__file__).parent.parent
    named = re.findall(r"`(rl_training/[\w/.]+|conf/|docs/[\w.-]+|scripts/\w+)`|\]\(([\w/.-]+)\)", README)
    paths = {first or second for first, second in named}
    assert len(paths) >= 8
    for path in paths:
        assert (root / path).exists(), path


def test_the_readme_says_what_the_virtual_environment_lacks():
    setup = (Path(__file__).parent.parent / "scripts" / "setup-venv").read_text()
    assert '--editable "$root[dev,mujoco,box2d,atari,envpool]"' in setup
    assert "come with the extra `bench`, which the `.venv` of `scripts/train` does not contain" in README
