"""Single definitions taken from a release's source. No torch is needed."""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path

import pytest

from mlapatch.verify.harness import source

FILES = {
    "a/modes.py": "from enum import IntEnum, auto\nfrom sglang.a.other import helper\n\n\n"
    "class Mode(IntEnum):\n    ONE = auto()\n    TWO = auto()\n\n"
    "    def help(self) -> Missing:\n        return helper(self)\n",
    "a/again.py": "from .modes import Mode as Mode\nfrom sglang.a.modes import Mode as Renamed\n",
    "a/spec.py": "LIMIT = 3\n\n\nclass Spec:\n    def make(self, n, *, m=LIMIT):\n        return n + m\n",
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "sglang" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    source.parse.cache_clear()
    return tmp_path / "sglang"


def resolve(module: str, name: str) -> object:
    return {"LIMIT": 3}.get(name, lambda *_: f"{module}.{name}")


@pytest.mark.parametrize(
    ("module", "name"), [("sglang.a.modes", "Mode"), ("sglang.a.again", "Mode"), ("sglang.a.again", "Renamed")]
)
def test_a_class_comes_with_the_names_it_uses(package: Path, module: str, name: str) -> None:
    where, _ = source.find(package, module, name)
    assert where == "sglang.a.modes"
    mode = source.take(package, "sglang.a.modes", "Mode", resolve)
    assert issubclass(mode, IntEnum)
    assert mode.TWO.help() == "sglang.a.other.helper"


def test_a_method_and_its_parameters(package: Path) -> None:
    make = source.take_method(package, "sglang.a.spec", "Spec", "make", resolve)
    assert make(None, 4) == 7
    assert source.parameters(package, "sglang.a.spec", "make") is None


@pytest.mark.parametrize(("module", "name"), [("sglang.a.modes", "Absent"), ("sglang.b", "Mode")])
def test_what_is_not_there_is_said(package: Path, module: str, name: str) -> None:
    with pytest.raises(source.MissingDefinition, match=f"{module}.{name}"):
        source.take(package, module, name, resolve)
