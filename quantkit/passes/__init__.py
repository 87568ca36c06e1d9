"""One pass over a model's layers by a method: which weights it sees, in which order, with which statistics.

    rounding     every layer by itself, straight from the files
    calibrated   block by block: each group of layers sees what the quantized layers before it produce

Both yield one `QuantizedBlock` per decoder block.
"""

from quantkit.passes.calibrated import CalibratedPass
from quantkit.passes.result import QuantizedBlock, QuantizedLayer
from quantkit.passes.rounding import round_blocks

__all__ = ["CalibratedPass", "QuantizedBlock", "QuantizedLayer", "round_blocks"]
