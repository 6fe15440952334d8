"""Recipes of the tiny checkpoints in golden/checkpoints: `python -m conformance.recipes --help`."""
