"""Python's own parser and compiler, without the warnings that they print about code which is not ours."""

from __future__ import annotations

import ast
import warnings


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
