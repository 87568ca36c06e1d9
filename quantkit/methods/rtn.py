"""Round to nearest: each weight takes the closest value that its format has.

Needs no data and treats layers one by one, so it is the baseline that calibrated methods must beat.
"""

from __future__ import annotations

from torch import Tensor

from quantkit.formats import Format, QuantizedWeight


def quantize_layer(weight: Tensor, fmt: Format) -> QuantizedWeight:
    """The nearest codes of a weight [out, in]; raises InputError when the format cannot hold its shape."""
    return fmt.quantize(weight)
