"""Trains the byte-level tokenizer of the bundled models and writes the files that `AutoTokenizer` loads.

Run as `python -m quantkit.bundled.training.tokenizer --shards FOLDER --out FOLDER [FOLDER ...]`.
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 4096
SPECIAL = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
SPLIT = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


def texts(shards: Path, limit: int) -> Iterator[str]:
    """Documents from the shards, up to a number of characters, without special tokens."""
    size = 0
    for path in sorted(shards.rglob("shard-*.xz")):
        for document in lzma.decompress(path.read_bytes()).decode("utf-8").split(SPECIAL[0]):
            if document.startswith("<|"):
                continue
            size += len(document)
            if size > limit:
                return
            yield document


def train(shards: Path, limit: int) -> Tokenizer:
    """A byte-level BPE tokenizer with exactly VOCAB entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(shards, limit), trainer)
    if tokenizer.get_vocab_size() != VOCAB:
        raise SystemExit(f"vocabulary of {tokenizer.get_vocab_size()} entries, wanted {VOCAB}")
    return tokenizer


def write(tokenizer: Tokenizer, out: Path) -> None:
    """Writes tokenizer.json and the settings next to it."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[0],
        "pad_token": SPECIAL[0],
        "additional_special_tokens": SPECIAL[1:],
        "chat_template": TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    named = {
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[0],
        "pad_token": SPECIAL[0],
        "additional_special_tokens": SPECIAL[1:],
    }
    (out / "special_tokens_map.json").write_text(json.dumps(named, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Trains on a part of the shards and writes the result to every output folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=60_000_000, help="characters to train on")
    parser.add_argument("--out", type=Path, nargs="+", required=True)
    args = parser.parse_args()
    tokenizer = train(args.shards, args.limit)
    for out in args.out:
        write(tokenizer, out)


if __name__ == "__main__":
    main()
