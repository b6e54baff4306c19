"""Finds turns of phrase that a native engineer would not use; run by `make lint` over src, docs, tools and the README.

    python tools/words.py [PATH ...]

In Python files only comments and strings are read, in Markdown all but inline code.
"""

from __future__ import annotations

import ast
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

RULES = {
    r"\btakes\b|\b(?:do|does|did|can|would)(?: not|n't)? take (?:a|an|no|only|the)\b": "requires, accepts, expects",
    r"(?<!there\s)\b(?:is|are|was|were|be) no (?!longer\b|(?:more|less|fewer) than\b)": "is not a; there is no",
    r"\b(?:leave|leaves|leaving|left) (?:\S+ ){1,4}away\b": "drop, omit",
    r"\bmend(?:s|ed|ing)?\b": "fix",
    r"\banew\b": "again, from scratch",
    r"\bsees? to (?:it|its|their|the|that)\b": "check, ensure",
    r"\bat the (?:most|least)\b": "at most, at least",
    r"\btold\b|\btellings?\b|\btellers?\b|\btells (?:callbacks|the callbacks|them|it)\b": "called, notified; fires",
    r"(?<!optimizer\s)(?<!optimizer's\s)(?<!Adam's\s)(?<!first\s)(?<!second\s)(?<!its\s)\bmoments?\b": "event, hook",
    r"\bfolders?\b": "directory",
    r"\bjournals?\b(?!\")": "metrics log",
    r"\bpass(?:ed|ing) over\b|\bto pass over\b": "skip",
    r"(?<!first-)\bculprits?\b|\bverdicts?\b|\baccus\w+|\bconfess\w*|\bwitness\w*": "diagnosis, report",
    r"\bstands?\b(?! for\b)(?! out\b)(?!-)|\bstood\b": "is, is listed",
    r"\bhas grown\b|\bgrowth of the batch\b|\bbatch grows\b": "ramp-up",
    r"\bruns already\b": "is already running",
    r"\b(?:goes|went|go|going|gone) on\b": "continues",
    r"\bwhole numbers?\b": "integer",
    r"\bmay not\b": "must not, might not",
    r"\b(?:is|are|was|were) (?:said|heard)\b": "is logged, is reported",
    r"\btoday'?s?\b": "current",
    r"\bt(?:ake|akes|aking|aken|ook) up\b": "record, start",
    r"\b(?:is|are|was|were) of (?:another|an other|a different)\b": "was saved with a different, belongs to another",
    r"\bno letters?\b|\bno form in\b": "cannot be saved, is not a character",
    r"\bof somebody else\b|\bsomebody else's\b": "another process's, another run's",
    r"\bthinn(?:ed|ing)\b": "downsampled",
    r"\bcertificates?\b(?![/\"'])": "trajectory hash",
    r"\bwhat (?:became|becomes) of\b": "the outcome of, what happened to",
    r"\bwhoever\b": "anyone who, the code that, the user who",
    r"\bstrangers?\b": "unknown, untrusted, other users",
}
PATTERNS = [(re.compile(pattern.replace(" ", r"\s+"), re.IGNORECASE), rather) for pattern, rather in RULES.items()]
RIDDLE = re.compile(r"(?:What|Who|How|Where|When|Why|Which)\b|.*\?$")


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """The text that people read, with the number of its first line."""
    if path.suffix != ".py":
        yield 1, re.sub(r"`[^`\n]+`", "`code`", path.read_text("utf-8"))
        return
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT or "STRING" in tokenize.tok_name[token.type]:
                yield token.start[0], token.string


def findings(path: Path) -> Iterator[tuple[int, str, str]]:
    """Line, words and what to write rather."""
    for start, indented in texts(path):
        text = re.sub(r"[ \t]*\n[ \t]*", "\n", indented)  # one blank between the words that a line break separates
        for pattern, rather in PATTERNS:
            for match in pattern.finditer(text):
                yield start + text.count("\n", 0, match.start()), " ".join(match[0].split()), rather
    if path.suffix == ".py":
        doc = ast.get_docstring(ast.parse(path.read_bytes()))
        if doc and RIDDLE.match(doc.partition("\n")[0]):
            yield 1, doc.partition("\n")[0], "a module's docstring says what it does"


def main(words: list[str]) -> int:
    """Print what is found; 1 if there is something."""
    roots = [Path(word) for word in words or ("src", "docs", "tools", "README.md")]
    files = [file for root in roots for file in ([root] if root.is_file() else sorted(root.rglob("*.*")))]
    found = 0
    for file in files:
        if file.suffix in (".py", ".md") and file.name != "words.py":
            for line, phrase, rather in sorted(findings(file)):
                found += 1
                print(f"{file}:{line}: {phrase!r}: rather {rather}")
    print(f"{found} found in {len(files)} files.")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
