"""Every way to build fused-decode's kernel computes attention: tiles, warps, heads that fill no block, no tokens."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.verify.fused_tunings import CASES, ROOT

pytest.importorskip("triton")


def test_every_tuning_computes_attention() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "tests.verify.fused_tunings"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for case, errors in zip((*CASES, "tied pieces", "sink"), found, strict=True):
        assert errors["error"] < 3e-3, (case, errors)  # BF16 rounding of the result alone is 1.7e-3
        assert errors["lse_error"] < 1e-2, (case, errors)
        assert errors["zeros"], case


def test_decode_reads_the_pool_and_allocates_no_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(ROOT / "bench" / "gpu"))
    snippets = importlib.import_module("snippets")
    module = snippets.load(snippets.FUSED_DECODE)
    pool = torch.zeros(64, 1, 576).to(torch.float8_e4m3fn)
    layer = SimpleNamespace(v_head_dim=512, head_dim=576, tp_q_head_num=8)
    backend = SimpleNamespace(stock_cast_reason="", skip_prefill=False)
    wrapper = SimpleNamespace(_kv_indices_buf=1, _kv_indptr_buf=1, _page_size=1, _use_cuda_graph=False, _sm_scale=0.1)
    assert module.fused_decode_pool(pool, torch.bfloat16, layer, backend, wrapper) is pool
    wrapper._sm_scale = -0.1
    assert "softmax scale" in module.fused_unfit(pool, torch.bfloat16, layer, backend, wrapper)
    assert not module.cast_workspaces
