"""The public Python names."""
