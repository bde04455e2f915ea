import random

import pytest

from router.prompts.conversation import UnsupportedPrompt
from router.prompts.templates import ChatTemplate, Prepared, environment

GROWING = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "head and tail with the first message": "{{ bos }}{% if messages[0].role == 'system' %}SYS {% endif %}{% set x = messages[0].content %}"
    "{%- for m in messages %}{{ x|length }} {{ m.content }};{% endfor -%} END {{ messages[0].role }}",
    "loop.first": "{% for m in messages %}{% if loop.first %}FIRST {% endif %}[{{ m.content }}]{% endfor %}",
    "tools in the head": "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.content }}|{% endfor %}",
    "inner loop over a message": "{% for m in messages %}{% for p in m.parts %}<{{ p }}>{% endfor %}{% endfor %}!",
    "a namespace read": "{% set ns = namespace(n=2) %}{% set ns.n = 3 %}{% for m in messages %}{{ ns.n }}{{ m.content }}{% endfor %}",
    "a set block": "{% set head %}H{{ messages[0].content }}{% endset %}{{ head }}"
    "{% for m in messages %}{{ head }}{{ m.content }}{% endfor %}",
}
OTHERS = {
    "loop.last": "{% for m in messages %}{{ m.content }}{% if not loop.last %},{% endif %}{% endfor %}",
    "loop.index0": "{% for m in messages %}{{ loop.index0 }}{{ m.content }}{% endfor %}",
    "a neighbour": "{% for m in messages %}{{ messages[loop.index0 - 1].role }}{{ m.content }}{% endfor %}",
    "the last message": "{% for m in messages %}{{ m.content }}{{ messages[-1].content }}{% endfor %}",
    "their number": "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
    "a namespace written": "{% set ns = namespace(n='') %}{% for m in messages %}{{ ns.n }}{% set ns.n = m.content %}{% endfor %}",
    "a slice": "{% for m in messages[1:] %}{{ m.content }}{% endfor %}",
    "two loops": "{% for m in messages %}{{ m.content }}{% endfor %}{% for m in messages %}{{ m.role }}{% endfor %}",
    "left early": "{% for m in messages %}{% if m.role == 'x' %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "a filtered loop": "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}",
    "nothing to loop": "{% for m in messages %}{{ m.content }}{% else %}EMPTY{% endfor %}",
    "a macro": "{% macro w(m) %}{{ m.content }}{% endmacro %}{% for m in messages %}{{ w(m) }}{% endfor %}",
    "inner loop, outer loop.first": "{% for m in messages %}{% for p in m.parts %}{{ loop.first }}{% endfor %}{% endfor %}",
    "the date": "{{ strftime_now('%Y') }}{% for m in messages %}{{ m.content }}{% endfor %}",
    "a cycler": "{% set c = cycler('a', 'b') %}{% for m in messages %}{{ c.next() }}{% endfor %}",
    "chance": "{% for m in messages %}{{ [1, 2] | random }}{% endfor %}",
    "inside a condition": "{% if tools %}{% else %}{% for m in messages %}{{ m.content }}{% endfor %}{% endif %}",
}
VALUES = {"bos": "<s>", "tools": [Prepared(name="f", é="ü")], "add_generation_prompt": True}


def talk(rng, n):
    roles = ["system", "user", "assistant"]
    return [{"role": rng.choice(roles), "content": "c" * rng.randrange(5), "parts": list("ab"[: rng.randrange(3)])} for _ in range(n)]


@pytest.mark.parametrize("name", GROWING)
def test_a_growing_templates_pieces_are_its_text_whatever_the_conversation(name):
    template = ChatTemplate.of(GROWING[name], environment())
    assert template.grows
    rng = random.Random(name)
    for _ in range(60):
        messages = talk(rng, rng.randrange(1, 8))
        known = rng.randrange(1, len(messages) + 1)
        text = template.render(messages, VALUES)
        head, *pieces, tail = template.pieces(messages, VALUES)
        assert head + "".join(pieces) + tail == text
        assert len(pieces) == len(messages)
        assert [*pieces[known:], tail] == template.new_pieces([messages[0], *messages[known:]], VALUES)


@pytest.mark.parametrize("name", OTHERS)
def test_a_template_that_looks_further_than_its_message_is_not_taken_for_growing(name):
    assert not ChatTemplate.of(OTHERS[name], environment()).grows


LOOP = "{% for p in c %}{{ p }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "wraps"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for p in m['content'] %}{{ p.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages[1:] %}{% for p in m['content'] | list %}{{ p.text }}{% endfor %}{% endfor %}", True),
        ("{% set rest = messages[1:] %}{% for m in rest %}{% for p in m.content %}{{ p }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% set content = m.content %}{% for p in content %}{{ p }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% set c = m.content %}{% for p in c %}{{ p }}{% endfor %}{% endfor %}", False),
        ("{% macro w(c) %}" + LOOP + "{% endmacro %}{% for m in messages %}{{ w(m.content) }}{% endfor %}", True),
        ("{% macro w(c) %}" + LOOP + "{% endmacro %}{% for m in messages %}{{ w(c=m.content) }}{% endfor %}", True),
        (
            "{% macro w(content) %}"
            + LOOP.replace(" c ", " content ")
            + "{% endmacro %}{% for m in messages %}{{ w(m.role) }}{% endfor %}",
            False,
        ),
        ("{% for m in messages %}{% for c in m.tool_calls %}{{ c }}{% endfor %}{% endfor %}", False),
    ],
)
def test_whether_a_template_gets_parts_follows_the_engines_rule(source, wraps):
    assert ChatTemplate.of(source, environment()).wrap_parts == wraps


def test_a_tool_is_written_as_json_once():
    tool = Prepared(name="é", n=1)
    template = ChatTemplate.of("{{ t | tojson }}{{ t | tojson(indent=1) }}", environment())
    assert template.render([], {"t": tool}) == '{"name": "é", "n": 1}{\n "name": "é",\n "n": 1\n}'
    assert tool.text == '{"name": "é", "n": 1}'


def test_a_mark_that_a_client_writes_is_only_text():
    template = ChatTemplate.of(GROWING["chatml"], environment())
    messages = [{"role": "user", "content": "\x00warmwatch\x00"}]
    assert "".join(template.pieces(messages, VALUES)) == template.render(messages, VALUES)


@pytest.mark.parametrize("source", ["{{ raise_exception('no') }}", "{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"])
def test_a_template_that_raises_or_reaches_out_of_its_sandbox_is_a_refused_prompt(source):
    with pytest.raises(UnsupportedPrompt):
        ChatTemplate.of(source, environment()).render([{"role": "user", "content": "a"}], VALUES)
