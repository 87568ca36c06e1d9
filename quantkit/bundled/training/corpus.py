"""Turns extracted documents into training shards, held-out text and calibration text.

Run as `python -m quantkit.bundled.training.corpus --work FOLDER` after fetch.py. Steps: extract every archive, clean,
remove repeated paragraphs over all sources, split by document, add conversations, shuffle, write compressed shards.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import random
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from . import chat, clean, collect
from .extract import Block

HERE = Path(__file__).parent
END = "<|endoftext|>"
CAP_SOURCE = 10_000_000
CAPS = {"botocore": 24_000_000, "google-api-python-client": 12_000_000, "python3.11-doc": 20_000_000}
CAPS_CHAT = ("botocore", "google-api-python-client")
NOT_SHIPPED = ("wordnet-base",)  # its licence wants the whole notice on every copy
CHAT_SHARE = 0.07
SHARD_BYTES = 24_000_000
PART_BYTES = 52_000_000
HELDOUT_BYTES, CALIBRATION_BYTES = 500_000, 600_000
FIRST = (
    "python3.11-doc",
    "postgresql-doc-15",
    "rust-doc",
    "sqlite3-doc",
    "django",
    "wordnet-base",
    "r-cran-janeaustenr",
)
Document = dict[str, object]


def extract_one(job: tuple[str, str, str, str]) -> None:
    """Extracts and cleans one archive into docs/KIND-PACKAGE.jsonl."""
    kind, package, archive, out = job
    target = Path(out)
    if target.exists():
        return
    partial = target.with_suffix(".tmp")
    with partial.open("w", encoding="utf-8") as stream:
        for document in collect.documents(Path(archive), package):
            blocks = clean.clean(document["blocks"])  # type: ignore[arg-type]
            if sum(len(text) for block, text in blocks if block in {"p", "li"}) >= clean.MIN_DOCUMENT:
                stream.write(
                    json.dumps({"source": package, "kind": kind, "name": document["name"], "blocks": blocks}) + "\n"
                )
    partial.rename(target)


def extract_all(work: Path, sources: list[dict[str, str]]) -> None:
    """Extracts every downloaded archive of the source table, several at a time."""
    (work / "docs").mkdir(exist_ok=True)
    jobs = []
    for row in sources:
        archive = work / "archives" / row["kind"] / row["archive"]
        if archive.exists():
            name = f"{row['kind']}-{row['package'].replace('/', '-')}.jsonl"
            jobs.append((row["kind"], row["package"], str(archive), str(work / "docs" / name)))
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(extract_one, jobs))


def ragged(kind: str, text: str, docstring: bool) -> bool:
    """Whether a block is left-over markup, or in a docstring the rest of a parameter list."""
    if kind == "sig":
        return text.startswith("_")
    return kind in {"p", "li"} and (
        text.startswith(("#", "|", "<")) or "</" in text or (docstring and text[0].islower())
    )


def pieces(document: Document) -> Iterator[list[Block]]:
    """A document's blocks, books cut into pieces of about 24 kB at paragraph ends."""
    piece: list[Block] = []
    size = 0
    for kind, text in document["blocks"]:  # type: ignore[attr-defined]
        if (size > 24_000 and kind in {"h", "sig"}) or size > 40_000:
            yield piece
            piece, size = [], 0
        if ragged(kind, text, str(document["name"]).endswith(".py")):
            continue
        piece.append((kind, text.replace("<|", "< |")))
        size += len(text)
    yield piece


def unique(work: Path, sources: list[dict[str, str]], seen: set[int]) -> Iterator[Document]:
    """Cleaned documents without paragraphs that occurred before, or are in `seen`, up to a size per source."""
    newest_first = sorted(sources, key=lambda row: row["package"], reverse=True)
    order = sorted(newest_first, key=lambda row: (row["package"] not in FIRST, row["kind"] == "debian"))
    for row in order:
        file = work / "docs" / f"{row['kind']}-{row['package'].replace('/', '-')}.jsonl"
        if not file.exists():
            continue
        size = 0
        for line in file.open(encoding="utf-8"):
            document = json.loads(line)
            name = document["name"]
            for number, piece in enumerate(pieces(document)):
                blocks = clean.deduplicate(piece, seen)
                if blocks and size < CAPS.get(row["package"], CAP_SOURCE):
                    text = clean.render(blocks)
                    size += len(text)
                    yield {
                        "source": row["package"],
                        "kind": row["kind"],
                        "blocks": blocks,
                        "text": text,
                        "name": f"{name}#{number}",
                    }


def is_sample(document: Document) -> bool:
    """Whether a document is fit for held-out and calibration text: a page of prose, neither short nor long."""
    text = str(document["text"])
    blocks: list[Block] = document["blocks"]  # type: ignore[assignment]
    prose = sum(len(t) for kind, t in blocks if kind == "p")
    return (
        2500 <= len(text) <= 16000
        and prose > 0.7 * len(text)
        and text.isascii()
        and ".py#" not in str(document["name"])
    )


def split(documents: list[Document], rng: random.Random) -> dict[str, list[Document]]:
    """Whole documents to held-out, calibration or training; each source gives one document a turn."""
    sizes = Counter()  # type: Counter[str]
    for document in documents:
        sizes[str(document["source"])] += len(str(document["text"]))
    by_source: dict[str, list[int]] = defaultdict(list)
    for index, document in enumerate(documents):
        if sizes[str(document["source"])] > 150_000 and is_sample(document):
            by_source[str(document["source"])].append(index)
    names = sorted(by_source)
    rng.shuffle(names)
    chosen: dict[int, str] = {}
    totals = {"heldout": 0, "calibration": 0}
    limits = {"heldout": HELDOUT_BYTES, "calibration": CALIBRATION_BYTES}
    for turn in range(4):
        for name in names:
            part = "heldout" if turn % 2 == 0 else "calibration"
            free = [index for index in by_source[name] if index not in chosen]
            if free and totals[part] < limits[part]:
                index = rng.choice(free)
                chosen[index] = part
                totals[part] += len(str(documents[index]["text"]))
    parts: dict[str, list[Document]] = {"train": [], "heldout": [], "calibration": []}
    for index, document in enumerate(documents):
        parts[chosen.get(index, "train")].append(document)
    return parts


def write_texts(parts: dict[str, list[Document]], files: list[Path]) -> None:
    """Writes the documents that were set aside, each part to the file of its name."""
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        kept = [str(document["text"]) for document in parts[file.stem] if document["source"] not in NOT_SHIPPED]
        file.write_text("\n\n".join(kept), encoding="utf-8")


def conversations(documents: list[Document], budget: int, rng: random.Random) -> list[str]:
    """Chat documents built from the training documents, up to a number of characters."""
    texts: list[str] = []
    for document in documents:
        blocks: list[Block] = document["blocks"]  # type: ignore[assignment]
        if document["source"] == "wordnet-base":
            found = chat.word_pairs(blocks, rng, 0.2)
        else:
            found = chat.pairs(blocks, rng, 0.02 if document["source"] in CAPS_CHAT else 0.4)
        texts.extend(chat.conversations(found, rng))
    rng.shuffle(texts)
    kept, size = chat.small_talk(2500, rng), 0
    for text in texts:
        size += len(text)
        if size > budget:
            break
        kept.append(text)
    return kept


def compress(job: tuple[str, str]) -> int:
    """Compresses one shard; returns its size."""
    text, path = job
    data = lzma.compress(text.encode("utf-8"), preset=9)
    Path(path).write_bytes(data)
    return len(data)


def write_shards(texts: list[str], out: Path) -> None:
    """Writes compressed shards into folders part0, part1, ... each small enough to be moved on its own."""
    shards: list[list[str]] = [[]]
    size = 0
    for text in texts:
        if size > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(text)
        size += len(text)
    out.mkdir(parents=True, exist_ok=True)
    jobs = [(END.join(shard) + END, str(out / f"shard-{index:03d}.xz")) for index, shard in enumerate(shards)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        sizes = list(pool.map(compress, jobs))
    part = used = 0
    for (_, path), packed in zip(jobs, sizes, strict=True):
        if used + packed > PART_BYTES:
            part, used = part + 1, 0
        used += packed
        folder = out / f"part{part}"
        folder.mkdir(exist_ok=True)
        Path(path).rename(folder / Path(path).name)


def report(documents: list[Document], parts: dict[str, list[Document]], work: Path) -> None:
    """Writes the size of every source in every part."""
    rows: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for part, members in parts.items():
        for document in members:
            rows[f"{document['kind']}/{document['source']}"][part] += len(str(document["text"]))
    (work / "report.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(
        {part: sum(len(str(d["text"])) for d in members) for part, members in parts.items()},
        len(documents),
        "documents",
    )


def main() -> None:
    """Runs all steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder with archives/, gets docs/ and report.json")
    parser.add_argument("--out", type=Path, required=True, help="folder for the shards")
    parser.add_argument("--text", type=Path, required=True, help="folder for heldout.txt and calibration.txt")
    parser.add_argument("--skip-extract", action="store_true")
    parser.add_argument(
        "--keep-text", action="store_true", help="leave these two files alone, and their paragraphs out of the shards"
    )
    args = parser.parse_args()
    sources = tomllib.loads((HERE / "sources.toml").read_text(encoding="utf-8"))["source"]
    if not args.skip_extract:
        extract_all(args.work, sources)
    rng = random.Random(20)
    files = [args.text / "heldout.txt", args.text / "calibration.txt"]
    if args.keep_text:
        shipped = set().union(*(clean.keys_of(file.read_text(encoding="utf-8")) for file in files))
        documents = list(unique(args.work, sources, shipped))
        parts: dict[str, list[Document]] = {"train": documents}
    else:
        documents = list(unique(args.work, sources, set()))
        parts = split(documents, rng)
        write_texts(parts, files)
    report(documents, parts, args.work)
    texts = [str(document["text"]) for document in parts["train"]]
    talk = conversations(parts["train"], int(CHAT_SHARE * sum(map(len, texts))), rng)
    print(len(texts), "documents", len(talk), "conversations", sum(map(len, talk)), "characters of conversation")
    texts += talk
    rng.shuffle(texts)
    write_shards(texts, args.out)
    print("sha256 of the text:", hashlib.sha256(END.join(texts).encode("utf-8")).hexdigest())


if __name__ == "__main__":
    main()
