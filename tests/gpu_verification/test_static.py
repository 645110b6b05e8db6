"""What is known of the Triton kernels without a GPU: the committed table of compiled binaries, and variants."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from mlaforge.gpu_verification.compilation import MULTIPROCESSORS, count, disassembled, gpu_of
from mlaforge.gpu_verification.kernel_launches import LAUNCHES
from mlaforge.gpu_verification.static import compiles, identity
from mlaforge.ops.gpu_properties import SHARED_MEMORY
from mlaforge.planning import kernel_loops

ROOT = Path(__file__).parents[2]
LAUNCHED = kernel_loops.compiled()
# Capabilities with asynchronous tensor cores.
ASYNCHRONOUS = (90, 100)
# Launches that spill in their loops: an accumulator of 64 x 512 takes half of the registers. Fewer warps or smaller
# tiles, which would not, take more instructions (docs/notes/triton-kernels.md).
SPILLING = ("mla-512", "mla-384", "mla-360", "mla-320", "latent coded sparse", "experts 20b gate, 2048")


def test_the_table_is_of_the_kernels_as_they_are():
    """A changed kernel or another tile needs `make gpu-static`."""
    launches = [(name, at) for at in MULTIPROCESSORS for name in LAUNCHES if compiles(name, at)]
    committed = {
        (line.name, line.capability): {"source": line.source, "constants": line.constants} for line in LAUNCHED
    }
    assert committed.keys() == {*launches}
    outdated = [launch for launch in launches if committed[launch] != json.loads(json.dumps(identity(*launch)))]
    assert not outdated, "run `make gpu-static`"


def test_spills_are_within_the_predictions_of_verify_gpu():
    over = [line for line in LAUNCHED if line.spilled > LAUNCHES[line.name](gpu_of(line.capability)).spilled]
    assert not over


def test_kernels_fit_into_the_shared_memory():
    assert not [line for line in LAUNCHED if line.shared > SHARED_MEMORY[divmod(line.capability, 10)]]


def test_kernels_use_the_processor_that_they_are_compiled_for():
    """Tensor cores where tiles are multiplied in 16 bits, wide loads of cache rows, few spills in loops."""
    offenders = []
    for line in LAUNCHED:
        if line.capability not in ASYNCHRONOUS:
            continue
        name, launch = line.name, f"{line.name}, sm_{line.capability}"
        multiplies = name.startswith(("gqa", "mla", "absorb", "up-project", "experts")) and "sum" not in name
        multiplies |= name in ("selection lse", "selection score") or (name.startswith("vector") and "sum" not in name)
        if multiplies and "fp32" not in name and not line.tensor:
            offenders.append(f"{launch}: no tensor cores")
        if line.loop_spills > (line.loop_instructions / 12 if name.startswith(SPILLING) else 0):
            offenders.append(f"{launch}: {line.loop_spills} spills among {line.loop_instructions} instructions")
        if name.startswith(("gqa", "mla", "merge")) and not line.loop_wide_loads:
            offenders.append(f"{launch}: no wide loads")
    assert not offenders, "\n".join(offenders)


def test_random_lengths_compile_few_variants():
    """40 chunks of random lengths, alone or beside decoding sequences."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "support.kernel_variants"], env=environment, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    variants = json.loads(done.stdout.splitlines()[-1])
    assert len(variants) >= 10 and max(variants.values()) <= 3, variants


def test_instructions_are_counted_in_the_largest_innermost_loop():
    text = """
.L_x_0:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/              @!P0 LDGSTS.E.BYPASS.128 [R1], desc[UR4][R2.64] ;
        /*0020*/                   LDGDEPBAR ;
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8] ;
        /*0040*/               @P1 BRA `(.L_x_1) ;
        /*0050*/                   STL [R1], R2 ;
        /*0060*/               @P2 BRA `(.L_x_0) ;
        /*0070*/                   LDG.E R3, desc[UR4][R2.64] ;
"""
    whole, loop = disassembled(text)
    assert count(loop) == {"all": 4, "tensor": 1, "exponential": 0, "spill": 0, "load": 1, "wide load": 1}
    assert count(whole) == {"all": 8, "tensor": 1, "exponential": 0, "spill": 1, "load": 2, "wide load": 1}
