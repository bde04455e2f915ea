"""Names come from outside, so they are shown as they are and never read as HTML or Markdown."""

from __future__ import annotations

import html
import re

_MARKDOWN = re.compile(r"([\\`*_{}\[\]()<>#+\-.!|~:$&^])")


def html_text(text: object) -> str:
    return html.escape(str(text), quote=True)


def markdown_text(text: object) -> str:
    """Text that Markdown shows letter by letter."""
    return _MARKDOWN.sub(r"\\\1", str(text).replace("\n", " "))
