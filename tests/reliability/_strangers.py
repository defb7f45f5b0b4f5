"""Patch folders from strangers: what stands in them, one named trick at a time, and what must come of it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from tests.corpus import BACKEND
from tests.reliability._attempts import SENTINEL, Oracle, Tally, run
from tests.reliability._place import Place

HEAD = 'name = "mine"\nsummary = "A patch"\ntarget = "srt/layers/attention/flashinfer_mla_backend.py"\n'
EDIT = '[[edit]]\nscope = "module"\nbefore = "class FlashInferMLAAttnBackend"\ninsert = "snippet.py"\n'
POST = '[[post]]\nscope = "module"\npresent = "added = {value}"\n'
GOOD = HEAD + EDIT + POST
DECODE = "FlashInferMLAAttnBackend.forward_decode"
RAN = f"open('{SENTINEL}', 'w').close()\n"

Build: TypeAlias = Callable[[Path], None]
Case: TypeAlias = tuple[str, Build, int]
"""A name, what makes the folder, and the exit code of `apply --dry-run`."""


def _folder(toml: str | bytes = GOOD, snippet: str | bytes = "added = 1\n", **others: str) -> Build:
    def build(folder: Path) -> None:
        _write(folder / "patch.toml", toml)
        _write(folder / "snippet.py", snippet)
        for name, text in others.items():
            _write(folder / name.replace("_py", ".py"), text)

    return build


def _write(path: Path, text: str | bytes) -> None:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def _key(line: str) -> str:
    """The good table with one more line at its top."""
    return f"{line}\n{GOOD}"


def _find(find: str, replace: str = "x", scope: str = DECODE) -> str:
    return f"{HEAD}[[edit]]\nscope = {scope!r}\nfind = {find!r}\nreplace = {replace!r}\n{POST}"


def _post(absent: str, scope: str = DECODE) -> str:
    return f"{GOOD}[[post]]\nscope = {scope!r}\nabsent = {absent!r}\n"


def _linked(name: str, to: str) -> Build:
    def build(folder: Path) -> None:
        _folder()(folder)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(to)

    return build


def _fifo(name: str) -> Build:
    def build(folder: Path) -> None:
        _folder()(folder)
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return build


def _is_folder(name: str) -> Build:
    def build(folder: Path) -> None:
        _folder()(folder)
        (folder / name).unlink()
        (folder / name).mkdir()

    return build


def _common_link(folder: Path) -> None:
    _folder(GOOD.replace('"snippet.py"', '"common/secret.py"'))(folder)
    outside = folder.parents[1] / "outside"
    outside.mkdir(exist_ok=True)
    _write(outside / "secret.py", "added = 'secret'\n")
    (folder.parent / "common").symlink_to(outside)


def _loop(folder: Path) -> None:
    _folder()(folder)
    (folder / "again").symlink_to(folder.parent)
    (folder.parent / "round").symlink_to(folder.parent)


def _planted(folder: Path) -> None:
    names = ("conftest_py", "__init___py", "setup_py", "sitecustomize_py", "patch_py", f"{SENTINEL}_py")
    _folder(GOOD, f"{RAN}added = 1\n", **dict.fromkeys(names, RAN))(folder)


def _unreadable(folder: Path) -> None:
    _folder()(folder)
    (folder / "snippet.py").chmod(0)


#: Wrong types for each key of the table and of its parts.
_KEYS: tuple[str, ...] = (
    "name",
    "summary",
    "target",
    "sglang",
    "sglang-reason",
    "excludes",
    "after",
    "upstream",
    "remove-when",
)
_KEYS += ("arithmetic", "requires", "edit", "post", "superseded")
_OTHER = ("1", "true", "2026-01-01", "nan", "[1]", "[[]]", "{ a = 1 }", "''", "[{}]", "[[[[1]]]]", "'\\u001b[2J'")


def _wrong_types() -> list[Case]:
    cases: list[Case] = []
    for number, key in enumerate(_KEYS):
        lines = [line for line in HEAD.splitlines() if not line.startswith(f"{key} =")]
        rest = "" if key in ("edit", "post") else EDIT + POST
        for value in (_OTHER[number % len(_OTHER)], _OTHER[(number * 3 + 1) % len(_OTHER)]):
            fits = (value in ("''", "'\\u001b[2J'") and key in ("summary", "sglang-reason", "remove-when")) or (
                value == "''" and key == "sglang"
            )
            text = "\n".join([f"{key} = {value}", *lines]) + "\n" + rest
            cases.append((f"{key} = {value}", _folder(text), 0 if fits else 2))
    return cases


_STARS = ", ".join(f"{{a{i}...}}, x" for i in range(25))
NAMED: list[Case] = [
    ("side effects planted", _planted, 0),
    ("not TOML", _folder("name = "), 2),
    ("empty", _folder(""), 2),
    ("not UTF-8", _folder(b"name = '\xff'"), 2),
    ("UTF-16", _folder(GOOD.encode("utf-16")), 2),
    ("NUL bytes", _folder(GOOD.encode() + b"\0" * 100), 2),
    ("a key twice", _folder(_key('name = "mine"')), 2),
    ("a table twice", _folder(GOOD + "[requires]\n[requires]\n"), 2),
    ("10,000 edits", _folder(HEAD + EDIT * 10_000 + POST), 2),
    ("101 edits", _folder(HEAD + EDIT * 101 + POST), 2),
    ("100 edits that compound", _folder(HEAD + EDIT.replace("module", "module") * 100 + POST), 3),
    ("1,000 postconditions", _folder(HEAD + EDIT + POST * 1000), 2),
    ("a key of 30,000 parts", _folder(_key("a." * 30_000 + "a = 1")), 2),
    ("keys of 500 parts each", _folder("".join(f"{'a.' * 500}a{i} = 1\n" for i in range(50)) + GOOD), 2),
    ("5,000 digits", _folder(_key("count = " + "9" * 1000 + "9" * 100)), 2),
    ("5,000 digits on lines", _folder(_key("sm = [\n" + "9" * 1100 + "\n]")), 2),
    ("6,000 hexadecimal digits", _folder(GOOD.replace("insert", "count = 0x" + "f" * 1000 + "\ninsert")), 2),
    ("arrays nested 400 deep", _folder(_key("upstream = " + "[" * 400 + "]" * 400)), 2),
    ("arrays nested 20,000 deep", _folder(_key("upstream = " + "[\n" * 20_000 + "]" * 400)), 2),
    ("tables nested 300 deep", _folder(_key("upstream = " + "{a=" * 300 + "1" + "}" * 300)), 2),
    ("lists of lists", _folder(_key("upstream = [" + "['lol','lol','lol','lol','lol'],\n" * 1500 + "]")), 2),
    ("a string of 60,000", _folder(_key('sglang-reason = """' + "a\n" * 30_000 + '"""')), 2),
    ("a target above", _folder(GOOD.replace("srt/layers", "srt/../..")), 2),
    ("a target that climbs", _folder(GOOD.replace("srt/layers/attention", "srt/../../../../../../var")), 2),
    ("an absolute target", _folder(GOOD.replace("srt/layers/attention", "/var")), 2),
    ("a target with NUL", _folder(GOOD.replace("srt/layers", "srt/\\u0000")), 2),
    ("a target with escapes", _folder(GOOD.replace("srt/layers", "srt/\\u001b[2J")), 2),
    ("a target with a backslash", _folder(GOOD.replace("srt/layers", "srt\\\\..\\\\..")), 2),
    ("a target of 3,000", _folder(GOOD.replace("srt/layers", "srt/" + "a" * 900)), 2),
    ("a target 200 deep", _folder(GOOD.replace("srt/layers", "srt/" + "a/" * 200)), 2),
    ("a target in the state folder", _folder(GOOD.replace("srt/layers/attention", "../.mlapatch")), 2),
    ("a target that is not there", _folder(GOOD.replace("attention/flash", "attention/x")), 3),
    ("a snippet above", _folder(GOOD.replace("snippet.py", "../../../../etc/hosts.py")), 2),
    ("an absolute snippet", _folder(GOOD.replace("snippet.py", "/etc/hosts.py")), 2),
    ("a snippet with NUL", _folder(GOOD.replace("snippet.py", "\\u0000.py")), 2),
    ("a snippet named by 900 letters", _folder(GOOD.replace("snippet.py", "a" * 900 + ".py")), 2),
    ("a snippet that is a device", _linked("snippet.py", "/dev/zero"), 2),
    ("a snippet that links to itself", _linked("snippet.py", "snippet.py"), 2),
    ("a snippet that links outside", _linked("snippet.py", "/etc/passwd"), 2),
    ("a snippet that is a pipe", _fifo("snippet.py"), 2),
    ("a snippet that is a folder", _is_folder("snippet.py"), 2),
    ("a table that links outside", _linked("patch.toml", "/etc/passwd"), 2),
    ("a common folder that links outside", _common_link, 2),
    ("folders that link to themselves", _loop, 0),
    ("a snippet nobody may read", _unreadable, 2 if os.geteuid() else 0),
    ("a snippet that is empty", _folder(GOOD, ""), 2),
    ("a snippet of 100,000", _folder(GOOD, "added = 1\n" + "x = 1\n" * 20_000), 2),
    ("a snippet with a list of 20,000", _folder(GOOD, "added = [" + "1," * 20_000 + "]\n"), 0),
    ("a snippet that closes the scope", _folder(GOOD, "added = 1\n)\nclass X:\n"), 2),
    ("a snippet that dedents", _folder(GOOD, "    added = 1\nx = 2\n"), 2),
    ("code that ends a method", _folder(
        f"{HEAD}[[edit]]\nscope = '{DECODE}'\nat = 'start'\ncode = \"a = 1\\n\\ndef other(self):\\n    pass\"\n{POST}"
    ), 3),
    ("code in an open string", _folder(GOOD.replace('insert = "snippet.py"', "code = '''added = \"\"\"'''")), 2),
    ("a snippet that ends in a comment", _folder(GOOD, "added = 1\n# ends\n"), 2),
    ("a snippet that ends in a backslash", _folder(GOOD, "added = 1\n\\"), 2),
    ("a snippet with a form feed", _folder(GOOD, "\fadded = 1\n"), 0),
    ("a snippet with lone carriage returns", _folder(GOOD, "added = 1\rx = 2\n"), 0),
    ("a snippet with line separators in a string", _folder(GOOD, "added = '\x85\u2028'\n"), 0),
    ("a snippet with escapes in a comment", _folder(GOOD, "added = 1  # \x1b[2J\x9b31m\u202e\n"), 0),
    ("a snippet with surrogates", _folder(GOOD, b"added = 1 # \xed\xa0\x80\n"), 2),
    ("a snippet with a byte order mark", _folder(GOOD, b"\xef\xbb\xbfadded = 1\n"), 2),
    ("a snippet that returns", _folder(GOOD, "added = 1\nreturn\n"), 3),
    ("a snippet from the future", _folder(GOOD, "from __future__ import annotations\nadded = 1\n"), 3),
    ("a snippet with 900 minus signs", _folder(GOOD, f"added = {'-' * 900}1\n"), 2),
    ("a snippet with 900 attributes", _folder(GOOD, f"added = lambda: a{'.a' * 900}\n"), 2),
    ("a snippet with 5,000 sums", _folder(GOOD, f"added = lambda: a{'+a' * 5000}\n"), 2),
    ("a snippet with 5,000 branches", _folder(GOOD, "added = 1\nif x:\n  pass\n" + "elif x:\n  pass\n" * 4000), 2),
    ("a snippet with 95 levels", _folder(GOOD, "".join(f"{' ' * i}if x:\n" for i in range(95)) + " " * 95 + "x\n"), 2),
    ("a snippet that says another coding", _folder(
        GOOD.replace('before = "class FlashInferMLAAttnBackend"', 'at = "start"'), "# coding: latin-1\nadded = 'é'\n"
    ), 0),
    ("25 holes in one call", _folder(_post(f"f({_STARS})", "g"), f"added = 1\ndef g():\n    f({'x, ' * 45}y)\n"), 2),
    ("3 holes in one call", _folder(
        _post("f({a...}, y, {b...}, z, {c...})", "g"), f"added = 1\ndef g(f, x, y):\n    f({'x, ' * 250}y)\n"
    ), 0),
    ("a pattern of 20,000 names", _folder(_find("f(" + ", ".join(f"name_{i}" for i in range(5000)) + ")")), 2),
    ("a pattern of 150 names", _folder(_find("f(" + ", ".join(f"nm{i}" for i in range(150)) + ")")), 3),
    ("a name of 900 letters", _folder(_find("f" + "a" * 900 + "(x)")), 3),
    ("a scope of 900 letters", _folder(_find("f(x)", scope="A." + "a" * 900)), 3),
    ("a pattern with 300 brackets", _folder(_post("(" * 300 + ")" * 300)), 2),
    ("a pattern with 400 minus signs", _folder(_post("-" * 400 + "1")), 2),
    ("a version range of 900", _folder(_key('sglang = "' + ",".join([">=0.5"] * 150) + '"')), 0),
    ("a version of 900 zeros", _folder(_key('sglang = "==' + "0" * 900 + '*!"')), 2),
    ("a patch after itself", _folder(_key('after = ["mine"]')), 3),
    ("a patch that excludes everything", _folder(_key('excludes = ["mine", "active-cast", "*", "\\u001b[2J"]')), 3),
    ("escapes in the summary", _folder(GOOD.replace("A patch", "\\u001b[2J\\u009b31m\\u202e[bold]x[/] :warning:")), 0),
    ("escapes in the name", _folder(GOOD.replace('"mine"', '"\\u001b[2Jmine"')), 2),
    ("escapes in a key", _folder(_key('"\\u001b[2J" = 1')), 2),
    ("escapes in a pattern", _folder(_post("'\x1b' + '\\u202e'".replace("\x1b", ""))), 0),
    ("shell words everywhere", _folder(
        _key(f"sglang-reason = '$(touch {SENTINEL}); `touch {SENTINEL}`'\nremove-when = '| touch {SENTINEL}'"),
        f"added = '$(touch {SENTINEL})'\n",
    ), 0),
    *_wrong_types(),
]  # fmt: skip


def judge_named(place: Place, rng: random.Random, *, thorough: bool) -> Tally:
    """Every named folder through list, apply --dry-run and, where it fits, apply, status and revert."""
    tally = Tally("inputs", "patch folders from strangers: one trick each, every verb")
    chosen = NAMED if thorough else [NAMED[0], *rng.sample(NAMED[1:], 3)]
    for number, (name, build, code) in enumerate(chosen):
        folder = place.work / f"stranger-{number}" / "mine"
        folder.mkdir(parents=True)
        build(folder)
        oracle = Oracle((folder.parent,), place.writable)
        tally.attempt(name, lambda f=folder, c=code: _through(place, f, c), oracle)  # type: ignore[misc]
        for left in (folder.parent, place.work, Path.cwd()):
            compiled = left != Path.cwd() and list(left.glob("*/__pycache__"))  # that folder may have others' modules
            if (left / SENTINEL).exists() or compiled:
                tally.lose(f"{name}: its code ran")
    return tally


def _through(place: Place, folder: Path, code: int) -> None:
    options = ("--sglang", place.site, "--patches", folder.parent)
    frozen = place.contents()
    shown = run("list", "--patches", folder.parent)
    assert shown.code == (2 if code == 2 else 0), f"list: {shown}"
    dry = run("apply", "mine", "--dry-run", *options)
    assert dry.code == code, f"apply --dry-run: exit {dry.code}, not {code}: {dry.err[:300]}"
    assert len(dry.err) < 5000, f"{len(dry.err)} characters of error"
    assert place.contents() == frozen, "a refusal or a dry run wrote something"
    if code == 0:
        _there_and_back(place, options, frozen)


def _there_and_back(place: Place, options: tuple[str | Path, ...], frozen: dict[str, str]) -> None:
    assert run("apply", "mine", *options).code == 0
    now = place.contents()
    assert {path for path in now if now[path] != frozen.get(path)} <= {BACKEND}, "another file was changed"
    assert run("status", "--require", "mine", *options).code == 0
    assert run("revert", *options).code == 0
    assert place.contents() == frozen, "revert is not the identity"
