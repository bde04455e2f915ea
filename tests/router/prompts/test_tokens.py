import json

import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from router.prompts.tokens import LocalTokenizer, UnsupportedPrompt
from schemas.settings import SettingsError
from tests.router.recordings import TOKENIZER, expected, requests_of


@pytest.fixture(scope="module")
def tokenizer() -> LocalTokenizer:
    return LocalTokenizer.from_dir(TOKENIZER)


def test_every_recorded_prompt_has_the_engines_token_ids(tokenizer):
    checked = 0
    recorded = {folder: requests_of(folder) for folder in {e["folder"] for e in expected()}}
    for line in expected():
        if not line["prompt_token_ids"]:
            continue
        body = recorded[line["folder"]][line["index"]]["request"]
        ids = tokenizer.chat(body["messages"], body.get("tools")) if "messages" in body else tokenizer.text(body["prompt"])
        assert ids.dtype == np.uint32
        assert ids.tolist() == line["prompt_token_ids"], (line["folder"], line["index"])
        checked += 1
    assert checked == 172


def test_decode_gives_the_text_back(tokenizer):
    text = "read the user file <|im_end|> done"
    assert tokenizer.decode(tokenizer.text(text)) == text


def test_only_a_prompt_with_little_new_text_is_quick():
    tokenizer = LocalTokenizer.from_dir(TOKENIZER)
    text = tokenizer.render([{"role": "user", "content": "read the file " * 500}])
    assert tokenizer.ids_if_quick(text, False, new_characters=100) is None
    whole = tokenizer.ids(text, False)
    assert tokenizer.ids_if_quick(text + "<|im_start|>more", False, new_characters=100).tolist() == [
        *whole,
        *tokenizer.ids("<|im_start|>more", False),
    ]
    assert tokenizer.ids_if_quick("short", True, new_characters=100).tolist() == tokenizer.text("short").tolist()


def test_parts_and_plain_text_are_the_same_prompt(tokenizer):
    plain = tokenizer.chat([{"role": "user", "content": "run the test"}])
    parts = tokenizer.chat([{"role": "user", "content": [{"type": "text", "text": "run the test"}]}])
    assert plain.tolist() == parts.tolist()


def test_tool_call_arguments_reach_the_template_parsed(tokenizer):
    call = {"id": "1", "type": "function", "function": {"name": "read", "arguments": '{"path":"a"}'}}
    assert 'call read {"path": "a"}' in tokenizer.render([{"role": "assistant", "content": None, "tool_calls": [call]}])


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "image_url"),
        ([{"content": "x"}], "role"),
        ([{"role": "user", "content": 5}], "text or a list"),
    ],
)
def test_a_prompt_that_cannot_be_told_exactly_is_refused(tokenizer, messages, says):
    with pytest.raises(UnsupportedPrompt, match=says):
        tokenizer.chat(messages)


def test_a_missing_tokenizer_says_what_to_do(tmp_path):
    with pytest.raises(SettingsError, match=r"tokenizer\.json.*copy.*fleet file"):
        LocalTokenizer.from_dir(tmp_path)


def folder_with(tmp_path, template, config=None):
    (tmp_path / "tokenizer.json").write_bytes((TOKENIZER / "tokenizer.json").read_bytes())
    content = {"bos_token": {"content": "<s>"}, "chat_template": template} | (config or {})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    return tmp_path


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ bos_token }}{% for m in messages %}\n  {% if true %}\n[{{ m.content }}]\n  {% endif %}\n{% endfor %}", "<s>[a]\n[b\nc]\n"),
        ("{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}", "<a><b><c>"),
        ("{% for m in messages %}{% set content = m.content %}{% for p in content %}<{{ p.text }}>{% endfor %}{% endfor %}", "<a><b><c>"),
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{% for m in messages %}{% break %}{% endfor %}{% generation %}x{% endgeneration %}", "x"),
        ("{{ 'think' if enable_thinking else 'plain' }}", "think"),
        ([{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}], "d"),
    ],
)
def test_templates_render_as_transformers_renders_them(tmp_path, template, text):
    tokenizer = LocalTokenizer.from_dir(folder_with(tmp_path, template))
    messages = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
    ]
    assert tokenizer.render(messages, enable_thinking=True) == text


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"])
def test_a_template_that_raises_or_reaches_out_of_its_sandbox_is_a_refused_prompt(tmp_path, template):
    with pytest.raises(UnsupportedPrompt):
        LocalTokenizer.from_dir(folder_with(tmp_path, template)).render([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    ("config", "adds", "sure"),
    [
        ({}, None, True),
        ({}, "$A", True),
        ({"add_bos_token": False, "add_eos_token": False}, None, True),
        ({"add_bos_token": True}, None, False),
        ({"add_bos_token": True, "add_eos_token": None}, "<|im_start|> $A", True),
        ({"add_bos_token": False}, "<|im_start|> $A", False),
        ({"add_bos_token": True, "add_eos_token": False}, "<|im_start|> $A <|im_end|>", False),
    ],
)
def test_files_that_differ_in_what_a_text_gets_are_told(tmp_path, config, adds, sure):
    folder = folder_with(tmp_path, "x", config)
    if adds is not None:
        plain = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
        marks = [(t, plain.token_to_id(t)) for t in ("<|im_start|>", "<|im_end|>")]
        plain.post_processor = processors.TemplateProcessing(single=adds, special_tokens=marks)
        plain.save(str(folder / "tokenizer.json"))
    assert LocalTokenizer.from_dir(folder).added_are_sure is sure


def test_a_broken_template_names_its_line(tmp_path):
    with pytest.raises(SettingsError, match="line 2"):
        LocalTokenizer.from_dir(folder_with(tmp_path, "a\n{% for %}"))


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"config.json": '{"model_type": "gpt_oss"}'}, "gpt_oss"),
        ({"config.json": '{"model_type": "llama"}'}, None),
        ({"tekken.json": "{}"}, "Mistral"),
        ({}, None),
    ],
)
def test_models_whose_chats_the_engine_writes_itself_have_no_exact_chats(tmp_path, files, says):
    folder = folder_with(tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}")
    for name, text in files.items():
        (folder / name).write_text(text)
    tokenizer = LocalTokenizer.from_dir(folder)
    assert len(tokenizer.text("read the file"))
    if says is None:
        assert tokenizer.render([{"role": "user", "content": "a"}]) == "a"
    else:
        with pytest.raises(UnsupportedPrompt, match=says):
            tokenizer.render([{"role": "user", "content": "a"}])


def test_a_tokenizers_own_first_and_last_tokens_stand_around_kept_pieces():
    plain = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    plain.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[(t, plain.token_to_id(t)) for t in ("<|im_start|>", "<|im_end|>")]
    )
    tokenizer = LocalTokenizer(plain, {}, {})
    assert (tokenizer.added_are_fixed, tokenizer.added_before) == (True, 1)
    for text in ("", "read the file", "a<|im_end|>b " * 900):
        assert tokenizer.ids(text, True).tolist() == plain.encode(text, add_special_tokens=True).ids
        assert tokenizer.ids_if_quick(text, True, 100_000).tolist() == plain.encode(text, add_special_tokens=True).ids
        assert tokenizer.ids(text, False).tolist() == plain.encode(text, add_special_tokens=False).ids
