"""Which algorithms exist, and how an experiment is set up and resumed."""
