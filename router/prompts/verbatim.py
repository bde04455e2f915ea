"""What a growing template (templates.py) makes of a plain message: pieces of text around the message's own, so that no template has to run.

A plain message has a role and a text, nothing else. The message loop's body is gone through once for each role, with a Hole where the text
stands. Wherever the outcome could depend on what the text is, the walk gives up (`Unknown`), and that role is rendered by the template
itself. What may be done with a hole: write it, join it to other texts, trim it, ask whether it is a string or empty (it is not).

    '<|im_start|>' + m.role + '\\n'  and  m.content | trim      role user  ->  '<|im_start|>user\\n', the text trimmed

Proved from the tree, never tried out on examples; the tests compare it with the templates. Known are the nodes that chat templates use; a
form that is not known makes no error, only no gain. 50 us a request are saved where it holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import nodes

from router.prompts.conversation import BILLING_HEADER

_MOST_ROLES = 32
_MOST_ROLE_CHARACTERS = 64


class Unknown(Exception):  # noqa: N818 - a value, named for what it is
    """The text of the message may matter here, or the form is not known."""


class Hole:
    """The message's text, or that trimmed. Not empty."""

    def __init__(self, trimmed: bool) -> None:
        self.trimmed = trimmed


WHOLE, TRIMMED = Hole(False), Hole(True)
Part = str | Hole
_UNDEFINED = object()
_LOOP, _INNER_LOOP = object(), object()


class Text(tuple[Part, ...]):
    """Parts one after the other, with a hole among them."""

    __slots__ = ()


class Verbatim:
    """Pieces of plain messages, but for the first of a conversation. body: of the loop over `messages`; item: its variable."""

    def __init__(self, body: Sequence[nodes.Node], item: str, wrap_parts: bool) -> None:
        self._body, self._item, self._wrap_parts = body, item, wrap_parts
        self._forms: dict[str, Text | None] = {}

    def pieces(self, messages: Sequence[Mapping[str, Any]]) -> list[str] | None:
        """A piece for each message, none of which is its conversation's first. None: the template has to be asked."""
        out = []
        for message in messages:
            role, content = message.get("role"), message.get("content")
            if type(role) is not str or type(content) is not str or len(message) != 2:
                return None
            form = self._forms[role] if role in self._forms else self._learn(role)
            text = content.strip()
            if form is None or not text or (role == "system" and content.startswith(BILLING_HEADER)):
                return None
            out.append("".join([p if type(p) is str else text if p is TRIMMED else content for p in form]))
        return out

    def _learn(self, role: str) -> Text | None:
        if len(role) > _MOST_ROLE_CHARACTERS or len(self._forms) >= _MOST_ROLES or role == "developer":
            return None
        content: Any = [{"type": "text", "text": WHOLE}] if self._wrap_parts and role != "tool" else WHOLE
        try:
            form = Text(_run(self._body, {self._item: {"role": role, "content": content}, "loop": _LOOP}))
        except Unknown:
            form = None
        self._forms[role] = form
        return form


def _run(body: Sequence[nodes.Node], names: dict[str, Any]) -> list[Part]:
    """What is written. Names that are set in a branch hold behind it, those of a loop do not, as in Jinja."""
    out: list[Part] = []
    for node in body:
        match node:
            case nodes.Output():
                for part in node.nodes:
                    out += _written(_value(part, names))
            case nodes.If():
                branch = next(
                    (b for t, b in [(node.test, node.body), *((e.test, e.body) for e in node.elif_)] if _true(_value(t, names))), None
                )
                out += _run(node.else_ if branch is None else branch, names)
            case nodes.For(target=nodes.Name(name=variable)) if node.test is None and not node.else_ and not node.recursive:
                items = _value(node.iter, names)
                if not isinstance(items, list):
                    raise Unknown
                for item in items:
                    out += _run(node.body, {**names, variable: item, "loop": _INNER_LOOP})
            case nodes.Assign(target=nodes.Name(name=variable)):
                names[variable] = _value(node.node, names)
            case _:
                raise Unknown
    return out


def _written(value: Any) -> Sequence[Part]:
    if value is _UNDEFINED:
        return ()
    if isinstance(value, Text):
        return value
    if isinstance(value, str | Hole):
        return (value,)
    raise Unknown


def _true(value: Any) -> bool:
    if value is _LOOP:
        raise Unknown
    return value is not _UNDEFINED and (isinstance(value, Hole | Text) or bool(value))


def _value(node: nodes.Node, names: Mapping[str, Any]) -> Any:
    match node:
        case nodes.Const():
            return node.value
        case nodes.TemplateData():
            return node.data
        case nodes.Name() if node.name in names:
            return names[node.name]
        case nodes.Getitem(arg=nodes.Const(value=key)):
            return _field(_value(node.node, names), key, by_name=False)
        case nodes.Getattr():
            return _field(_value(node.node, names), node.attr, by_name=True)
        case nodes.Not():
            return not _true(_value(node.node, names))
        case nodes.And():
            left = _value(node.left, names)
            return _value(node.right, names) if _true(left) else left
        case nodes.Or():
            left = _value(node.left, names)
            return left if _true(left) else _value(node.right, names)
        case nodes.CondExpr():
            if _true(_value(node.test, names)):
                return _value(node.expr1, names)
            return _UNDEFINED if node.expr2 is None else _value(node.expr2, names)
        case nodes.Add():
            return _joined([_value(node.left, names), _value(node.right, names)])
        case nodes.Concat():
            return _joined([_value(n, names) for n in node.nodes])
        case nodes.Compare(ops=[nodes.Operand(op="eq" | "ne" | "in" | "notin")]):
            return _compared(_value(node.expr, names), node.ops[0].op, node.ops[0].expr, names)
        case nodes.Test(args=[], kwargs=[], dyn_args=None, dyn_kwargs=None):
            return _tested(_value(node.node, names), node.name)
        case nodes.Filter(name="trim", args=[], kwargs=[], dyn_args=None, dyn_kwargs=None) if node.node is not None:
            value = _value(node.node, names)
            if isinstance(value, Hole):
                return TRIMMED
            if isinstance(value, str):
                return value.strip()
    raise Unknown


def _field(value: Any, key: Any, by_name: bool) -> Any:
    if value is _LOOP and key == "first" and by_name:
        return False
    if not isinstance(value, dict) or not isinstance(key, str) or (by_name and hasattr(dict, key)):
        raise Unknown
    return value.get(key, _UNDEFINED)


def _joined(values: Sequence[Any]) -> str | Text:
    if not all(isinstance(v, str | Hole | Text) for v in values):
        raise Unknown
    parts: list[Part] = []
    for value in values:
        parts += value if isinstance(value, Text) else (value,)
    return "".join(p for p in parts if isinstance(p, str)) if all(isinstance(p, str) for p in parts) else Text(parts)


def _compared(left: Any, op: str, right: nodes.Node, names: Mapping[str, Any]) -> bool:
    """Texts with texts, or with a written list of texts: no hole is looked into."""
    if isinstance(right, nodes.List | nodes.Tuple):
        among: Any = [_value(item, names) for item in right.items]
    else:
        among = _value(right, names)
    if not isinstance(left, str) or not (isinstance(among, str) or (op in ("in", "notin") and isinstance(among, list))):
        raise Unknown
    if isinstance(among, list) and not all(isinstance(item, str) for item in among):
        raise Unknown
    return {"eq": left == among, "ne": left != among, "in": left in among, "notin": left not in among}[op]


def _tested(value: Any, name: str) -> bool:
    if value is _LOOP:
        raise Unknown
    if name == "string":
        return isinstance(value, str | Hole | Text)
    if name in ("defined", "undefined"):
        return (value is _UNDEFINED) == (name == "undefined")
    if name == "none":
        return value is None
    raise Unknown
