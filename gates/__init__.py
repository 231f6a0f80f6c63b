"""Correctness gates on real servers: what was restored must decode as what never left.

`python -m gates --help` lists the commands. Servers are started as a user would start them and
judged by their answers and metrics; nothing here reaches into the packages under test.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The repository's root: default caches and results lie below it, ignored by git."""

PUBLISHED = Path(__file__).resolve().parent / "published"
"""Recordings and verdicts that this repository's claims rest on, a folder for each profile."""
