"""The blocks of GGUF files: `types.py` says as data where every bit of a block lies, `blocks.py` takes blocks apart and
puts them together, `weight.py` is a layer's weight in them and its format.
"""

from __future__ import annotations

from quantkit.formats.gguf.blocks import Blocks, pack, unpack
from quantkit.formats.gguf.types import TYPES, BlockType
from quantkit.formats.gguf.weight import Gguf, GgufDialect, GgufWeight

__all__ = ["TYPES", "BlockType", "Blocks", "Gguf", "GgufDialect", "GgufWeight", "pack", "unpack"]
