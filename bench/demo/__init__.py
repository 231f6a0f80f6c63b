"""The demonstration: a real engine keeps its hot contexts under memory pressure, or does not."""
