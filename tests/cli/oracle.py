"""What a patch may change in the real file, judged with Python's own `ast` and `difflib`, not with the engine."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator

BACKEND_CLASS = "FlashInferMLAAttnBackend"
DECODE_UPDATER, PREFILL_UPDATER = "FlashInferMLAIndicesUpdaterDecode", "FlashInferMLAIndicesUpdaterPrefill"
FORWARDS = {f"{BACKEND_CLASS}.forward_decode", f"{BACKEND_CLASS}.forward_extend"}
#: Where each patch may add lines; existing lines may change or go only where CHANGES says so.
SCOPES = {
    "active-cast": {*FORWARDS, f"{BACKEND_CLASS}.__init__", f"{PREFILL_UPDATER}.call_begin_forward"},
    "gather-cast": {
        *FORWARDS,
        f"{BACKEND_CLASS}.__init__",
        f"{DECODE_UPDATER}.call_begin_forward",
        f"{PREFILL_UPDATER}.call_begin_forward",
    },
    "fp8-plan": {
        *FORWARDS,
        *(f"{updater}.__init__" for updater in (DECODE_UPDATER, PREFILL_UPDATER)),
        *(f"{updater}.call_begin_forward" for updater in (DECODE_UPDATER, PREFILL_UPDATER)),
    },
}
CHANGES = {
    "active-cast": FORWARDS,
    "gather-cast": FORWARDS,
    "fp8-plan": {*FORWARDS, f"{DECODE_UPDATER}.call_begin_forward", f"{PREFILL_UPDATER}.call_begin_forward"},
}


def functions(source: bytes) -> dict[str, tuple[int, int]]:
    """First and last line (from 1, decorators in) of every top-level function and method, by dotted name."""
    found = {}
    for name, node in _definitions(ast.parse(source).body, ""):
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        found[name] = (first, node.end_lineno or node.lineno)
    return found


def _definitions(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield f"{prefix}{node.name}", node
        elif isinstance(node, ast.ClassDef):
            yield from _definitions(node.body, f"{prefix}{node.name}.")


def whole_pool_casts(source: bytes, owner: str = BACKEND_CLASS) -> list[int]:
    """Lines of `X.get_key_buffer(...).to(...)` in a class."""
    tree = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == owner)
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "to"
        and isinstance(node.func.value, ast.Call)
        and isinstance(node.func.value.func, ast.Attribute)
        and node.func.value.func.attr == "get_key_buffer"
    ]


def segments(source: bytes, wanted: str) -> list[str]:
    """The exact text of what must not be touched: the class `wanted`, calls on `ragged` wrappers, the DCP branch."""
    lines, tree = source.splitlines(keepends=True), ast.parse(source)
    assert len(lines) == source.count(b"\n") + (not source.endswith(b"\n")), "Python's lines are those of `lines`"
    found = []
    for node in ast.walk(tree):
        if wanted == "ragged" and isinstance(node, ast.Call) and "ragged" in ast.unparse(node.func):
            found.append(_segment(lines, node))
        elif wanted == "dcp" and isinstance(node, ast.If) and "dcp_kv_buffer" in "".join(map(ast.unparse, node.body)):
            found.append("\n".join(_segment(lines, statement) for statement in node.body))
        elif isinstance(node, ast.ClassDef) and node.name == wanted:
            found.append(_segment(lines, node))
    return found


def _segment(lines: list[bytes], node: ast.expr | ast.stmt) -> str:
    """What `ast.get_source_segment` gives, without taking the lines apart for each node."""
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    part = lines[node.lineno - 1 : node.end_lineno]
    part[-1] = part[-1][: node.end_col_offset]
    part[0] = part[0][node.col_offset :]
    return b"".join(part).decode()


def trespasses(before: bytes, after: bytes, patch: str) -> list[str]:
    """Every changed line that lies where the patch has no business."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    spans, gaps = functions(before), _gaps(before)
    wrong = []
    for kind, i1, i2, j1, j2 in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "insert":  # between the lines i1 and i1 + 1
            inside = {name for name, (first, last) in spans.items() if first <= i1 < last}
            if not (inside & SCOPES[patch] or any(first <= i1 <= last for first, last in gaps)):
                wrong.append(f"inserted after line {i1} in {inside}: {new[j1:j2]}")
        elif kind != "equal":
            for line in range(i1 + 1, i2 + 1):
                inside = {name for name, (first, last) in spans.items() if first <= line <= last}
                if not inside & CHANGES[patch]:
                    wrong.append(f"line {line} in {inside}: {old[line - 1]!r}")
    return wrong


def _gaps(source: bytes) -> list[tuple[int, int]]:
    """Where helpers may go: between the backend's class and what stands before it, and at the end."""
    body = ast.parse(source).body
    index = next(i for i, n in enumerate(body) if isinstance(n, ast.ClassDef) and n.name == BACKEND_CLASS)
    last = body[-1].end_lineno or 0
    return [(body[index - 1].end_lineno or 0, body[index].lineno - 1), (last, source.count(b"\n"))]
