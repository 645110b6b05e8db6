"""`draft check`: which of the target's states a head was trained on, by how often it then says what the target says.

Cheap because nothing is drafted step by step: on a given text, the head's likeliest token at every position is compared
with the target's. That is the acceptance of a first drafted token on that text; later ones are accepted less often.
What the target itself has written (`draft regenerate`) is what a head was trained on, other text understates it.

Legend: T tokens of a window, R = T - 1 rows, C hidden size of the target, S of its captured states side by side.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlaforge.artifact import Manifest
from mlaforge.checkpoint.eagle3 import check_head, read_head
from mlaforge.checkpoint.layerwise import HEAD_ROWS, LayerStream
from mlaforge.checkpoint.source_model import SourceModel
from mlaforge.data import corpus
from mlaforge.drafting.config import SHORTEST, DraftCheckConfig
from mlaforge.drafting.dataset import STAGE, read_answers
from mlaforge.modeling.eagle3 import AFTER_NORM, Eagle3Head
from mlaforge.runtime import resolve_device, resolve_dtype

# One choice of states is better than another where so many standard errors lie between them.
SURE = 3.0
# The choice that a head's own config.json makes.
STORED = "as stored"


@dataclasses.dataclass(frozen=True)
class Row:
    """A choice of states: what it is called, its boundaries, and at each position whether head and target agree."""

    name: str
    boundaries: tuple[int, ...]
    agrees: Tensor

    @property
    def agreement(self) -> float:
        return float(self.agrees.double().mean())


def run(directory: Path, target: str, config: DraftCheckConfig) -> dict[str, Any]:
    """Agreement of the head in `directory` with the model `target`, for its own boundaries and those beside them.

    `right` names the choice that is better than all others by SURE standard errors, None where none is. Raises
    UserError for a head of another model and a text that is too short.
    """
    model, device = SourceModel.open(target), resolve_device(config.device)
    dtype, spec = resolve_dtype(config.dtype, model.dtype), model.spec
    head = read_head(directory, spec.num_layers).to(device)
    check_head(head.config, spec.hidden_size, spec.vocab_size)
    texts = read_texts(model.tokenizer, config)
    model.check_tokens(*texts)
    choices = shifted(head.config.boundaries, spec.num_layers)
    with LayerStream(model, dtype, device) as stream:
        captured, said = target_states(stream, texts, {b for boundaries in choices.values() for b in boundaries})
        embedded = [(head.embed_tokens(ids.to(device)) if head.config.has_embed_tokens else stream.embed(ids[None])[0])
                    for ids in texts]  # fmt: skip
    rows = []
    for name, boundaries in choices.items():
        agrees = [
            predictions(head, torch.cat([states[b] for b in boundaries], dim=-1), rest).cpu() == tokens[1:]
            for states, rest, tokens in zip(captured, embedded, said, strict=True)
        ]
        rows.append(Row(name, boundaries, torch.cat(agrees)))
    known = torch.zeros(spec.vocab_size, dtype=torch.bool)
    known[head.target_ids.cpu()] = True
    coverage = known[torch.cat([tokens[1:] for tokens in said])]
    return {
        "rows": [{"states": r.name, "boundaries": list(r.boundaries), "agreement": r.agreement} for r in rows],
        "positions": len(coverage),
        "coverage": float(coverage.double().mean()),
        "right": best(rows),
    }


def read_texts(tokenizer: Any, config: DraftCheckConfig) -> list[Tensor]:
    """At most `windows` texts of at most `seqlen` tokens: windows of a text, or answers of the target with their
    prompts."""
    manifest = Manifest.load(Path(config.text).expanduser()) if config.text != corpus.EMBEDDED else None
    if manifest is None or manifest.stage != STAGE:
        text = corpus.windows(tokenizer, config.text, config.windows, config.seqlen, evaluation=True)
        return list(text.ids)
    _, answers = read_answers(Path(config.text).expanduser())
    whole = (torch.tensor([*answer.prompt_ids, *answer.answer_ids])[: config.seqlen] for answer in answers)
    return [ids for ids in whole if len(ids) >= SHORTEST][: config.windows]


def shifted(boundaries: tuple[int, ...], num_layers: int) -> dict[str, tuple[int, ...]]:
    """Name -> boundaries: the head's own, a layer later, a layer earlier, and the last one on the other side of the
    final norm; those that the target has."""
    choices = {STORED: boundaries}
    for name, by in (("+1", 1), ("-1", -1)):
        moved = tuple(b + by for b in boundaries)
        if AFTER_NORM not in boundaries and all(0 <= b <= num_layers for b in moved):
            choices[name] = moved
    other = {num_layers: AFTER_NORM, AFTER_NORM: num_layers}
    if any(b in other for b in boundaries):
        name = "before the final norm" if AFTER_NORM in boundaries else "after the final norm"
        choices[name] = tuple(other.get(b, b) for b in boundaries)
    return choices


def best(rows: list[Row]) -> str | None:
    """The row that agrees more often than every other, by SURE standard errors of the difference at a position."""
    first = max(rows, key=lambda row: row.agreement)
    for row in rows:
        if row is not first:
            difference = first.agrees.double() - row.agrees.double()
            error = float(difference.std()) / len(difference) ** 0.5
            if not float(difference.mean()) > SURE * error:
                return None
    return first.name


@torch.no_grad()
def target_states(
    stream: LayerStream, texts: list[Tensor], boundaries: set[int]
) -> tuple[list[dict[int, Tensor]], list[Tensor]]:
    """Per text its states [T, C] at every boundary, and the target's likeliest token after every position [T]."""
    captured: list[dict[int, Tensor]] = [{} for _ in texts]

    def keep(boundary: int, n: int, states: Tensor) -> None:
        if boundary in boundaries:
            captured[n][boundary] = states[0]

    hidden, said = stream.last_states(texts, "target's states", keep), []
    with stream.head() as (norm, weight):
        for n, states in enumerate(hidden):
            keep(stream.num_layers, n, states)
            normed = norm(states)
            keep(AFTER_NORM, n, normed)
            said.append(torch.cat([(rows @ weight.T).argmax(-1) for rows in normed[0].split(HEAD_ROWS)]).cpu())
    return captured, said


@torch.no_grad()
def predictions(head: Eagle3Head, states_TS: Tensor, embedded_TC: Tensor) -> Tensor:
    """The target's token [T - 1] that the head finds likeliest after each position but the first, from the states
    captured at all positions and the embeddings of their tokens."""
    out_RC = whole_pass(head, states_TS.float(), embedded_TC[1:].float())[0]
    likeliest = torch.cat([head.logits(rows).argmax(-1) for rows in out_RC.split(HEAD_ROWS)])
    return head.target_ids[likeliest]


def whole_pass(head: Eagle3Head, states_TS: Tensor, embedded_RC: Tensor) -> Tensor:
    """The head's output [1, R, C] before its final norm, all R = T - 1 rows of a text at once: from the states at all
    its tokens but the last, and the embeddings of all but the first."""
    hidden_1RC = head.fuse(states_TS[None, :-1])
    at_R = torch.arange(len(embedded_RC), device=embedded_RC.device)
    distance = at_R[:, None] - at_R
    mask = (distance >= 0) & (distance < (head.config.sliding_window or len(at_R)))
    out: Tensor = head(hidden_1RC, embedded_RC[None], at_R[None], mask)
    return out


def table(agreement: dict[str, Any]) -> str:
    """What `run` returns, for a terminal."""
    lines = [f"{'states':22} {'boundaries':16} agreement"]
    lines += [f"{row['states']:22} {row['boundaries']!s:16} {row['agreement']:9.4f}" for row in agreement["rows"]]
    share, right = f"{100 * agreement['coverage']:.1f} %", agreement["right"]
    lines.append(f"{agreement['positions']} positions; HEAD's vocabulary has {share} of what MODEL says there")
    if right is None:
        verdict = "undecided: no choice of states is surely the best; give more text, or a head of this model"
    elif right == STORED:
        verdict = "its states are the right ones"
    else:
        verdict = f"wrong states: {right} is right; import it again with another --convention"
    return "\n".join([*lines, verdict])
