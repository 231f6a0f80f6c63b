"""Progress that says what is being waited for, on a terminal and in a plain log.

On a terminal a spinner or a bar is drawn and replaced by one line when the phase ends. Without
one (a CI log, a pipe) each phase prints a line when it starts and when it ends, with a few in
between, and no control characters.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

_PLAIN_WAIT_S = 15.0  # seconds between two lines of one wait in a plain log
_PLAIN_PARTS = 4  # lines of one counted phase in a plain log
_PLAIN_WIDTH = 140


def make_console() -> Console:
    """Return a console for stdout; without a terminal it is wide and plain."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PLAIN_WIDTH, no_color=True)
    return console


class Reporter:
    """Tells one person, in order, what a long run is doing."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def say(self, line: str) -> None:
        """Print one line, as it is."""
        self.console.print(line, markup=False, soft_wrap=True)

    @contextmanager
    def waiting(self, what: str) -> Iterator[Callable[[float, float], None]]:
        """Show a wait; the callable is told the seconds waited and the seconds allowed."""
        started = time.monotonic()
        if self.console.is_terminal:
            with self._live(SpinnerColumn(), TextColumn("{task.description}")) as live:
                task = live.add_task(what)

                def update(elapsed: float, budget: float) -> None:
                    text = f"{what}: {elapsed:.0f} s (at most {budget:.0f} s)"
                    live.update(task, description=text)

                yield update
        else:
            self.say(f"{what} ...")
            said = 0.0

            def update(elapsed: float, budget: float) -> None:
                nonlocal said
                if elapsed - said >= _PLAIN_WAIT_S:
                    said = elapsed
                    self.say(f"{what}: {elapsed:.0f} s (at most {budget:.0f} s)")

            yield update
        self.say(f"{what}: done in {time.monotonic() - started:.0f} s")

    @contextmanager
    def counting(self, what: str, total: int) -> Iterator[Callable[[], None]]:
        """Show a phase of `total` steps; the callable is told of each finished step."""
        started = time.monotonic()
        done = 0
        if self.console.is_terminal:
            count = TextColumn("{task.fields[k]}")
            with self._live(TextColumn("{task.description}"), BarColumn(), count) as live:
                task = live.add_task(what, total=total, k=f"0/{total}")

                def advance() -> None:
                    nonlocal done
                    done += 1
                    live.update(task, completed=done, k=f"{done}/{total}")

                yield advance
        else:
            every = max(1, total // _PLAIN_PARTS)

            def advance() -> None:
                nonlocal done
                done += 1
                if done % every == 0 and done < total:
                    self.say(f"{what}: {done}/{total}")

            yield advance
        self.say(f"{what}: {done}/{total} in {time.monotonic() - started:.0f} s")

    def _live(self, *columns: SpinnerColumn | TextColumn | BarColumn) -> Progress:
        return Progress(*columns, console=self.console, transient=True)
