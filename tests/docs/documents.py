"""The repository's Markdown files, and what stands in them: blocks, commands, links and headings."""

from __future__ import annotations

import re
import shlex
import subprocess

from tests.conftest import ROOT

TRACKED = subprocess.run(
    ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True
).stdout.split("\0")[:-1]
DOCUMENTS = [path for path in TRACKED if path.endswith(".md") and (ROOT / path).exists()]

YOURS = ("job.yaml", "train.yaml", "broken.yaml")
"""Configs that the documents take for the reader's own."""

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(kind: str) -> list[tuple[str, str]]:
    """(document, text) of every fenced block of a kind."""
    return [
        (document, text)
        for document in DOCUMENTS
        for found, text in FENCE.findall((ROOT / document).read_text())
        if found == kind
    ]


def the_block(kind: str, start: str) -> str:
    """The only block of all documents that begins so."""
    [text] = [text for _, text in blocks(kind) if text.startswith(start)]
    return text


def commands() -> list[tuple[str, str]]:
    """(document, command) of every line in a block that is typed at a prompt, without the … that stands for more of the same."""
    lines = []
    for document, text in [block for kind in ("", "sh", "bash") for block in blocks(kind)]:
        for line in text.splitlines():
            is_row = re.search(r"  +\d", line.partition("#")[0])  # of a table whose first column says launcher
            has_more = re.search(r"\[options\]|\[.*…\]|^launcher prepare .*\[", line)  # a usage, in the reference
            if re.match(r"(?:\$ )?(?:\.venv/bin/)?launcher ", line) and not is_row and not has_more:
                words = shlex.split(line.removeprefix("$ "), comments=True)
                lines.append((document, shlex.join(word for word in words[1:] if word != "…")))
    return list(dict.fromkeys(lines))


def mentions() -> list[tuple[str, str]]:
    """(document, command) of every command in running text and tables, `launcher diagnose RUN --probe` for example."""
    return list(
        dict.fromkeys(
            (document, words)
            for document in DOCUMENTS
            for words in re.findall(
                r"`launcher ([^`]+)`", FENCE.sub("", (ROOT / document).read_text()).replace("\n", " ")
            )
        )
    )


def anchors(document: str) -> set[str]:
    """What a link into a document may name, as GitHub makes it of headings."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", (ROOT / document).read_text()), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}
