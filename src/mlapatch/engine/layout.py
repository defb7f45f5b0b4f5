"""The layout of a replaced call: more or other arguments, one a line where the old ones stood one a line."""

from __future__ import annotations

import libcst as cst


def laid_out_as(new: cst.Call, old: cst.Call) -> cst.Call:
    """`new` with the line breaks, the comments and the trailing comma of `old`.

    Arguments that `new` shares with `old` are the same nodes, and keep what stands beside them.
    """
    if not old.args or not new.args:
        return new
    last, args = old.args[-1], list(new.args)
    place = next((i for i, arg in enumerate(args) if arg is last), None)
    if place is None:
        args[-1] = args[-1].with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
    elif place < len(args) - 1:
        args[place], args[-1] = _pushed_in(last, args[-1], _indentation(old))
    return new.with_changes(args=args, whitespace_before_args=old.whitespace_before_args)


def _pushed_in(last: cst.Arg, new: cst.Arg, indentation: cst.ParenthesizedWhitespace | None) -> tuple[cst.Arg, cst.Arg]:
    """The argument that was the last one, and the one that is last now."""
    trailing = isinstance(last.comma, cst.Comma)
    end = last.comma.whitespace_after if isinstance(last.comma, cst.Comma) else last.whitespace_after_arg
    if not isinstance(end, cst.ParenthesizedWhitespace) or indentation is None:
        space = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        first = last.with_changes(comma=space, whitespace_after_arg=cst.SimpleWhitespace(""))
        return first, new.with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
    between = end.with_changes(indent=indentation.indent, last_line=indentation.last_line)
    closing = end.with_changes(
        first_line=end.first_line.with_changes(comment=None, whitespace=cst.SimpleWhitespace("")), empty_lines=[]
    )
    first = last.with_changes(comma=cst.Comma(whitespace_after=between), whitespace_after_arg=cst.SimpleWhitespace(""))
    if trailing:
        return first, new.with_changes(comma=cst.Comma(whitespace_after=closing))
    return first, new.with_changes(comma=cst.MaybeSentinel.DEFAULT, whitespace_after_arg=closing)


def _indentation(call: cst.Call) -> cst.ParenthesizedWhitespace | None:
    """The line break before an argument, where there is one."""
    commas = [arg.comma.whitespace_after for arg in call.args[:-1] if isinstance(arg.comma, cst.Comma)]
    breaks = [w for w in (call.whitespace_before_args, *commas) if isinstance(w, cst.ParenthesizedWhitespace)]
    return breaks[0] if breaks else None
