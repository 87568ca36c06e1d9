"""The end-to-end touch-up of a quantized model: all its scales and norms together, towards the original's predictions.

Methods work block by block; what their errors do to each other shows only at the end. Here the whole model runs, with
its codes as they are, and numbers that cost no bits are learned by the KL divergence from the original's predictions
(as in the second phase of EfficientQAT; Chen et al., 2024, arXiv 2407.11062).

    learned.py    scales of a linear and weights of a norm, as numbers that can be learned
    student.py    the original model with learned parts in the place of what was quantized
    learning.py   the steps
"""

from quantkit.touch_up.learning import Touched, TouchUp
from quantkit.touch_up.student import Student, check_touch_up

__all__ = ["Student", "TouchUp", "Touched", "check_touch_up"]
