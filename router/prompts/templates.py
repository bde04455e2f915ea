"""A model's chat template: its environment, what it makes of messages, and whether its text grows with the conversation.

The environment is transformers' (sandboxed, immutable, trimmed blocks, `tojson` without HTML escapes). Two things are read from the
template's syntax tree:

- `wrap_parts`: it loops over a message's content, so the engine hands it parts (vLLM's content format `openai`), else text. The rule
  follows names as vLLM 0.32 does: loops over `messages` or what was assigned from it, over `content`, and macro parameters that get it.
- whether it grows: the text is head + a piece for each message + tail, where a piece depends on nothing but its message and on being first:

      text([m0 .. mn]) = head(m0) + piece(m0, first) + piece(m1) + .. + piece(mn) + tail(m0)

  Then a longer conversation is rendered from its first message and its new ones alone, and the head not at all. This is proved from the
  tree, not guessed: one loop over `messages` at the top, `messages` elsewhere only as `messages[0]`, of `loop` only `loop.first`, no
  namespace written or stateful global used in the loop, no loop left early, no date asked for. Many templates of today look at
  neighbours or at the last question and are not of this form: those are rendered whole each time. Rejected: trusting that the text of a
  shorter conversation begins the longer one's (templates drop old thoughts).
"""

from __future__ import annotations

import datetime
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.prompts.conversation import UnsupportedPrompt
from router.prompts.verbatim import Verbatim

_IMPURE = frozenset(("cycler", "joiner", "lipsum"))
_MARK = f"\x00warmwatch {secrets.token_hex(16)}\x00"
"""Stands before each message's piece and before the tail. Nobody outside of this process knows it."""


class Prepared(dict[str, Any]):
    """A tool as the template gets it, with its JSON once it was asked for: templates write the same tools at each request."""

    __slots__ = ("text",)
    text: str


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """One template, compiled. variables: the names that it takes from outside. timeless: it does not ask for the date.

    marked, behind: of a growing template, with _MARK before each message's piece and before the tail; `behind` without what only writes the
    head. verbatim: its pieces of plain messages. None: not of the growing form.
    """

    compiled: jinja2.Template
    marked: jinja2.Template | None
    behind: jinja2.Template | None
    verbatim: Verbatim | None
    wrap_parts: bool
    knows_developer: bool
    knows_reasoning: bool
    variables: frozenset[str]
    timeless: bool

    @classmethod
    def of(cls, source: str, env: jinja2.Environment) -> ChatTemplate:
        """Raises jinja2.TemplateSyntaxError."""
        tree = env.parse(source)
        knows = '"developer"' in source or "'developer'" in source
        timeless = "strftime_now" not in source
        marked = behind = verbatim = None
        wraps = _loops_over_content(tree)
        if timeless and _grows(tree):
            marked, behind = _with_marks(env, source, head=True), _with_marks(env, source, head=False)
            loop = _message_loop(tree)
            assert loop is not None
            assert isinstance(loop.target, nodes.Name)
            verbatim = Verbatim(loop.body, loop.target.name, wraps)
        variables = frozenset(find_undeclared_variables(tree))
        reasons = "reasoning" in source
        return cls(env.from_string(source), marked, behind, verbatim, wraps, knows, reasons, variables, timeless)

    @property
    def grows(self) -> bool:
        return self.marked is not None

    def render(self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> str:
        """The prompt's text. Raises UnsupportedPrompt: templates are foreign code and may raise anything."""
        return _rendered(self.compiled, messages, values)

    def pieces(self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> list[str]:
        """Of a growing template: [head, a piece for each message .., tail]."""
        assert self.marked is not None
        return _rendered(self.marked, messages, values).split(_MARK)

    def new_pieces(self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> list[str]:
        """Of a growing template: [a piece for each message but the first .., tail]; the first is the conversation's first."""
        assert self.behind is not None
        return _rendered(self.behind, messages, values).split(_MARK)[2:]


def _rendered(template: jinja2.Template, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> str:
    try:
        return template.render({**values, "messages": messages})
    except Exception as e:
        raise UnsupportedPrompt(f"the chat template does not take this conversation: {type(e).__name__}: {e}") from e


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; here it only shows its content."""

    tags = {"generation"}  # noqa: RUF012 - the name and type that jinja2 asks for

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock])
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    if isinstance(value, Prepared) and not ensure_ascii and indent is None and separators is None and not sort_keys:
        if not hasattr(value, "text"):
            value.text = json.dumps(value, ensure_ascii=False)
        return value.text
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)  # local time, as the engine's template sees it


# -- whether it loops over a message's content ----------------------------------------------------------------------------------------


def _loops_over_content(tree: nodes.Template) -> bool:
    lists = _names_of(tree, "messages")
    items = {
        loop.target.name
        for loop in tree.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name) and any(_reads(loop.iter, name) for name in lists)
    }
    in_macros: set[int] = set()
    through_macros: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        loops = list(macro.find_all(nodes.For))
        in_macros |= {id(loop) for loop in loops}
        filled = set(_parameters_with_content(tree, macro, items))
        through_macros |= {id(loop): filled for loop in loops if filled}
    for loop in tree.find_all(nodes.For):
        over = loop.iter.name if isinstance(loop.iter, nodes.Name) else None
        if any(_reads(loop.iter, item, "content") for item in items) or over in through_macros.get(id(loop), ()):
            return True
        if over == "content" and id(loop) not in in_macros:
            return True
    return False


def _names_of(tree: nodes.Template, name: str) -> set[str]:
    """The name and what was assigned from it or its elements, to any depth."""
    found, new = {name}, [name]
    while new:
        source = new.pop()
        for assign in tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and assign.target.name not in found and _reads(assign.node, source):
                found.add(assign.target.name)
                new.append(assign.target.name)
    return found


def _parameters_with_content(tree: nodes.Template, macro: nodes.Macro, items: set[str]) -> Iterator[str]:
    for call in tree.find_all(nodes.Call):
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        for parameter, argument in zip(macro.args, call.args, strict=False):
            if any(_reads(argument, item, "content") for item in items):
                yield parameter.name
        for given in call.kwargs:
            if isinstance(given, nodes.Keyword) and any(_reads(given.value, item, "content") for item in items):
                yield given.key


def _reads(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether the expression is the variable (or its field `key`), also through filters, tests and slices."""
    while isinstance(node, (nodes.Filter, nodes.Test)) or (isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)):
        node = node.node
    if key is not None:
        if isinstance(node, nodes.Getitem):
            if not (isinstance(node.arg, nodes.Const) and node.arg.value == key):
                return False
        elif not (isinstance(node, nodes.Getattr) and node.attr == key):
            return False
        node = node.node
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


# -- whether its text grows with the conversation -------------------------------------------------------------------------------------


def _message_loop(tree: nodes.Template) -> nodes.For | None:
    loops = [n for n in tree.body if isinstance(n, nodes.For) and isinstance(n.iter, nodes.Name) and n.iter.name == "messages"]
    return loops[0] if len(loops) == 1 else None


def _grows(tree: nodes.Template) -> bool:
    loop = _message_loop(tree)
    if loop is None or not isinstance(loop.target, nodes.Name) or loop.test is not None or loop.else_ or loop.recursive:
        return False
    if _has(tree, nodes.Macro, nodes.CallBlock, nodes.Import, nodes.FromImport, nodes.Include, nodes.Block, nodes.Extends):
        return False
    inside = nodes.Template(loop.body)
    if _has(inside, nodes.NSRef, nodes.Break, nodes.Continue) or any(f.name == "random" for f in tree.find_all(nodes.Filter)):
        return False
    if any(n.name in _IMPURE for n in tree.find_all(nodes.Name)) or any(n.name == "namespace" for n in inside.find_all(nodes.Name)):
        return False
    if any(n.name == "loop" for n in inside.find_all(nodes.Name)) and not _only_first(inside):
        return False
    return _only_first_message(tree, loop)


def _only_first(inside: nodes.Template) -> bool:
    """Each use of the outer `loop` is `loop.first`. An inner loop has a `loop` of its own, so with one nothing is sure."""
    uses = sum(n.name == "loop" for n in inside.find_all(nodes.Name))
    first = sum(_reads(n, "loop", "first") for n in inside.find_all((nodes.Getattr, nodes.Getitem)))
    return bool(uses == first and not _has(inside, nodes.For))


def _only_first_message(tree: nodes.Template, loop: nodes.For) -> bool:
    """`messages` is used as the loop's list and otherwise only as `messages[0]`."""
    uses = sum(n.name == "messages" for n in tree.find_all(nodes.Name))
    first = sum(
        isinstance(n.node, nodes.Name) and n.node.name == "messages" and isinstance(n.arg, nodes.Const) and n.arg.value == 0
        for n in tree.find_all(nodes.Getitem)
    )
    return bool(uses == first + 1)


def _with_marks(env: jinja2.Environment, source: str, head: bool) -> jinja2.Template:
    """The same template with _MARK before each message's piece and before the tail; without `head` also without what stands before the
    loop and sets nothing. White space was trimmed by the lexer before."""
    tree = env.parse(source)
    loop = _message_loop(tree)
    assert loop is not None
    at = next(i for i, n in enumerate(tree.body) if n is loop)
    for body, place in ((loop.body, 0), (tree.body, at + 1)):
        mark = nodes.Output([nodes.TemplateData(_MARK, lineno=loop.lineno, environment=env)], lineno=loop.lineno, environment=env)
        body.insert(place, mark)
    if not head:
        tree.body = [n for i, n in enumerate(tree.body) if i >= at or _sets(n)]
    return jinja2.Template.from_code(env, env.compile(tree), env.make_globals(None))


def _sets(node: nodes.Node) -> bool:
    kinds = (nodes.Assign, nodes.AssignBlock)
    return isinstance(node, kinds) or _has(node, *kinds)


def _has(node: nodes.Node, *kinds: type[nodes.Node]) -> bool:
    return any(node.find(kind) is not None for kind in kinds)
