import random
import threading

import numpy as np
import pytest

from router.prompts.asked import Chat
from router.prompts.conversation import OrderedCall, UnsupportedPrompt
from router.prompts.known import KnownChats, TooLong
from router.prompts.tokens import LocalTokenizer
from tests.router.prompts.test_templates import GROWING, OTHERS
from tests.router.recordings import TOKENIZER

TEMPLATES = {
    "served": None,
    **GROWING,
    **{name: source for name, source in OTHERS.items() if name not in ("chance", "left early")},
    "thoughts dropped": "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning and loop.last %}{{ m.reasoning }}{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "knows developers": "{% for m in messages %}<|im_start|>{{ 'D' if m.role == 'developer' else m.role }}{{ m.content }}{% endfor %}",
}
TOOLS = [{"type": "function", "function": {"name": "read", "description": "reads the file", "parameters": {"type": "object"}}}]


def tokenizer(name) -> LocalTokenizer:
    source = TEMPLATES[name]
    served = LocalTokenizer.from_dir(TOKENIZER)
    return served if source is None else LocalTokenizer(served._tokenizer, {"default": source}, {"bos": "<s>"})


def known_chats(t, limit_bytes=8 << 20):
    assert t.segments is not None
    return KnownChats(t, t.segments, limit_bytes)


def message(rng, role=None):
    words = ["read", " the", " file", "\n", "é", "<|im_end|>", "<|im_", "<", " function", "x" * 3]
    out = {"role": role or rng.choice(["user", "assistant", "system", "tool", "developer"])}
    out["content"] = "".join(rng.choice(words) for _ in range(rng.choice([0, 1, 5, 40, 400])))
    if rng.random() < 0.2:
        out["content"] = [{"type": "text", "text": out["content"]}, {"type": "text", "text": "more"}]
    if out["role"] == "assistant" and rng.random() < 0.3:
        out["tool_calls"] = [{"id": "1", "type": "function", "function": {"name": "read", "arguments": '{"a": 1}'}}]
    if out["role"] == "assistant" and rng.random() < 0.3:
        out["reasoning"] = "hm"
    return out


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_of_known_and_new_conversations_are_those_of_the_whole_text(name):
    t = tokenizer(name)
    chats = known_chats(t)
    rng = random.Random(name)
    talks = [[message(rng, "system")] for _ in range(4)]
    for _ in range(150):
        i = rng.randrange(len(talks))
        talk = talks[i]
        if rng.random() < 0.2:
            talk = talks[i] = talk[: rng.randrange(1, len(talk) + 1)]  # back to an earlier step
        talks[i] = talk = [*talk, *(message(rng) for _ in range(rng.randrange(3)))]
        values = {"add_generation_prompt": rng.random() < 0.9}
        chat = Chat([dict(m) for m in talk], [dict(TOOLS[0])] if rng.random() < 0.8 else None, values)
        found = chats.read(chat, 0)
        assert found is not None
        assert found.ids.tolist() == t.ids(t.rendered(chat), add_special_tokens=False).tolist()
        if found.base is not None:
            assert found.base.stem.tolist() == found.ids[: len(found.base.stem)].tolist()
        if found.made is not None:
            assert found.made.stem.tolist() == found.ids[: len(found.made.stem)].tolist()
    assert chats.hits > 20
    assert chats.hits + chats.misses == 150
    assert chats.kept_bytes <= 8 << 20


def talk_of(n, words=300):
    return [{"role": "user" if i % 2 else "system", "content": f"message {i} reads the file " * words} for i in range(n)]


def test_the_next_step_is_quick_and_begins_with_the_step_before():
    t = tokenizer("served")
    chats = known_chats(t)
    talk = talk_of(6)
    assert chats.read(Chat(talk, TOOLS), 0, new_characters=100) is None
    first = chats.read(Chat(talk, TOOLS), 0)
    after = chats.read(Chat([*talk, {"role": "user", "content": "go on"}], TOOLS), 0, new_characters=100)
    assert first is not None
    assert after is not None
    assert after.base is first.made
    assert len(after.base.stem) > 0.9 * len(first.ids)
    again = chats.read(Chat([*talk, {"role": "user", "content": "go on"}], TOOLS), 0, new_characters=0)
    assert again is not None
    assert again.base is after.made
    assert np.array_equal(again.ids, after.ids)


def test_another_last_message_is_all_that_is_read_anew():
    t = tokenizer("served")
    chats = known_chats(t)
    talk = talk_of(6)
    first = chats.read(Chat([*talk, {"role": "user", "content": "how?"}], TOOLS), 0)
    other = chats.read(Chat([*talk, {"role": "user", "content": "why?"}], TOOLS), 0, new_characters=100)
    assert first is not None
    assert other is not None
    assert other.base is first.made.short[1]
    assert len(other.base.messages) == 6
    assert other.ids.tolist() == t.ids(t.rendered(Chat([*talk, {"role": "user", "content": "why?"}], TOOLS)), False).tolist()
    alone = chats.read(Chat(talk, TOOLS), 0, new_characters=100)
    assert alone is not None
    assert alone.ids.tolist() == t.ids(t.rendered(Chat(talk, TOOLS)), False).tolist()


def test_a_conversation_and_what_is_kept_without_its_last_message_go_together():
    chats = known_chats(tokenizer("served"), limit_bytes=300_000)
    for i in range(60):
        chats.read(Chat([*talk_of(3, 20 + i), {"role": "user", "content": f"{i}"}]), 0)
        assert {mark for mark, _ in chats._short.values()} <= chats._kept.keys()
    assert 0 < len(chats._short) <= len(chats._kept) < 60


def test_another_tool_setting_or_message_is_another_conversation():
    t = tokenizer("served")
    chats = known_chats(t)
    talk = talk_of(2, 1)
    chats.read(Chat(talk, TOOLS), 0)
    for other in (
        Chat(talk, None),
        Chat(talk, [{"type": "function", "function": {"name": "write"}}]),
        Chat(talk, TOOLS, {"add_generation_prompt": False}),
        Chat([talk[0], {"role": "user", "content": talk[1]["content"][:-30] + "X" + talk[1]["content"][-29:]}], TOOLS),
        Chat([{**talk[0], "role": "user"}, talk[1]], TOOLS),
    ):
        found = chats.read(other, 0)
        assert found is not None
        assert found.ids.tolist() == t.ids(t.rendered(other), False).tolist()


CALLS = "{% for m in messages %}<|im_start|>{{ m.role }}{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}<|im_end|>{% endfor %}"
USES = {"name": "read", "arguments": "{}"}


def called(call):
    return Chat([{"role": "user", "content": "go"}, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "done"}])


def with_parameters(parameters):
    return Chat(talk_of(2, 1), [{"type": "function", "function": {"name": "read", "parameters": parameters}}])


@pytest.mark.parametrize(
    ("source", "one", "other"),
    [
        (None, with_parameters({"most": 1}), with_parameters({"most": True})),
        (None, with_parameters({"most": 1}), with_parameters({"most": 1.0})),
        (None, with_parameters({"most": 0.0}), with_parameters({"most": -0.0})),
        (None, with_parameters({"a": 1, "b": 2}), with_parameters({"b": 2, "a": 1})),
        ("{{ deep }}" + CALLS, Chat(talk_of(2, 1), None, {"deep": 1}), Chat(talk_of(2, 1), None, {"deep": True})),
        (CALLS, called({"id": 1, "type": "function", "function": USES}), called({"id": True, "type": "function", "function": USES})),
        (
            CALLS,
            called({"id": "1", "function": USES, "type": "function"}),
            called(OrderedCall(id="1", function=USES, type="function")),
        ),
    ],
)
def test_what_is_equal_and_written_otherwise_is_another_conversation(source, one, other):
    t = LocalTokenizer.from_dir(TOKENIZER)
    if source is not None:
        t = LocalTokenizer(t._tokenizer, {"default": source}, {})
    assert (one.messages, one.tools, one.values) == (other.messages, other.tools, other.values)
    assert t.rendered(one) != t.rendered(other)
    for first, second in ((one, other), (other, one)):
        chats = known_chats(t)
        chats.read(first, 0)
        found = chats.read(second, 0)
        assert found is not None
        assert found.ids.tolist() == t.ids(t.rendered(second), False).tolist()


def nested(levels):
    value = {"type": "object"}
    for _ in range(levels):
        value = {"properties": value}
    return value


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(UnsupportedPrompt, match="nested too deeply"):
        known_chats(tokenizer("served")).read(with_parameters(nested(300)), 0)
    with pytest.raises(UnsupportedPrompt, match="without messages"):
        known_chats(tokenizer("loop.last")).read(Chat([]), 0)


def test_conversations_that_share_only_their_first_message_share_its_ids():
    t = tokenizer("served")
    chats = known_chats(t)
    system = {"role": "system", "content": "read the user file " * 800}
    chats.read(Chat([system, {"role": "user", "content": "a"}], TOOLS), 0)
    found = chats.read(Chat([dict(system), {"role": "user", "content": "another"}], TOOLS), 0)
    assert found is not None
    assert found.base is not None
    assert len(found.base.stem) > 0.9 * len(found.ids)


def test_a_prompt_over_the_limit_is_not_tokenized():
    t = tokenizer("served")
    chats = known_chats(t)
    misses = t.segments.misses
    with pytest.raises(TooLong):
        chats.read(Chat(talk_of(2, 100)), 0, most_characters=1_000)
    assert t.segments.misses == misses
    chats.read(Chat(talk_of(2, 10)), 0, most_characters=10_000)
    with pytest.raises(TooLong):
        chats.read(Chat(talk_of(3, 10)), 0, most_characters=600)  # the known part counts


@pytest.mark.parametrize("name", ["served", "loop.last"])
def test_the_bound_holds_and_the_newest_steps_stay(name):
    chats = known_chats(tokenizer(name), limit_bytes=600_000)
    talk = talk_of(1, 5)
    for i in range(60):
        talk = [*talk, {"role": "user", "content": f"step {i} of the file " * 20}]
        chats.read(Chat(talk), 0)
        assert chats.kept_bytes <= 600_000
    hits = chats.hits
    chats.read(Chat([*talk, {"role": "user", "content": "last"}]), 0)
    assert chats.hits == hits + 1


def test_what_no_template_reads_counts_too():
    chats = known_chats(tokenizer("served"), limit_bytes=4_000_000)
    for i in range(30):
        chats.read(Chat([{"role": "user", "content": f"{i}", "more": ["x" * 100_000, *([] for _ in range(2_000))]}]), 0)
    assert 20 < len(chats._kept) * 8 < 200
    assert chats.kept_bytes <= 4_000_000


def test_tools_are_kept_once_for_all_conversations_that_have_them():
    chats = known_chats(tokenizer("served"), limit_bytes=1_000_000)
    tools = [{"type": "function", "function": {"name": f"read_{i}", "description": "reads the file " * 20}} for i in range(20)]
    for i in range(30):
        chats.read(Chat([{"role": "user", "content": f"{i}"}], [dict(t) for t in tools]), 0)
    (front,) = chats._fronts.values()
    assert front.users == len(chats._kept) == 30
    assert chats.kept_bytes == sum(k.held_bytes for k in chats._kept.values()) + front.held_bytes
    for i in range(80):
        chats.read(Chat(talk_of(2, 50 + i)), 0)
    assert [f.users for f in chats._fronts.values()] == [len(chats._kept)]
    assert chats.kept_bytes <= 1_000_000


def test_several_threads_read_the_same_conversations():
    t = tokenizer("served")
    chats, wrong = known_chats(t, limit_bytes=200_000), []

    def work(seed):
        rng = random.Random(seed)
        for _ in range(60):
            chat = Chat(talk_of(6, 3)[: rng.randrange(1, 7)])
            found = chats.read(chat, 0)
            if found is None or found.ids.tolist() != t.ids(t.rendered(chat), False).tolist():
                wrong.append(chat)

    threads = [threading.Thread(target=work, args=(s,)) for s in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
