"""The table of perturbations: which change, and which verdicts are right after it."""

from __future__ import annotations

import ast

from tests.check.perturbations import (
    AMBIGUOUS,
    DRIFTED,
    FITS,
    MAY,
    NOT_ONE,
    Perturbation,
    appended,
    before_statement,
    commented,
    copy_of,
    decorated,
    inner,
    methods_reversed,
    on_cast,
    one_argument_a_line,
    parameter_added,
    parenthesised,
    plan_branches_swapped,
    rename,
    replaced,
    split_cast,
    under_with,
    unparsed,
    updaters_swapped,
    with_argument,
)
from tests.check.source import BACKEND, DECODE, DECODE_PLAN, EXTEND, PREFILL_PLAN, Source, is_call_of, is_cast

BOTH = (DECODE, EXTEND)
PLANS = (DECODE_PLAN, PREFILL_PLAN)
D_PLAN, P_PLAN = ((DECODE_PLAN, ".plan("),), ((PREFILL_PLAN, ".plan("),)
_k = ("k_buffer", "k_buf")


def _same(source: Source) -> str:
    return source.text


def _crlf(source: Source) -> str:
    return source.text.replace("\n", "\r\n")


P = Perturbation
FORMATTING = [
    P("nothing", _same, FITS),
    P("one argument a line", one_argument_a_line, FITS),
    P("each statement on one line", unparsed, FITS),
    P("comments with the cast and our own markers", commented, FITS),
    P("cast in parentheses", parenthesised, FITS),
    P("CRLF", _crlf, FITS),
    P("byte order mark", lambda source: "\ufeff" + source.text, FITS),
    P("no newline at the end", lambda source: source.text.rstrip("\n"), FITS),
    P("tabs", lambda source: source.text.replace("    ", "\t"), FITS, commutes=False),
    P(
        "form feed",
        replaced("\n\nclass FlashInferMLAIndicesUpdaterDecode", "\n\f\nclass FlashInferMLAIndicesUpdaterDecode"),
        MAY,
    ),
]
NAMES = [
    P("the cast's local renamed", rename(BOTH, _k, "kv_all"), FITS),
    P("the decode wrapper's local renamed", rename([DECODE], ["decode_wrapper"], "w"), MAY),
    P("the prefill wrapper's local renamed", rename([EXTEND], ["prefill_wrapper_paged"], "w"), MAY),
    P("the plans' wrapper parameters renamed", rename(PLANS, ["wrapper", "wrapper_paged"], "w"), MAY),
    P("kv_indices renamed", rename(PLANS, ["kv_indices"], "slots"), MAY),
    P("kv_indptr renamed", rename(PLANS, ["kv_indptr"], "starts"), MAY),
    P("bs renamed", rename(PLANS, ["bs"], "requests"), MAY),
    P("q renamed", rename(BOTH, ["q"], "query"), MAY),
    P("layer renamed", rename(BOTH, ["layer"], "attn"), MAY),
    P("forward_batch renamed", rename(BOTH, ["forward_batch"], "batch"), MAY),
    P("self renamed", rename((*BOTH, *PLANS), ["self"], "this"), MAY),
]
ORDER = [
    P("methods in reverse order", methods_reversed, FITS),
    P("the updaters in the other order", updaters_swapped, FITS),
    P("plan's branches the other way round", plan_branches_swapped, MAY),
]
UNRELATED = [
    P("forward_decode's lines in another method", copy_of(DECODE, "forward_reference"), FITS, commutes=False),
    P("forward_extend's lines in a function", copy_of(EXTEND, "reference", "module"), FITS, commutes=False),
    P("forward_decode of another class", copy_of(DECODE, "forward_decode", "Other"), FITS, commutes=False),
    P(
        "call_begin_forward of another class",
        copy_of(DECODE_PLAN, "call_begin_forward", "OtherUpdater"),
        FITS,
        commutes=False,
    ),
    P(
        "a subclass with the same method",
        appended(f"""
        class Derived({BACKEND}):
            def forward_decode(self, q, layer, forward_batch):
                k_buffer = forward_batch.token_to_kv_pool.get_key_buffer(layer.layer_id).to(q.dtype)
                return k_buffer
        """),
        FITS,
        commutes=False,
    ),
    P("the cast in a string", before_statement(DECODE, is_cast, "note = 'x = p.get_key_buffer(i).to(q.dtype)'"), FITS),
    P("a check before the run", before_statement(DECODE, is_call_of("run"), "assert q is not None"), FITS),
    P("one more parameter", parameter_added, FITS),
    P("decorated", decorated, FITS),
    P("one more keyword to decode's run", with_argument(DECODE, ["run"], "enable_pdl=True"), MAY, commutes=False),
    P("one more keyword to extend's run", with_argument(EXTEND, ["run"], "enable_pdl=True"), MAY, commutes=False),
    P("body under with", under_with(DECODE), FITS),
    P("another dtype", on_cast(BOTH, lambda call, source: f"{inner(call, source)}.to(torch.bfloat16)"), FITS),
    P("another receiver", replaced("token_to_kv_pool.get_key_buffer", "pool.mla.get_key_buffer", times=2), FITS),
]
CHANGED = [
    P("one more argument to the cast", on_cast(BOTH, lambda c, s: f"{inner(c, s)}.to(q.dtype, copy=True)"), DRIFTED),
    P("the dtype by keyword", on_cast(BOTH, lambda c, s: f"{inner(c, s)}.to(dtype=q.dtype)"), MAY, commutes=False),
    P("type() for to()", on_cast(BOTH, lambda c, s: f"{inner(c, s)}.type(q.dtype)"), DRIFTED),
    P("decode's cast gone", on_cast([DECODE], inner), DRIFTED),
    P("extend's cast gone", on_cast([EXTEND], inner), DRIFTED),
    P("both casts gone", on_cast(BOTH, inner), DRIFTED),
    P("decode's cast in two statements", split_cast, DRIFTED),
    P("get_key_buffer renamed", replaced("get_key_buffer", "get_kv_buffer", times=2), DRIFTED),
    P("class renamed", replaced(f"class {BACKEND}", f"class {BACKEND}V2"), DRIFTED),
    P("method renamed", replaced("def forward_decode(", "def forward_decode_step("), DRIFTED),
    P("class under if", lambda s: s.text.replace("\n", "\n    ").join(["if True:\n    ", "\n"]), DRIFTED),
    P(
        "one more positional to decode's plan",
        with_argument(DECODE_PLAN, ["plan"], "None"),
        MAY,
        breaks=D_PLAN,
    ),
    P(
        "one more positional to prefill's plan",
        with_argument(PREFILL_PLAN, ["plan"], "None"),
        MAY,
        breaks=P_PLAN,
    ),
    P(
        "decode's updater renamed",
        replaced("FlashInferMLAIndicesUpdaterDecode", "DecodeUpdater"),
        DRIFTED,
        breaks=D_PLAN,
    ),
    P("not Python", lambda source: source.text + "\ndef (:\n", DRIFTED),
    P("empty file", lambda _: "", DRIFTED),
]
DOUBLED = [
    P("decode's cast twice", before_statement(DECODE, is_cast, "{it}"), AMBIGUOUS),
    P("extend's cast twice", before_statement(EXTEND, is_cast, "{it}"), AMBIGUOUS),
    P("the cast in a function inside", before_statement(DECODE, is_cast, "def again():\n    {it}"), AMBIGUOUS),
    P("decode's plan twice", before_statement(DECODE_PLAN, is_call_of("plan"), "{it}"), AMBIGUOUS, breaks=D_PLAN),
    P("prefill's plan twice", before_statement(PREFILL_PLAN, is_call_of("plan"), "{it}"), AMBIGUOUS, breaks=P_PLAN),
    P("forward_decode defined twice", copy_of(DECODE, "forward_decode"), NOT_ONE),
    P("forward_extend defined twice", copy_of(EXTEND, "forward_extend"), NOT_ONE),
    P("the class defined twice", appended(f"class {BACKEND}:\n    def forward_decode(self):\n        pass\n"), NOT_ONE),
]  # fmt: skip
TABLE = [*FORMATTING, *NAMES, *ORDER, *UNRELATED, *CHANGED, *DOUBLED]

FORWARD = "ModelRunner.forward"


def _is_return(node: ast.AST) -> bool:
    return isinstance(node, ast.Return) and isinstance(node.value, ast.Name) and node.value.id == "output"


RUNNER_TABLE = [
    P("runner: nothing", _same, FITS),
    P("runner: one argument a line", lambda source: one_argument_a_line(source, [FORWARD]), FITS),
    P("runner: each statement on one line", lambda source: unparsed(source, [FORWARD]), FITS),
    P("runner: comments with our own markers", lambda source: commented(source, [FORWARD]), FITS),
    P("runner: CRLF", _crlf, FITS),
    P("runner: byte order mark", lambda source: "\ufeff" + source.text, FITS),
    P("runner: no newline at the end", lambda source: source.text.rstrip("\n"), FITS),
    P("runner: self renamed", rename([FORWARD], ["self"], "this"), MAY),
    P("runner: forward_batch renamed", rename([FORWARD], ["forward_batch"], "batch"), MAY),
    P("runner: output renamed", rename([FORWARD], ["output"], "result"), MAY),
    P("runner: the same method elsewhere", copy_of(FORWARD, "forward", "OtherRunner"), FITS, commutes=False),
    P("runner: body under with", under_with(FORWARD), FITS, commutes=False),
    P("runner: class renamed", replaced("class ModelRunner", "class Runner"), DRIFTED),
    P("runner: method renamed", replaced("    def forward(", "    def forward_step("), DRIFTED),
    P("runner: the return twice", before_statement(FORWARD, _is_return, "if not forward_batch:\n    {it}"), AMBIGUOUS),
    P("runner: forward defined twice", copy_of(FORWARD, "forward"), NOT_ONE),
    P("runner: not Python", lambda source: source.text + "\ndef (:\n", DRIFTED),
]  # fmt: skip

assert len({p.name for p in TABLE}) == len(TABLE)
