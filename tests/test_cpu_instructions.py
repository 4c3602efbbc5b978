"""What a processor can do is read from the file that Linux has, whose text is planted here."""

from __future__ import annotations

import pytest

from piecegraph.cpu_instructions import cpu_instructions, has_bfloat16, instructions_in, is_intel_in

X86 = "processor : 0\nflags\t\t: fpu avx2 avx512f avx512_bf16\nbugs : x\n\nprocessor : 1\nflags\t\t: fpu avx2 {}\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd {}\nCPU part\t: 0xd40\n"


@pytest.mark.parametrize(
    ("text", "has"),
    [
        (X86.format("avx512f avx512_bf16"), True),
        (X86.format("amx_bf16"), False),
        (X86.format("avx512f"), False),
        ("flags : fpu amx_bf16 amx_tile\n", True),
        (ARM.format("i8mm bf16"), True),
        (ARM.format("i8mm"), False),
        ("flags : svebf16 my_avx512_bf16x\n", False),
        ("vmx flags : avx512_bf16\n", False),
        ("", False),
    ],
)
def test_bfloat16_needs_instructions_that_every_processor_lists(text: str, has: bool) -> None:
    assert has_bfloat16(instructions_in(text)) == has


def test_names_are_those_that_all_processors_have() -> None:
    assert instructions_in(X86.format("sse")) == {"fpu", "avx2"}


def test_a_machine_always_gives_the_same_answer() -> None:
    assert cpu_instructions() is cpu_instructions()


def test_the_maker_is_the_one_of_all_processors() -> None:
    intel, amd = "vendor_id\t: GenuineIntel\nmodel\t: 1\n", "vendor_id\t: AuthenticAMD\n"
    assert is_intel_in(intel * 2)
    assert not is_intel_in(amd)
    assert not is_intel_in(intel + amd)
    assert not is_intel_in("CPU implementer\t: 0x41\n")
