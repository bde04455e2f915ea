"""Where prompts of one kind stop being alike, and what that costs."""

from __future__ import annotations

from collector.analytics.content_index import ContentIndex, Known, Told

__all__ = ["ContentIndex", "Known", "Told"]
