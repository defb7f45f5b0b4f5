"""Secrets in arguments and environment: what they are, and text without them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

HIDDEN = "***"
_NAME = re.compile(
    r"(?:^|[-_])(?:api[-_]?key|key|token|secret|password|passwd|passphrase|credentials?|auth)$", re.IGNORECASE
)
_SHORTEST = 6  # a shorter value would also cut words that are no secret
_IN_TEXT = re.compile(
    r"""((?:\w+_)?(?:api_key|secret|password|auth_token|hf_token|access_token))\s*=\s*(['"])(?!\2)(.+?)\2""",
    re.IGNORECASE,
)


def is_secret_name(name: str) -> bool:
    """Whether an option or variable of this name holds a secret (`--api-key`, `HF_TOKEN`), not a path to one."""
    return _NAME.search(name.lstrip("-")) is not None


def arguments(command: Sequence[str]) -> list[str]:
    """A command line that may be shown and recorded."""
    shown, hide = [], False
    for word in command:
        name, equals, _ = word.partition("=")
        if hide and not word.startswith("--"):
            shown.append(HIDDEN)
        elif equals and is_secret_name(name) and (name.startswith("--") or name.isupper()):
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(word)
        hide = word.startswith("--") and not equals and is_secret_name(word)
    return shown


def command(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The same, and without what the environment keeps secret."""
    values = secrets(words, environment)
    return [text(word, values) for word in arguments(words)]


def secrets(command: Sequence[str], environment: Mapping[str, str]) -> tuple[str, ...]:
    """The values that must not appear in a log, longest first."""
    found = {value for name, value in environment.items() if is_secret_name(name)}
    for at, word in enumerate(command):
        name, equals, value = word.partition("=")
        if is_secret_name(name) and (name.startswith("--") or name.isupper()):
            found.add(value if equals else command[at + 1] if at + 1 < len(command) else "")
    return tuple(sorted((v for v in found if len(v) >= _SHORTEST), key=len, reverse=True))


def text(line: str, values: Sequence[str]) -> str:
    """A line without the values, and without what stands behind `api_key=` and its like."""
    for value in values:
        line = line.replace(value, HIDDEN)
    return _IN_TEXT.sub(rf"\1=\2{HIDDEN}\2", line)
