"""python -m rl_training.verify algo=sac env=hopper: proves on your own settings that a killed run resumes exactly."""

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

USAGE = """Prove that a run of these settings is reproducible and resumes exactly after kill -9.

usage: python -m rl_training.verify [any overrides of rl_training.train] [verify.steps=…] [verify.kills=2]

Trains twice without interruption and once killed with SIGKILL and resumed, each to verify.steps env steps of the full
budget, and compares weights, optimizers, replay buffer, normaliser, random generators and metric rows bit for bit.
Schedules, threads and device are those of your run. Exit code 0: exact; 1: not, and the first difference is named.

  verify.steps   where to stop and compare; default: some updates after learning has started
  verify.kills   how often the third run is killed"""


def cli() -> None:
    """Run the command."""
    from rl_training.arguments import fail, leave, parse_key_values, whole_number, working_directory_importable
    from rl_training.cli import compose_config
    from rl_training.errors import UserError

    working_directory_importable()
    own = [argument for argument in sys.argv[1:] if argument.startswith("verify.") or argument in ("-h", "--help")]
    overrides = [argument for argument in sys.argv[1:] if argument not in own]
    try:
        settings = parse_key_values(own, {"verify.steps": whole_number, "verify.kills": whole_number}, USAGE)
        config = compose_config(overrides)
        default_steps = config.algo.second_update_step(config.env.num_envs) + 2_000
        steps = min(settings.get("verify.steps", [default_steps])[-1], config.total_timesteps)
        kills = settings.get("verify.kills", [2])[-1]
        if steps < 1 or kills < 1:
            raise UserError("verify.steps and verify.kills must be at least 1.")
        directory = Path(tempfile.mkdtemp(prefix="rl_training_verify_"))
        try:
            difference = find_difference(overrides, steps, kills, directory)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    except UserError as error:
        fail(str(error))
    except KeyboardInterrupt:
        leave("interrupted", 130)
    if difference is not None:
        print(f"not exact: {difference}")
        sys.exit(1)
    print(f"exact: {config.algo.name} on {config.env.id}, {steps:,} steps, killed {kills} times")


def find_difference(overrides: list[str], steps: int, kills: int, directory: Path) -> str | None:
    """Make the three runs and return their first difference, or None."""
    from rl_training.runtime.comparison import first_difference
    from rl_training.runtime.run_card import read_run_card

    # None of these settings touches what is learned; rows are dense so that a difference is found near where it began.
    command = [sys.executable, "-m", "rl_training.train", *overrides, f"stop_at_step={steps}"]
    command += ["logging.progress=false", "logging.metrics_file=true", f"logging.every={max(1, steps // 50)}"]
    command += [f"checkpoint.every={max(1, steps // 7)}", "checkpoint.keep_last=2", "checkpoint.every_seconds=null"]
    straight, again, killed = directory / "straight", directory / "again", directory / "killed"

    print(f"1/3 training to step {steps:,}", flush=True)
    _run([*command, f"hydra.run.dir={straight}"])
    print("2/3 training again", flush=True)
    _run([*command, f"hydra.run.dir={again}"])
    difference = first_difference(straight, again)
    if difference is not None:
        return f"two runs with the same seed differ: {difference}"
    print(f"3/3 training, killed {kills} times and resumed", flush=True)
    _run_and_kill([*command, f"hydra.run.dir={killed}"], killed, steps, _kill_steps(straight, kills))
    reasons = read_run_card(killed).get("inexact_reasons")
    return "; ".join(dict.fromkeys(reasons)) if reasons else first_difference(straight, killed)


def _run(command: list[str]) -> None:
    from rl_training.errors import UserError

    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        lines = process.stderr.strip().splitlines() or ["no message"]
        raise UserError(f"training failed: {lines[-1].removeprefix('error: ')}")


def _kill_steps(straight: Path, kills: int) -> list[int]:
    """Spread the kills over the steps at which the first run wrote a row: that is how the third one is followed."""
    from rl_training.errors import UserError
    from rl_training.runtime.loggers import METRICS_FILE, read_rows

    steps = [row["step"] for row in read_rows(straight / METRICS_FILE)]
    if not steps:
        raise UserError("the run is too short to be killed; give it more to do with verify.steps=…")
    return [steps[(kill + 1) * len(steps) // (kills + 1)] for kill in range(kills)]


def _run_and_kill(command: list[str], run_dir: Path, steps: int, kill_steps: list[int]) -> None:
    """Start the run, kill it once each of these steps is logged and a checkpoint exists, and let it end."""
    from rl_training.errors import UserError

    for goal in kill_steps:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        while process.poll() is None and _last_step(run_dir) < goal:
            time.sleep(0.002)
        if process.poll() is not None:
            assert process.stderr is not None
            lines = process.stderr.read().strip().splitlines()
            raise UserError(lines[-1].removeprefix("error: ") if process.returncode and lines else _TOO_FAST)
        process.kill()
        process.communicate()
        command = [sys.executable, "-m", "rl_training.train", f"resume={run_dir}", f"stop_at_step={steps}"]
    _run(command)


_TOO_FAST = "the run ended before it could be killed; give it more to do with verify.steps=…, or try again"


def _last_step(run_dir: Path) -> int:
    """Return the step of the newest metric row, 0 before a checkpoint exists."""
    from rl_training.runtime.checkpointing import checkpoint_paths
    from rl_training.runtime.loggers import METRICS_FILE, read_rows

    rows = read_rows(run_dir / METRICS_FILE) if checkpoint_paths(run_dir) else []
    return int(rows[-1]["step"]) if rows else 0


if __name__ == "__main__":
    cli()
