"""The recorded vLLM runs as the router's tests read them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures" / "vllm-0.32.0"
TOKENIZER = ROOT / "simulator" / "tokenizer"


def lines(file: Path) -> list[dict[str, Any]]:
    with gzip.open(file, "rt") as f:
        return [json.loads(line) for line in f]


def expected() -> list[dict[str, Any]]:
    return lines(FIXTURES / "expected_requests.jsonl.gz")


def requests_of(folder: str) -> list[dict[str, Any]]:
    return lines(FIXTURES / folder / "http.jsonl.gz")
