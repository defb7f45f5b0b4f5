"""What a command line says of what it starts: the program, and of a Python the module. Nothing is run."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_PYTHON = re.compile(r"python(?:\d+(?:\.\d+)*)?")
_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")


@dataclass(frozen=True)
class Command:
    """`name` as it is typed, `program` the file that it is ('' where there is none), `module` of `python -m`.

    `whole`: it holds all of the server's options, where a wrapper or script may add others. `refusal` is why its Python
    did not say which SGLang it has, with `hint`, the next command.
    """

    name: str = ""
    program: str = ""
    module: str = ""
    whole: bool = False
    refusal: str = ""
    hint: str = ""

    @classmethod
    def of(cls, words: Sequence[str], environment: Mapping[str, str]) -> Command:
        """Read it; the program is looked for where the server's environment will."""
        program = shutil.which(words[0], path=environment.get("PATH"))
        module = next(_modules(words), "") if is_python(words[0]) else ""
        whole = module.partition(".")[0] == "sglang" or Path(words[0]).name == "sglang"
        return cls(words[0], str(Path(program).absolute()) if program else "", module, whole)

    @property
    def starts_sglang(self) -> bool:
        """Whether it runs a module of SGLang: `python -m sglang.launch_server`."""
        return self.module.partition(".")[0] == "sglang"

    def is_in(self, package: Path) -> bool:
        """Whether an SGLang has the module."""
        path = package.parent.joinpath(*self.module.split("."))
        shapes = (f"{path.name}.py", f"{path.name}.*.so", f"{path.name}.pyc", f"{path.name}/__main__.*")
        return any(any(path.parent.glob(shape)) for shape in shapes)


def is_python(word: str) -> bool:
    """Whether a word names a Python: python, python3, python3.12, or a path to one."""
    return _PYTHON.fullmatch(Path(word).name) is not None


def _modules(words: Sequence[str]) -> Iterator[str]:
    """The module of `-m`, which ends Python's own options, as a script and `-c` do."""
    rest = iter(words[1:])
    for word in rest:
        if word == "-m":
            yield next(rest, "")
        if word in _WITH_VALUE:
            next(rest, "")
        elif word in ("-m", "-c", "-") or not word.startswith("-"):
            return
