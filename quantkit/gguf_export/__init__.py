"""GGUF files out: a Hugging Face folder becomes a file that llama.cpp runs.

export_gguf("model", "model.gguf")

metadata.py     config.json -> keys of the architecture        rope.py         its rotary part
tokenizer.py    tokenizer.json -> vocabulary                   split_rules.py  the name of its splitting rule
tensors.py      names, the order of rows, Gemma's norms
file.py         streams tensors, reads them back, names the file
"""

from quantkit.gguf_export.export import ExportReport, export_gguf, exported, file_type, plain_tensor, write_model
from quantkit.gguf_export.file import FileTensor, check_file
from quantkit.gguf_export.tensors import arranged

__all__ = [
    "ExportReport",
    "FileTensor",
    "arranged",
    "check_file",
    "export_gguf",
    "exported",
    "file_type",
    "plain_tensor",
    "write_model",
]
