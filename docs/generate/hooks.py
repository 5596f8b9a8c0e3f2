"""Hooks of mkdocs: pages that are generated when the site is built, and links between files as links between pages."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import docstrings
import gallery
import ladder
import links
import reference
import results
import source
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

FILES = {page: file for file, page in links.ROOT_PAGES.items() if (links.ROOT / file).is_file()}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the generated pages in the navigation: below the index of their folder."""
    generated = {**ladder.pages(), **reference.pages(), **results.pages()}
    for section in config.nav or []:
        for items in section.values():
            index = items[0] if isinstance(items, list) else ""
            if isinstance(index, str) and index.endswith("/index.md"):
                folder = index.removesuffix("index.md")
                listed = [path for path in generated if path.startswith(folder) and path not in items]
                items[1:1] = [path for path in listed if path not in _older()]
    return config


def _older() -> set[str]:
    return {f"results/{path.name}" for _, *older in results.tables().values() for path in older}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, those of the repository's root, and the files that any page links to."""
    pages = {**ladder.pages(), **reference.pages(), **results.pages(), "gallery.md": gallery.page()}
    for file, page in links.ROOT_PAGES.items():
        path = links.ROOT / file
        if path.is_file() and files.get_file_from_path(page) is None and page not in pages:
            pages[page] = path.read_text() if path.suffix == ".md" else source.page(file)
    linking = {file.src_uri: file.content_string for file in files.documentation_pages()} | pages
    pages |= _linked(target for page, text in linking.items() for target in links.targets(text, file_of(page)))
    for page, text in pages.items():
        inclusion = InclusionLevel.NOT_IN_NAV if page in _aside(pages) else InclusionLevel.UNDEFINED
        files.append(File.generated(config, page, content=text, inclusion=inclusion))
    for path in results.FOLDER.glob("*.png"):
        files.append(File.generated(config, f"results/{path.name}", content=path.read_bytes()))
    return files


def _linked(targets: Iterable[str]) -> dict[str, str]:
    """Return the pages of files and folders that no other page shows."""
    found: dict[str, str] = {}
    for target in targets:
        page, path = links.page_of(target), links.ROOT / target
        if page.startswith("source/") and page not in found and path.exists():
            found[page] = source.folder_page(target) if path.is_dir() else source.page(target)
            if path.is_dir():
                found |= _linked(source.modules(target))
    return found


def _aside(pages: Iterable[str]) -> set[str]:
    """Return the pages that are only linked to, from no list of pages."""
    return _older() | {page for page in pages if page.startswith("source/")}


def file_of(page: str) -> str:
    """Return the file of the repository whose links a page of the site has."""
    if page in FILES:
        return FILES[page]
    if page.startswith("results/"):
        return f"benchmarks/{page}"
    return f"docs/{page}"


def on_page_markdown(markdown: str, *, page: Page, **kwargs: Any) -> str:
    """Rewrite links to files as links to pages, and public names in inline code as links to the reference."""
    uri = page.file.src_uri
    if uri.startswith(("reference/", "source/")):
        return markdown
    if page.file.generated_by and uri not in FILES and not uri.startswith("results/20"):
        return markdown
    return link_names(links.rewrite(markdown, file_of(uri), uri))


def link_names(markdown: str) -> str:
    """Link `fds.name` and `fds.name(...)` in inline code to the reference."""
    code = re.compile(r"(?<![\[`])`(fds\.[^`\n]+)`(?![\]`])")
    return links.outside_fences(markdown, lambda text: code.sub(lambda m: docstrings.link(m[0], m[1], "fds", ()), text))


def on_page_content(html: str, *, page: Page, **kwargs: Any) -> str:
    """Mark the page by its name, for the style sheet, and leave folded sources out of the search."""
    if page.present_anchor_ids is not None:  # mkdocs looks into no block of code
        page.present_anchor_ids |= set(re.findall(r'id="(__codelineno-[\d-]+)"', html))
    html = html.replace(
        '<details class="mkdocstrings-source"', '<details data-search-exclude class="mkdocstrings-source"'
    )
    name = page.file.src_uri.removesuffix(".md").replace("/", "-")
    return f'<div class="page-{name}">{html}</div>'
