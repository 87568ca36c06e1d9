"""Headers of safetensors files as they stand in the file, to be damaged: the library writes right ones only."""

import json
import struct
from pathlib import Path
from typing import Any

Header = dict[str, dict[str, Any]]  # tensor -> {"dtype", "shape", "data_offsets"}


def read_raw(file: Path) -> tuple[Header, bytes]:
    """The header without its metadata, and the bytes of all tensors."""
    data = file.read_bytes()
    length = header_length(data)
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    return header, data[8 + length :]


def write_raw(file: Path, header: Header, payload: bytes) -> None:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text + payload)


def header_length(data: bytes) -> int:
    (length,) = struct.unpack("<Q", data[:8])
    return int(length)
