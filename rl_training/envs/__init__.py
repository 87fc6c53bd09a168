"""Making, stepping and normalising Gymnasium environments."""
