import random

import pytest

from router.prompts.conversation import BILLING_HEADER, conversation
from router.prompts.templates import ChatTemplate, environment
from tests.router.prompts.test_templates import GROWING
from tests.router.recordings import TOKENIZER

PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}"
    "{% endfor %}{% endif %}{% endfor %}"
)
PLAIN = {
    "served": (TOKENIZER / "chat_template.jinja").read_text(),
    "chatml": GROWING["chatml"],
    "loop.first": GROWING["loop.first"],
    "parts": PARTS,
    "by role": "{% for m in messages %}{% if m.role == 'user' %}U:{{ m['content'] }}{% elif m.role in ['system', 'tool'] %}"
    "S:{{ m['content'] + ';' }}{% else %}A:{{ m.content ~ '!' }}{% endif %}{% endfor %}",
    "trimmed": "{% for m in messages %}{{ '<' + m['role'] + '>\n' + m['content'] | trim + '<end>' }}{% endfor %}",
    "set": "{% for m in messages %}{% if m.content is string %}{% set c = m.content %}{% else %}{% set c = '' %}{% endif %}[{{ c }}]"
    "{{ c if c else 'none' }}{% endfor %}",
    "fields that are not there": "{% for m in messages %}{{ m.name }}{% if m.tool_calls is defined and m.tool_calls %}T{% endif %}"
    "{% if m.reasoning is not none and not m.x %}{{ m.content or 'empty' }}{% endif %}{% endfor %}",
    "first of others": "{% for m in messages %}{% if not loop.first %}, {% endif %}{{ m.content }}{% endfor %}",
    "doubled": "{% for m in messages %}{% set c = '(' ~ m.content ~ ')' %}{{ c + c }}{% endfor %}",
}
MATTERS = {
    "length": "{% for m in messages %}{{ m.content | length }}{% endfor %}",
    "within": "{% for m in messages %}{% if '</think>' in m.content %}x{% endif %}{{ m.content }}{% endfor %}",
    "equal": "{% for m in messages %}{% if m.content == 'x' %}y{% endif %}{{ m.content }}{% endfor %}",
    "part of": "{% for m in messages %}{% if m.content in ['x'] %}y{% endif %}{{ m.content }}{% endfor %}",
    "a method": "{% for m in messages %}{{ m.content.split('x')[-1] }}{% endfor %}",
    "a method of the message": "{% for m in messages %}{{ m.get('content') }}{% endfor %}",
    "an attribute of all dicts": "{% for m in messages %}{{ m.keys }}{{ m.content }}{% endfor %}",
    "from outside": "{% for m in messages %}{{ bos }}{{ m.content }}{% endfor %}",
    "set before": "{% set x = messages[0].content %}{% for m in messages %}{{ x }}{{ m.content }}{% endfor %}",
    "upper": "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
    "cut": "{% for m in messages %}{{ m.content[:3] }}{% endfor %}",
    "repeated": "{% for m in messages %}{{ m.content * 2 }}{% endfor %}",
    "letters": "{% for m in messages %}{% for c in m.content or 'x' %}{{ c }}-{% endfor %}{% endfor %}",
    "json": "{% for m in messages %}{{ m.content | tojson }}{% endfor %}",
    "whole": "{% for m in messages %}{{ m }}{% endfor %}",
    "a number": "{% for m in messages %}{{ 1 + 1 }}{{ m.content }}{% endfor %}",
    "the loop": "{% for m in messages %}{{ m.content }}{% if loop %}x{% endif %}{% endfor %}",
    "refusals": "{% for m in messages %}{% if m.role == 'user' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}{% endfor %}",
}
VALUES = {"add_generation_prompt": True, "bos": "<s>"}


def template(source):
    made = ChatTemplate.of(source, environment())
    assert made.grows or made.verbatim is None
    return made


def talk(rng):
    texts = ["hello", " a b \n", "{{ x }}", "<|im_end|>", "é\u2028", "\x00", "x"]
    roles = ["system", "user", "assistant", "tool", "other"]
    return [{"role": rng.choice(roles), "content": rng.choice(texts) * rng.randrange(1, 3)} for _ in range(rng.randrange(2, 9))]


def rendered(made, messages):
    return made.new_pieces(conversation(messages, made.wrap_parts, made.knows_developer, made.knows_reasoning), VALUES)


@pytest.mark.parametrize("name", PLAIN)
def test_pieces_are_those_of_the_template(name):
    made, rng = template(PLAIN[name]), random.Random(name)
    for _ in range(60):
        messages = talk(rng)
        found = made.verbatim.pieces(messages[1:])
        assert found is not None
        assert found == rendered(made, messages)[:-1]


@pytest.mark.parametrize("name", MATTERS)
def test_where_the_text_or_anything_else_may_matter_the_template_is_asked(name):
    made = template(MATTERS[name])
    assert made.verbatim is None or made.verbatim.pieces([{"role": "user", "content": "x"}]) is None


def test_a_role_that_the_template_refuses_leaves_others_alone():
    made = template(MATTERS["refusals"])
    assert made.verbatim.pieces([{"role": "assistant", "content": "x"}]) == ["x"]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": ""},
        {"role": "user", "content": " \n"},
        {"role": "user", "content": None},
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "user", "content": "x", "name": "y"},
        {"role": "assistant", "content": "x", "reasoning": "y"},
        {"role": "developer", "content": "x"},
        {"role": "system", "content": BILLING_HEADER + ": x\ny"},
        {"role": "u" * 65, "content": "x"},
        {"role": None, "content": "x"},
        {"content": "x"},
    ],
)
def test_other_messages_are_the_templates(message):
    made = template(PLAIN["chatml"])
    assert made.verbatim.pieces([{"role": "user", "content": "x"}, message]) is None


def test_roles_are_bounded():
    made = template(PLAIN["chatml"])
    found = [made.verbatim.pieces([{"role": f"role {i}", "content": "x"}]) for i in range(100)]
    assert found[0] == ["<|im_start|>role 0\nx<|im_end|>\n"]
    assert found[99] is None
    assert len(made.verbatim._forms) == 32
