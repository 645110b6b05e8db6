"""Second moments of a running model: what calibration learns about a layer, and all that it keeps.

One pass over the calibration windows with one backward per window. Per layer it streams, in fp64:
the inputs' mean and covariance, the Fisher matrix of (k, v), and local Gauss-Newton weights of k and v.
docs/conversion.md derives them. No activation outlives its window.

Legend: B windows, T tokens, H query heads, G KV heads, D head_dim, P = D/2 rotary pairs, I sampled query rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mlaforge.modeling.rope_mla import pairs, rotate
from mlaforge.spec import LayerSpec

# Query rows per window at which the Gauss-Newton weights are sampled, and keys drawn for each of them.
ROWS, DRAWS = 256, 4
# Rows of the vocabulary head that are held at once (each is as long as the vocabulary).
HEAD_ROWS = 512
# Variance given to every input direction, as a share of the mean: without it, a short calibration text would leave
# directions whose outputs count for nothing at all.
UNSEEN = 1e-5
# Weight of a token that has no gradient at all: where no token has one (o_proj is zero), all count alike.
LEAST = 1e-30


@dataclasses.dataclass
class LayerMoments:
    """Sums over the calibration tokens of one layer, fp64; the properties are per-token means.

    g_outer [2GD, 2GD]: gradients g of the loss by [k before RoPE; v], labels drawn from the model itself.
    x_outer [hidden, hidden], x_sum [hidden], x_weight: the normed inputs x of the projections, each token weighted
    by |g|². The loss of an error E x is E[(gᵀE x)²]; a plain E[ggᵀ] ⊗ E[xxᵀ] would let the few tokens that everything
    attends to set the scale of g while hardly counting in x.
    key_outer, query_outer [H, D, D]: scale² · Σ_j w_ij (R_{i-j} q_i)(·)ᵀ, and the same without the rotation. With
    norms on q and k, q_i is normed and key_outer has J_jᵀ R_{i-j} q_i, J_j the Jacobian of the norm at key j.
    value_mix [H, H]: Σ_j a^h_ij a^h'_ij.   phase [H, P] complex, weight [H]: Σ w_ij e^{-iω(i-j)} and Σ w_ij.
    """

    x_outer: Tensor
    x_sum: Tensor
    g_outer: Tensor
    key_outer: Tensor
    query_outer: Tensor
    value_mix: Tensor
    phase: Tensor
    weight: Tensor
    x_weight: float = 0.0
    tokens: int = 0
    rows: int = 0

    @classmethod
    def empty(cls, layer: LayerSpec, hidden: int, device: torch.device) -> LayerMoments:
        H, D = layer.num_heads, layer.head_dim

        def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return cls(
            zeros(hidden, hidden), zeros(hidden), zeros(layer.cached, layer.cached), zeros(H, D, D), zeros(H, D, D),
            zeros(H, H), zeros(H, D // 2, dtype=torch.complex128), zeros(H),
        )  # fmt: skip

    @property
    def mean(self) -> Tensor:
        """[hidden]: weighted mean input."""
        return self.x_sum / self.x_weight

    @property
    def covariance(self) -> Tensor:
        """[hidden, hidden]: weighted covariance of the input, and a trace of every direction that no token took."""
        seen = self.x_outer / self.x_weight - torch.outer(self.mean, self.mean)
        return seen + UNSEEN * seen.diagonal().mean() * torch.eye(len(seen), dtype=seen.dtype, device=seen.device)

    @property
    def fisher(self) -> Tensor:
        return self.g_outer / self.tokens

    @property
    def rho(self) -> Tensor:
        """[H, P]: the mean rotation E[e^{-iω(i-j)}] of each head's pairs, over the distances that matter."""
        return self.phase / self.weight.clamp_min(1e-300)[:, None]


def _gauss_newton(
    moments: LayerMoments, layer: LayerSpec, q: Tensor, k: Tensor, v: Tensor, rope: tuple[Tensor, Tensor],
    w_o: Tensor, scale: float, generator: torch.Generator, norms: tuple[nn.Module, nn.Module] | None = None,
) -> None:  # fmt: skip
    """Adds one window's local Gauss-Newton weights, at ROWS random query rows.

    q [H, T, D], k and v [G, T, D] as they are projected; rope: cos and sin [T, P]; w_o [hidden, H·D]; norms: what q
    and k pass through before RoPE.
    An error δk_j moves the output of head h by Σ_i a_ij (v_j - o_i) (∂logit_ij/∂k_j)·δk_j, seen through W_o.
    """
    T = q.shape[1]
    device = q.device
    projected = k
    if norms is not None:
        q, k = norms[0](q), norms[1](k)
    rows = torch.randperm(T, generator=generator)[:ROWS].sort().values.to(device)
    cos, sin = rope
    q_rot, k_rot = rotate(q, cos, sin), rotate(k, cos, sin)
    k_rot, v = (t.repeat_interleave(layer.group, dim=0) for t in (k_rot, v))
    q_rows = q_rot[:, rows]
    seen = torch.arange(T, device=device)[None] <= rows[:, None]
    if layer.window is not None:
        seen &= torch.arange(T, device=device)[None] > rows[:, None] - layer.window
    logits = (q_rows @ k_rot.transpose(1, 2) * scale).masked_fill(~seen, -torch.inf)
    a_HIT = torch.softmax(logits, dim=-1)
    moments.value_mix += torch.einsum("hit,git->hg", a_HIT, a_HIT).double()

    w_o_HND = w_o.view(w_o.shape[0], layer.num_heads, layer.head_dim).transpose(0, 1)
    gram = w_o_HND.transpose(1, 2) @ w_o_HND
    out = a_HIT @ v
    v_gram = v @ gram
    distance = (v_gram * v).sum(-1)[:, None] - 2 * out @ v_gram.transpose(1, 2)
    distance += ((out @ gram) * out).sum(-1)[..., None]
    w_HIT = a_HIT.square() * distance.clamp_min(0)
    total_HI = w_HIT.sum(-1)

    # Keys are drawn in proportion to their weight instead of summing over all of them.
    cdf = w_HIT.cumsum(-1)
    draw = torch.rand(*total_HI.shape, DRAWS, generator=generator).to(device) * total_HI[..., None]
    key_at = torch.searchsorted(cdf, draw).clamp_max(T - 1)
    share = (scale**2 * total_HI / DRAWS)[..., None].expand_as(draw).reshape(layer.num_heads, -1)
    # R_{i-j} q_i: the rotated query turned back by j (the scaling of cos and sin stays in, once for each).
    turned = rotate(q_rows[:, :, None].expand(-1, -1, DRAWS, -1).flatten(1, 2)[:, None],
                    cos[key_at].flatten(1, 2), -sin[key_at].flatten(1, 2))[:, 0]  # fmt: skip
    if norms is not None:
        # The logit's gradient by the key as it is projected: back through the norm at that key.
        at = key_at.flatten(1)[..., None].expand(-1, -1, layer.head_dim)
        turned = torch.func.vjp(norms[1], projected.repeat_interleave(layer.group, dim=0).gather(1, at))[1](turned)[0]
    moments.key_outer += torch.einsum("hnd,hn,hne->hde", turned, share, turned).double()
    q_plain = q[:, rows]
    moments.query_outer += torch.einsum("hid,hi,hie->hde", q_plain, scale**2 * total_HI, q_plain).double()

    angle_cos = cos[rows][None, :, None] * cos[key_at] + sin[rows][None, :, None] * sin[key_at]
    angle_sin = sin[rows][None, :, None] * cos[key_at] - cos[rows][None, :, None] * sin[key_at]
    turn = torch.complex(angle_cos.double(), -angle_sin.double())
    # cos and sin may carry an attention scaling; a phase has length one.
    turn = turn / turn.abs().clamp_min(1e-300)
    each = (total_HI / DRAWS).double()
    moments.phase += torch.einsum("hinp,hi->hp", turn, each.to(turn.dtype))
    moments.weight += total_HI.double().sum(-1)
    moments.rows += len(rows)


@contextmanager
def _capture(layers: list[tuple[int, nn.Module]], store: dict[int, dict[str, Any]]) -> Iterator[None]:
    """While open, each forward leaves a layer's q, k, v, input and rotary tables in `store[index]`."""
    handles = []
    for index, layer in layers:
        attention = layer.self_attn
        assert isinstance(attention, nn.Module)
        for name in ("q_proj", "k_proj", "v_proj"):

            def keep(_: nn.Module, args: Any, out: Tensor, index: int = index, name: str = name) -> None:
                out.retain_grad()
                store.setdefault(index, {})[name] = out
                store[index]["x"] = args[0].detach()

            handles.append(getattr(attention, name).register_forward_hook(keep))

        def rope(_: nn.Module, args: Any, kwargs: Any, index: int = index) -> None:
            store.setdefault(index, {})["rope"] = kwargs["position_embeddings"]

        handles.append(attention.register_forward_pre_hook(rope, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _sampled_gradient(hidden_NC: Tensor, head: nn.Linear, generator: torch.Generator) -> Tensor:
    """dl/dhidden of l = -Σ log p(y), y drawn from p itself; the head is applied HEAD_ROWS tokens at a time."""
    grads = []
    for rows in hidden_NC.split(HEAD_ROWS):
        p = torch.softmax(head(rows).float(), dim=-1)
        cdf = p.cumsum(-1)
        draw = torch.rand(len(rows), 1, generator=generator).to(cdf.device) * cdf[:, -1:]
        y = torch.searchsorted(cdf, draw).clamp_max(p.shape[-1] - 1)
        p.scatter_add_(-1, y, torch.full_like(draw, -1.0))
        grads.append(p.to(rows.dtype) @ head.weight)
    return torch.cat(grads)


@torch.enable_grad()
def collect(
    model: Any, layers: dict[int, LayerSpec], windows: Iterator[Tensor], scale: float, seed: int
) -> dict[int, LayerMoments]:
    """Moments of the given layers of a transformers causal LM.

    windows: token ids [B, T] each; scale: what multiplies the logits. The model's parameters are left as they
    are (no weight gradients are made).
    """
    device = model.device
    generator = torch.Generator().manual_seed(seed)
    decoder, head = model.model, model.get_output_embeddings()
    hidden = model.config.hidden_size
    moments = {i: LayerMoments.empty(layer, hidden, device) for i, layer in layers.items()}
    wanted = [(i, decoder.layers[i]) for i in layers]
    trainable = [p for p in model.parameters() if p.requires_grad]
    model.requires_grad_(False)
    store: dict[int, dict[str, Any]] = {}
    try:
        with _capture(wanted, store):
            for ids in windows:
                embeds = model.get_input_embeddings()(ids.to(device)).requires_grad_(True)
                out = decoder(inputs_embeds=embeds, use_cache=False).last_hidden_state
                with torch.no_grad():
                    gradient = _sampled_gradient(out.detach().flatten(0, 1), head, generator)
                out.backward(gradient.view_as(out))
                for index, layer in layers.items():
                    attention = decoder.layers[index].self_attn
                    _accumulate(moments[index], layer, store.pop(index), attention, scale, generator)
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
    return moments


@torch.no_grad()
def _accumulate(
    moments: LayerMoments, layer: LayerSpec, seen: dict[str, Any], attention: Any, scale: float,
    generator: torch.Generator,
) -> None:  # fmt: skip
    """Adds one forward and backward of one layer. Products are taken in fp32, sums in fp64."""
    x = seen["x"].flatten(0, 1).float()
    g = torch.cat((seen["k_proj"].grad, seen["v_proj"].grad), dim=-1).flatten(0, 1).float()
    moments.g_outer += (g.T @ g).double()
    importance = g.square().sum(-1) + LEAST
    moments.x_outer += ((x * importance[:, None]).T @ x).double()
    moments.x_sum += (importance @ x).double()
    moments.x_weight += float(importance.sum())
    moments.tokens += len(x)
    w_o = attention.o_proj.weight.float()
    norms = (attention.q_norm, attention.k_norm) if layer.qk_norm else None
    cos, sin = (pairs(table, layer.head_dim // 2).float() for table in seen["rope"])
    for b in range(seen["x"].shape[0]):
        q, k, v = (
            seen[name][b].detach().float().view(seen[name].shape[1], -1, layer.head_dim).transpose(0, 1)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        row = min(b, cos.shape[0] - 1)
        _gauss_newton(moments, layer, q, k, v, (cos[row], sin[row]), w_o, scale, generator, norms)
