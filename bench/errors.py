"""Errors that end a command with one line and no traceback.

`BenchError` ends with exit code 1 (the run could not be done), `UsageProblem` with exit
code 2 (what was asked for cannot be right: an option, a path, a port).
"""

import click


class BenchError(click.ClickException):
    """The run failed; the message is one line that says what happened and where to look."""

    exit_code = 1


class UsageProblem(BenchError):
    """An option, a path or a port that was given cannot be used; the message says which."""

    exit_code = 2
