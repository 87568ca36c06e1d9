"""GGUF files in: a file of llama.cpp becomes a Hugging Face folder that every other command takes.

    import_gguf("model-Q4_K_M.gguf", "model")

    reader.py     opens the file, checks that it is whole
    config.py     metadata -> config.json, generation_config.json      rope.py  its rotary part
    tokenizer.py  vocabulary -> tokenizer.json, tokenizer_config.json
    weights.py    tensor names, row order, decoding

Tensors stream one by one, so memory holds one tensor and one shard. What was lost when the file was quantized stays
lost: the folder holds the decoded numbers, rounded to `dtype`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoint_writer import CheckpointWriter, check_output
from quantkit.errors import InputError, did_you_mean
from quantkit.formats.base import DTYPES
from quantkit.gguf_import.config import generation_config, model_config
from quantkit.gguf_import.families import family_of_file
from quantkit.gguf_import.placement import placements
from quantkit.gguf_import.reader import GgufFile, open_gguf
from quantkit.gguf_import.tokenizer import tokenizer_files
from quantkit.gguf_import.weights import check_types, read_weight, tensor_types
from quantkit.gguf_view import IMPORT_RECORD, import_record
from quantkit.progress import Progress, silent

__all__ = ["import_gguf"]


def import_gguf(
    file: str | Path,
    output: str | Path,
    *,
    dtype: str = "bfloat16",
    overwrite: bool = False,
    on_tensor: Progress = silent,
) -> dict[str, Any]:
    """Writes the folder and returns a summary.

    Everything that can be known without decoding is checked before the first byte is written.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype '{dtype}' is not supported; {did_you_mean(dtype, DTYPES)}")
    check_output(Path(output).absolute(), overwrite)
    source = open_gguf(file)
    config = model_config(source, dtype)
    places = placements(source, family_of_file(source), config)
    check_types(source, places)
    tokenizer, settings = tokenizer_files(source, config)
    parameters = sum(torch.Size(place.shape).numel() for place in places)
    needed = parameters * DTYPES[dtype].itemsize
    with CheckpointWriter(output, overwrite=overwrite, expected_bytes=needed) as writer:
        for place in places:
            writer.add(place.target, read_weight(source, place, DTYPES[dtype]))
            on_tensor(place.source, len(places))
        writer.add_json("config.json", config)
        writer.add_json("generation_config.json", generation_config(source, config))
        writer.add_json("tokenizer.json", tokenizer)
        writer.add_json("tokenizer_config.json", settings)
        writer.add_json(IMPORT_RECORD, import_record(file, tensor_types(source)))
        writer.finish()
    facts = {"file": str(file), "output": str(output), "parameters": parameters, "tensors": len(places)}
    return {
        **facts,
        **_summary(source, config),
        "bytes": writer.total_bytes,
        "chat_template": "chat_template" in settings,
    }


def _summary(source: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """What a user wants to know about the model in a file."""
    return {
        "architecture": source.architecture,
        "name": source.find("general.name", str),
        "tensor_types": tensor_types(source),
        "dtype": config["dtype"],
        "vocab_size": config["vocab_size"],
        "context_length": config["max_position_embeddings"],
        "tied_embeddings": config["tie_word_embeddings"],
    }
