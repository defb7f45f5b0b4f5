"""Drives one backend, stock or patched, through one scenario."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from . import batch, census, indices, poison, recording, replay, specs, standins
from .batch import DRAFT_STEPS, HEADS, ForwardBatch, Inputs, Layer, Plan
from .pool import HEAD_DIM, LORA_RANK, PACKED_DIM, ROPE_DIM, KVPool, RequestTable
from .reads import PoolReads
from .record import Plan as WrapperPlan
from .record import Recorder, Run
from .scenarios import WINDOW, Mode, Scenario

CACHES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "bf16": torch.bfloat16, "packed": torch.float8_e4m3fn}
SUBCLASSES = {"flashmla": "FlashMLABackend", "cutlass_mla": "CutlassMLABackend", "trtllm_mla": "TRTLLMMLABackend"}


class Skip(Exception):
    """This release cannot run the scenario; the message says why."""


@dataclass
class Taken:
    """What came out of one step: outputs `[tokens, heads * dim]` a forward and layer, valid rows, wrapper records,
    slots loaded."""

    step: int
    outputs: list[torch.Tensor]
    tokens: int
    plans: list[WrapperPlan]
    runs: list[Run]
    reads: set[int]
    allowed: set[int]
    crowded: bool
    """Whether the requests have more tokens than the pool has slots: then reading the whole pool is the cheaper way."""
    census: list[torch.Tensor]
    """The outputs of the same step over coded slots, see `census`; none where it was not due."""


class Messages(logging.Handler):
    """Log lines of the module under test."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the text."""
        self.lines.append(record.getMessage())


class Side:
    """One backend in its own world. `stock_names` are the attributes of the stock twin's objects, None for the stock
    side."""

    def __init__(
        self, scenario: Scenario, path: Path, package: Path, device: str, seed: int, wrappers: Any, recorder: Recorder
    ) -> None:
        self.scenario, self.device, self.seed, self.recorder = scenario, device, seed, recorder
        self.messages = Messages()
        self.world = standins.make_world(package, device, scenario.flags, wrappers)
        standins.enter(self.world)
        specs.register(self.world)
        logger = logging.getLogger(standins.BACKEND_MODULE)
        logger.handlers, logger.propagate = [self.messages], False
        logger.setLevel(logging.DEBUG)
        self.module: types.ModuleType = standins.load(path, standins.BACKEND_MODULE)
        if device != "cpu":  # flashinfer is the real one there, so the recording class goes in by hand
            vars(self.module).update(wrappers)
            recording.fast_plans(self.module, recorder)
        self.modes = self.world.resolve("sglang.srt.model_executor.forward_batch_info", "ForwardMode")
        self.slots = batch.table(scenario, seed)
        width = PACKED_DIM if scenario.cache == "packed" else HEAD_DIM
        page = int(scenario.flags.get("page_size", 1))
        self.pool = KVPool(scenario.slots, page, CACHES[scenario.cache], scenario.layers, device, width)
        if scenario.cache == "packed":
            self.pool.fill_bytes(batch.generator(seed, scenario.name, -2))
        self.reads = PoolReads(self.pool.kv_buffer) if device == "cpu" else None
        self.graphs: dict[tuple[str, int], replay.Captured] = {}
        self.again: Callable[[], list[torch.Tensor]] = list
        """The forwards of the last step once more, with the inputs of a census."""
        self.stock_names: dict[str, set[str]] | None = None
        self.runner = self._runner(page)
        self.layers = [Layer(i, device=device) for i in range(scenario.layers)]
        self.ragged_layers = [Layer(i, ragged=True, device=device) for i in range(scenario.layers)]

    def _runner(self, page: int) -> SimpleNamespace:
        slots = self.slots.to(self.device)
        config = SimpleNamespace(
            context_len=self.scenario.context,
            num_attention_heads=HEADS,
            kv_lora_rank=LORA_RANK,
            qk_nope_head_dim=batch.NOPE_DIM,
            qk_rope_head_dim=ROPE_DIM,
            v_head_dim=batch.V_DIM,
            scaling=batch.SCALING,
            num_hidden_layers=self.scenario.layers,
            get_num_kv_heads=lambda _: 1,
            hf_config=SimpleNamespace(architectures=["DeepseekV3ForCausalLM"]),
            head_dim=HEAD_DIM,
        )
        return SimpleNamespace(
            device=self.device,
            dtype=torch.bfloat16,
            kv_cache_dtype=self.pool.dtype,
            page_size=page,
            model_config=config,
            req_to_token_pool=RequestTable(slots),
            token_to_kv_pool=self.pool,
            server_args=self.world.server_args,
            kv_index_translator=indices.Translator(slots),
            is_draft_worker=False,
            max_running_requests=len(slots),
            token_to_kv_pool_allocator=SimpleNamespace(),
            tp_rank=0,
            tp_size=1,
            gpu_id=0,
            spec_algorithm=None,
            sliding_window_size=None,
            is_hybrid=False,
        )

    def build(self) -> None:
        """Constructs the backend, as SGLang does after the pool; this is where a patch refuses."""
        kind = self.scenario.backend
        if kind == "draft":
            self.backend = self.module.FlashInferMLAMultiStepDraftBackend(self.runner, 1, DRAFT_STEPS)
        elif kind in SUBCLASSES:
            self.backend = self._subclass(kind)
        else:
            self.backend = self.module.FlashInferMLAAttnBackend(self.runner)
        self.parts = list(self.backend.attn_backends) if kind == "draft" else [self.backend]

    def capture(self) -> None:
        """Captures the graphs that the scenario replays."""
        if self.scenario.captures:
            replay.capture_all(self)

    def _subclass(self, kind: str) -> Any:
        path = self.world.package / "srt" / "layers" / "attention" / f"{kind}_backend.py"
        if not path.is_file():
            raise Skip(f"this release has no {kind}_backend.py")
        try:
            module = standins.load(path, f"sglang.srt.layers.attention.{kind}_backend")
            backend = getattr(module, SUBCLASSES[kind])
        except (standins.StandInMissing, ImportError, AttributeError, TypeError) as error:
            raise Skip(f"{kind}_backend.py cannot be loaded under the stand-ins: {error}") from error
        if kind == "trtllm_mla":
            falls_back = "fallback_to_flashinfer_impl" in backend.forward_extend.__code__.co_names
            if falls_back != (self.scenario.steps[0].mode == "extend"):
                raise Skip(
                    f"this release's {SUBCLASSES[kind]} falls back for {'prefix hits' if falls_back else 'verify'} only"
                )
        return backend(self.runner)

    # -- one step ---------------------------------------------------------------------------------------------------

    def run(self, index: int) -> Taken:
        """Performs the `index`-th step and returns what came out."""
        plan = batch.make(self.scenario, index, self.slots, self.seed, self.device)
        self._fill(plan)
        PoolReads.active = None
        outputs = replay.replay(self, plan) if plan.step.graph else self._eager(plan)
        PoolReads.active = None
        plans, runs = self.recorder.take()
        tokens = len(plan.step.prefix) if plan.step.mode == "draft" else sum(plan.step.added())
        reads = self.reads.take() if self.reads else set()
        after = DRAFT_STEPS if plan.step.mode == "draft" else 0
        crowded = sum(n + after for n in plan.lens) > self.pool.slots
        copies = [o.clone() for o in outputs]
        coded = self._census(plan) if census.due(self.scenario, index, plan, self.device) else []
        return Taken(index, copies, tokens, plans, runs, reads, self._allowed(plan, after), crowded, coded)

    def _census(self, plan: Plan) -> list[torch.Tensor]:
        """The step once more, as it was planned, over coded slots."""
        census.fill(self.pool, plan)
        outputs = [o.clone() for o in self.again()]
        self.recorder.take()
        if self.reads:
            self.reads.take()
        return outputs

    def _fill(self, plan: Plan) -> None:
        if self.scenario.cache != "packed":
            for layer, content in enumerate(plan.content):
                self.pool.fill(layer, plan.live, content)

    def _allowed(self, plan: Plan, after: int) -> set[int]:
        """Slots in the page table of the step's requests, and slot 0, which padding reads."""
        rows = zip(plan.rows.tolist(), plan.lens, strict=True)
        return {0}.union(*(self.slots[row, : n + after].tolist() for row, n in rows))

    def _eager(self, plan: Plan) -> list[torch.Tensor]:
        step = plan.step
        fb = self._forward_batch(plan)
        if step.prefix or step.mode != "idle":
            self.backend.init_forward_metadata(fb)
        elif not self._attends_when_idle():
            return []
        if step.pad_after_plan:
            self._pad_after_plan(fb, plan)
        self.again = lambda: self.forward(fb, census.inputs(plan.inputs, fb.out_cache_loc), poisoned=True)
        return self.forward(fb, plan.inputs, poisoned=True)

    def _attends_when_idle(self) -> bool:
        """Before 0.5 a model with no tokens left before its attention; since then `forward` looks for idle itself."""
        return "is_idle" in type(self.backend).forward.__code__.co_names

    def _pad_after_plan(self, fb: ForwardBatch, plan: Plan) -> None:
        more = plan.step.pad_after_plan
        fb.batch_size += more
        fb.seq_lens = torch.cat((fb.seq_lens, fb.seq_lens.new_ones(more)))
        fb.req_pool_indices = torch.cat((fb.req_pool_indices, fb.req_pool_indices.new_zeros(more)))
        fb.out_cache_loc = torch.cat(
            (fb.out_cache_loc, fb.out_cache_loc.new_zeros((*fb.out_cache_loc.shape[:-1], more))), dim=-1
        )
        plan.inputs = [[batch.padded(i, i.q.shape[0] + more) for i in forward] for forward in plan.inputs]

    def forward(self, fb: ForwardBatch, inputs: list[list[Inputs]], poisoned: bool) -> list[torch.Tensor]:
        """Each forward (one, or one a draft step) through each layer. Poison goes between, except inside a graph."""
        outputs = []
        for i, layers in enumerate(inputs):
            backend, loc = self.backend, fb.out_cache_loc
            if self.scenario.backend == "draft":
                backend, fb.out_cache_loc = self.parts[i], loc[i]
            for layer_id, one in enumerate(layers):
                if poisoned:
                    self.poison()
                PoolReads.active = self.reads
                outputs.append(self._attend(backend, fb, one, layer_id))
                PoolReads.active = None
            fb.out_cache_loc = loc
        return outputs

    def _attend(self, backend: Any, fb: ForwardBatch, one: Inputs, layer_id: int) -> torch.Tensor:
        if one.q_rope is None:
            layer = self.ragged_layers[layer_id]
            result = backend.forward(one.q, one.k, one.v, layer, fb, save_kv_cache=False)
        elif self.scenario.backend == "flashmla":
            result = backend.forward(one.query().flatten(1), one.key(), one.v, self.layers[layer_id], fb)
        else:
            result = backend.forward(
                one.q.flatten(1), one.k, one.v, self.layers[layer_id], fb, q_rope=one.q_rope, k_rope=one.k_rope
            )
        if isinstance(result, tuple):
            out, lse = result
            return torch.cat((out.float(), lse.float()), dim=-1)
        return result  # type: ignore[no-any-return]

    def poison(self) -> None:
        """Overwrites what only the patched side keeps; does nothing on the stock side."""
        if self.stock_names is None:
            return
        spared = {b.untyped_storage().data_ptr() for b in self.pool.kv_buffer}
        for captured in self.graphs.values():
            spared |= {t.untyped_storage().data_ptr() for f in captured.inputs for i in f for t in i.tensors()}
        poison.poison(self.module, [(o, self.stock_names.get(k, set())) for k, o in self.objects().items()], spared)

    def objects(self) -> dict[str, object]:
        """The objects a patch may hang state on, by a name that both sides share."""
        found: dict[str, object] = {}
        for i, part in enumerate(self.parts):
            found[f"backend{i}"] = part
            for name, value in list(vars(part).items()):
                if "wrapper" in name or "updater" in name:
                    found[f"backend{i}.{name}"] = value
            for table in ("decode_cuda_graph_metadata", "prefill_cuda_graph_metadata"):
                for key, value in getattr(part, table, {}).items():
                    found[f"backend{i}.{table}.{key}"] = value
        return {k: v for k, v in found.items() if hasattr(v, "__dict__")}

    # -- the batch --------------------------------------------------------------------------------------------------

    def _mode(self, mode: Mode) -> Any:
        name = {"ragged": "EXTEND", "verify": "TARGET_VERIFY", "dflash": "TARGET_VERIFY", "draft": "DECODE"}
        return self.modes[name.get(mode, mode.upper())]

    def _forward_batch(self, plan: Plan) -> ForwardBatch:
        step, count = plan.step, len(plan.step.prefix)
        lens = torch.tensor(step.prefix if step.mode in replay.COMMITTED else plan.lens, dtype=torch.int64)
        return self.batch(
            step.mode,
            count,
            plan.rows,
            lens.to(self.device),
            replay.host_lens(step.mode, lens),
            plan.out_loc,
            plan.positions,
            self.spec(step.mode, torch.tensor(step.added(), dtype=torch.int32, device=self.device)),
            plan,
        )

    def spec(self, mode: Mode, added: torch.Tensor) -> Any:
        """The speculative input of a mode, or None; `added` `[bs]` int32 tokens."""
        if mode in ("verify", "dflash"):
            return specs.verify(self.world, WINDOW, self.device, mode == "dflash")
        if mode in ("draft_extend", "draft_extend_v2"):
            return specs.draft_extend(self.world, added, WINDOW)
        return specs.draft(self.world) if mode == "draft" else None

    def batch(
        self,
        mode: Mode,
        count: int,
        rows: torch.Tensor,
        lens: torch.Tensor,
        host: torch.Tensor,
        out_loc: torch.Tensor,
        positions: torch.Tensor,
        spec: Any,
        plan: Plan | None = None,
    ) -> ForwardBatch:
        """What a backend gets: `rows`, `lens` and `host` (on the host) `[count]`, `out_loc` and `positions`
        `[tokens]`."""
        fields: dict[str, Any] = {}
        if plan is not None and mode in ("extend", "ragged", "draft_extend", "draft_extend_v2"):
            added = plan.step.added()
            fields = {
                "extend_prefix_lens": torch.tensor(plan.step.prefix, dtype=torch.int64, device=self.device),
                "extend_prefix_lens_cpu": list(plan.step.prefix),
                "extend_seq_lens": torch.tensor(added, dtype=torch.int32, device=self.device),
                "extend_seq_lens_cpu": list(added),
            }
        return ForwardBatch(
            forward_mode=self._mode(mode),
            batch_size=count,
            req_pool_indices=rows,
            seq_lens=lens,
            seq_lens_cpu=host,
            seq_lens_sum=int(lens.sum()),
            out_cache_loc=out_loc,
            positions=positions,
            spec_info=spec,
            token_to_kv_pool=self.pool,
            req_to_token_pool=self.runner.req_to_token_pool,
            attn_backend=self.backend,
            **fields,
        )
