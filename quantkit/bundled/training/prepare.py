"""Tokenizes compressed text shards into one file of uint16 token numbers, using all cores.

Run as `python -m quantkit.bundled.training.prepare --shards FOLDER --tokenizer FOLDER --out FOLDER`.
"""

from __future__ import annotations

import argparse
import lzma
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

END = "<|endoftext|>"


def encode(job: tuple[str, str]) -> tuple[bytes, int]:
    """Token numbers of one shard (uint16 bytes, documents closed by the end-of-text token) and its size in bytes."""
    path, tokenizer_file = job
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer.from_file(tokenizer_file)
    text = lzma.decompress(Path(path).read_bytes())
    documents = text.decode("utf-8").split(END)
    arrays = []
    for document in documents:
        if document:
            ids = tokenizer.encode(document).ids
            ids.append(0)
            arrays.append(np.asarray(ids, dtype=np.uint16))
    return np.concatenate(arrays).tobytes(), len(text)


def main() -> None:
    """Encodes all shards below a folder, in the order of their names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=Path, required=True, help="folder that holds part0, part1, ...")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    shards = sorted(args.shards.rglob("shard-*.xz"), key=lambda path: path.name)
    args.out.mkdir(parents=True, exist_ok=True)
    count = size = 0
    with ProcessPoolExecutor(os.cpu_count()) as pool, (args.out / "tokens.bin").open("wb") as stream:
        for data, length in pool.map(encode, [(str(path), str(args.tokenizer / "tokenizer.json")) for path in shards]):
            stream.write(data)
            count += len(data) // 2
            size += length
    print(f"{len(shards)} shards, {size / 1e6:.1f} MB, {count / 1e6:.2f} M tokens, {size / count:.3f} bytes a token")


if __name__ == "__main__":
    main()
