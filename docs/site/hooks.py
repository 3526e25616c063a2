"""Makes pages of the README, the changelog and the READMEs of folders, which are not in `docs`."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_ROOT = Path(__file__).parent.parent.parent
_PLACES = {
    "../README.md": "index.md",
    "../CHANGELOG.md": "changelog.md",
    "../tests/README.md": "tests.md",
    "../benchmarks/README.md": "benchmarks.md",
}
"""How pages name these files, and their names in the site."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add these files, with links as from a page of `docs`."""
    for place, name in _PLACES.items():
        text = (_ROOT / place.removeprefix("../")).read_text()
        text = re.sub(r"\]\((?=CHANGELOG\.md|tests/)", "](../", text)
        text = re.sub(r"\]\((\.\./)?docs/", "](", text)  # `../`: in READMEs of folders
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to these files to the pages that were made of them."""
    for place, name in _PLACES.items():
        markdown = re.sub(rf"\]\({re.escape(place)}(?=[)#])", f"]({name}", markdown)
    return markdown
