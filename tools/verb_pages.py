"""Write what `docs/verbs/*.md` say of options and synopsis anew from the command line itself; the prose is by hand.

python tools/verb_pages.py            # write
python tools/verb_pages.py --check    # exit 1 where a page is not today's
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

import mlapatch.cli

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "verbs"
BEGIN, END = "<!-- begin: tools/verb_pages.py -->", "<!-- end: tools/verb_pages.py -->"
#: The sections of a page after the generated part, in order; `JSON` where the verb has --json.
SECTIONS = ("Description", "Exit codes", "Files", "Examples", "JSON", "See also")
_KINDS = {"int": "N", "integer": "N", "float": "X"}
_EXAMPLE = re.compile(r"^Examples?: ", re.MULTILINE)


def verbs() -> dict[str, Any]:
    """Every verb's command by its whole name, in the order of `mlapatch --help`."""
    if not mlapatch.cli.app.registered_commands:
        mlapatch.cli._register()
    root: Any = typer.main.get_command(mlapatch.cli.app)
    found: dict[str, Any] = {}
    for name, command in root.commands.items():
        inner = getattr(command, "commands", None)
        found |= {name: command} if inner is None else {f"{name} {its}": one for its, one in inner.items()}
    return found


def page_of(verb: str) -> Path:
    """`docs/verbs/guard-record.md`."""
    return FOLDER / f"{verb.replace(' ', '-')}.md"


def generated(verb: str, command: Any) -> str:
    """Summary, synopsis, arguments and options, and the example of `--help`."""
    summary, *rest = (part.strip() for part in (command.help or "").split("\n\n"))
    shown = [param for param in command.params if not getattr(param, "hidden", False)]
    arguments = [param for param in shown if param.param_type_name == "argument"]
    words = ["mlapatch", verb, "[OPTIONS]", *map(_value, arguments)]
    lines = [BEGIN, " ".join(summary.split()), "", f"    {' '.join(words)}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {text} |" for name, text in _rows(shown)]
    examples = [" ".join(_EXAMPLE.sub("", part).split()) for part in rest if _EXAMPLE.match(part)]
    return "\n".join([*lines, "", *(f"    $ {example}" for example in examples), END])


def _value(param: Any) -> str:
    """What stands for its value; the same whatever typer calls its types."""
    return str(param.metavar or _KINDS.get(param.type.name, "TEXT"))


def _rows(params: list[Any]) -> Iterator[tuple[str, str]]:
    for param in params:
        text = " ".join(str(param.help or "").split()).replace("|", "\\|")
        if param.param_type_name == "argument":
            yield _code(_value(param)), text
            continue
        names = ", ".join([*sorted(param.opts, key=len), *param.secondary_opts])
        value = "" if param.is_flag else f" {_value(param)}"
        extra = [f"`{param.envvar}`"] if param.envvar else []
        if not param.is_flag and param.default not in (None, "", [], ()) and "default" not in text:
            extra.append(f"default {param.default}")
        yield _code(names + value), text + (f" ({'; '.join(extra)})" if extra else "")


def _code(text: str) -> str:
    return "`" + text.replace("|", "\\|") + "`"


def written(verb: str, command: Any) -> str:
    """The whole page: its own prose around today's generated part."""
    path, title = page_of(verb), f"# mlapatch {verb}"
    text = (
        path.read_text("utf-8")
        if path.is_file()
        else f"{title}\n\n{BEGIN}\n{END}\n\n" + "\n\n".join(f"## {section}" for section in SECTIONS)
    )
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{generated(verb, command)}{after}"


def index(found: dict[str, Any]) -> str:
    """The table of `docs/verbs/README.md`."""
    path = FOLDER / "README.md"
    text = path.read_text("utf-8") if path.is_file() else f"# The verbs\n\n{BEGIN}\n{END}\n"
    rows = [BEGIN, "| verb | does |", "|---|---|"]
    for verb, command in found.items():
        summary = " ".join((command.help or "").split("\n\n")[0].split())
        rows.append(f"| [{verb}]({page_of(verb).name}) | {summary} |")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + "\n".join([*rows, END]) + after


def main(arguments: list[str]) -> int:
    """0 where all pages are as they should be, else 1."""
    found = verbs()
    pages = {page_of(verb): written(verb, command) for verb, command in found.items()} | {
        FOLDER / "README.md": index(found)
    }
    old = {path for path in FOLDER.glob("*.md") if path not in pages}
    wrong = [path for path, text in pages.items() if not path.is_file() or path.read_text("utf-8") != text]
    if "--check" in arguments:
        for path in [*wrong, *old]:
            print(f"{path.relative_to(ROOT)} is not today's: python tools/verb_pages.py", file=sys.stderr)
        return 1 if wrong or old else 0
    FOLDER.mkdir(exist_ok=True)
    for path in wrong:
        path.write_text(pages[path], "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
