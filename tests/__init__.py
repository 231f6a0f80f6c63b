"""A package, so that a dependency that ships its own ``tests`` cannot stand in front of it."""
