"""Triton's interpreter without the work that it repeats."""

from __future__ import annotations

from typing import Any


def prepare_once_a_launch() -> None:
    """Lets a call of one kernel function by another skip what the launch has done already.

    The interpreter replaces Triton's language before each such call, by going through all of its members, although
    they stay replaced until the launch ends (Triton 3.3 to 3.9).
    """
    from triton.runtime import interpreter

    replace, execute = getattr(interpreter, "_patch_lang", None), interpreter.GridExecutor.__call__
    if replace is None:
        return
    language = interpreter.tl
    done: set[tuple[bool, bool]] = set()
    sees: dict[Any, tuple[bool, bool]] = {}

    def once(function: Any) -> Any:
        if function not in sees:
            names = [value for value in function.__globals__.values() if value is language or value is language.core]
            sees[function] = (language in names, language.core in names)
        if sees[function] in done:
            return None
        done.add(sees[function])
        return replace(function)

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        done.clear()
        return execute(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = once, launch
