# ruff: noqa: ARG002, ARG005 - a stand-in takes what the real thing takes
"""Run a release's own argument code, to the end of its checks, on a machine without SGLang's dependencies or a GPU.

    python real_server_args.py WHEEL_DIR CAPABILITY '[["--model-path", "/models/x", ...], ...]'

What is real: every line of `sglang` that runs (the parser, the resolution of defaults, the adjustments to the model and
`check_server_args`), torch, Triton, pydantic, msgspec, dill. What stands in: eight GPUs of the given capability with
96 GiB each (torch.cuda's answers and an `nvidia-smi` that prints a number); transformers' AutoConfig, which reads the
model's config.json; and an empty module for each other package that SGLang imports and that is not installed. Prints a
line of JSON for each list of arguments: what they resolve to, or the error.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import logging
import os
import sys
import tempfile
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

WANTED = (
    "tp_size",
    "page_size",
    "chunked_prefill_size",
    "kv_cache_dtype",
    "attention_backend",
    "moe_runner_backend",
    "mem_fraction_static",
    "port",
    "num_continuous_decode_steps",
    "quantization",
)
DSA = (("nsa_prefill_backend", "nsa_decode_backend"), ("dsa_prefill_backend", "dsa_decode_backend"))


class _AnyClass(type):
    """A class of a package that is not here: any attribute, any base class, any annotation."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name != "__class_validators__":
            raise AttributeError(name)
        value: Any = [] if name == "__class_validators__" else MagicMock(name=f"{cls.__name__}.{name}")
        setattr(cls, name, value)
        return value

    def __getitem__(cls, item: object) -> type:
        return cls

    def __or__(cls, other: object) -> Any:
        return cls

    def __ror__(cls, other: object) -> Any:
        return cls


def _any_schema(cls: type, *args: object) -> object:
    from pydantic_core import core_schema

    return core_schema.any_schema()


def _make_class(name: str) -> type:
    body = {
        "__init__": lambda self, *args, **kwargs: None,
        "__init_subclass__": classmethod(lambda cls, **kwargs: None),
        "__get_pydantic_core_schema__": classmethod(_any_schema),
    }
    return _AnyClass(name, (), body)


class _Absent(types.ModuleType):
    """A module of a package that is not here."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "99.0.0"
        if name.startswith("__"):
            raise AttributeError(name)
        value = _make_class(name) if name[:1].isupper() else MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class Absentees(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for packages that SGLang itself imports; a probe by torch or another real package stays a failure."""

    def __init__(self, wheel: str) -> None:
        self.wheel, self.names = wheel, set[str]()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        top = fullname.partition(".")[0]
        if top == "sglang" or top in sys.stdlib_module_names:
            return None
        if top not in self.names:
            frame = sys._getframe(1)
            while frame.f_back is not None and "importlib" in frame.f_code.co_filename:
                frame = frame.f_back
            if not frame.f_code.co_filename.startswith((self.wheel, __file__)):
                return None
        self.names.add(top)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to execute."""


class Config:
    """A config.json with attribute access, as transformers 5 gives it."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)
        self._values = values

    @property
    def rope_scaling(self) -> object:
        return self._values.get("rope_parameters")

    def get_text_config(self, *args: object, **kwargs: object) -> Config:
        return self

    def to_dict(self) -> dict[str, Any]:
        return dict(self._values)


def _values(path: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((Path(path) / "config.json").read_text())
    return loaded


def stand_in_for_gpus(capability: int) -> None:
    import torch

    major, minor = divmod(capability, 10)
    properties = types.SimpleNamespace(
        total_memory=96 << 30, major=major, minor=minor, multi_processor_count=188, name="stand-in"
    )
    answers: dict[str, Callable[..., object]] = {
        "is_available": lambda: True,
        "device_count": lambda: 8,
        "current_device": lambda: 0,
        "get_device_capability": lambda *a, **k: (major, minor),
        "get_device_name": lambda *a, **k: "stand-in",
        "get_device_properties": lambda *a, **k: properties,
        "mem_get_info": lambda *a, **k: (95 << 30, 96 << 30),
        "get_arch_list": lambda: [f"sm_{capability}"],
        "synchronize": lambda *a, **k: None,
        "empty_cache": lambda *a, **k: None,
        "set_device": lambda *a, **k: None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.version.cuda = "12.9"
    for name in ("register_fake", "impl"):  # sgl_kernel's operators are not here to be described
        setattr(torch.library, name, lambda *a, **k: lambda function: function)
    folder = Path(tempfile.mkdtemp())
    smi = folder / "nvidia-smi"
    smi.write_text("#!/bin/sh\nfor i in 0 1 2 3 4 5 6 7; do echo 97887; done\n")
    smi.chmod(0o755)
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"


def stand_in_for_transformers() -> None:
    import importlib

    transformers: Any = importlib.import_module("transformers")
    utils: Any = importlib.import_module("transformers.utils")

    transformers.AutoConfig = types.SimpleNamespace(
        register=lambda *a, **k: None, from_pretrained=lambda path, *a, **k: Config(_values(path))
    )
    utils.cached_file = lambda *a, **k: None
    for owner in (transformers.PretrainedConfig, transformers.PreTrainedConfig):
        owner.get_config_dict = staticmethod(lambda path, *a, **k: (_values(path), {}))


def resolve(args: list[str]) -> dict[str, object]:
    from sglang.srt.server_args import prepare_server_args

    resolved = prepare_server_args(args)
    if hasattr(resolved, "resolve_once"):  # 0.5.23 resolves later than it parses
        resolved.resolve_once()
    resolved.check_server_args()
    values = resolved.resolved_dict() if hasattr(resolved, "resolved_dict") else vars(resolved)
    shown = {name: values.get(name) for name in WANTED}
    for prefill, decode in DSA:
        if values.get(prefill) is not None:
            shown |= {"dsa_prefill": values[prefill], "dsa_decode": values[decode]}
    return shown


def main(wheel: str, capability: str, sets: str) -> None:
    sys.path.insert(0, wheel)
    absentees = Absentees(wheel)
    sys.meta_path.append(absentees)
    stand_in_for_gpus(int(capability))
    stand_in_for_transformers()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for args in json.loads(sets):
        try:
            print(json.dumps({"resolved": resolve(args)}, default=str), flush=True)
        except (Exception, SystemExit) as error:
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
    print(f"stand-ins: {' '.join(sorted(absentees.names))}", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:4])
