"""Hooks of mkdocs: files of the repository's root become pages, and links into the repository addresses.

So the same links work on the site, on the hosting page of the repository, and in an editor.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
#: An entry of docs/api.md, which scripts/reference.py writes in plain Markdown.
ENTRY = re.compile(r"^<!-- (niwaki\.\w+) -->$.*?^<!-- end of \1 -->$", re.MULTILINE | re.DOTALL)
ERRORS = """
    options:
      show_root_heading: false
      show_bases: true
      filters: ["!^_", "!^NiwakiError$", "!^first_line$"]
"""
LINK = re.compile(r'(\]\(|\b(?:src|srcset|href)=")(?!\w+:|#)([^)"#\s]+)')

log = logging.getLogger("mkdocs.hooks.site")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of the root."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns each relative link into one that works on the site, and entries of the reference into whole docstrings."""
    name = page.file.src_uri
    markdown = ENTRY.sub(lambda entry: f"::: {entry[1]}" + (ERRORS if entry[1] == "niwaki.errors" else ""), markdown)
    folder = "" if name in PAGES.values() else posixpath.join("docs", posixpath.dirname(name))

    def address(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        if not (ROOT / target).exists():
            log.warning("%s links to %s, which does not exist", name, target)
        if target in PAGES:
            return link[1] + PAGES[target]
        if target.startswith("docs/"):
            place = target.removeprefix("docs/")
            # mkdocs makes links of Markdown relative to the page's address, and not those of HTML.
            return link[1] + (place if link[1] == "](" else posixpath.relpath(place, page.file.url))
        return f"{link[1]}{config.repo_url}/blob/main/{target}"

    return LINK.sub(address, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Shows what docstrings write in another markup: names, such as :func:`niwaki.prune`, and literal blocks."""
    html = re.sub(r":\w+:<code>~?(?:[\w.]*\.)?(\w+)</code>", r"<code>\1</code>", html)
    return html.replace("<p>::</p>", "")
