# SPDX-License-Identifier: Apache-2.0
"""MkDocs' hooks: the pages of docs/ as a site.

Pages are written for a clone, where a link may lead to any file: README.md at the root is the first page here, and a file that a page
links to, such as a header or a test, is a page of its own that shows it.
"""
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md", "docs/README.md": "contents.md", "examples/README.md": "examples.md"}
LANGUAGES = {".hpp": "cpp", ".ipp": "cpp", ".cpp": "cpp", ".cu": "cuda", ".cuh": "cuda", ".py": "python", ".lua": "lua", ".json": "json", ".cmake": "cmake"}
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^)\s]+)(\))")

CODE = re.compile(r"^````?.*?^````?$|`[^`\n]+`", re.S | re.M)


def is_elsewhere(target):
    return re.match(r"[a-z]+:|#", target)


def page_of(path):
    """Where the site has a file of the repository."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"sources/{path.replace('.', '_')}.md"


def linked_from(path, text):
    """The files and folders of the repository to which a page links, by what the page calls them."""
    found = {}
    for _, target, _ in LINK.findall(CODE.sub("", text)):
        if not is_elsewhere(target):
            found[target] = posixpath.normpath(posixpath.join(posixpath.dirname(path), target.partition("#")[0]))
    return found


def rewritten(path, text):
    """A page's text with links to where the site has their targets."""
    here, targets = posixpath.dirname(page_of(path)), linked_from(path, text)

    def link(match):
        target = match.group(2)
        if target not in targets:
            return match.group(0)
        anchor = target.partition("#")[2]
        return match.group(1) + posixpath.relpath(page_of(targets[target]), here or ".") + (f"#{anchor}" if anchor else "") + match.group(3)

    return LINK.sub(link, text)


def shown(path):
    """A page that shows a file, or the names in a folder."""
    file = ROOT / path
    if file.is_dir():
        return f"# {path}\n\n" + "\n".join(f"- `{name.name}`" for name in sorted(file.iterdir())) + "\n"
    text = file.read_text()
    language = LANGUAGES.get(file.suffix, "bash" if text.startswith("#!/usr/bin/env bash") else "python" if text.startswith("#!") else "text")
    return f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n````{language}\n{text}\n````\n"


def navigation():
    """docs/README.md's tables: each one a section, each link of it a page."""
    sections, lines = [{"lockstep": [{"Overview": "index.md"}, {"All pages": "contents.md"}, {"API reference": "api/index.html"}]}], (ROOT / "docs/README.md").read_text().splitlines()
    for line in lines:
        if title := re.match(r"\| ([a-z ]+) \| \|", line):
            sections.append({title.group(1).capitalize(): []})
        elif line.startswith("| ") and len(sections) > 1:
            first, second = line.split("|")[1:3]
            if first.strip() == "Notes on measurements":
                sections.append({"Measurements": []})
            entries = sections[-1][next(iter(sections[-1]))]
            for name, target in re.findall(r"\[([^\]]+)\]\(([^)#\s]+\.md)\)", first if "](" in first else second):
                entries.append({name[0].upper() + name[1:]: page_of(posixpath.normpath(f"docs/{target}"))})
    return sections


def on_config(config):
    version = re.search(r'version = "([\d.]+)"', (ROOT / "include/lockstep/version.hpp").read_text()).group(1)
    config.copyright = f"lockstep {version}, Apache-2.0"
    config.nav = navigation()
    return config


def on_files(files, config):
    for file in list(files):
        if file.src_uri == "README.md":
            files.remove(file)
    texts = {path: (ROOT / path).read_text() for path in ["docs/README.md", *PAGES]}
    texts |= {f"docs/{file.src_uri}": Path(file.abs_src_path).read_text() for file in files if file.src_uri.endswith(".md")}
    for path in PAGES:
        files.append(File.generated(config, page_of(path), content=rewritten(path, texts[path])))
    linked = {target for path, text in texts.items() for target in linked_from(path, text).values()}
    for path in sorted(linked):
        if not path.startswith("docs/") and path not in PAGES:
            files.append(File.generated(config, page_of(path), content=shown(path)))
    css = (Path(__file__).parent / "site.css").read_text()
    files.append(File.generated(config, "site.css", content=css))
    return files


def on_page_markdown(markdown, page, config, files):
    return markdown if page.file.generated_by else rewritten(f"docs/{page.file.src_uri}", markdown)
