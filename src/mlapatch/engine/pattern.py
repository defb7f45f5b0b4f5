"""Structural patterns with named holes, compiled to libcst matchers, and templates filled from what they matched.

`{name}` stands for one expression, `{name...}` for any number of call arguments. White space, comments, parentheses,
quotes and trailing commas do not count. Braces of a dict or set are doubled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, TypeAlias, cast

import libcst as cst
import libcst.matchers as m

from mlapatch.engine.holes import HEADER, MANY, ONE, with_stand_ins

#: Fields of libcst nodes that carry formatting only.
FORMATTING = frozenset(
    {"lpar", "rpar", "comma", "equal", "semicolon", "dot", "colon", "lbracket", "rbracket", "lbrace", "rbrace"}
    | {"first_colon", "second_colon", "header", "footer", "leading_lines", "lines_after_decorators"}
    | {"trailing_whitespace", "indent", "star_etc_comma"}
)

Bindings: TypeAlias = Mapping[str, cst.CSTNode | Sequence[cst.CSTNode]]


class PatternError(ValueError):
    """A pattern or template is not Python with holes."""


@dataclass(frozen=True)
class Pattern:
    """A compiled pattern: the type of node that it can match, and the matcher."""

    text: str
    root: type[cst.CSTNode]
    matcher: m.BaseMatcherNode
    definition: str = ""  # the name, for the patterns 'class X' and 'def x'

    def match(self, node: cst.CSTNode) -> Bindings | None:
        """What the holes stand for, if the node matches."""
        if not isinstance(node, self.root):
            return None
        if self.definition:
            named = cast("cst.ClassDef | cst.FunctionDef", node)
            return {} if named.name.value == self.definition else None
        return cast("Bindings | None", m.extract(node, self.matcher))


def _matcher(node: cst.CSTNode) -> m.BaseMatcherNode:
    if isinstance(node, cst.Name) and node.value.startswith(ONE):
        return m.SaveMatchedNode(m.DoNotCare(), node.value[len(ONE) :])  # type: ignore[return-value]
    if isinstance(node, cst.SimpleString):
        value = node.evaluated_value
        return m.SimpleString(m.MatchIfTrue(lambda text: cst.SimpleString(text).evaluated_value == value))
    wanted: dict[str, object] = {}
    for item in fields(node):
        if item.name in FORMATTING or item.name.startswith("whitespace"):
            continue
        value = getattr(node, item.name)
        if isinstance(value, cst.CSTNode):
            wanted[item.name] = _matcher(value)
        elif isinstance(value, (list, tuple)):
            wanted[item.name] = [_element(child) for child in value]
        elif value is None or isinstance(value, str):
            wanted[item.name] = value
    return cast("m.BaseMatcherNode", getattr(m, type(node).__name__)(**wanted))


def _element(node: cst.CSTNode) -> object:
    many = _many(node)
    return m.SaveMatchedNode(m.ZeroOrMore(), many) if many else _matcher(node)


def _many(node: cst.CSTNode) -> str:
    """The name of an `{x...}` hole, if this call argument is one."""
    if isinstance(node, cst.Arg) and node.star == "*" and isinstance(node.value, cst.Name):
        return node.value.value[len(MANY) :] if node.value.value.startswith(MANY) else ""
    return ""


@lru_cache(maxsize=1024)
def compile_pattern(text: str) -> Pattern:
    """Compile an expression, a simple statement, or the header `class X` / `def x`; raises PatternError."""
    header = HEADER.fullmatch(text.strip())
    if header:
        root = cst.ClassDef if header[1] == "class" else cst.FunctionDef
        return Pattern(text, root, m.DoNotCare(), header[2])  # type: ignore[arg-type]
    source, names = with_stand_ins(text.strip())
    if len(set(names)) != len(names):
        raise PatternError(f"a hole is named twice in the pattern {text!r}")
    try:
        node: cst.CSTNode = cst.parse_expression(source)
    except cst.ParserSyntaxError:
        node = _statement(source, text)
    return Pattern(text, type(node), _matcher(node))


def _statement(source: str, text: str) -> cst.CSTNode:
    try:
        statement = cst.parse_statement(source)
    except cst.ParserSyntaxError as error:
        raise PatternError(f"the pattern {text!r} is not Python: {error.message}") from None
    if isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1:
        return statement.body[0]
    raise PatternError(f"the pattern {text!r} must be one expression or one simple statement")


#: Expressions that bind tighter than any operator, an attribute or a call around them.
_ATOMS = (
    *(cst.Name, cst.Call, cst.Attribute, cst.Subscript, cst.SimpleString, cst.FormattedString, cst.Ellipsis),
    *(cst.List, cst.Set, cst.Dict, cst.ListComp, cst.SetComp, cst.DictComp),
)


def enclosed(node: cst.BaseExpression) -> cst.BaseExpression:
    """The expression in parentheses, unless it stands for one value anywhere without them."""
    if isinstance(node, _ATOMS) or node.lpar:
        return node
    return node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


def _code(node: cst.CSTNode) -> str:
    return cst.Module(body=[]).code_for_node(node)


def _bracketed(arg: cst.Arg) -> cst.Arg:
    """A generator may stand without parentheses only where it is the one argument."""
    return arg.with_changes(value=enclosed(arg.value)) if isinstance(arg.value, cst.GeneratorExp) else arg


class _Fill(cst.CSTTransformer):
    """Put the bound nodes where the holes are."""

    def __init__(self, bindings: Bindings) -> None:
        super().__init__()
        self.bindings = bindings

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
        if not original_node.value.startswith(ONE):
            return updated_node
        return enclosed(self._one(original_node.value[len(ONE) :]))

    def leave_Arg(self, original_node: cst.Arg, updated_node: cst.Arg) -> cst.Arg:
        value = original_node.value
        if original_node.star or not (isinstance(value, cst.Name) and value.value.startswith(ONE)):
            return updated_node
        return updated_node.with_changes(value=self._one(value.value[len(ONE) :]))

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:  # noqa: ARG002 (libcst's name)
        args: list[cst.Arg] = []
        for arg in updated_node.args:
            many = _many(arg)
            if many:
                args += [cst.ensure_type(bound, cst.Arg) for bound in self._many(many)]
                if args and isinstance(arg.comma, cst.Comma) and "\n" in _code(arg.comma.whitespace_after):
                    args[-1] = args[-1].with_changes(comma=arg.comma)  # the template's own line break
            else:
                args.append(arg)
        if len(args) > 1:
            args = [_bracketed(arg) for arg in args]
        return updated_node.with_changes(args=args)

    def _one(self, name: str) -> cst.BaseExpression:
        bound = self.bindings.get(name)
        if not isinstance(bound, cst.CSTNode):
            raise PatternError(f"the template uses {{{name}}}, which the pattern does not bind")
        return cast("cst.BaseExpression", bound.deep_clone())

    def _many(self, name: str) -> Sequence[cst.CSTNode]:
        bound = self.bindings.get(name)
        if bound is None or isinstance(bound, cst.CSTNode):
            raise PatternError(f"the template uses {{{name}...}}, which the pattern does not bind")
        return bound


def _filled(node: cst.CSTNode, bindings: Bindings) -> cst.CSTNode:
    try:
        return cast("cst.CSTNode", node.visit(_Fill(bindings)))
    except cst.CSTValidationError as error:
        raise PatternError(f"what the holes stand for does not fit there: {error}") from None


def fill_expression(template: str, bindings: Bindings, config: cst.PartialParserConfig) -> cst.BaseExpression:
    """The template as an expression, its holes filled; raises PatternError."""
    try:
        node = cst.parse_expression(with_stand_ins(template.strip())[0], config)
    except cst.ParserSyntaxError as error:
        raise PatternError(f"the replacement {template!r} is not an expression: {error.message}") from None
    return cast("cst.BaseExpression", _filled(node, bindings))


@lru_cache(maxsize=64)
def _parsed_code(source: str, indent: str, newline: str) -> cst.Module:
    """Snippets are the same for every file; their nodes are immutable."""
    return cst.parse_module(
        source, cst.PartialParserConfig(default_indent=indent, default_newline=cast("Any", newline))
    )


def fill_statements(
    code: str, bindings: Bindings, config: cst.PartialParserConfig
) -> tuple[list[cst.BaseStatement], list[cst.EmptyLine]]:
    """The code as statements with their holes filled, and the comment lines after the last one."""
    source = with_stand_ins(code)[0] if bindings else code
    try:
        module = _parsed_code(source, str(config.default_indent), str(config.default_newline))
        if not bindings and len(module.body) == 1:  # may be inserted at several places, and nodes are told by identity
            module = module.deep_clone()
    except cst.ParserSyntaxError as error:
        raise PatternError(f"the inserted code is not Python: {error}") from None
    if not module.body:
        raise PatternError("the inserted code has no statement")
    body: list[cst.BaseStatement] = list(module.body)
    if bindings:
        body = [cast("cst.BaseStatement", _filled(statement, bindings)) for statement in body]
    first = cast("cst.SimpleStatementLine", body[0])
    body[0] = first.with_changes(leading_lines=[*module.header, *first.leading_lines])
    return body, [line for line in module.footer if line.comment is not None]
