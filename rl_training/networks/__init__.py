"""Neural networks and the probability formulas of their outputs."""
