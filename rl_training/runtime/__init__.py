"""What happens while a run trains: trainers, checkpoints, logs, callbacks, evaluation."""
