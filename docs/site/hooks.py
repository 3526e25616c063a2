"""Makes pages of the README and the changelog, which stand at the root of the repository."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_ROOT = Path(__file__).parent.parent.parent
_PLACES = {"../README.md": "index.md", "../CHANGELOG.md": "changelog.md"}
"""How pages call what stands at the root, and what it is called in the site."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what stands at the root, with links as from a page of `docs`."""
    for place, name in _PLACES.items():
        text = (_ROOT / Path(place).name).read_text()
        text = text.replace("](CHANGELOG.md", "](../CHANGELOG.md").replace("](docs/", "](")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to the root to the pages that were made of it."""
    for place, name in _PLACES.items():
        markdown = re.sub(rf"\]\({re.escape(place)}(?=[)#])", f"]({name}", markdown)
    return markdown
