"""Registers the games of the Arcade Learning Environment; `env.import_module` of the Atari groups names this module."""

import ale_py

# Else each process prints a banner over its progress line.
ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
