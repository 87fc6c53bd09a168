"""python -m rl_training.train algo=sac env=pendulum: composes the config with Hydra and trains."""


def cli() -> None:
    """Run the command."""
    from rl_training.cli import train_main

    train_main()


if __name__ == "__main__":
    cli()
