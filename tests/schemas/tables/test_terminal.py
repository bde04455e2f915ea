import json

from schemas.tables.terminal import printable, printable_json

ODD = "a\x1b[2J\x7f\x9b\u202e\U000e0001\xa0"


def test_what_could_steer_a_terminal_is_escaped_and_letters_stay():
    assert printable("größe 🦊 \\") == "größe 🦊 \\"
    assert printable(ODD) == r"a\x1b[2J\x7f\x9b\u202e\U000e0001\xa0"


def test_json_says_the_same_after_it():
    value = {ODD: [ODD, "größe 🦊"]}
    told = printable_json(json.dumps(value, ensure_ascii=False, indent=1))
    assert json.loads(told) == value
    assert "größe 🦊" in told
    assert all(c.isprintable() or c == "\n" for c in told)
