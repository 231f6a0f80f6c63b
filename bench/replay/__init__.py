"""Does one policy, with its defaults, hold on every workload? `python -m bench replay`.

Recorded traces, generated shapes and a change of phase are replayed under our policies and their
rivals. Each workload becomes one JSON file; the report and its plots are rendered from these files
alone. See bench/REPLAY.md for the result and bench/policy-notes.md for how it came about.
"""
