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
if sys.argv[2] == "cut":
    os.truncate(os.path.join(sys.argv[1], "model.safetensors"), 4096)
    llm.generate([[4, 5, 6]], greedy)
    print("survived")
elif sys.argv[2] == "sent":
    os.kill(os.getpid(), signal.SIGBUS)
"""


@pytest.mark.skipif(why_not() is not None, reason="no compiled kernels")
@pytest.mark.parametrize("what", ["cut", "sent"])
def test_truncated_weight_file_ends_with_one_line(what, tiny_models, tmp_path):
    model = save_packed(tiny_models["gpt_oss"], tmp_path / "model")
    # faulthandler takes the same signal, and keeps what is not ours.
    command = [sys.executable, "-X", "faulthandler", "-c", SCRIPT, model, what]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "4\n"
    if what == "cut":
        assert done.returncode == 2 and done.stderr.endswith(SHRUNK), done.stderr
        assert "Fatal Python error" not in done.stderr
    else:
        assert done.returncode == -7 and "Fatal Python error: Bus error" in done.stderr, done.stderr
