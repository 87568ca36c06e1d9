"""Quantization methods: the mathematics that turns the weight of a layer into the codes of a format, one file each.

    rtn    round each weight to the nearest value of its format; needs no data, works with every format
    gptq   round column by column, later columns make up for earlier errors; needs calibration data, integer formats

A method neither reads nor writes files and knows no model: it sees one layer and a `Format`.
To add one: a file with its function, its name here. Recipes name methods by these names.
"""

from __future__ import annotations

DATA_FREE = ("rtn",)
CALIBRATED = ("gptq",)
METHODS: tuple[str, ...] = (*DATA_FREE, *CALIBRATED)
