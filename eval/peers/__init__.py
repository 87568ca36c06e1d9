"""Other projects' quantizers on our protocol: each in an environment of its own, its files read and measured by us.

`python -m quantkit.eval.peers`, or `make peers`, runs them; docs/explanations/quantization.md shows what came of it.
"""
