"""What compute-sanitizer says is read as it is meant."""

import re

from sanitize.findings import ROOT, Finding, passed_tests, read_findings

BEGIN = next(
    number
    for number, line in enumerate((ROOT / "kernels/attention/prefill_hopper.py").read_text().splitlines(), 1)
    if line.startswith("def _hopper_prefill")
)
SAID = f"""\
========= COMPUTE-SANITIZER
..========= Error: Race reported between Read access at _hopper_prefill+0x30 in prefill_hopper.py:{BEGIN}
=========     and Write access at _hopper_prefill in prefill_hopper.py:74 [291 hazards]
.========= Error: Race reported between Write access at _decode+0x31f0 in decode.py:201
=========     and Read access at _decode+0x3410 in decode.py:207 [4 hazards]
=========
========= Error: Race reported between Read access at nvjet_sm90_tst_24x64_64x16_4x1_v_bz_bias_TNN+0xb00
=========     and Write access at nvjet_sm90_tst_24x64_64x16_4x1_v_bz_bias_TNN+0x2d60 [336 hazards]
========= Invalid __global__ read of size 4 bytes
=========     at _skinny+0x890 in skinny.py:141
=========     by thread (3,0,0) in block (0,5,0)
========= Uninitialized __global__ memory read of size 2 bytes
=========     at void at::native::vectorized_elementwise_kernel<(int)8, at::native::AUnaryFunctor<c10::Half>>+0x250
"""


def test_findings_by_kernel() -> None:
    ours = [
        Finding("Race reported between Read access", "_hopper_prefill", True, at_begin=True),
        Finding("Race reported between Write access", "_decode", True),
        Finding("Invalid __global__ read", "_skinny", True),
    ]
    found = read_findings(SAID)
    assert [finding for finding in found if finding.ours] == ours
    assert len(found) == 5
    assert [finding.kernel for finding in found if finding.counts("racecheck")] == ["_decode", "_skinny"]
    assert len([finding for finding in found if finding.counts("memcheck")]) == 3


def test_such_kernels_count_for_their_own_lines() -> None:
    (found,) = read_findings(
        f"========= Error: Race reported between Read access at _hopper_prefill+0x30 in prefill_hopper.py:{BEGIN + 9}\n"
        f"=========     and Write access at _hopper_prefill in prefill_hopper.py:{BEGIN + 40} [291 hazards]\n"
    )
    assert found.counts("racecheck")
    assert not re.search(r"hazards", found.kernel)


def test_a_finding_without_a_kernel_counts() -> None:
    (found,) = read_findings("========= Invalid __shared__ write of size 4 bytes\n=========     by thread (1,0,0)\n")
    assert found.counts("racecheck")


def test_how_many_tests_ran() -> None:
    assert passed_tests("..........\n10 passed, 3 deselected in 5.0s") == 10
    assert passed_tests("=====\n....====\n..s\n") == 7
