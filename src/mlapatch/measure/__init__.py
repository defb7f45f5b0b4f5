"""Bench, trace, estimate and runs."""
