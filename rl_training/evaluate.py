"""python -m rl_training.evaluate run=outputs/… episodes=20: plays seeded episodes with a trained agent."""

import sys
from pathlib import Path

USAGE = """Evaluate a trained agent on seeded, deterministic episodes.

usage: python -m rl_training.evaluate run=<run directory> [checkpoint=best] [episodes=20] [seed=…]

  run         a run directory, or one of its checkpoints; may be given several times
  checkpoint  best (default), last, or a step number
  episodes    how many episodes to play
  seed        episode i starts from seed + i; default: the run's eval.seed"""


def cli() -> None:
    """Run the command."""
    from rl_training.cli import fail, parse_key_values
    from rl_training.errors import UserError

    converters = {"run": Path, "checkpoint": str, "episodes": int, "seed": int}
    try:
        arguments = parse_key_values(sys.argv[1:], converters, USAGE)
        if "run" not in arguments:
            raise UserError("Name a run: python -m rl_training.evaluate run=outputs/ppo/cartpole/<run>")
        episodes = arguments.get("episodes", [20])[-1]
        if episodes < 1:
            raise UserError(f"episodes must be at least 1, got {episodes}.")
        for run in arguments["run"]:
            _evaluate(run, arguments.get("checkpoint", ["best"])[-1], episodes, arguments.get("seed", [None])[-1])
    except UserError as error:
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def _evaluate(run: Path, checkpoint: str, episodes: int, seed: int | None) -> None:
    from rl_training.runtime.workflows import evaluate_checkpoint

    def show(played: int) -> None:
        if sys.stderr.isatty():
            print(
                f"\r\x1b[K{played}/{episodes} episodes", end="\r\x1b[K" if played == episodes else "", file=sys.stderr
            )

    result = evaluate_checkpoint(run, checkpoint=checkpoint, episodes=episodes, seed=seed, on_episode=show)
    summary = result.summary
    print(
        f"{run} at step {result.global_step:,}: return {summary.mean:.2f}, standard deviation {summary.std:.2f}, "
        f"95 % interval [{summary.low:.2f}, {summary.high:.2f}], {summary.count} episodes from seed {result.first_seed}"
    )


if __name__ == "__main__":
    cli()
