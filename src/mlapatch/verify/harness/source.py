"""Takes single definitions out of the target release's source, without importing the release.

Enums, length formulas and the index arguments of speculative inputs differ between releases; taking the release's own
text keeps the stand-ins honest without a table of versions.
"""

from __future__ import annotations
import __future__ as future

import ast
import builtins
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Resolve = Callable[[str, str], Any]
"""(module, name) -> the stand-in for a name that the definition uses."""


class MissingDefinition(LookupError):
    """The release defines no such name where it was looked for."""


@functools.cache
def parse(path: Path) -> ast.Module:
    """The file's syntax tree, read once."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def module_file(package: Path, module: str) -> Path | None:
    """`sglang.a.b` -> the file in `package` (the folder named sglang) that holds it, or None."""
    relative = Path(*module.split(".")[1:])
    for candidate in (package / relative.with_suffix(".py"), package / relative / "__init__.py"):
        if relative.parts and candidate.is_file():
            return candidate
    return None


def find(package: Path, module: str, name: str, depth: int = 4) -> tuple[str, ast.stmt]:
    """The statement that defines `name`, and the module that holds it, following `from x import name`."""
    path = module_file(package, module)
    if path is None or depth == 0:
        raise MissingDefinition(f"{module}.{name}")
    tree = parse(path)
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return module, node
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return module, node
    for bound, source, original in _imported(tree, module, path.name == "__init__.py"):
        if bound == name and source.startswith("sglang"):
            return find(package, source, original, depth - 1)
    raise MissingDefinition(f"{module}.{name}")


def parameters(package: Path, module: str, name: str) -> list[str] | None:
    """The parameter names of a function of the release, in order, or None where it has no such function."""
    try:
        _, node = find(package, module, name)
    except MissingDefinition:
        return None
    return [a.arg for a in node.args.args] if isinstance(node, ast.FunctionDef) else None


def take(package: Path, module: str, name: str, resolve: Resolve) -> Any:
    """The object that the release's own definition of `name` makes, with every name it uses resolved."""
    where, node = find(package, module, name)
    return _execute(package, where, node, name, resolve)


def take_method(package: Path, module: str, owner: str, method: str, resolve: Resolve) -> Callable[..., Any]:
    """One method of a class of the release, as a function."""
    where, node = find(package, module, owner)
    if isinstance(node, ast.ClassDef):
        for item in node.body:
            if isinstance(item, ast.FunctionDef) and item.name == method:
                function: Callable[..., Any] = _execute(package, where, item, method, resolve)
                return function
    raise MissingDefinition(f"{module}.{owner}.{method}")


def _execute(package: Path, module: str, node: ast.stmt, name: str, resolve: Resolve) -> Any:
    path = module_file(package, module)
    if path is None:
        raise MissingDefinition(f"{module}.{name}")
    tree = parse(path)
    namespace: dict[str, Any] = {"__name__": module, "__builtins__": builtins}
    imported = {
        bound: (source, original) for bound, source, original in _imported(tree, module, path.name == "__init__.py")
    }
    for used in sorted(_names(node) - {name}):
        if hasattr(builtins, used):
            continue
        if used in imported and not imported[used][0].startswith(("sglang", "sgl_kernel")):
            namespace[used] = _import(*imported[used])
        elif used in imported:
            namespace[used] = resolve(*imported[used])
        elif any(isinstance(n, (ast.ClassDef, ast.FunctionDef)) and n.name == used for n in tree.body) or _assigned(
            tree, used
        ):
            namespace[used] = resolve(module, used)
    code = compile(ast.Module([node], []), str(path), "exec", flags=future.annotations.compiler_flag, dont_inherit=True)
    exec(code, namespace)  # noqa: S102 - verify runs the release's code, in a process of its own
    return namespace[name]


def _import(source: str, original: str) -> Any:
    module = __import__(source, fromlist=["_"])
    return module if not original else getattr(module, original)


def _assigned(tree: ast.Module, name: str) -> bool:
    return any(
        isinstance(n, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in n.targets)
        for n in tree.body
    )


def _imported(tree: ast.Module, module: str, is_package: bool) -> Iterator[tuple[str, str, str]]:
    """(bound name, module, original name or '') of every import of the file, those under `if TYPE_CHECKING` too."""
    parts = module.split(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = parts[: len(parts) - node.level + (1 if is_package else 0)] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield alias.asname or alias.name, source, alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield (
                    alias.asname or alias.name.split(".")[0],
                    alias.name if alias.asname else alias.name.split(".")[0],
                    "",
                )


class _WithoutAnnotations(ast.NodeVisitor):
    def __init__(self) -> None:
        self.names: set[str] = set()

    def visit_Name(self, node: ast.Name) -> None:
        self.names.add(node.id)

    def visit_arg(self, node: ast.arg) -> None:
        """An annotation is never evaluated."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for child in (*node.decorator_list, node.args, *node.body):
            self.visit(child)


def _names(node: ast.stmt) -> set[str]:
    visitor = _WithoutAnnotations()
    visitor.visit(node)
    return visitor.names
