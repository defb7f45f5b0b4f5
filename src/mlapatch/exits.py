"""Exit codes, each with the sentence that explains it (the table in README.md is this enum)."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Process exit codes of `mlapatch`; scripts rely on them."""

    sentence: str

    def __new__(cls, value: int, sentence: str) -> Exit:  # noqa: D102
        member = int.__new__(cls, value)
        member._value_ = value
        member.sentence = sentence
        return member

    OK = 0, "done, or nothing to do"
    FOUND = 1, "a check found something"
    USAGE = 2, "the command line is wrong"
    DOES_NOT_FIT = 3, "the patch does not fit (drifted, ambiguous, conflicts)"
    REFUSED = 4, "refused, to protect local edits"
    ENVIRONMENT = 5, "the environment: no SGLang, a file that cannot be used, an unsupported version, GPU or library"
    SERVER = 6, "the server did not start, died, or answers garbage"
    BUG = 70, "a bug in mlapatch"
    INTERRUPTED = 130, "interrupted"
