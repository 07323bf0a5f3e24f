# SPDX-License-Identifier: Apache-2.0
"""The error messages of the library, read from its headers: what docs/errors.md lists.

Every error has a problem and a cure. At compile time they are one literal, `"lockstep: problem; cure"`, in a static_assert;
at run time they are the last two of three arguments of `Error(operation, problem, cure, rank)`, or of a helper that makes
one. Whatever is known at run time only is shown as `...`.
"""
import pathlib
import re

LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')
HELPERS = "Error|require|reject|fail_value|fail"  # and `return {...}` of a function that makes an Error


def strip_comments(text):
    return re.sub(r'("(?:[^"\\]|\\.)*")|//[^\n]*', lambda found: found[1] or "", text)


def arguments_at(text, begin):
    """The arguments of a call whose parenthesis opens before `begin`, as source text."""
    depth, start, at, parts = 1, begin, begin, []
    while depth:
        if text[at] == '"':
            at = LITERAL.match(text, at).end()
            continue
        if text[at] in "([{":
            depth += 1
        elif text[at] in ")]}":
            depth -= 1
        if depth == 0 or (depth == 1 and text[at] == ","):
            parts.append(text[start:at])
            start = at + 1
        at += 1
    return parts


def message_of(source, least="[a-z]{2}"):
    """An expression of string literals and values as a reader sees it. Nothing where it has no literal of words."""
    literals = [found[1] for found in LITERAL.finditer(source)]
    if not any(re.search(least, text) for text in literals):
        return ""
    if "?" in LITERAL.sub("", source):  # one of several: the first that has words
        branches = re.split(r"[?:](?!:)(?<!::)", LITERAL.sub(lambda f: f[0].replace("?", "\1").replace(":", "\2"), source))
        chosen = next(branch for branch in branches if re.search(r'"[^"]*[a-z]{2}', branch))
        source = chosen.replace("\1", "?").replace("\2", ":")
    out, last = "", 0
    for found in LITERAL.finditer(source):
        between = source[last:found.start()].strip()
        if re.sub(r"[\s+(){},]|std::string(_view)?", "", between):
            out += "..."
        out += found[1]
        last = found.end()
    rest = re.sub(r"[\s+(){},]", "", source[last:])
    if rest and rest not in (".c_str",):
        out += "..."
    return re.sub(r"\.{4,}", "...", out.replace('\\"', '"')).strip()


def operation_of(source):
    """What failed: the literals of an expression, or `...` where they are known at run time only."""
    return message_of(source, "[A-Za-z]{2}") or "..."


class Message:
    def __init__(self, folder, operation, problem, cure):
        self.folder, self.operation, self.problem, self.cure = folder, operation, problem, cure

    def key(self):
        return (self.folder, self.operation, self.problem, self.cure)


def folder_of(file, root):
    parts = file.relative_to(root).parts
    return parts[1] if parts[0] == "detail" else "trainer"


def headers(root):
    """The folder and the text of every header."""
    for file in sorted(root.rglob("*")):
        if file.suffix in (".hpp", ".cuh", ".ipp"):
            yield folder_of(file, root), strip_comments(file.read_text())


def at_run_time(root):
    found = {}
    for folder, text in headers(root):
        for call in re.finditer(rf"\b(?:({HELPERS})\(|return \{{)", text):
            try:
                parts = arguments_at(text, call.end())
            except (AttributeError, IndexError):
                continue
            spoken = [(i, message_of(part)) for i, part in enumerate(parts)]
            spoken = [(i, words) for i, words in spoken if words]
            if call[1] in ("Error", None):
                if len(parts) < 3 or not message_of(parts[1]) or call[1] is None and not message_of(parts[2]):
                    continue
                message = Message(folder, operation_of(parts[0]), message_of(parts[1]), message_of(parts[2]) or "...")
                if message.cure == "..." and len(re.findall("[a-z]+", message.problem)) < 3:
                    continue
            elif call[1] == "fail_value":
                if not spoken or spoken[-1][0] != 2:
                    continue
                message = Message(folder, "launch", "... is '...'", spoken[-1][1])
            else:  # a helper: its last two arguments of words, which follow each other
                if len(spoken) < 2 or spoken[-1][0] != spoken[-2][0] + 1 or len(spoken[-2][1].split()) < 3:
                    continue
                named = operation_of(parts[0]) if call[1] == "fail" and spoken[-2][0] == 1 else "..."
                message = Message(folder, named, spoken[-2][1], spoken[-1][1])
            found[message.key()] = message
    return list(found.values())


def at_compile_time(root):
    found = {}
    for folder, text in headers(root):
        for literal in re.finditer(r'"lockstep: (?:[^"\\]|\\.)*"(?:\s*"(?:[^"\\]|\\.)*")*', text):
            before = text[:literal.start()].rstrip()
            words = "".join(LITERAL.findall(literal[0]))[len("lockstep: "):].replace('\\"', '"')
            if "static_assert" not in text[max(0, literal.start() - 400):literal.start()] or not before.endswith(","):
                continue
            problem, _, cure = words.partition("; ")
            found[words] = Message(folder, "", problem, cure)
    return list(found.values())


# Which folders' messages stand under which heading.
COMPILING = (
    ("The composition of a job", ("trainer", "policy")),
    ("The model", ("model", "norm", "bucket", "core")),
    ("Steps", ("strategy", "hook", "optim", "device")),
    ("LibTorch", ("torch",)),
    ("Data, groups, communication", ("data", "topology", "comm", "launch", "store", "observe", "checkpoint")),
)
RUNNING = (
    ("Starting and joining", ("launch", "store",)),
    ("Communicating and groups", ("comm", "topology")),
    ("Training", ("strategy", "hook", "norm", "trainer", "bucket", "model", "optim", "core", "observe")),
    ("Data", ("data",)),
    ("Checkpoints", ("checkpoint",)),
    ("LibTorch", ("torch",)),
    ("GPUs", ("device",)),
)


def cell(text):
    return re.sub(r"([<|[*])", r"\\\1", text)


def tables(root):
    """The two generated parts of docs/errors.md, by their marks."""
    compiling, running = at_compile_time(root), at_run_time(root)
    parts = {}
    for mark, groups, messages in (("compiling", COMPILING, compiling), ("running", RUNNING, running)):
        lines = []
        for title, folders in groups:
            chosen = [s for s in messages if s.folder in folders]
            if not chosen:
                continue
            lines += ["", f"### {title}", "", "| message | what to do |", "|---|---|"]
            for s in chosen:
                before = f"{s.operation}: " if s.operation else ""
                lines.append(f"| {cell(before + s.problem)} | {cell(s.cure)} |")
        parts[mark] = "\n".join(lines) + "\n"
    unknown = {s.folder for s in compiling + running} - {f for groups in (COMPILING, RUNNING) for _, fs in groups for f in fs}
    if unknown:
        raise SystemExit(f"tests/docs/messages.py knows no heading for {unknown}")
    return parts
