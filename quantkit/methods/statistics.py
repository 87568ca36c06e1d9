"""What calibration remembers about the inputs of a group of layers."""

from __future__ import annotations

import torch
from torch import Tensor

SAMPLE = 2048  # inputs kept as they are, for searches that cannot work on sums


class InputStatistics:
    """H = sum of x x^T, the largest magnitude of every input column, and a sample of inputs; all in float32.

    With a drift also the sum of (y - x) x^T, where y stands in the place of x in the model that is not quantized.
    """

    def __init__(
        self, inputs: int, device: torch.device | None = None, *, hessian: bool = True, drift: bool = False
    ) -> None:
        self.hessian = torch.zeros(inputs, inputs, device=device) if hessian else None
        self.drift = torch.zeros(inputs, inputs, device=device) if drift else None
        self.absmax = torch.zeros(inputs, device=device)
        self.tokens = 0
        self._sample: list[Tensor] = []

    def add(self, inputs: Tensor, exact: Tensor | None = None) -> None:
        """Inputs [..., in] of the layers, and for a drift what the model that is not quantized has in their place."""
        flat = inputs.flatten(0, -2)  # [tokens, in]
        if self.hessian is not None:
            _add_products(self.hessian, flat, flat)
        if self.drift is not None:
            assert exact is not None, "a drift is from exact inputs"
            moved = exact.flatten(0, -2).float() - flat.float()
            _add_products(self.drift, moved.to(flat.dtype), flat)
        self.absmax = torch.maximum(self.absmax, flat.abs().amax(0).float())
        missing = SAMPLE - sum(len(part) for part in self._sample)
        if missing > 0:
            self._sample.append(flat[:missing].float())
        self.tokens += flat.shape[0]

    def lean_on(self, others: InputStatistics) -> None:
        """Adds to H what two tokens more for each input would: one like the mean of others, one as large in all
        directions alike. They stand for inputs that were not seen and may come; among many that were, they count
        little."""
        hessian, of_others = self.require_hessian(), others.require_hessian()
        share = len(hessian) / max(1, others.tokens)
        hessian += share * of_others
        hessian.diagonal().add_(share * of_others.diagonal().mean())

    def see(self, others: InputStatistics) -> None:
        """Largest magnitudes and sample are those of others, too."""
        self.tokens += others.tokens
        self.absmax = torch.maximum(self.absmax, others.absmax)
        missing = SAMPLE - sum(len(part) for part in self._sample)
        self._sample.append(others.sample[: max(0, missing)])

    def cover(self, absmax: Tensor) -> None:
        """Largest magnitudes [in] that inputs may also have."""
        self.absmax = torch.maximum(self.absmax, absmax)

    @property
    def sample(self) -> Tensor:
        """The first inputs [up to 2,048, in]."""
        return torch.cat(self._sample)

    def take_drift(self) -> Tensor | None:
        """Hands the drift over; it is as large as H, and nobody asks for it twice."""
        drift, self.drift = self.drift, None
        return drift

    def require_hessian(self) -> Tensor:
        assert self.hessian is not None, "these statistics were collected without H"
        return self.hessian

    def divide(self, scales: Tensor) -> None:
        """From now on the statistics of the inputs divided by scales [in]."""
        for products in (self.hessian, self.drift):
            if products is not None:
                products /= scales
                products /= scales[:, None]
        self.absmax /= scales
        self._sample = [part / scales for part in self._sample]


def _add_products(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left^T right. 16-bit inputs are multiplied as they are on a GPU and summed in float32."""
    if left.is_cuda and left.dtype != torch.float32:
        total += torch.mm(left.T, right, out_dtype=torch.float32)
    else:
        total.addmm_(left.float().T, right.float())
