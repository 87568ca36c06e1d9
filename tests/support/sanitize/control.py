"""Two groups of warps, one of which hands numbers to the other through shared memory, with a barrier between them: what
racecheck says of this, it says of such barriers as such.

compute-sanitizer --tool racecheck python tests/support/sanitize/control.py
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def _give(numbers, full):
    numbers.store(gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0])))
    mbarrier.arrive(full, count=1)


@gluon.jit
def _take(numbers, full, out):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.wait(full, 0)
    gl.store(out + gl.arange(0, 128, layout=layout), numbers.load(layout))


@gluon.jit
def control_kernel(out):
    numbers = gl.allocate_shared_memory(gl.int32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    gl.warp_specialize([(_give, (numbers, full)), (_take, (numbers, full, out))], [4], [24])


if __name__ == "__main__":
    numbers = torch.zeros(128, dtype=torch.int32, device="cuda")
    control_kernel[(4,)](numbers, num_warps=4)
    print("right" if numbers.tolist() == list(range(128)) else "wrong")
