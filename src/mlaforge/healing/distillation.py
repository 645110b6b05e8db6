"""Teacher and student side by side: one forward pass over both that gives the distillation loss of a batch."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor, nn

from mlaforge.data.packing import NO_LABEL, Rows
from mlaforge.training.forward import final_states
from mlaforge.training.kl_loss import Hidden, Targets, compare, distillation_loss


@dataclasses.dataclass(frozen=True)
class Loss:
    """What is minimised: the sum of these weights times their terms.

    kl: KL(teacher | student) on logits / temperature, times temperature²; lm: cross-entropy of the text itself;
    hidden, attention: squared error of every layer's output, and of its attention's, beside the teacher's own size.
    """

    temperature: float = 2.0
    kl: float = 1.0
    lm: float = 0.0
    hidden: float = 0.0
    attention: float = 0.0


# The terms of a batch, in the order of `Distillation.forward`'s result.
TERMS = ("loss", "kl", "lm", "hidden", "attention")


class Distillation(nn.Module):
    """A student (causal LM in training) and its frozen teacher, or None where the targets are given with each batch.

    One module, so that what shards it gathers both heads where the loss is computed.
    """

    terms = TERMS

    def __init__(self, student: Any, teacher: Any | None, loss: Loss):
        super().__init__()
        self.student, self.teacher, self.loss = student, teacher, loss
        student.requires_grad_(False)
        if teacher is not None:
            teacher.requires_grad_(False)
            teacher.eval()
        self._seen: dict[tuple[str, str, int], Tensor] = {}
        for name, model in (("student", student), ("teacher", teacher)):
            if model is not None:
                self._watch(name, model)

    def parts(self) -> list[tuple[Any, list[nn.Module]]]:
        """Both models, and of each the layers that are sharded one by one."""
        return [(model, list(model.model.layers)) for model in (self.student, self.teacher) if model is not None]

    def _watch(self, name: str, model: Any) -> None:
        """Remembers what every layer, and its attention, puts out, where the loss wants to match them."""
        for index, layer in enumerate(model.model.layers):
            for kind, module, weight in (
                ("hidden", layer, self.loss.hidden), ("attention", layer.self_attn, self.loss.attention)
            ):  # fmt: skip
                if weight:

                    def keep(_: Any, __: Any, out: Any, key: tuple[str, str, int] = (name, kind, index)) -> None:
                        self._seen[key] = out[0] if isinstance(out, tuple) else out

                    module.register_forward_hook(keep)

    def forward(self, rows: Rows, targets: Targets | None = None) -> Tensor:
        """The loss of a batch and its terms, [5] as TERMS; only the first carries a gradient."""
        if targets is None:
            assert self.teacher is not None
            with torch.no_grad():
                targets = Hidden(final_states(self.teacher, rows), self.teacher.lm_head.weight)
        loss, kl, lm = distillation_loss(
            final_states(self.student, rows), self.student.lm_head.weight, targets, self.loss.temperature, self.loss.kl,
            rows.labels.flatten(), self.loss.lm,
        )  # fmt: skip
        terms = []
        for kind, weight in (("hidden", self.loss.hidden), ("attention", self.loss.attention)):
            term = self._mismatch(kind) if weight else torch.zeros_like(kl)
            terms.append(term.detach())
            loss = loss + weight * term
        self._seen.clear()
        return torch.stack((loss, kl, lm, *terms))

    @torch.no_grad()
    def validate(self, rows: Rows, wanted: Hidden) -> Tensor:
        """Sums over the rows' labelled tokens: the student's loss, the teacher's, KL at temperature 1 (nats), tokens
        on whose likeliest successor both agree, and tokens; fp64 [5]."""
        hidden = final_states(self.student, rows)
        self._seen.clear()
        labels = rows.labels.flatten()
        some = labels != NO_LABEL
        device = hidden.device
        theirs = wanted.hidden_NC.to(device)[some], wanted.head_VC
        measures = compare((hidden[some], self.student.lm_head.weight), theirs, labels[some])
        return torch.stack([*(part.double().sum() for part in measures), some.sum().double()]).cpu()

    def _mismatch(self, kind: str) -> Tensor:
        """Mean over layers and tokens of |student - teacher|² / |teacher|²: each token beside its own size, because
        some are hundreds of times larger than others."""
        parts = []
        for (name, of, index), ours in self._seen.items():
            if name == "student" and of == kind:
                theirs = self._seen["teacher", kind, index].float()
                size = theirs.square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)
                parts.append(((ours.float() - theirs).square().sum(-1) / size).mean())
        return torch.stack(parts).mean()


def trainable(student: Any, subset: str) -> list[str]:
    """Names of the parameters that a subset trains. `projections`: the matrices that conversion made, and their
    biases and norms; `attention`: all of every converted layer's attention; `all`: everything. An index of tokens
    stays: a choice has no gradient."""
    if subset == "all":
        return [name for name, _ in student.named_parameters() if ".self_attn.index." not in name]
    names = []
    for index, layer in enumerate(student.model.layers):
        attention = layer.self_attn
        if not hasattr(attention, "kv_b_proj"):
            continue
        converted = {"kv_a_proj_with_mqa", "kv_b_proj", "q_norm", "k_norm", "q_a_proj", "q_b_proj"}
        # In the layout `latent` an unfactored q_proj is the source's own.
        if attention.layout == "latent_rope":
            converted.add("q_proj")
        names += [
            f"model.layers.{index}.self_attn.{name}"
            for name, _ in attention.named_parameters()
            if (subset == "attention" and name.split(".")[0] != "index") or name.split(".")[0] in converted
        ]
    return names


class Validation:
    """Rows that nothing is trained on, and what the teacher computes on them, once. Judged by `goal`, which falls."""

    goal = "kl"
    shown: tuple[str, ...] = ("kl", "ppl")

    @torch.no_grad()
    def __init__(self, teacher: Any, rows: Rows, at_once: int):
        self.rows = [rows.take(part) for part in torch.arange(len(rows)).split(at_once)]
        device = teacher.device
        # A copy: the teacher's own may be sharded, or be gone, by the time it is needed.
        self.head = teacher.lm_head.weight.detach().clone()
        self.states = [final_states(teacher, part.to(device)).cpu() for part in self.rows]

    def measure(self, model: Distillation) -> dict[str, float]:
        """The student's perplexity and the teacher's, KL(teacher | student) at temperature 1 in nats per token, and
        the share of tokens on which both think the same successor likeliest."""
        sums = torch.zeros(5, dtype=torch.float64)
        for rows, states in zip(self.rows, self.states, strict=True):
            sums += model.validate(rows.to(self.head.device), Hidden(states, self.head))
        ours, theirs, kl, same = (sums[:4] / sums[4]).tolist()
        return {"ppl": math.exp(min(ours, 700.0)), "teacher_ppl": math.exp(theirs), "kl": kl, "top1": same}

    def summary(self, metrics: dict[str, Any]) -> str:
        """`measure`'s result in words."""
        return f"validation ppl {metrics['ppl']:.4f} (teacher {metrics['teacher_ppl']:.4f}), KL {metrics['kl']:.5f}"
