"""scripts/sac_pendulum_reference.py runs as its help says."""

import re
import subprocess
import sys

from cli_helpers import REPO, checkpoint_steps, command_environment, only_run_dir, run_card

SCRIPT = REPO / "scripts" / "sac_pendulum_reference.py"


def run_script(*arguments, cwd):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        cwd=cwd,
        env=command_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_reference_script_trains_and_prints_the_return_with_its_interval(tmp_path):
    result = run_script("--steps", "200", "--seed", "3", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    match = re.search(
        r"^SAC on Pendulum-v1, 200 steps, seed 3: return (-\d+\.\d), 95 % interval \[(-?\d+\.\d), (-?\d+\.\d)\]",
        result.stdout,
        re.MULTILINE,
    )
    assert match is not None, result.stdout
    mean, low, high = map(float, match.groups())
    assert low < mean < high < 0.0
    run_dir = only_run_dir(tmp_path / "outputs" / "sac" / "pendulum")
    assert checkpoint_steps(run_dir)[-1] == 200
    assert (run_card(run_dir)["seed"], run_card(run_dir)["preset"]) == (3, "sac_pendulum")


def test_the_reference_script_explains_its_flags(tmp_path):
    result = run_script("--help", cwd=tmp_path)
    assert result.returncode == 0
    assert re.search(r"--steps STEPS\s+.*20000", result.stdout)
    assert "--seed SEED" in result.stdout
    assert list(tmp_path.iterdir()) == []
