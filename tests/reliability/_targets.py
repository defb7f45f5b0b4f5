"""Targets that are no plain Python file: a refusal with its exit code and what to do; or, if readable, the way back."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from tests.reliability._installing import Bench, Install, Kind, Trial

DOES_NOT_FIT, ENVIRONMENT = 3, 5
SECONDS = 30.0  # not a speed: what takes longer hangs
PRINTED = "nested too deeply to be taken apart"  # seen by apply only: status does not print the file
BLANKS = "the parser would change line endings, form feeds or blanks"


def _here(bench: Bench, name: str) -> Install:
    site = bench.small(re.sub(r"\W+", "-", name))
    return Install(site / "sglang", ("--sglang", site), "wheel", state="edited")


CONTENTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a syntax error": (lambda text: text.replace(b"def forward_decode(", b"def forward_decode((", 1), "not Python 3"),
    "half a file": (lambda text: text[: len(text) // 2], "not Python 3"),
    "a conflict of git's": (lambda text: b"<<<<<<< HEAD\n" + text, "not Python 3"),
    "a print statement": (lambda text: text + b'print "hello"\n', "not Python 3"),
    "Python 2's except": (lambda text: text + b"try:\n  pass\nexcept A, b:\n  raise A, b\n", "not Python 3"),
    "tabs and spaces mixed": (lambda text: text + b"if 1:\n\tif 1:\n        pass\n", "not Python 3"),
    "Latin-1 that is not declared": (lambda text: text + b"x = '\xe9'\n", "cannot be decoded"),
    "UTF-16": (lambda text: text.decode().encode("utf-16"), "cannot be decoded"),
    "an unknown coding": (lambda text: b"# coding: nonsense\n" + text, "cannot be decoded"),
    "a null byte": (lambda text: text + b"\0\n", "not Python 3"),
    "random bytes": (lambda _: bytes((i * i * 31 + 7) % 256 for i in range(40_000)), ""),
    "empty": (lambda _: b"", "found"),
    "a comment only": (lambda _: b"# moved\n", "found"),
    "another module": (lambda _: b"class FlashInferMLAAttnBackend:\n    pass\n", "found"),
    "3,000 parentheses": (lambda text: text + b"x = " + b"(" * 3000 + b")" * 3000 + b"\n", "not Python 3"),
    "20,000 terms": (lambda text: text + b"x = 0" + b" + 0" * 20_000 + b"\n", "nested"),
    "20,000 conditions": (lambda text: text + b"x = 0" + b" or 0" * 20_000 + b"\n", "nested"),
    "3,000 strings side by side": (lambda text: text + b"x = " + b"'' " * 3000 + b"\n", PRINTED),
    "3,000 calls of calls": (lambda text: text + b"x = f" + b"()" * 3000 + b"\n", "nested"),
    "blank lines and blanks at the end": (lambda text: text + b"\n\n   \n", BLANKS),
    "100 MB": (lambda text: text + b"# 0123456789abcdef\n" * (100_000_000 // 19), "is not looked into"),
}
QUICK = ("3,000 parentheses",)


def _misfit(here: Install, words: str) -> None:
    begin = time.monotonic()
    found = here.facts("gather-cast")
    assert found[2] == "drifted" or words == PRINTED, found
    here.refuses("apply", "gather-cast", code=DOES_NOT_FIT, words=("flashinfer_mla_backend.py", words))
    here.ok("revert")
    assert time.monotonic() - begin < SECONDS, f"it took {time.monotonic() - begin:.0f} s"


def unreadable(bench: Bench) -> Iterator[Trial]:
    for name in CONTENTS if bench.thorough else QUICK:
        change, words = CONTENTS[name]
        here = _here(bench, name)
        here.file.write_bytes(change(here.file.read_bytes()))
        yield name, partial(_misfit, here, words)


def broken_later(bench: Bench) -> Iterator[Trial]:
    """The file is broken by hand while a patch is in it: nothing is forgotten, the way back stays."""
    for name in list(CONTENTS)[::2]:
        here = _here(bench, name)
        before = here.file.read_bytes()

        def story(here: Install, before: bytes, change: Callable[[bytes], bytes]) -> None:
            here.ok("apply", "gather-cast")
            patched = here.file.read_bytes()
            here.file.write_bytes(change(patched))
            here.ok("status")
            assert here("revert").code in (0, 3, 4)
            here.file.write_bytes(patched)
            here.ok("revert")
            assert here.file.read_bytes() == before

        yield name, partial(story, here, before, CONTENTS[name][0])


READABLE: dict[str, Callable[[bytes], bytes]] = {
    "a BOM": lambda text: b"\xef\xbb\xbf" + text,
    "CRLF": lambda text: text.replace(b"\n", b"\r\n"),
    "Latin-1, declared": lambda text: b"# -*- coding: latin-1 -*-\n" + text + b"x = '\xe9'\n",
    "no newline at the end": lambda text: text.rstrip(b"\n"),
    "trailing blanks everywhere": lambda text: text.replace(b":\n", b":  \n"),
    "text of other alphabets": lambda text: text + "名 = 'ünï 🙂'\n".encode(),
}


def readable(bench: Bench) -> Iterator[Trial]:
    for name, change in READABLE.items():
        here = _here(bench, name)
        here.file.write_bytes(change(here.file.read_bytes()))
        yield name, partial(here.story, "gather-cast")


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    here = os.open(path.parent, os.O_RDONLY)  # a socket's name has 107 bytes at most
    try:
        socket.socket(socket.AF_UNIX).bind(f"/proc/self/fd/{here}/{path.name}")
    finally:
        os.close(here)


SHAPES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a folder": (lambda path: path.mkdir(), "a folder"),
    "a FIFO": (_fifo, "a device or pipe"),
    "a link to /dev/zero": (lambda path: path.symlink_to("/dev/zero"), "a device or pipe"),
    "a link to nothing": (lambda path: path.symlink_to("/nowhere/at/all.py"), "a link to nothing"),
    "a link to itself": (lambda path: path.symlink_to(path.name), "a link to nothing"),
}


def shapes(bench: Bench) -> Iterator[Trial]:
    for name, (make, words) in SHAPES.items():
        for verb in ("status", "apply gather-cast", "revert", "guard check"):
            here = _here(bench, f"{name} {verb}")
            here.file.unlink()
            make(here.file)

            def refused(here: Install, verb: str, words: str) -> None:
                begin = time.monotonic()
                here.refuses(*verb.split(), code=ENVIRONMENT, words=(str(here.file), words))
                assert time.monotonic() - begin < SECONDS

            yield f"{name}: {verb}", partial(refused, here, verb, words)
    here = _here(bench, "missing")
    here.file.unlink()

    def missing() -> None:
        assert here("status").code == 0
        here.refuses("apply", "gather-cast", code=DOES_NOT_FIT, words=("is not in this SGLang",))

    yield "missing", missing
    for name in ("a FIFO", "a link to /dev/zero"):
        here = _here(bench, f"neighbour {name}")
        neighbour = here.package / "srt" / "server_args.py"
        neighbour.unlink()
        SHAPES[name][0](neighbour)

        def stopped(here: Install, neighbour: Path) -> None:
            here.refuses("guard", "check", code=ENVIRONMENT, words=(str(neighbour),))

        yield f"another file is {name}: guard check", partial(stopped, here, neighbour)


KINDS: Iterable[Kind] = (
    Kind("a target that does not parse, is too large or too deep: exit 3, in seconds", unreadable, True),
    Kind("the same after a patch was applied: the way back is kept", broken_later),
    Kind("a target with a BOM, CRLF, another coding, odd blanks: patched and back", readable),
    Kind("a target that is a folder, FIFO, device or link to nothing: exit 5, never a wait", shapes),
)
