"""A weight file that is truncated while its model is served: the bus error becomes a one-line message."""

import subprocess
import sys

import pytest

from mlaforge.engine.execution.model import SHRUNK
from mlaforge.ops.native import why_not
from support.tiny_models import save_packed

SCRIPT = """
import os, signal, sys
from mlaforge import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", dtype="bfloat16", cache_bytes=1 << 20)
greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
print(len(llm.generate([[1, 2, 3]], greedy)[0].outputs[0].token_ids), flush=True)
if not (child := os.fork()):
    os.kill(os.getpid(), signal.SIGBUS)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
print("truncated", file=sys.stderr)
os.truncate(os.path.join(sys.argv[1], "model.safetensors"), 4096)
llm.generate([[4, 5, 6]], greedy)
print("survived")
"""


@pytest.mark.skipif(why_not() is not None, reason="no compiled kernels")
def test_truncated_weight_file_ends_with_one_line(tiny_models, tmp_path):
    """faulthandler takes the same signal, and keeps what is not ours: first in a fork, to which the signal is sent."""
    model = save_packed(tiny_models["gpt_oss"], tmp_path / "model")
    command = [sys.executable, "-X", "faulthandler", "-c", SCRIPT, model]
    done = subprocess.run(command, capture_output=True, text=True)
    sent, _, cut = done.stderr.partition("truncated\n")
    assert done.stdout == "4\n-7\n" and "Fatal Python error: Bus error" in sent, done.stderr
    assert done.returncode == 2 and cut == SHRUNK, done.stderr
