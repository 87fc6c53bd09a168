#!/usr/bin/env python
"""Trains SAC on Pendulum with its tuned preset and prints the return: the number to compare other versions with.

python scripts/sac_pendulum_reference.py --seed 1        about two minutes; a good agent reaches about -150
"""

import argparse

import rl_training


def main() -> None:
    """Train, play 100 seeded episodes with the last checkpoint, and print their mean with its 95 % interval."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter, prog="sac_pendulum_reference.py"
    )
    parser.add_argument("--steps", type=int, default=20_000, help="env steps to train for")
    parser.add_argument("--seed", type=int, default=1, help="seed of the run")
    arguments = parser.parse_args()

    result = rl_training.fit("sac", "Pendulum-v1", total_timesteps=arguments.steps, seed=arguments.seed)
    summary = rl_training.evaluate_checkpoint(result.run_dir, checkpoint="last", episodes=100).summary
    print(
        f"SAC on Pendulum-v1, {arguments.steps} steps, seed {arguments.seed}: return {summary.mean:.1f}, "
        f"95 % interval [{summary.low:.1f}, {summary.high:.1f}] over {summary.count} episodes"
    )


if __name__ == "__main__":
    main()
