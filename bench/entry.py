"""How `python -m bench` and `python -m gates` run a command and end.

One line for every error, no traceback, and no server left behind: SIGTERM unwinds like Ctrl-C.
"""

import signal
from collections.abc import Sequence
from types import FrameType

import click

_INTERRUPTED = 130


def run(cli: click.Command, name: str, args: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code: what it returns, its error's, 130 when interrupted."""
    signal.signal(signal.SIGTERM, _end)
    try:
        result = cli.main(args, prog_name=f"python -m {name}", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        click.echo(f"Error: {error.format_message()}", err=True)
        return error.exit_code
    except click.Abort:
        click.echo("Interrupted.", err=True)
        return _INTERRUPTED
    return result or 0


def _end(number: int, frame: FrameType | None) -> None:
    """Turn SIGTERM into an exception, so that servers are ended on the way out."""
    raise KeyboardInterrupt
