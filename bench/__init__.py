"""Benchmarks and demonstrations that drive real servers through HTTP only.

`python -m bench --help` lists them. Nothing here reaches into the packages it measures:
a server is started as a user would start it, and what it did is read from its answers and
its metrics.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The repository's root: default caches and results lie below it, ignored by git."""
