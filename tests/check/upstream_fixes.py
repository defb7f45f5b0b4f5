"""What upstream's own fix would look like: the ideas of the open pull requests, put into a real file by hand."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from tests.check.perturbations import inner, on_cast
from tests.check.source import BACKEND, DECODE, DECODE_PLAN, EXTEND, PREFILL_PLAN, Source, is_call_of, is_cast


def native_fp8(source: Source, scopes: Sequence[str] = (DECODE, EXTEND)) -> str:
    """The idea of sgl-project/sglang#35322: plan with the pool's dtype, no cast, scales of 1.0 to run()."""
    source = Source(on_cast(scopes, inner)(source))
    edits = []
    for scope in scopes:
        for call in source.within(scope, is_call_of("run")):
            end = source.span(call)[1] - 1
            comma = "" if source.text[:end].rstrip().endswith(",") else ", "
            edits.append((end, end, f"{comma}ckv_scale=1.0, kpe_scale=1.0"))
    source = Source(source.spliced(edits))
    edits = []
    for scope in (DECODE_PLAN, PREFILL_PLAN):
        for call in source.within(scope, is_call_of("plan")):
            assert isinstance(call, ast.Call)
            edits.append((*source.span(call.args[-1]), "self.kv_cache_dtype"))
    return source.spliced(edits)


def native_fp8_on_some_gpus(source: Source) -> str:
    """#35322 as it must be to run anywhere: the scales where the kernel can, the whole-pool cast everywhere else."""
    edits = []
    for scope in (DECODE, EXTEND):
        statement = source.statement_of(scope, source.within(scope, is_cast)[0])
        assert isinstance(statement, ast.Assign)
        assert isinstance(statement.value, ast.Call)
        name, pad = ast.unparse(statement.targets[0]), source.indent(statement)
        lines = (
            f"{name} = {inner(statement.value, source)}",
            "if not self.native_fp8:",
            f"    {name} = {name}.to(q.dtype)",
        )
        edits.append((*source.span(statement), f"\n{pad}".join(lines)))
        for call in source.within(scope, is_call_of("run")):
            end = source.span(call)[1] - 1
            comma = "" if source.text[:end].rstrip().endswith(",") else ", "
            edits.append((end, end, f"{comma}ckv_scale=self.ckv_scale, kpe_scale=self.kpe_scale"))
    return source.spliced(edits)


def gathered_rows(source: Source, scopes: Sequence[str] = (EXTEND,)) -> str:
    """The idea of sgl-project/sglang#34638 (prefill only): the batch's rows through `get_mla_kv_buffer`."""

    def rows(call: ast.Call, source: Source) -> str:
        assert isinstance(call.func, ast.Attribute)
        getter = call.func.value
        assert isinstance(getter, ast.Call)
        assert isinstance(getter.func, ast.Attribute)
        pool = source.of(getter.func.value)
        return f"torch.cat({pool}.get_mla_kv_buffer(layer, self.forward_metadata.rows, q.dtype), dim=-1)"

    return on_cast(scopes, rows)(source)


def shared_shadow(source: Source, scopes: Sequence[str] = (DECODE, EXTEND)) -> str:
    """The idea of sgl-project/sglang#36087: dequantise only the referenced pages into one shared shadow."""
    text = on_cast(scopes, lambda call, source: f"self.kv_shadow.refresh({inner(call, source)}, forward_batch)")(source)
    return text.replace(f"class {BACKEND}", f"class PagedShadow:\n    pass\n\n\nclass {BACKEND}", 1)
