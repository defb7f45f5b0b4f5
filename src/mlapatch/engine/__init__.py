"""Bytes in, value out: patches, patterns, edits and verdicts. No I/O, no printing, no exits."""
