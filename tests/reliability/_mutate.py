"""Seeded mutations: of bytes, of tokens, and of the structure of parsed JSON or TOML."""

from __future__ import annotations

import copy
import json
import random
import re
from typing import Any

from tests.reliability._attempts import SENTINEL

HOSTILE: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2**31, 2**63, -(2**63), 10**30, 1e308, -0.0, float("nan"), float("inf"),
    "", " ", "\x00", "\x1b[2J\x9b31m", "\u202egnp", "é", "🙂", "\ufeff", "../../../etc/passwd", "/dev/zero",
    "a" * 5000, "[bold]x[/]", ":warning:", "%s%n{0}{x}", "${HOME}", f"$(touch {SENTINEL})", f"`touch {SENTINEL}`; #",
    "'\"\\", "module", "{a...}", "{a}", "{{", "}", "9" * 400, "0x" + "f" * 100, "nan", "-1", "~", "*", "\n", "\r", "\t",
    [], {}, [[]], [None], {"": ""}, {"a": {"a": {"a": []}}}, [[[[[[[[1]]]]]]]], ["a"] * 300,
)  # fmt: skip
"""Values that stand where another one is meant."""
_TOKEN = re.compile(rb"\w+|\s+|[^\w\s]")
_JUNK: tuple[bytes, ...] = (
    b"\x00",
    b"\xff",
    b"\xc3(",
    b"\x1b[2J",
    b'"',
    b"'''",
    b"\n",
    b"\r",
    b"\\",
    b"{",
    b"}",
    b"[[",
    b"]]",
    b"=",
    b"#",
)
_JUNK += (
    b"9" * 5000,
    b"0x" + b"f" * 5000,
    b"[" * 3000,
    b"{" * 300,
    b"a." * 2000,
    b"\xe2\x80\xae",
    b"1e999",
    b"..",
    b"/",
)


def mutated(data: bytes, rng: random.Random, others: tuple[bytes, ...] = ()) -> bytes:
    """One to four changes of bytes or tokens."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = rng.choice((_bytes, _tokens, _tokens, _lines))(data, rng)
        if others and rng.random() < 0.1:
            other = rng.choice(others)
            at, start = rng.randrange(len(data) + 1), rng.randrange(len(other) + 1)
            data = data[:at] + other[start : start + rng.randrange(400)] + data[at:]
    return data


def _bytes(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    size = rng.choice((1, 1, 3, 20, 200))
    kind = rng.randrange(6)
    if kind == 0:
        return data[:at] + bytes(rng.randrange(256) for _ in range(size)) + data[at + size :]
    if kind == 1:
        return data[:at] + data[at + size :]
    if kind == 2:
        return data[:at] + data[at : at + size] * rng.choice((2, 3, 50)) + data[at + size :]
    if kind == 3:
        return data[:at]
    if kind == 4:
        return data[:at] + rng.choice(_JUNK) + data[at:]
    return data[:at] + bytes([(data[at] if at < len(data) else 0) ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def _tokens(data: bytes, rng: random.Random) -> bytes:
    tokens = _TOKEN.findall(data)
    if not tokens:
        return rng.choice(_JUNK)
    at, other = rng.randrange(len(tokens)), rng.randrange(len(tokens))
    kind = rng.randrange(5)
    if kind == 0:
        del tokens[at]
    elif kind == 1:
        tokens[at], tokens[other] = tokens[other], tokens[at]
    elif kind == 2:
        tokens[at] = tokens[other]
    elif kind == 3:
        tokens.insert(at, rng.choice(_JUNK))
    else:
        tokens[at] = tokens[at] * rng.choice((2, 100))
    return b"".join(tokens)


def _lines(data: bytes, rng: random.Random) -> bytes:
    lines = data.splitlines(keepends=True) or [b""]
    at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    kind = rng.randrange(4)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines[at], lines[other] = lines[other], lines[at]
    elif kind == 2:
        lines.insert(at, lines[other])
    else:
        lines[at] = lines[at] * rng.choice((2, 30))
    return b"".join(lines)


def misshapen(value: Any, rng: random.Random) -> Any:
    """The same structure with one to three of its parts replaced, removed, doubled, renamed or moved."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = list(_places(value))
        if not places:
            return rng.choice(HOSTILE)
        holder, key = rng.choice(places)
        kind = rng.randrange(6)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            name = rng.choice(
                [k for k in (*holder, "x", "", "\x1b[2J", "__class__", "a.b", "path") if k != key] or ["y"]
            )
            holder[name] = holder.pop(key)
        elif kind == 2:
            other, its = rng.choice(places)
            holder[key] = copy.deepcopy(_at(other, its))
        elif kind == 3:
            holder[key] = [holder[key]] * rng.choice((1, 2, 120))
        elif kind == 4 and isinstance(holder[key], str):
            text, junk = holder[key], str(rng.choice([h for h in HOSTILE if isinstance(h, str)]))
            at = rng.randrange(len(text) + 1)
            holder[key] = text[:at] + junk + text[at:]
        else:
            holder[key] = copy.deepcopy(rng.choice(HOSTILE))
    return value


def _at(holder: Any, key: Any) -> Any:
    try:
        return holder[key]
    except (KeyError, IndexError, TypeError):
        return None


def _places(value: Any) -> Any:
    below = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in list(below):
        yield value, key
        yield from _places(child)


def as_toml(table: dict[str, Any]) -> str:
    """A table as TOML, as far as TOML can say it."""
    plain = "".join(f"{json.dumps(k)} = {_toml(v)}\n" for k, v in table.items() if not _tables(v))
    return plain + "".join(
        f"[[{json.dumps(k)}]]\n" + "".join(f"{json.dumps(n)} = {_toml(v)}\n" for n, v in one.items())
        for k, many in table.items()
        if _tables(many)
        for one in many
    )


def _tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(k))} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float):
        return repr(value).replace("e+", "e")
    if value is None:
        return "''"
    return (
        json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        if isinstance(value, (str, bool))
        else str(value)
    )
