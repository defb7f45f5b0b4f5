"""Properties over generated edits: apply keeps every other byte, and nothing depends on the order of patches."""

from __future__ import annotations

import ast
from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from mlapatch.engine.patch import Patch, load_patch
from mlapatch.engine.verdict import Fits, apply, judge

ATOMS = st.sampled_from(
    ["x", "self.y", "f(x)", "x[0]", "-x", "x + 1", "lambda: x", "x if x else 1", "'é'", "[*x]", "(y for y in x)"]
)
NOISE = st.sampled_from(["# old(x)\n", "y = 'old(x)'\n", "\n", "z = x  ;  w = 1\n", "other(old)\n", "y = {'a': 1 }\n"])


def patch(find: str, replace: str, present: str, name: str = "p") -> Patch:
    table = {
        "name": name, "summary": "", "target": "a.py",
        "edit": [{"scope": "g", "find": find, "replace": replace}],
        "post": [{"scope": "g", "present": present}],
    }  # fmt: skip
    return load_patch(table, {})


@settings(max_examples=60, deadline=None)
@given(argument=ATOMS, around=st.lists(NOISE, max_size=4), after=st.lists(NOISE, max_size=4), crlf=st.booleans())
def test_a_replacement_means_what_it_says_and_touches_nothing_else(
    argument: str, around: list[str], after: list[str], crlf: bool
) -> None:
    head = "def g(self, x, w=1):\n" + "".join(f"    {line}" for line in around)
    tail = "".join(f"    {line}" for line in after) + "    return 2 * old(1).real\n"
    inner = argument if not argument.startswith("(") else argument[1:-1]  # a generator alone needs no parentheses
    text = f"{head}    v = 2 * old({inner}, ).real\n{tail}".replace("old(1)", "elder(1)").replace(", )", ")")
    source = (text.replace("\n", "\r\n") if crlf else text).encode()
    wanted = patch("old({a})", "repr({a}) - {a}", "repr({a}) - {b}")
    outcome = apply(source, wanted, None)
    assert isinstance(outcome, Fits), outcome
    before, now = source.splitlines(keepends=True), outcome.source.splitlines(keepends=True)
    changed = [index for index, (old, new) in enumerate(zip(before, now, strict=True)) if old != new]
    assert changed == [head.count("\n")]
    assert judge(outcome.source, wanted, None).verdict == "applied"
    expected = ast.parse(f"v = 2 * (repr(({inner})) - ({inner})).real").body[0]
    assert ast.dump(expected) in ast.dump(ast.parse(outcome.source))


@settings(max_examples=25, deadline=None)
@given(noise=st.lists(NOISE, max_size=3))
def test_the_order_of_compatible_patches_does_not_matter(noise: list[str]) -> None:
    body = "".join(f"    {line}" for line in noise)
    source = f"def g(self, x, w=1):\n{body}    return old(x), elder(x), oldest(x)\n".encode()
    patches = [patch(f"{n}({{a}})", f"repr({{a}}, '{n}')", f"repr({{a}}, '{n}')") for n in ("old", "elder", "oldest")]
    results = set()
    for order in permutations(patches):
        data = source
        for one in order:
            outcome = apply(data, one, None)
            assert isinstance(outcome, Fits), outcome
            data = outcome.source
        results.add(data)
    assert len(results) == 1
