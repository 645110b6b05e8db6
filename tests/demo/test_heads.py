"""The heads that come with the package, on the real model that they draft for."""

from pathlib import Path

import pytest

from mlaforge.artifact import Manifest, sha256
from mlaforge.checkpoint import verify
from mlaforge.checkpoint.eagle3 import read_head
from mlaforge.demo import model as demo_model
from mlaforge.drafting import dataset
from mlaforge.engine.llm import LLM
from mlaforge.engine.sampling.params import SamplingParams

HEADS = sorted(demo_model.HEADS.iterdir())
EVAL_TEXTS = Path(__file__).parents[3] / "shared" / "data" / "prompts" / "mt_bench.jsonl"
NUM_LAYERS, TOKENS = 30, 49152
GREEDY = {"temperature": 0.0, "max_tokens": 32}


@pytest.mark.parametrize("folder", HEADS, ids=lambda folder: folder.name)
def test_heads_are_small_complete_and_may_be_evaluated(folder):
    assert sum(path.stat().st_size for path in folder.iterdir()) < 12e6
    head = read_head(folder, NUM_LAYERS)
    assert head.config.layer.vocab_size == TOKENS and head.config.sliding_window
    if not EVAL_TEXTS.is_file():
        pytest.skip("shared/data is not beside this checkout")
    assert dataset.check_unseen(folder, [{"path": str(EVAL_TEXTS), "sha256": sha256(EVAL_TEXTS)}]) == ""


@pytest.mark.parametrize("folder", HEADS, ids=lambda folder: folder.name)
def test_a_head_is_what_draft_export_writes(folder, cli, tmp_path):
    """Exported to int8 again it is the same, and its manifest has the hashes of its files."""
    assert verify.run(folder).problems == []
    manifest = Manifest.load(folder)
    assert manifest.config == {"dtype": "int8"}
    # What it was trained on is known; the curve and the loss of every step stay with the training.
    assert "text" in manifest.inputs["head"]["manifest"]["inputs"]
    metrics = manifest.inputs["head"]["manifest"]["metrics"]
    assert not {"losses", "curve"} & metrics.keys() and {"first", "best", "last"} <= metrics.keys()
    assert len((folder / "manifest.json").read_text().splitlines()) < 60
    assert cli("draft", "export", folder, tmp_path / "out", "--dtype", "int8").exit_code == 0
    for name in ("config.json", "model.safetensors"):
        assert sha256(tmp_path / "out" / name) == sha256(folder / name)


def test_speculation_for_real(smollm2):
    """Fewer steps than tokens, and the tokens of plain decoding."""
    llm = LLM(
        smollm2, dtype="float32", device="cpu", cache_bytes=1 << 28, speculative=str(demo_model.head("original")),
        adaptive_speculation=False,
    )  # fmt: skip
    prompts = ["How does a rainbow form?", "Write a function that reverses a string."]
    asked = [llm.chat_prompt([{"role": "user", "content": prompt}]) for prompt in prompts]
    plain, drafted = (
        [output.outputs[0].token_ids for output in llm.generate(asked, SamplingParams(**GREEDY, speculate=speculate))]
        for speculate in (False, True)
    )
    assert drafted == plain
    block = llm.engine.stats().speculation.block()
    assert block["mean_acceptance_length"] > 1.3, block
