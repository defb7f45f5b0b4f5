"""What a command line says of what it starts: the program, and of a Python the module. Nothing is run."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_PYTHON = re.compile(r"python(?:\d+(?:\.\d+)*)?")
_TAKES = re.compile(r"-[^-cmWX]*(?P<letter>[cmWX])(?P<value>.*)", re.DOTALL)
"""A word of Python's short options, one or several, with the first that takes a value."""


@dataclass(frozen=True)
class Command:
    """`name` as it is typed, `program` the file that it is ('' where there is none), `module` of `python -m`.

    `whole`: it holds all of the server's options, where a wrapper or script may add others. `refusal` is why its Python
    did not say which SGLang it has, with `hint`, the next command; `none`: because it certainly has none.
    """

    name: str = ""
    program: str = ""
    module: str = ""
    whole: bool = False
    refusal: str = ""
    hint: str = ""
    none: bool = False

    @classmethod
    def of(cls, words: Sequence[str], environment: Mapping[str, str]) -> Command:
        """Read it; the program is looked for where the server's environment will."""
        program = shutil.which(words[0], path=environment.get("PATH"))
        module = _module(words) if is_python(words[0]) else ""
        whole = module.partition(".")[0] == "sglang" or Path(words[0]).name == "sglang"
        return cls(words[0], str(Path(program).absolute()) if program else "", module, whole)

    @property
    def starts_sglang(self) -> bool:
        """Whether it runs a module of SGLang: `python -m sglang.launch_server`."""
        return self.module.partition(".")[0] == "sglang"

    def is_in(self, package: Path) -> bool:
        """Whether an SGLang has the module. The folder may have another name: `sglang` can be a link to it."""
        inside = self.module.split(".")[1:]
        path = package.joinpath(*inside)
        shapes = (f"{path.name}.py", f"{path.name}.*.so", f"{path.name}.pyc") if inside else ()
        return any(any(path.parent.glob(shape)) for shape in shapes) or any(path.glob("__main__.*"))


def is_python(word: str) -> bool:
    """Whether a word names a Python: python, python3, python3.12, or a path to one."""
    return _PYTHON.fullmatch(Path(word).name) is not None


def venv_python(site: Path) -> Path | None:
    """The Python of the venv around a site-packages; None where there is none."""
    own = site.parents[2] / "bin" / "python" if site.name == "site-packages" else None
    return own if own is not None and own.exists() else None


def _module(words: Sequence[str]) -> str:
    """The module of `-m`, which ends Python's own options, as a script, `-c` and `--` do. Values may be joined: -mX."""
    rest = iter(words[1:])
    for word in rest:
        taking = _TAKES.fullmatch(word)
        if taking:
            value = taking["value"] or next(rest, "")
            if taking["letter"] in "cm":
                return value if taking["letter"] == "m" else ""
        elif word == "--check-hash-based-pycs":
            next(rest, "")
        elif word in ("-", "--") or not word.startswith("-"):
            return ""
    return ""
