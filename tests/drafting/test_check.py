"""`draft check` finds the states that a head was made for, whatever its config says."""

import json

import pytest
import torch

from mlaforge.checkpoint import loading, source_model
from mlaforge.checkpoint.eagle3 import write_head
from mlaforge.drafting.check import Row, best, shifted
from mlaforge.modeling.eagle3 import AFTER_NORM
from support.eagle3_heads import make
from support.tiny_models import load_original

SEQLEN, WINDOWS = 96, 6
FEW = ["--seqlen", SEQLEN, "--windows", WINDOWS, "--dtype", "float32", "--device", "cpu"]


@torch.no_grad()
def fitted(directory, text, boundaries, stored, folder, **fields):
    """A random head whose lm_head is fitted (least squares) to what the target says on the text, from the states at
    `boundaries`; its config says `stored`. The target is transformers', not the stream under test."""
    converted = "mla_layer_types" in json.loads((directory / "config.json").read_text())
    model = loading.load_model(directory, "float32") if converted else load_original(directory)
    tokens = source_model.load_tokenizer(directory)(text.read_text())["input_ids"]
    ids = torch.tensor(tokens[: SEQLEN * WINDOWS]).view(WINDOWS, SEQLEN)
    out = model(ids, output_hidden_states=True)
    caught = {}
    model.model.layers[-1].register_forward_hook(
        lambda layer, given, made: caught.update(last=made[0] if isinstance(made, tuple) else made)
    )
    model(ids)
    at = {**dict(enumerate(out.hidden_states[:-1])), 3: caught["last"], AFTER_NORM: out.hidden_states[-1]}
    head = make(boundaries=stored, tokens=range(256), **fields)
    hidden = head.fuse(torch.cat([at[b] for b in boundaries], dim=-1)[:, :-1])
    embedded = (head.embed_tokens if head.config.has_embed_tokens else model.get_input_embeddings())(ids[:, 1:])
    T = SEQLEN - 1
    distance = torch.arange(T)[:, None] - torch.arange(T)
    mask = (distance >= 0) & (distance < (head.config.sliding_window or T))
    features = head.norm(head(hidden, embedded, torch.arange(T)[None], mask)).flatten(0, 1)
    said = out.logits[:, 1:].argmax(-1).flatten()
    wanted = torch.nn.functional.one_hot(said.clamp_max(255), 256).float()
    gram = features.T @ features + 1e-3 * torch.eye(features.shape[1])
    head.lm_head.weight.copy_(torch.linalg.solve(gram, features.T @ wanted).T)
    agreement = float((head.target_ids[head.lm_head(features).argmax(-1)] == said).float().mean())
    folder.mkdir()
    write_head(head, folder, torch.float32)
    return agreement, len(said)


CASES = [
    ((0, 1, 2), (0, 1, 2), "as stored", None, {}),
    ((1, 2, 3), (0, 1, 2), "+1", "latent_rope", {"sliding_window": 9, "norm_before_fc": True}),
    ((0, 1, 2), (1, 2, 3), "-1", None, {"has_embed_tokens": True}),
    ((0, 2, AFTER_NORM), (0, 2, 3), "after the final norm", None, {}),
]


@pytest.mark.parametrize(("boundaries", "stored", "right", "layout", "fields"), CASES)
def test_the_right_states_are_found(
    boundaries, stored, right, layout, fields, cli, tiny_models, converted, evaluation_file, tmp_path
):
    directory = converted("mistral", layout, budget=0.75, layers="all") if layout else tiny_models["llama"]
    agreement, positions = fitted(directory, evaluation_file, boundaries, stored, tmp_path / "head", **fields)
    done = cli("draft", "check", tmp_path / "head", "--target", directory, "--text", evaluation_file, *FEW, "--json")
    found = json.loads(done.stdout)
    assert found["right"] == right, found
    assert done.exit_code == (right != "as stored")
    rows = {row["states"]: row for row in found["rows"]}
    assert rows["as stored"]["boundaries"] == list(stored)
    assert found["positions"] == positions
    # A tie of two logits may fall the other way.
    assert rows[right]["agreement"] == pytest.approx(agreement, abs=2.5 / positions)
    assert agreement > 0.3


def test_a_head_of_nothing_is_undecided(cli, tiny_models, evaluation_file, tmp_path):
    write_head(make(), tmp_path, torch.float32)
    done = cli("draft", "check", tmp_path, "--target", tiny_models["llama"], "--text", evaluation_file, *FEW)
    assert done.exit_code == 1 and "undecided" in done.stdout and "+1" in done.stdout, done.stdout + done.stderr


def test_answers_are_a_text(cli, tiny_models, tmp_path):
    """What `draft regenerate` writes is measured with its prompts, answer by answer."""
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


def test_mistakes(refused, tiny_models, evaluation_file, tmp_path):
    (tmp_path / "head").mkdir()
    write_head(make(layer={"vocab_size": 300}), tmp_path / "head", torch.float32)
    asked = ("draft", "check", tmp_path / "head", "--target", tiny_models["llama"], "--text", evaluation_file)
    refused("vocab_size is 300", *asked)
    refused("windows = 0", *asked, "--windows", 0)
    refused("seqlen = 2", *asked, "--seqlen", 2)
    refused("config.json", "draft", "check", tmp_path, "--target", tiny_models["llama"])


def test_choices_stay_inside_the_target():
    assert list(shifted((0, 1, 2), 3)) == ["as stored", "+1"]
    assert list(shifted((1, 2, 3), 3)) == ["as stored", "-1", "after the final norm"]
    assert list(shifted((0, 3, AFTER_NORM), 3)) == ["as stored", "before the final norm"]


def test_what_is_best_is_best_for_sure():
    generator = torch.Generator().manual_seed(0)
    often, rarely = (Row(str(p), (), torch.rand(2000, generator=generator) < p) for p in (0.3, 0.2))
    assert best([rarely, often]) == "0.3"
    assert best([rarely, often, Row("again", (), often.agrees)]) is None
    assert best([Row("few", (), often.agrees[:40]), Row("less", (), rarely.agrees[:40])]) is None
    assert best([often]) == "0.3"
