"""The code that documentation pages show."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def code_blocks(page: str, heading: str = "") -> list[str]:
    """The Python blocks of a page below ``docs``, or below one of its headings of level two."""
    text = (DOCS / page).read_text(encoding="utf-8")
    if heading:
        text = text.split(f"\n## {heading}\n")[1].partition("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
