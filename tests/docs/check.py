#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the documents against the repository; `--write` rewrites the generated parts of docs/errors.md.

- Every relative link leads to a file, and to a heading where it names one.
- Every path of a file or folder in `code` exists: as written, under include/lockstep or its detail/, or beside the document.
- A line `<!-- path -->` before a code block says that the block is cut from that file: its lines stand there, one after the
  other, whatever their common indentation. Every block of C++ must be so marked, and cut from a file that tests compile or run; on
  docs/from-pytorch.md every block of Python too.
- Every name of the library in the right column of docs/from-pytorch.md's "Call by call" is declared in a header.
- docs/troubleshooting.md quotes messages of the library: a line `> message` is one, with `...` for what is known at run time.
- README.md has at most 150 lines, and one whole program. Its benchmark rows stand in docs/benchmarks.md.
- No header and no page has a name that the field has another word for (INVENTED); the changelog may.
- docs/README.md links every page, and docs/decisions/README.md every decision; docs/policies.md names every axis and choice;
  docs/errors.md lists every error message.
"""
import pathlib
import re
import sys
import textwrap

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import messages  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADERS = ROOT / "include" / "lockstep"
FOLDERS = ("include", "tests", "bench", "docs", "examples")
COMPILED = ("examples/*", "examples/torch/*", "examples/from_pytorch/*", "tests/*/*.cpp", "tests/consume/own_loop/main.cpp", "tests/consume/fetched/CMakeLists.txt", "tests/*/*.hpp", "tests/*/*.py", "tests/*/*.cu", "tests/*/*.cuh", "bench/*/*")
# Names that the library once had for what PyTorch, NCCL, MPI, CUDA or the standard have a word for.
INVENTED = re.compile(r"\b\w*(?:riders|Crew|errand|Parcel|Harbour|Berth|Kept|for_each_kept|[Tt]ravelling|RollCall|Greeting|farewell|tripwire|Ledger|"
                      r"NoticeBoard|last_words|Participant|blemish|tell_others|let_job_follow|let_program_follow|GoingOn|CourseState|PlaceInData|"
                      r"UpdateClock|look_after|under_way|[Ss]weep|hand_out|let_host_look|Verdict|refuse)\w*|\b(?:crew|parcel|Meeting|meeting_?|Offers?)\b")
SUFFIXES = r"hpp|cuh|ipp|cpp|cu|py|md|lua|svg|sh"
pages = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
problems, counts = [], {"links": 0, "paths": 0, "snippets": 0, "messages": 0, "quotes": 0, "names in rows": 0}


def complain(page, what):
    problems.append(f"{page.relative_to(ROOT)}: {what}")


def without_code(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)


def anchors_of(page):
    """The anchors that GitHub gives a page's headings."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", without_code(page.read_text()), flags=re.M):
        words = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)).strip().lower()
        found.add(words.replace(" ", "-"))
    return found


def check_links(page, text):
    prose = re.sub(r"(?<!\[)`[^`\n]*`(?!\])", "", without_code(text))  # a lambda's [](...) is no link
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if "://" in target:
            continue
        counts["links"] += 1
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            complain(page, f"the link {target} leads nowhere")
        elif anchor and anchor not in anchors_of(file):
            complain(page, f"the link {target} names no heading of {file.name}")


def check_paths(page, text):
    code = re.findall(r"`([^`\n]+)`", without_code(text)) + re.findall(r"^<!-- (\S+) -->$", text, flags=re.M)
    for word in (word for span in code for word in re.split(r"[\s<>(),;'\"]+", span)):
        word = word.strip(".:")
        of_repository = word.split("/")[0] in FOLDERS and "/" in word
        if not (of_repository or re.fullmatch(rf"[\w.-]+(/[\w.-]+)+\.({SUFFIXES})", word) or
                re.fullmatch(r"[a-z_]+(/[a-z_]+)*/", word)):
            continue
        if re.search(r"[*{}$]|\.\.\.", word) or word.startswith(("build/", "/")):
            continue
        counts["paths"] += 1
        if not any((place / word).exists() for place in (ROOT, ROOT / "include", HEADERS, HEADERS / "detail", page.parent)):
            complain(page, f"there is no {word}")


def check_snippets(page, text):
    blocks = re.findall(r"(?:^<!-- (\S+) -->\n)?^ *```([\w+]*)[^\n]*\n(.*?)^ *```$", text, flags=re.S | re.M)
    for path, language, block in blocks:
        if not path:
            compiled = language.lower() in ("cpp", "c++", "cc", "cxx", "cuda", "cu", "hpp")
            if compiled or (language == "python" and page.name == "from-pytorch.md"):
                complain(page, f"a block of {'C++' if compiled else 'Python'} does not say from which file it is cut: " + block.split("\n")[0])
            continue
        counts["snippets"] += 1
        wanted = [line.rstrip() for line in block.rstrip("\n").split("\n")]
        file = ROOT / path
        if not any(file.match(pattern) for pattern in COMPILED):
            complain(page, f"no test compiles or runs {path}, from which a block is cut")
        lines = [line.rstrip() for line in file.read_text().split("\n")] if file.exists() else []
        for start in range(len(lines) - len(wanted) + 1):
            cut = textwrap.dedent("\n".join(lines[start:start + len(wanted)])).split("\n")
            if cut == wanted:
                break
        else:
            complain(page, f"this block is not in {path}: {wanted[0]}")


def table_under(text, heading):
    section = text.split(f"## {heading}\n", 1)[-1].split("\n## ", 1)[0]
    return [line for line in section.split("\n") if line.startswith("| ")][1:]


def check_readme():
    readme = ROOT / "README.md"
    text = readme.read_text()
    lines = text.count("\n")
    if lines > 150:
        complain(readme, f"it has {lines} lines, of 150 at most")
    programs = re.findall(r"^```cpp\n(?:(?!^```).)*?int main\(", text, flags=re.S | re.M)
    if len(programs) != 1:
        complain(readme, f"it has {len(programs)} whole programs instead of one")
    figures = (ROOT / "docs" / "benchmarks.md").read_text()
    for row in table_under(text, "How fast"):
        if row not in figures:
            complain(readme, f"docs/benchmarks.md does not have this row: {row}")


def check_index():
    index = ROOT / "docs" / "README.md"
    decisions = ROOT / "docs" / "decisions" / "README.md"
    for page in pages[2:]:
        of = decisions if page.parent == decisions.parent and page != decisions else index
        linked = set(re.findall(r"\]\(([^)#\s]+)", of.read_text()))
        if str(page.relative_to(of.parent)) not in linked | {"README.md"}:
            complain(of, f"it does not link {page.name}")


def check_policies():
    page = ROOT / "docs" / "policies.md"
    text = page.read_text()
    for file in sorted(HEADERS.rglob("*.hpp")):
        source = file.read_text()
        names = re.findall(r"struct (\w+) : Choice<", source)
        names += re.findall(r"struct (\w+) : (?:ValuePolicy|ChoicePolicy)<", source)
        for name in names:
            if not re.search(rf"\b{name}\b", text) and not name.endswith("Rule"):
                complain(page, f"it does not name {name} of {file.relative_to(HEADERS)}")


def declared_members():
    """Functions and fields of classes: clang-format has them indented, behind a type."""
    found = set()
    no_type = r"(?!return |else |throw |new |case |using |co_)"
    for file in HEADERS.rglob("*"):
        if file.suffix in (".hpp", ".cuh"):
            source = re.sub(r"//.*", "", file.read_text())
            found.update(re.findall(rf"^  (?:  )?{no_type}[\w:<>,&*\[\]() \"]*?[\w>*&\]\)] [*&]*(\w+)(?:\(|\{{|;| =)", source, flags=re.M))
            found.update(re.findall(r"^  (?!if|for|while|switch)(\w+)\([^;{}]*\)(?: const)? \{$", source, flags=re.M))
    return found


# Names in those rows that are a program's own, LibTorch's or another launcher's.
OF_PROGRAMS = {"M", "Net", "Norm1", "Batch", "Tensor", "DIR", "Parameters", "Output", "crop", "convert", "no_python"}


def check_rows():
    """A type and a function must be a public name, what follows a point or an arrow a member, and an option one of the launcher's or of jobs'."""
    page = ROOT / "docs" / "from-pytorch.md"
    public = set(re.findall(r"^\| `(\w+)`", (ROOT / "docs" / "names.md").read_text(), flags=re.M)) | OF_PROGRAMS
    for file in (HEADERS / "detail" / "torch").rglob("*.*h*"):  # lockstep::torch::X
        for part in re.findall(r"^namespace (?:lockstep::)?torch_loops \{$(.*?)^\}  // namespace", file.read_text(), flags=re.S | re.M):
            public |= set(re.findall(r"^(?:class|struct) (\w+)", part, flags=re.M))
    members = declared_members()
    flags = set(re.findall(r'"(?:--)?([a-z-]+)"', "\n".join(f.read_text() for f in HEADERS.rglob("*.*pp"))))
    for row in table_under(page.read_text(), "Call by call"):
        for code in re.findall(r"`([^`]+)`", re.split(r"(?<!\\)\|", row)[2]):
            if "torchrun" in code:
                continue
            plain = re.sub(r'"[^"]*"', '""', code).replace("std::", "")
            wanted = [(name, name in OF_PROGRAMS or name.replace("_", "-") in flags, "option") for name in re.findall(r"(?<!\S)--([a-z_-]+)", plain)]
            plain = re.sub(r"(?<!\S)--\S+", "", plain)
            for found in re.finditer(r"(\.|->|)\b([A-Za-z_]\w+)(\(|<|)", plain):
                before, name, after = found.groups()
                is_variable = re.search(r"[\w>] $", plain[:found.start()])  # `DataLoader loader(...)`
                if before:
                    wanted.append((name, name in members, "member"))
                elif name[0].isupper():
                    wanted.append((name, name in public, "name"))
                elif after and not is_variable:
                    wanted.append((name, name in public | members, "function"))
            for name, is_declared, what in wanted:
                counts["names in rows"] += 1
                if not is_declared:
                    complain(page, f"no header declares the {what} '{name}' of this row: {code}")


def check_quotes():
    """What docs/troubleshooting.md quotes stands in the sources, piece by piece."""
    page = ROOT / "docs" / "troubleshooting.md"
    sources = [f.read_text() for f in sorted(HEADERS.rglob("*")) if f.suffix in (".hpp", ".cuh", ".ipp")]
    literals = re.sub(r'"\s*"', "", "\n".join(sources)).replace('\\"', '"')
    for quote in re.findall(r"^> (.+)$", page.read_text(), flags=re.M):
        counts["quotes"] += 1
        for piece in quote.split("..."):
            if piece.strip() not in literals:
                complain(page, f"no error of the library says: {piece.strip()}")


def check_errors(write):
    page = ROOT / "docs" / "errors.md"
    text = page.read_text()
    for mark, table in messages.tables(HEADERS).items():
        counts["messages"] += table.count("\n| ") - table.count("\n| message |")
        begin, end = f"<!-- generated: {mark} -->\n", "<!-- end of generated -->"
        before, rest = text.split(begin, 1)
        old, after = rest.split(end, 1)
        if old != table and not write:
            complain(page, "its list of messages is not that of the sources; run tests/docs/check.py --write")
        text = before + begin + table + end + after
    if write:
        page.write_text(text)


check_errors("--write" in sys.argv)
for page in pages:
    text = page.read_text()
    check_links(page, text)
    check_paths(page, text)
    check_snippets(page, text)
check_readme()
check_index()
check_policies()
check_rows()
check_quotes()
for file in [f for folder in ("include", "examples", "tests", "bench") for f in (ROOT / folder).rglob("*")]:
    if file.suffix in (".hpp", ".cuh", ".ipp", ".cpp", ".cu") or file.name in ("run", "xmake.lua"):
        for path in re.findall(r"\bdocs/[\w/-]+\.md\b", file.read_text()):
            if not (ROOT / path).exists():
                complain(file, f"there is no {path}")

def check_words():
    for page in [*pages, *(p for p in HEADERS.rglob("*") if p.suffix in (".hpp", ".cuh", ".ipp"))]:
        if page.name == "changelog.md" or "measurements" in page.parts:
            continue
        text = page.read_text().split("## Words of the code")[0]  # the table itself has them
        for word in sorted(set(INVENTED.findall(text.replace("Connection refused", "")))):
            complain(page, f"'{word}' has another name in the field; docs/concepts.md has the table")


check_words()
print(*problems, sep="\n", end="\n" if problems else "")
print(f"{len(pages)} pages: " + ", ".join(f"{count} {what}" for what, count in counts.items()) + " checked, "
      f"{len(problems)} wrong")
sys.exit(1 if problems else 0)
