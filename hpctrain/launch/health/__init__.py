"""The step before training that finds slow and broken nodes."""
