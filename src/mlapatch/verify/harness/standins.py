"""Stand-ins for every `sglang.*` module (and on the CPU for flashinfer), so that a backend's real source loads from its
text.

A name that a module asks for is looked up by name alone, since releases move things between modules: first in the table
of stand-ins, then, for enums and formulas, in the release's own source, and last as a placeholder that says so when it
is used.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from . import indices, source

ROOTS = ("sglang", "sgl_kernel", "flash_mla")
BACKEND_MODULE = "sglang.srt.layers.attention.flashinfer_mla_backend"

_FROM_RELEASE = {
    "AttentionBackend",
    "ForwardMode",
    "IdSpaceKind",
    "SpecInput",
    "SpecInputType",
    "assert_buffer_fits",
    "build_inner_fb_view",
    "draft_kv_indices_buffer_width",
    "draft_kv_indices_used_len",
}
"""Taken from the release's own source where it has them."""

SERVER_ARGS: dict[str, Any] = {
    "attention_backend": "flashinfer",
    "chunked_prefill_size": 8192,
    "dcp_size": 1,
    "device": "cuda",
    "disable_chunked_prefix_cache": False,
    "disable_cuda_graph": False,
    "disaggregation_mode": "null",
    "dp_size": 1,
    "enable_deterministic_inference": False,
    "enable_dp_attention": False,
    "enable_pdmux": False,
    "enable_two_batch_overlap": False,
    "enable_single_batch_overlap": False,
    "flashinfer_mla_disable_ragged": False,
    "kv_cache_dtype": "auto",
    "page_size": 1,
    "speculative_algorithm": None,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 3,
    "speculative_num_steps": 3,
    "tp_size": 1,
}


class StandInMissing(AttributeError):
    """The code under test used something of SGLang that the harness has no stand-in for."""


class _Unavailable(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _Finder.world.names:  # it was a module
            return _Finder.world.names[name]
        raise StandInMissing(f"{cls.__module__}.{cls.__name__}.{name}: the harness has no stand-in for it")

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "_missing" in cls.__dict__:
            raise StandInMissing(f"{cls.__module__}.{cls.__name__}: the harness has no stand-in for it")
        return super().__call__(*args, **kwargs)

    def __getitem__(cls, _: Any) -> Any:
        return cls


def placeholder(module: str, name: str) -> type:
    """A class that can be named and subclassed, and says what is missing when it is called."""
    return _Unavailable(name, (), {"__module__": module, "_missing": True})


@dataclass
class World:
    """What one side of one scenario runs in: the release, the flags, and the names it can import."""

    package: Path
    device: str
    server_args: SimpleNamespace
    captured_prefill: bool = False
    """Whether the step runs inside a captured (piecewise) prefill graph, which forces the paged wrapper."""
    names: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def resolve(self, module: str, name: str) -> Any:
        """The object that `from module import name` gives."""
        if name in self.names:
            return self.names[name]
        if name in _FROM_RELEASE:
            try:
                self.names[name] = source.take(self.package, module, name, self.resolve)
                return self.names[name]
            except source.MissingDefinition:
                pass
        if name in ("is_in_piecewise_cuda_graph", "is_in_tc_piecewise_cuda_graph", "is_in_breakable_cuda_graph"):
            return lambda: self.captured_prefill
        if name.startswith(("is_", "_is_", "get_bool_")):
            return lambda *_, **__: False
        self.missing.append(f"{module}.{name}")
        return placeholder(module, name)


class _Envs:
    """`envs.NAME.get()`: the workspace sizes of a small run, everything else off."""

    def __init__(self, device: str) -> None:
        self._workspace = (1 << 20) if device == "cpu" else 128 << 20

    def __getattr__(self, name: str) -> SimpleNamespace:
        value = self._workspace if name.endswith("WORKSPACE_SIZE") else False
        return SimpleNamespace(get=lambda: value)


@dataclass
class WriteLoc:
    """`KVWriteLoc`: where a batch writes."""

    loc: torch.Tensor
    swa_loc: torch.Tensor | None = None
    full_loc: torch.Tensor | None = None
    physical: bool = False

    @classmethod
    def for_batch(cls, forward_batch: Any, **_: Any) -> WriteLoc:
        """Where this batch writes."""
        return cls(forward_batch.out_cache_loc)


def make_world(package: Path, device: str, flags: dict[str, Any], classes: dict[str, Any]) -> World:
    """The world of one side: `flags` override server arguments, `classes` are the wrappers to hand out under
    flashinfer's names."""
    unknown = set(flags) - set(SERVER_ARGS) - {"captured_prefill"}
    if unknown:
        raise ValueError(f"a scenario sets server arguments that have no stand-in: {unknown}")
    args = SimpleNamespace(**{**SERVER_ARGS, **{k: v for k, v in flags.items() if k != "captured_prefill"}})
    world = World(package, device, args, captured_prefill=bool(flags.get("captured_prefill")))
    dcp = args.dcp_size
    parallel = SimpleNamespace(
        attn_tp_size=1,
        attn_tp_rank=0,
        tp_size=1,
        attn_dp_size=1,
        attn_dcp_size=dcp,
        attn_dcp_rank=0,
        dcp_size=dcp,
        dcp_rank=0,
        dcp_enabled=dcp > 1,
        attn_cp_size=1,
        moe_ep_size=1,
    )

    static = SimpleNamespace(v2p_page_table=None, translate_kv_loc_dense=None, kernel_page_multiplier=1, enabled=False)

    def get_buffer(name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        if name not in world.buffers:
            world.buffers[name] = make()
        return world.buffers[name]

    world.names = {
        **classes,
        "KVWriteLoc": WriteLoc,
        "create_flashinfer_kv_indices_triton": indices.RequestIndices(),
        "debug_kernel_api": lambda f: f,
        "dcp_enabled": lambda: dcp > 1,
        "envs": _Envs(device),
        "generate_draft_decode_kv_indices": indices.DraftIndices(_draft_parameters(package)),
        "get_attention_dcp_rank": lambda: 0,
        "get_attention_dcp_world_size": lambda: dcp,
        "get_attention_tp_size": lambda: 1,
        "get_buffer": get_buffer,
        "get_cuda_graph_max_batch_size": lambda n: n,
        "get_dcp_rank": lambda: 0,
        "get_dcp_world_size": lambda: dcp,
        "get_device_sm_count": lambda *_: 2,
        "get_disagg": lambda: args,
        "get_exec": lambda: SimpleNamespace(kernel=args),
        "get_global_server_args": lambda: args,
        "get_parallel": lambda: parallel,
        "get_platform": lambda: SimpleNamespace(is_sm90=True, is_sm100=False, is_sm120=False, is_cuda=True),
        "get_schedule": lambda: args,
        "get_server_args": lambda: args,
        "get_spec": lambda: args,
        "global_config": SimpleNamespace(flashinfer_workspace_size=1 << 20 if device == "cpu" else 128 << 20),
        "global_server_args_dict": vars(args),
        "is_flashinfer_available": lambda: True,
        "next_power_of_2": lambda n: 1 << max(n - 1, 0).bit_length(),
        "plan_dcp_decode_metadata": lambda *a, **k: indices.keep_own_share(dcp, *a, **k),
        "spec_kv_index_token_blocks": lambda *_, **__: 1,
        "unified_mla_hooks": lambda _: static,
        "update_local_kv_lens_for_dcp": lambda lens: indices.own_lengths(dcp, lens),
        # Subclasses of the backend ask for these when they are built; their own kernels are not driven.
        "_jit_fixup_module": lambda *_: None,
        "can_use_set_mla_kv_concat_q": lambda *_: False,
        "can_use_set_mla_kv_concat_q_fp8": lambda *_: False,
        "get_kv_shard_pool": lambda *_: None,
        "get_trtllm_gen_multi_ctas_kv_counter_bytes": lambda *_, **__: 64,
        "make_persistent_multi_ctas_kv_counter_buffer": lambda *_, **__: None,
    }
    return world


def _draft_parameters(package: Path) -> list[str]:
    for module in ("sglang.srt.speculative.spec_utils", "sglang.srt.speculative.eagle_utils"):
        found = source.parameters(package, module, "generate_draft_decode_kv_indices")
        if found:
            return found
    return []


class _StandIn(types.ModuleType):
    """A module whose names are resolved by the world of the side that imports it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Finder.world.resolve(self.__name__, name)
        setattr(self, name, value)
        return value


class _Loader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _StandIn(spec.name)
        if spec.name == "flashinfer":
            module.__version__ = _Finder.flashinfer  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run: names come when asked for."""


class _Finder(importlib.abc.MetaPathFinder):
    world: World
    roots: tuple[str, ...] = ROOTS
    flashinfer = "0.6.18"

    def find_spec(self, fullname: str, _path: object, _target: object = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] not in self.roots:
            return None
        return importlib.machinery.ModuleSpec(fullname, _Loader(), is_package=True)


def install(flashinfer: str | None) -> None:
    """Puts the stand-ins before everything else on the import path; flashinfer too, as that version, unless it is
    None."""
    if flashinfer is not None:
        _Finder.roots, _Finder.flashinfer = (*ROOTS, "flashinfer"), flashinfer
        import importlib.metadata as metadata

        real = metadata.version
        names = ("flashinfer-python", "flashinfer_python", "flashinfer")
        setattr(metadata, "version", lambda name: flashinfer if name in names else real(name))  # noqa: B010 - typed
    sys.meta_path.insert(0, _Finder())


def enter(world: World) -> None:
    """Makes `world` answer for imports from now on, forgetting what an earlier one gave."""
    for name in [n for n in sys.modules if n.split(".")[0] in _Finder.roots]:
        del sys.modules[name]
    _Finder.world = world


def load(path: Path, name: str) -> types.ModuleType:
    """Executes a source file as module `name` in the world that is entered."""
    module = types.ModuleType(name)
    module.__file__ = str(path)
    module.__package__ = name.rpartition(".")[0]
    sys.modules[name] = module
    code = compile(path.read_text(encoding="utf-8"), str(path), "exec", dont_inherit=True)
    exec(code, module.__dict__)  # noqa: S102 - this is what verify is for, in a process of its own
    return module
