"""`draft check` finds the states that a head was trained on, whatever its config says."""

import json

import pytest
import torch

from mlaforge.checkpoint import draft_head, loading, source_model
from mlaforge.checkpoint.eagle3 import write_head
from mlaforge.drafting.check import Row, alternatives, best
from mlaforge.modeling.eagle3 import AFTER_NORM
from support import block_heads, eagle3_heads
from support.eagle3_heads import make
from support.tiny_models import load_original

SEQLEN, WINDOWS = 96, 6
OPTIONS = ["--seqlen", SEQLEN, "--windows", WINDOWS, "--dtype", "float32", "--device", "cpu"]


@torch.no_grad()
def fit_head(directory, text, boundaries, stored, folder, kind=eagle3_heads, **fields):
    """A random head whose lm_head is fitted (least squares) to what the target says on the text, from the states at
    `boundaries`; its config says `stored`. The target is transformers', not the stream under test."""
    converted = "mla_layer_types" in json.loads((directory / "config.json").read_text())
    model = loading.load_model(directory, "float32") if converted else load_original(directory)
    tokens = source_model.load_tokenizer(directory)(text.read_text())["input_ids"]
    ids = torch.tensor(tokens[: SEQLEN * WINDOWS]).view(WINDOWS, SEQLEN)
    out = model(ids, output_hidden_states=True)
    captured = {}
    model.model.layers[-1].register_forward_hook(
        lambda layer, inputs, output: captured.update(last=output[0] if isinstance(output, tuple) else output)
    )
    model(ids)
    states = {**dict(enumerate(out.hidden_states[:-1])), 3: captured["last"], AFTER_NORM: out.hidden_states[-1]}
    head = kind.make(boundaries=stored, tokens=range(256), **fields)
    captured = torch.cat([states[b] for b in boundaries], dim=-1)[:, :-1]
    T = SEQLEN - 1
    if kind is block_heads:
        # The first masked place, by a pass per token.
        embedded = model.get_input_embeddings()(ids)
        places = [head(captured[:, : t + 1], embedded[:, t + 1], 4)[:, 0] for t in range(T)]
        features = head.norm(torch.stack(places, dim=1)).flatten(0, 1)
    else:
        embedded = (head.embed_tokens if head.config.has_embed_tokens else model.get_input_embeddings())(ids[:, 1:])
        distance = torch.arange(T)[:, None] - torch.arange(T)
        mask = (distance >= 0) & (distance < (head.config.sliding_window or T))
        features = head.norm(head(head.fuse(captured), embedded, torch.arange(T)[None], mask)).flatten(0, 1)
    target_tokens = out.logits[:, 1:].argmax(-1).flatten()
    targets = torch.nn.functional.one_hot(target_tokens.clamp_max(255), 256).float()
    gram = features.T @ features + 1e-3 * torch.eye(features.shape[1])
    head.lm_head.weight.copy_(torch.linalg.solve(gram, features.T @ targets).T)
    agreement = float((head.target_ids[head.lm_head(features).argmax(-1)] == target_tokens).float().mean())
    folder.mkdir()
    draft_head.write_head(head, folder, torch.float32)
    return agreement, len(target_tokens)


CASES = [
    ((0, 1, 2), (0, 1, 2), "as stored", None, {}),
    ((1, 2, 3), (0, 1, 2), "+1", "latent_rope", {"sliding_window": 9, "norm_before_fc": True}),
    ((0, 1, 2), (1, 2, 3), "-1", None, {"has_embed_tokens": True}),
    ((0, 2, AFTER_NORM), (0, 2, 3), "after the final norm", None, {}),
    ((1, 2, 3), (0, 1, 2), "+1", None, {"kind": block_heads, "sliding_window": 9, "layers": 2}),
    ((0, 1, 2), (0, 1, 2), "as stored", None, {"kind": block_heads}),
]


@pytest.mark.parametrize(("boundaries", "stored", "right", "layout", "fields"), CASES)
def test_finds_the_states_of_the_head(
    boundaries, stored, right, layout, fields, cli, tiny_models, converted, evaluation_file, tmp_path
):
    directory = converted("mistral", layout, budget=0.75, layers="all") if layout else tiny_models["llama"]
    agreement, positions = fit_head(directory, evaluation_file, boundaries, stored, tmp_path / "head", **fields)
    done = cli(
        "draft", "check", tmp_path / "head", "--target", directory, "--text", evaluation_file, *OPTIONS, "--json"
    )
    result = json.loads(done.stdout)
    assert result["right"] == right, result
    assert done.exit_code == (right != "as stored")
    rows = {row["states"]: row for row in result["rows"]}
    assert rows["as stored"]["boundaries"] == list(stored)
    assert result["positions"] == positions
    # Ties of two logits may be broken differently.
    assert rows[right]["agreement"] == pytest.approx(agreement, abs=2.5 / positions)
    assert agreement > 0.3


def test_a_random_head_is_undecided(cli, tiny_models, evaluation_file, tmp_path):
    write_head(make(), tmp_path, torch.float32)
    done = cli("draft", "check", tmp_path, "--target", tiny_models["llama"], "--text", evaluation_file, *OPTIONS)
    assert done.exit_code == 1 and "undecided" in done.stdout and "+1" in done.stdout, done.stdout + done.stderr


def test_regenerated_answers_are_a_text(cli, tiny_models, tmp_path):
    """The output of `draft regenerate` is measured with its prompts, answer by answer."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in ("Why is it so?", "And who are you?")))
    few = ["--max-new-tokens", 12, "--cache-bytes", 1000000, "--dtype", "float32"]
    done = cli("draft", "regenerate", tiny_models["llama"], "--out", tmp_path / "text", "--prompts", prompts, *few)
    assert done.exit_code == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "text" / "text.jsonl").read_text().splitlines()]
    (tmp_path / "head").mkdir()
    write_head(make(), tmp_path / "head", torch.float32)
    done = cli("draft", "check", tmp_path / "head", "--target", tiny_models["llama"], "--text", tmp_path / "text",
               "--json")  # fmt: skip
    assert json.loads(done.stdout)["positions"] == sum(len(line["prompt"] + line["answer"]) - 1 for line in lines)


def test_rejects_invalid_inputs(refused, tiny_models, evaluation_file, tmp_path):
    (tmp_path / "head").mkdir()
    write_head(make(layer={"vocab_size": 300}), tmp_path / "head", torch.float32)
    command = ("draft", "check", tmp_path / "head", "--target", tiny_models["llama"], "--text", evaluation_file)
    refused("vocab_size is 300", *command)
    refused("windows = 0", *command, "--windows", 0)
    refused("seqlen = 2", *command, "--seqlen", 2)
    refused("config.json", "draft", "check", tmp_path, "--target", tiny_models["llama"])


def test_alternatives_stay_within_the_target():
    assert list(alternatives((0, 1, 2), 3)) == ["as stored", "+1"]
    assert list(alternatives((1, 2, 3), 3)) == ["as stored", "-1", "after the final norm"]
    assert list(alternatives((0, 3, AFTER_NORM), 3)) == ["as stored", "before the final norm"]


def test_the_best_choice_is_significant():
    generator = torch.Generator().manual_seed(0)
    frequent, rare = (Row(str(p), (), torch.rand(2000, generator=generator) < p) for p in (0.3, 0.2))
    assert best([rare, frequent]) == "0.3"
    assert best([rare, frequent, Row("again", (), frequent.agrees)]) is None
    assert best([Row("few", (), frequent.agrees[:40]), Row("less", (), rare.agrees[:40])]) is None
    assert best([frequent]) == "0.3"
