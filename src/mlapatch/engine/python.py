"""Python's own parser and compiler, without the warnings that they print about code which is not ours."""

from __future__ import annotations

import ast
import tokenize
import warnings

LARGEST = 4 << 20
"""Bytes of a file that is looked into: the largest of SGLang's has a tenth, and a parsed one takes a thousandfold."""
DEEPEST = 200
"""Levels of nesting: SGLang's files have 25. Recursion over a tree has an end somewhere above."""


def parse_ast(source: str | bytes) -> ast.Module:
    """The abstract syntax tree; raises SyntaxError or ValueError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes and the like: the file's author was told
        return ast.parse(source)


def check_compiles(source: bytes, name: str) -> None:
    """Raise SyntaxError or ValueError where the source does not compile."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compile(source, name, "exec", dont_inherit=True)


def check_readable(source: bytes) -> None:
    """Raise ValueError (its text is for people) where the source is no Python, or too large or too deep."""
    if len(source) > LARGEST:
        raise ValueError(f"the file has {len(source):,} bytes, and one of more than {LARGEST:,} is not looked into")
    lines = iter(source.split(b"\n", 2)[:2])  # a coding is named in the first two
    try:
        source.decode(tokenize.detect_encoding(lines.__next__)[0])
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise ValueError(f"the file cannot be decoded: {error}") from None
    try:
        level: list[ast.AST] = [parse_ast(source)]
    except SyntaxError as error:
        from platform import python_version

        at = f"line {error.lineno}: " if error.lineno else ""
        raise ValueError(f"{at}not Python {python_version()}: {error.msg}") from None
    except (RecursionError, MemoryError):
        raise ValueError("code is nested too deeply to be read") from None
    for _ in range(DEEPEST):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if not level:
            return
        if any(isinstance(node, ast.BoolOp) and len(node.values) > DEEPEST for node in level):
            break  # `a or b or c` is nested for libcst
    raise ValueError(f"code is nested more than {DEEPEST} levels deep")
