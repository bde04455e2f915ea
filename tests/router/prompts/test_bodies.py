"""Bodies of every endpoint -> what is asked. Expected values: vLLM 0.32's request models and its conversions, read in its source."""

import pytest

from router.endpoints import ENDPOINTS
from router.prompts.anthropic_bodies import messages
from router.prompts.conversation import BILLING_HEADER, OrderedCall, UnsupportedPrompt
from router.prompts.openai_bodies import chat, completion, embedding
from router.prompts.responses_bodies import responses

USER = {"role": "user", "content": "hi"}
TOOL = {"name": "read", "description": "reads", "parameters": {"type": "object"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"p": 1}'}}


@pytest.mark.parametrize(
    ("body", "texts", "ids"),
    [
        ({"prompt": "a"}, ("a",), []),
        ({"prompt": ["a"]}, ("a",), []),
        ({"prompt": ["a", "bb"]}, ("a", "bb"), []),
        ({"prompt": [1, 2]}, (), [[1, 2]]),
        ({"prompt": [[1, 2]]}, (), [[1, 2]]),
        ({"prompt": [[1], [2, 3]]}, (), [[1], [2, 3]]),
    ],
)
def test_a_completions_prompts(body, texts, ids):
    for asked in (completion(body), embedding({"input": body["prompt"]})):
        assert (asked.texts, [i.tolist() for i in asked.ids]) == (texts, ids)
        assert asked.special


@pytest.mark.parametrize("prompt", [None, "", [], [[]], [[1], "a"], ["a", 1], {"a": 1}, [1.5], [-1], [1 << 32], [True, None]])
def test_what_is_no_prompt_is_refused_or_empty(prompt):
    if prompt == "":
        assert completion({"prompt": prompt}).texts == ("",)
    else:
        with pytest.raises(UnsupportedPrompt):
            completion({"prompt": prompt})


@pytest.mark.parametrize(
    ("read", "body", "says"),
    [
        (completion, {"prompt": "a", "suffix": "b"}, "suffix"),
        (completion, {"prompt": "a", "prompt_embeds": "x"}, "prompt_embeds"),
        (completion, {"prompt": "a", "truncate_prompt_tokens": 5}, "truncation_side"),
        (completion, {"prompt": "a", "truncate_prompt_tokens": -1, "truncation_side": "left"}, "truncation_side"),
        (chat, {"messages": [USER], "chat_template": "x"}, "chat_template"),
        (chat, {"messages": [USER], "continue_final_message": True}, "continue_final_message"),
        (chat, {"messages": [USER], "mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
        (chat, {"messages": [USER], "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        (chat, {"messages": [USER], "kv_transfer_params": {"prompt_token_ids": [1]}}, "kv_transfer_params"),
        (chat, {"messages": "hi"}, "list"),
        (embedding, {"input": "a", "padding": "max_length"}, "padding"),
        (embedding, {"input": [{"content": "a"}]}, "prompt must be"),
        (responses, {"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        (responses, {"input": []}, "input"),
        (responses, {"input": [{"role": "assistant", "content": "x", "status": "in_progress"}]}, "continued"),
        (responses, {"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        (responses, {"input": "a", "tools": [{"type": "web_search"}]}, "no functions"),
        (responses, {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, "encrypted"),
        (messages, {"messages": [{"role": "system", "content": "x"}]}, "system"),
        (messages, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        (messages, {"messages": [USER], "thinking": {"type": "disabled"}}, "disabled"),
        (messages, {"messages": [USER], "tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "Anthropic"),
        (messages, {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}]}, "no text"),
    ],
)
def test_what_only_the_engine_knows_is_refused_with_the_reason(read, body, says):
    with pytest.raises(UnsupportedPrompt, match=says):
        read(body)


@pytest.mark.parametrize(
    ("body", "values"),
    [
        ({}, {"add_generation_prompt": True}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True, "add_generation_prompt": True}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False, "add_generation_prompt": True}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "high"}},
            {"reasoning_effort": "low", "enable_thinking": False, "add_generation_prompt": True},
        ),
        ({"chat_template_kwargs": {"x": None, "y": "auto", "z": 0}}, {"z": 0, "add_generation_prompt": True}),
        ({"documents": [{"text": "d"}]}, {"documents": [{"text": "d"}], "add_generation_prompt": True}),
        ({"tool_choice": "none", "n": 3, "response_format": {"type": "json_object"}}, {"add_generation_prompt": True}),
    ],
)
def test_what_a_chats_template_gets(body, values):
    assert chat({"messages": [USER]} | body).chat.values == values


@pytest.mark.parametrize(
    ("read", "body", "reads_cache"),
    [
        (completion, {"prompt": "a"}, True),
        (completion, {"prompt": "a", "echo": True}, True),
        (completion, {"prompt": "a", "logprobs": 1}, True),
        (completion, {"prompt": "a", "echo": True, "logprobs": 1}, False),
        (completion, {"prompt": "a", "prompt_logprobs": 0}, False),
        (chat, {"messages": [USER], "echo": True}, False),
        (chat, {"messages": [USER], "prompt_logprobs": 1}, False),
    ],
)
def test_log_probabilities_of_the_prompt_leave_the_cache_unread(read, body, reads_cache):
    assert read(body).reads_cache == reads_cache


def test_truncation_keeps_one_side():
    assert completion({"prompt": "a", "truncate_prompt_tokens": 5, "truncation_side": "left"}).keep == 5
    assert embedding({"input": "a", "truncate_prompt_tokens": 5, "truncation_side": "right"}).keep == -5


def test_special_tokens_are_added_to_texts_and_responses_but_not_to_chats():
    assert not chat({"messages": [USER]}).special
    assert chat({"messages": [USER], "add_special_tokens": True}).special
    assert not completion({"prompt": "a", "add_special_tokens": False}).special
    assert responses({"input": "a"}).special
    assert not messages({"messages": [USER]}).special
    assert not embedding({"messages": [USER]}).special


def test_a_chat_to_embed_ends_without_a_generation_prompt():
    assert embedding({"messages": [USER]}).chat.values == {"add_generation_prompt": False}


@pytest.mark.parametrize(
    ("body", "made"),
    [
        ({"system": "s", "messages": [USER]}, [{"role": "system", "content": "s"}, USER]),
        (
            {"system": [{"type": "text", "text": "a"}, {"type": "text", "text": BILLING_HEADER + ": 1"}, {"type": "text", "text": "b"}],
             "messages": [USER]},
            [{"role": "system", "content": "ab"}, USER],
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]}]},
            [{"role": "user", "content": "a"}],
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        ),
        (
            {"messages": [{"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "t"}, {"type": "tool_use", "id": "c1", "name": "read", "input": {"p": 1}}]}]},
            [{"role": "assistant", "reasoning": "hm", "tool_calls": [CALL], "content": "t"}],
        ),
        (
            {"messages": [{"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"type": "tool_result", "tool_use_id": "c2", "content": "c"}, {"type": "tool_result", "tool_use_id": "c3"},
                {"type": "text", "text": "go on"}]}]},
            [
                {"role": "tool", "tool_call_id": "c1", "content": "a\nb"}, {"role": "tool", "tool_call_id": "c2", "content": "c"},
                {"role": "tool", "tool_call_id": "c3", "content": ""}, {"role": "user", "content": "go on"},
            ],
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "a"}]}]},
            [{"role": "tool", "tool_call_id": "c1", "content": "a"}],
        ),
        ({"messages": [{"role": "assistant", "content": []}, USER]}, [{"role": "assistant"}, USER]),
    ],
)  # fmt: skip
def test_anthropics_messages_become_a_chat(body, made):
    assert list(messages(body).chat.messages) == made


def test_anthropics_tools_and_effort():
    asked = messages({
        "messages": [USER], "tools": [{"name": "read", "description": "reads", "input_schema": {"properties": {}}}],
        "output_config": {"effort": "high"}, "thinking": {"type": "enabled", "budget_tokens": 2000}, "tool_choice": {"type": "any"},
    }).chat  # fmt: skip
    parameters = {"properties": {}, "type": "object"}
    function = {"name": "read", "description": "reads", "parameters": parameters, "strict": None, "defer_loading": None}
    assert asked.tools == [{"type": "function", "function": function}]
    assert asked.values == {"add_generation_prompt": True, "reasoning_effort": "high", "enable_thinking": True}


ITEM_CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "read", "arguments": '{"p": 1}', "status": "completed"}
OUTPUT = {"type": "output_text", "text": "a"}
MADE_CALL = {"id": "c1", "function": {"name": "read", "arguments": '{"p": 1}'}, "type": "function"}


@pytest.mark.parametrize(
    ("body", "made"),
    [
        ({"input": "hi"}, [USER]),
        ({"input": "hi", "instructions": "s"}, [{"role": "system", "content": "s"}, USER]),
        ({"input": [{"type": "message", **USER}]}, [USER]),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]},
            [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}],
        ),
        ({"input": [{"role": "assistant", "content": "a"}, USER]}, [{"role": "assistant", "content": "a"}, USER]),
        (
            {"input": [{"type": "message", "role": "assistant", "content": [OUTPUT, {**OUTPUT, "text": "b"}]}]},
            [{"role": "assistant", "content": "a"}],
        ),
        (
            {"input": [{"type": "reasoning", "summary": [{"text": "sum"}], "content": [{"text": "hm"}]}, ITEM_CALL,
                       {**ITEM_CALL, "call_id": "c2"}, {"type": "function_call_output", "call_id": "c1", "output": "o"}]},
            [{"role": "assistant", "reasoning": "hm", "tool_calls": [MADE_CALL, {**MADE_CALL, "id": "c2"}]},
             {"role": "tool", "content": "o", "tool_call_id": "c1"}],
        ),
        (
            {"input": [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}, ITEM_CALL]},
            [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [MADE_CALL]}],
        ),
    ],
)  # fmt: skip
def test_responses_items_become_a_chat(body, made):
    assert list(responses(body).chat.messages) == made


def test_responses_tools_effort_and_truncation():
    asked = responses(
        {"input": "a", "tools": [{"type": "function", **TOOL, "strict": True}], "reasoning": {"effort": "low"}, "truncation": "auto"}
    )
    assert asked.chat.tools == [{"type": "function", "function": {**TOOL, "strict": True}}]
    assert asked.chat.values == {"add_generation_prompt": True, "reasoning_effort": "low", "enable_thinking": True}
    assert asked.cuts_to_model
    assert not responses({"input": "a", "truncation": "disabled"}).cuts_to_model


def test_a_call_of_responses_keeps_its_order():
    (message,) = responses({"input": [ITEM_CALL]}).chat.messages
    assert isinstance(message["tool_calls"][0], OrderedCall)


def test_every_endpoint_reads_a_plain_body():
    plain = {"chat": {"messages": [USER]}, "completion": {"prompt": "a"}, "responses": {"input": "a"}}
    plain |= {"messages": {"messages": [USER]}, "embedding": {"input": "a"}}
    for endpoint in ENDPOINTS.values():
        asked = endpoint.reads(plain[endpoint.reads.__name__])
        assert (asked.chat is None) == bool(asked.texts)
