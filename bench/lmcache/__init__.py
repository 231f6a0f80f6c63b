"""Replays through a real LMCache engine; see `replay.py`."""
