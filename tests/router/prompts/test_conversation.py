import json

import pytest

from router.prompts.conversation import (
    BILLING_HEADER,
    OrderedCall,
    UnsupportedPrompt,
    conversation,
    plain_chat,
    tool_for_template,
)

CALL = {"type": "function", "id": "c1", "function": {"name": "f", "arguments": '{"b": 1, "a": 2}', "extra": 1}, "extra": 1}


def one(message, wrap=False):
    return conversation([message], wrap)[0]


@pytest.mark.parametrize(
    ("message", "text", "parts"),
    [
        ({"role": "user", "content": "a"}, "a", ["a"]),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "a\nb", ["a", "b"]),
        ({"role": "user", "content": ["a", {"type": "input_text", "text": "b"}]}, "a\nb", ["a", "b"]),
        ({"role": "assistant"}, "", []),
        ({"role": "assistant", "content": None}, "", []),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, "no", ["no"]),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "", []),
        ({"role": "system", "content": BILLING_HEADER + ": 1\nrest"}, "rest", ["rest"]),
        ({"role": "system", "content": [{"type": "text", "text": BILLING_HEADER + ": 1"}, {"type": "text", "text": "s"}]}, "s", ["s"]),
        ({"role": "user", "content": BILLING_HEADER + ": 1\nrest"}, BILLING_HEADER + ": 1\nrest", [BILLING_HEADER + ": 1\nrest"]),
    ],
)
def test_content_is_text_or_parts_as_the_template_wants_it(message, text, parts):
    assert one(message)["content"] == text
    assert one(message, wrap=True)["content"] == [{"type": "text", "text": p} for p in parts]


def test_empty_parts_are_left_out_of_joined_text_but_not_of_parts():
    parts = [{"type": "text", "text": t} for t in ("", "a", "")]
    assert one({"role": "user", "content": parts})["content"] == "a"
    assert one({"role": "user", "content": parts}, wrap=True)["content"] == parts
    assert one({"role": "tool", "content": parts}, wrap=True)["content"] == "\na\n"


def test_reasoning_beside_a_null_content_is_refused_where_the_template_speaks_of_it():
    message = {"role": "assistant", "content": None, "reasoning": "r"}
    assert conversation([message], False, knows_reasoning=False)[0]["reasoning"] == "r"
    with pytest.raises(UnsupportedPrompt, match="null content"):
        conversation([message], False, knows_reasoning=True)
    del message["content"]
    assert conversation([message], False, knows_reasoning=True)[0]["reasoning"] == "r"


def test_a_tools_answer_is_text_whatever_the_template_wants():
    message = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert one(message, wrap=True) == {"role": "tool", "content": "a\nb", "tool_call_id": "c1"}


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [('{"b": 1, "a": 2}', {"b": 1, "a": 2}), ("", {}), (None, {}), ("{", {}), ("[1]", {}), ({"x": 1}, {"x": 1})],
)
def test_tool_call_arguments_are_parsed_and_objects(arguments, parsed):
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    assert one({"role": "assistant", "tool_calls": [call]})["tool_calls"][0]["function"]["arguments"] == parsed


def test_a_call_has_the_order_of_the_engines_request_model_but_for_responses():
    made = one({"role": "assistant", "tool_calls": [CALL]})["tool_calls"][0]
    assert json.dumps(made) == '{"id": "c1", "function": {"arguments": {"b": 1, "a": 2}, "name": "f"}, "type": "function"}'
    own = OrderedCall(id="c1", function={"name": "f", "arguments": "{}"}, type="function")
    assert json.dumps(one({"role": "assistant", "tool_calls": [own]})["tool_calls"][0]["function"]) == '{"name": "f", "arguments": {}}'


def test_empty_tool_calls_are_left_out_and_reasoning_has_two_names():
    made = one({"role": "assistant", "content": "a", "tool_calls": [], "reasoning_content": "r"})
    assert made == {"role": "assistant", "content": "a", "reasoning": "r", "reasoning_content": "r"}
    assert one({"role": "assistant", "reasoning": "new", "reasoning_content": "old"})["reasoning"] == "new"


@pytest.mark.parametrize("wrap", [False, True])
def test_a_developer_becomes_the_one_system_message_where_the_template_does_not_know_him(wrap):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "developer", "content": "d", "tools": []}]
    assert [m["role"] for m in conversation(messages, wrap, knows_developer=True)] == ["system", "user", "developer"]
    made = conversation(messages, wrap, knows_developer=False)
    assert made[0] == {"role": "system", "content": "s\n\nd"}
    assert [m["role"] for m in made] == ["system", "user"]
    (first, _) = conversation([messages[2], messages[1]], wrap, knows_developer=False)
    assert (first["role"], "tools" in first) == ("system", False)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "image_url"),
        ({"role": "user", "content": [{"type": "text", "text": "a", "uuid": "1"}]}, "text"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "without text"),
        ({"role": "user", "content": [5]}, "int"),
        ({"content": "x"}, "role"),
        ({"role": "user", "content": 5}, "text or a list"),
        ({"role": "assistant", "tool_calls": [{"type": "custom", "id": "1"}]}, "no function"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, "without an id"),
    ],
)
def test_what_cannot_be_told_exactly_is_refused(message, says):
    with pytest.raises(UnsupportedPrompt, match=says):
        one(message)


@pytest.mark.parametrize(
    ("tool", "json_text"),
    [
        (
            {"function": {"parameters": {"b": 1, "a": 2}, "name": "f", "odd": 1}, "odd": 1},
            '{"type": "function", "function": {"name": "f", "description": null, "parameters": {"b": 1, "a": 2}}}',
        ),
        (
            {"type": "function", "function": {"name": "f", "strict": False}, "defer_loading": True},
            '{"type": "function", "function": {"name": "f", "description": null, "parameters": null, "strict": false, '
            '"defer_loading": true}, "defer_loading": true}',
        ),
    ],
)
def test_a_tool_has_the_order_and_the_nulls_of_the_engines_request_model(tool, json_text):
    assert json.dumps(tool_for_template(tool)) == json_text


@pytest.mark.parametrize("tool", [{"type": "custom", "name": "x"}, {"type": "function"}, "x"])
def test_a_tool_that_is_no_function_is_refused(tool):
    with pytest.raises(UnsupportedPrompt):
        tool_for_template(tool)


PLAIN = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("messages", "tools", "values", "plain"),
    [
        ([{"role": "system", "content": "s"}, PLAIN], None, {"add_generation_prompt": True}, True),
        ([PLAIN], [{}], {}, False),
        ([PLAIN], None, {"reasoning_effort": "low"}, False),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}]}], None, {}, False),
        ([PLAIN, {"role": "assistant", "content": "x"}], None, {}, False),
        ([{"role": "assistant", "content": "x", "tool_calls": [CALL]}, PLAIN], None, {}, False),
        ([{"role": "tool", "content": "x"}, PLAIN], None, {}, False),
    ],
)
def test_only_plain_chats_are_read_alike_by_sglang(messages, tools, values, plain):
    if plain:
        plain_chat(messages, tools, values)
    else:
        with pytest.raises(UnsupportedPrompt):
            plain_chat(messages, tools, values)
