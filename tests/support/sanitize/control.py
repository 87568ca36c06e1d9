"""Two groups of warps that share nothing: what racecheck says of this, it says of groups of warps as such.

compute-sanitizer --tool racecheck python tests/support/sanitize/control.py
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _write(out, first: gl.constexpr):
    at = first + gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(out + at, at)


@gluon.jit
def control_kernel(out):
    gl.warp_specialize([(_write, (out, 0)), (_write, (out, 128))], [4], [24])


if __name__ == "__main__":
    numbers = torch.zeros(256, dtype=torch.int32, device="cuda")
    control_kernel[(4,)](numbers, num_warps=4)
    print("right" if numbers.tolist() == list(range(256)) else "wrong")
