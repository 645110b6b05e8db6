"""Distillation of a student from a frozen teacher: the loss of a batch, trainable parameters, and validation."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor, nn

from mlaforge.data.packing import NO_LABEL, Rows
from mlaforge.training.forward import final_states
from mlaforge.training.kl_loss import HiddenTargets, Targets, compare, distillation_loss


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Temperature, and weights of the loss terms.

    kl: KL(teacher | student) of logits / temperature, times temperature². lm: cross-entropy with the text. hidden,
    attention: squared error of the outputs of every layer and of its attention, relative to the teacher's.
    """

    temperature: float = 2.0
    kl: float = 1.0
    lm: float = 0.0
    hidden: float = 0.0
    attention: float = 0.0


# The terms of a batch, in the order of `Distillation.forward`'s result.
TERMS = ("loss", "kl", "lm", "hidden", "attention")


class Distillation(nn.Module):
    """A student (causal LM) and its frozen teacher; teacher None: targets are passed with each batch.

    One module, so that FSDP gathers both language model heads before the loss is computed.
    """

    terms = TERMS

    def __init__(self, student: Any, teacher: Any | None, loss: LossConfig):
        super().__init__()
        self.student, self.teacher, self.loss = student, teacher, loss
        student.requires_grad_(False)
        if teacher is not None:
            teacher.requires_grad_(False)
            teacher.eval()
        self._outputs: dict[tuple[str, str, int], Tensor] = {}
        for name, model in (("student", student), ("teacher", teacher)):
            if model is not None:
                self._register_hooks(name, model)

    def parts(self) -> list[tuple[Any, list[nn.Module]]]:
        """Return each model with the layers to shard one by one."""
        return [(model, list(model.model.layers)) for model in (self.student, self.teacher) if model is not None]

    def _register_hooks(self, name: str, model: Any) -> None:
        """Record the outputs of all layers and their attentions that the loss compares."""
        for index, layer in enumerate(model.model.layers):
            for kind, module, weight in (
                ("hidden", layer, self.loss.hidden), ("attention", layer.self_attn, self.loss.attention)
            ):  # fmt: skip
                if weight:

                    def record(_: Any, __: Any, out: Any, key: tuple[str, str, int] = (name, kind, index)) -> None:
                        self._outputs[key] = out[0] if isinstance(out, tuple) else out

                    module.register_forward_hook(record)

    def forward(self, rows: Rows, targets: Targets | None = None) -> Tensor:
        """Return the loss of a batch and its terms, [5] in the order of TERMS; only the first carries a gradient."""
        if targets is None:
            assert self.teacher is not None
            with torch.no_grad():
                targets = HiddenTargets(final_states(self.teacher, rows), self.teacher.lm_head.weight)
        loss, kl, lm = distillation_loss(
            final_states(self.student, rows), self.student.lm_head.weight, targets, self.loss.temperature, self.loss.kl,
            rows.labels.flatten(), self.loss.lm,
        )  # fmt: skip
        terms = []
        for kind, weight in (("hidden", self.loss.hidden), ("attention", self.loss.attention)):
            term = self._relative_error(kind) if weight else torch.zeros_like(kl)
            terms.append(term.detach())
            loss = loss + weight * term
        self._outputs.clear()
        return torch.stack((loss, kl, lm, *terms))

    @torch.no_grad()
    def validate(self, rows: Rows, teacher: HiddenTargets) -> Tensor:
        """Return sums over the labelled tokens, fp64 [5]: student's loss, teacher's loss, KL at temperature 1 (nats),
        tokens with the same most likely successor, and the number of tokens."""
        hidden = final_states(self.student, rows)
        self._outputs.clear()
        labels = rows.labels.flatten()
        labelled = labels != NO_LABEL
        teacher_outputs = teacher.hidden_NC.to(hidden.device)[labelled], teacher.head_VC
        measures = compare((hidden[labelled], self.student.lm_head.weight), teacher_outputs, labels[labelled])
        return torch.stack([*(part.double().sum() for part in measures), labelled.sum().double()]).cpu()

    def _relative_error(self, kind: str) -> Tensor:
        """Return the mean over layers and tokens of |student - teacher|² / |teacher|². Relative per token, because the
        norms of tokens differ by factors of hundreds."""
        errors = []
        for (name, output_kind, index), student_output in self._outputs.items():
            if name == "student" and output_kind == kind:
                teacher_output = self._outputs["teacher", kind, index].float()
                size = teacher_output.square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)
                errors.append(((student_output.float() - teacher_output).square().sum(-1) / size).mean())
        return torch.stack(errors).mean()


def trainable(student: Any, subset: str) -> list[str]:
    """Return the names of the parameters that a subset trains.

    projections: the matrices that conversion created, with biases and norms. attention: the whole attention of every
    converted layer. all: everything. The index of a sparse layer is never trained: a selection has no gradient.
    """
    if subset == "all":
        return [name for name, _ in student.named_parameters() if ".self_attn.index." not in name]
    names = []
    for index, layer in enumerate(student.model.layers):
        attention = layer.self_attn
        if not hasattr(attention, "kv_b_proj"):
            continue
        converted = {"kv_a_proj_with_mqa", "kv_b_proj", "q_norm", "k_norm", "q_a_proj", "q_b_proj"}
        # In the layout `latent`, an unfactored q_proj is unchanged from the source model.
        if attention.layout == "latent_rope":
            converted.add("q_proj")
        names += [
            f"model.layers.{index}.self_attn.{name}"
            for name, _ in attention.named_parameters()
            if (subset == "attention" and name.split(".")[0] != "index") or name.split(".")[0] in converted
        ]
    return names


class Validation:
    """Held-out rows with the teacher's hidden states, which are computed once."""

    metric_for_best = "kl"
    progress_metrics: tuple[str, ...] = ("kl", "ppl")

    @torch.no_grad()
    def __init__(self, teacher: Any, rows: Rows, micro_rows: int):
        self.rows = [rows.take(part) for part in torch.arange(len(rows)).split(micro_rows)]
        device = teacher.device
        # A copy, because the teacher may be sharded or deleted later.
        self.head = teacher.lm_head.weight.detach().clone()
        self.states = [final_states(teacher, part.to(device)).cpu() for part in self.rows]

    def measure(self, model: Distillation) -> dict[str, float]:
        """Return the perplexities of student and teacher, KL(teacher | student) at temperature 1 in nats per token, and
        the share of tokens with the same most likely successor (top1)."""
        sums = torch.zeros(5, dtype=torch.float64)
        for rows, states in zip(self.rows, self.states, strict=True):
            sums += model.validate(rows.to(self.head.device), HiddenTargets(states, self.head))
        loss, teacher_loss, kl, top1 = (sums[:4] / sums[4]).tolist()
        return {"ppl": math.exp(min(loss, 700.0)), "teacher_ppl": math.exp(teacher_loss), "kl": kl, "top1": top1}

    def summary(self, metrics: dict[str, Any]) -> str:
        """Format the metrics of `measure` for a log line."""
        return f"validation ppl {metrics['ppl']:.4f} (teacher {metrics['teacher_ppl']:.4f}), KL {metrics['kl']:.5f}"
