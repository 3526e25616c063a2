"""The README and the pages behind it, as tests read them."""

import re
from pathlib import Path
from typing import Final

import streamshard

ROOT: Final = Path(streamshard.__file__).parent.parent
README: Final = ROOT / "README.md"
PAGES: Final = (README, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md")))
TEXTS: Final = {page: page.read_text() for page in PAGES}
_BLOCK: Final = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def page(name: str) -> str:
    """Return the text of a page of `docs`."""
    return TEXTS[ROOT / "docs" / f"{name}.md"]


def blocks(text: str, language: str | None = None) -> list[str]:
    """List what stands in fences, of one language if it is given."""
    return [block for word, block in _BLOCK.findall(text) if language in (None, word)]
