"""A plain log gets whole lines and no control characters."""

import io

from rich.console import Console

from bench.progress import Reporter


def reporter() -> tuple[Reporter, io.StringIO]:
    text = io.StringIO()
    return Reporter(Console(file=text, width=100, highlight=False, force_terminal=False)), text


def test_wait_says_what_and_how_long() -> None:
    plain, text = reporter()
    with plain.waiting("booting [arm]") as update:
        for elapsed in (0.0, 5.0, 15.0, 16.0, 30.5):
            update(elapsed, 300.0)
    assert text.getvalue().splitlines() == [
        "booting [arm] ...",
        "booting [arm]: 15 s (at most 300 s)",
        "booting [arm]: 30 s (at most 300 s)",
        "booting [arm]: done in 0 s",
    ]


def test_count_says_a_few_steps() -> None:
    plain, text = reporter()
    with plain.counting("requests", 8) as advance:
        for _ in range(8):
            advance()
    assert text.getvalue().splitlines() == [
        "requests: 2/8",
        "requests: 4/8",
        "requests: 6/8",
        "requests: 8/8 in 0 s",
    ]


def test_terminal_shows_the_same_facts() -> None:
    text = io.StringIO()
    live = Reporter(Console(file=text, width=100, highlight=False, force_terminal=True))
    with live.counting("requests", 2) as advance:
        advance()
        advance()
    with live.waiting("booting") as update:
        update(3.0, 300.0)
    assert "requests: 2/2 in 0 s" in text.getvalue()
    assert "booting: 3 s (at most 300 s)" in text.getvalue()
