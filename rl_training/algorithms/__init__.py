"""The algorithms: losses as pure functions, and agents that own networks and optimizers."""
