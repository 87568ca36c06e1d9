"""Plain text out of documentation files: every reader returns a list of (kind, text) blocks.

Kinds: `h` heading, `sig` documented name, `p` paragraph, `li` list item, `pre` code example.
"""

from __future__ import annotations

import ast
import gzip
import json
import re
import struct
import zlib
from collections.abc import Iterator

from selectolax.lexbor import LexborHTMLParser  # type: ignore[import-not-found,unused-ignore]

Block = tuple[str, str]

HTML_DROP = (
    "script,style,nav,header,footer,noscript,table,form,button,svg,a.headerlink,div.sphinxsidebar,div.related,"
    "div.footer,div.header,div.navheader,div.navfooter,.sidebar,.navbar,.toc,.contents,.toctree-wrapper,"
    ".viewcode-link,.linenos,.copyright,.topnav,.bottomnav,.sub-nav,.srclink,.nav,.menu"
)
HTML_TAKE = "h1,h2,h3,h4,h5,p,pre,li,dd,dt,div.block,blockquote"
HEADINGS = {"h1", "h2", "h3", "h4", "h5"}
ADORNMENT = re.compile(r"^([=\-~^\"'`*+#.:_<>])\1{2,}\s*$")


def squash(text: str) -> str:
    """One line of text without link markers."""
    return re.sub(r"\s+", " ", text.replace("¶", "").replace("[source]", "").replace("\u200b", "")).strip()


def html(data: str) -> list[Block]:
    """Blocks of an HTML page without navigation, tables and scripts."""
    tree = LexborHTMLParser(data)
    if tree.body is None:
        return []
    for node in tree.css(HTML_DROP):
        node.decompose()
    blocks: list[Block] = []
    for node in tree.body.css(HTML_TAKE):
        tag = node.tag
        if tag == "pre":
            blocks.append(("pre", node.text().strip("\n")))
        elif tag in HEADINGS:
            blocks.append(("h", squash(node.text())))
        elif tag == "dt":
            blocks.append(("sig", squash(node.text())))
        elif tag == "p":
            blocks.append(("p", squash(node.text())))
        elif node.css_first("p,pre,ul,ol,dl,div.block,li") is None:
            blocks.append(("li" if tag == "li" else "p", squash(node.text())))
    return [block for block in blocks if block[1]]


def inline_rst(text: str) -> str:
    """Running text without reStructuredText markup."""
    text = re.sub(r":[\w:+.-]+:`([^`<]*?)\s*<[^`>]*>`", r"\1", text)
    text = re.sub(r":[\w:+.-]+:`[~!]?([^`]*)`", r"\1", text)
    text = re.sub(r"`([^`<]+?)\s*<[^`>]*>`_{1,2}", r"\1", text)
    text = re.sub(r"``([^`]*)``", r"\1", text)
    text = re.sub(r"`([^`]*)`_{0,2}", r"\1", text)
    text = re.sub(r"\*\*([^*\n]+)\*\*", r"\1", text)
    text = re.sub(r"(?<!\w)\*([^*\s][^*\n]*)\*(?!\w)", r"\1", text)
    text = re.sub(r"\|(\S+?)\|_{0,2}|\[#?\w*\]_", lambda m: m[1] or "", text)
    return squash(text.replace("\\ ", "").replace("\\*", "*"))


def rst(data: str) -> list[Block]:
    """Blocks of a reStructuredText file; directives are dropped, their indented prose is kept."""
    blocks: list[Block] = []
    code_next = False
    for chunk in re.split(r"\n[ \t]*\n", data.replace("\t", "    ").replace("\r", "")):
        lines = [line for line in chunk.split("\n") if line.strip()]
        if not lines:
            continue
        indented = all(line.startswith("  ") for line in lines)
        if lines[0].lstrip().startswith(".. "):
            code_next = bool(re.match(r"\s*\.\. (code|code-block|sourcecode|parsed-literal|ipython|prompt)", lines[0]))
            continue
        if code_next and indented:
            blocks.append(("pre", chunk.strip("\n")))
            continue
        code_next = lines[-1].rstrip().endswith("::")
        if lines[0].lstrip().startswith(">>>"):
            blocks.append(("pre", chunk.strip("\n")))
            continue
        blocks.extend(rst_chunk([line for line in lines if not re.match(r"\s*:[\w -]+:(?!`)", line)]))
    return blocks


def rst_chunk(lines: list[str]) -> Iterator[Block]:
    """Headings, list items and paragraphs of one blank-line separated chunk."""
    text: list[str] = []
    kind = "p"
    for index, line in enumerate(lines):
        following = lines[index + 1] if index + 1 < len(lines) else ""
        if ADORNMENT.match(line) or re.match(r"\s*(\+[-=+]+\+|\|.*\||=+( +=+)+)\s*$", line):
            continue
        if ADORNMENT.match(following) and len(following.rstrip()) >= len(line.rstrip()) - 1 and not text:
            yield "h", inline_rst(line)
            continue
        item = re.match(r"\s*(?:[-*+•]|\d+[.)]|#\.)\s+(.*)", line)
        if item is not None:
            if text:
                yield kind, inline_rst(" ".join(text))
            kind, text = "li", [item[1]]
        else:
            text.append(re.sub(r"::\s*$", ":", line))
    if text:
        yield kind, inline_rst(" ".join(text))


def markdown(data: str) -> list[Block]:
    """Blocks of a Markdown file."""
    data = re.sub(r"\A---\n.*?\n---\n", "", data.replace("\r", ""), flags=re.DOTALL)
    data = re.sub(r"<!--.*?-->", "", data, flags=re.DOTALL)
    blocks: list[Block] = []
    for index, part in enumerate(re.split(r"^[ \t]*(?:```|~~~).*$", data, flags=re.MULTILINE)):
        if index % 2:
            blocks.append(("pre", part.strip("\n")))
            continue
        part = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", part)
        part = re.sub(r"\[([^\]]*)\](\([^)]*\)|\[[^\]]*\])", r"\1", part)
        part = re.sub(r"</?[a-zA-Z][^>\n]*>|\*\*|__|`|^\s*>\s?|\{[#:%{][^}]*\}+", "", part, flags=re.MULTILINE)
        part = re.sub(r"^(#+ .*)$", r"\n\1\n", part, flags=re.MULTILINE)
        for chunk in re.split(r"\n[ \t]*\n", part):
            lines = [
                line for line in chunk.split("\n") if line.strip() and not re.match(r"\s*(\||:::|!!!|\?\?\?)", line)
            ]
            if lines and lines[0].startswith("#"):
                blocks.append(("h", squash(lines[0].strip("# "))))
                lines = lines[1:]
            if lines:
                blocks.extend(rst_chunk(lines))
    return [block for block in blocks if block[1]]


def plain(data: str) -> list[Block]:
    """Paragraphs of a plain text file; line breaks inside a paragraph are joined."""
    chunks = re.split(r"\n[ \t]*\n", data.replace("\r", ""))
    return [("p", squash(chunk)) for chunk in chunks if chunk.strip()]


def docstrings(data: str) -> list[Block]:
    """Docstrings of a Python module, each under the name it documents."""
    try:
        tree = ast.parse(data)
    except (SyntaxError, ValueError, RecursionError):
        return []
    blocks: list[Block] = []
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        text = ast.get_docstring(node)
        if not text or len(text) < 120:
            continue
        if not isinstance(node, ast.Module):
            blocks.append(("sig", node.name))
        blocks.extend(block for block in rst(text) if block[0] != "h")
    return blocks


def api_json(data: bytes, name: str) -> list[Block]:
    """Description strings of a service description in JSON (possibly compressed with gzip)."""
    loaded = json.loads(gzip.decompress(data) if name.endswith(".gz") else data)
    blocks: list[Block] = []
    stack: list[tuple[str, object]] = [("", loaded)]
    while stack:
        key, value = stack.pop()
        if isinstance(value, dict):
            stack.extend(
                (str(k) if not isinstance(v, str) else key, v) for k, v in value.items() if not isinstance(v, str)
            )
            text = value.get("documentation") or value.get("description")
            if isinstance(text, str) and len(text) > 80:
                blocks.append(("sig", key))
                blocks.extend(html(f"<body>{text}</body>") if "<p>" in text else plain(text))
        elif isinstance(value, list):
            stack.extend((key, entry) for entry in value)
    return blocks


def text_json(data: bytes) -> list[Block]:
    """The title and the text of a JSON file with those keys; long runs are cut at sentence ends."""
    loaded = json.loads(data)
    if not isinstance(loaded, dict) or not isinstance(loaded.get("text"), str):
        return []
    blocks: list[Block] = [("h", str(loaded.get("title") or f"{loaded.get('name')}, {loaded.get('year')}"))]
    for paragraph in loaded["text"].split("\n"):
        piece = ""
        for sentence in re.split(r"(?<=[.!?]) (?=[A-Z])", paragraph):
            piece = f"{piece} {sentence}".strip()
            if len(piece) > 600:
                blocks.append(("p", piece))
                piece = ""
        blocks.append(("p", piece))
    return blocks


def sword(index: bytes, body: bytes) -> list[Block]:
    """Verses or comments of a compressed SWORD module (block index, zlib blocks) without their markup."""
    text: list[str] = []
    for offset, size, _ in struct.iter_unpack("<III", index[: len(index) // 12 * 12]):
        try:
            text.append(zlib.decompress(body[offset : offset + size]).decode("utf-8", "replace"))
        except zlib.error:
            continue
    joined = re.sub(r"<note.*?</note>|<title.*?</title>", "", "\n".join(text), flags=re.DOTALL)
    joined = re.sub(r"<(p|/p|lb|l|div|/div|br|milestone|chapter)\b[^>]*>", "\n\n", joined)
    return plain(re.sub(r"<[^>]*>", "", joined))


def r_strings(data: bytes) -> list[Block]:
    """Lines of text stored in an R lazy-load database, joined to paragraphs at empty lines."""
    lines: list[str] = []
    for match in re.finditer(rb"\x78[\x01\x9c\xda]", data):
        try:
            raw = zlib.decompress(data[match.start() :])
        except zlib.error:
            try:
                raw = zlib.decompressobj().decompress(data[match.start() :])
            except zlib.error:
                continue
        for item in re.finditer(rb"\x00\x04\x00\x09(.{4})", raw, re.DOTALL):
            size = struct.unpack(">I", item[1])[0]
            if size < 200:
                lines.append(raw[item.end() : item.end() + size].decode("utf-8", "replace"))
    return plain("\n".join(lines))


def wordnet(data: str) -> list[Block]:
    """Words with their definitions from a WordNet data file."""
    blocks: list[Block] = []
    for line in data.split("\n"):
        if line.startswith("  ") or " | " not in line:
            continue
        fields, gloss = line.split(" | ", 1)
        word = re.sub(r"\(.*\)", "", fields.split()[4].replace("_", " "))
        blocks += [("sig", word), ("p", squash(gloss))]
    return blocks
