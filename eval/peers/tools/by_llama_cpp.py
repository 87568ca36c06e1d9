"""A GGUF file by llama.cpp with an importance matrix, decoded into a folder; embeddings and head stay in 16 bits.

Its programs stand in `llama.cpp` of this environment (see `environments.py`). It reads the calibration as text.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from transformers import AutoTokenizer

from quantkit.eval.peers.tools.task import read_task

HOME = Path(sys.prefix) / "llama.cpp"
# It knows tokenizers by a hash of what they do, and not this one, which cuts words as Llama 3's but for digits.
CONVERT = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda *_: "llama-bpe"
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def call(program: str | Path, *arguments: object) -> None:
    subprocess.run([str(program), *map(str, arguments)], check=True)


task = read_task()
task.output.mkdir(parents=True)
whole, text, matrix = (task.output / name for name in ("whole.gguf", "calibration.txt", "imatrix.gguf"))
samples = task.samples
text.write_text("".join(AutoTokenizer.from_pretrained(task.model).batch_decode(samples)), encoding="utf-8")
script = HOME / "convert_hf_to_gguf.py"
call(sys.executable, "-c", CONVERT, HOME, script, task.model, "--outfile", whole, "--outtype", "f32")
call(HOME / "bin" / "llama-imatrix", "-m", whole, "-f", text, "-o", matrix, "-c", len(samples[0]), "-ngl", 0)
kept = ("--token-embedding-type", "bf16", "--output-tensor-type", "bf16")
call(HOME / "bin" / "llama-quantize", "--imatrix", matrix, *kept, whole, task.output / "model.gguf", task.method)
for file in (whole, text, matrix):
    file.unlink()
