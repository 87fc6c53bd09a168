"""The errors that are the user's to mend: shown as one line, never as a traceback."""


class UserError(Exception):
    """Something the user can fix; the message says what is wrong, where, and what to do instead."""


class ConfigError(UserError, ValueError):
    """A configuration value that is unknown, of the wrong type, out of range, or at odds with another one."""


class NonFiniteError(UserError):
    """NaN or infinity where a number is needed."""


class EnvironmentFailure(UserError):  # noqa: N818 - it is the environment that fails
    """An environment that raised, or returned something its spaces do not allow."""


def did_you_mean(name: str, choices: "list[str] | tuple[str, ...]") -> str:
    """Return " Did you mean 'x'?" for the closest of `choices`, or an empty string when none is close."""
    import difflib

    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""
