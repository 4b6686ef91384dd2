"""The network in float64: plain masks, full logits, a Python loop over layers, heads and experts.

NumPy with the derivatives of HIPS autograd, so that even the automatic differentiation is not the one under test.
"""

import math
from dataclasses import dataclass

import autograd.numpy as np

from moejax.config import AttentionConfig, ModelConfig, MoEConfig
from tests.oracle.capacity import demand, kept_routes
from tests.oracle.layout import Layout


@dataclass
class Routes:
    """Chosen experts [BT, k] and which of these routes are kept, of one MoE layer."""

    experts: np.ndarray
    kept: np.ndarray


@dataclass
class Routing:
    """What one MoE layer's router did: logits [BT, E], balance scores [BT, E], routes, and the gap to the nearest other choice."""

    logits: np.ndarray
    balance_scores: np.ndarray
    routes: Routes
    margin: float


def rms_norm(x, scale, eps):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * scale


def softmax(x):
    return np.exp(x - logsumexp(x)[..., None])


def logsumexp(x):
    return np.log(np.sum(np.exp(x), axis=-1))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rope(x, positions, theta):
    """Turn the pairs (i, i + H/2) of x [B, T, N, H] by position * theta^(-2 i / H)."""
    half = x.shape[-1] // 2
    angle = positions[:, :, None, None] * theta ** (-2.0 * np.arange(half) / x.shape[-1])
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)], axis=-1)


def attention_mask(segment_ids, window):
    """Bool [B, query, key]: not later, in the same document, inside the window."""
    index = np.arange(segment_ids.shape[1])
    distance = index[:, None] - index[None, :]
    near = (distance >= 0) & ((distance < window) if window > 0 else True)
    return near[None] & (segment_ids[:, :, None] == segment_ids[:, None, :])


def attention(p, x, batch, settings: AttentionConfig, window, eps):
    q = np.einsum("btd,dnh->btnh", x, p["w_q"])
    k = np.einsum("btd,dnh->btnh", x, p["w_k"])
    v = np.einsum("btd,dnh->btnh", x, p["w_v"])
    if settings.qk_norm == "head":
        q, k = rms_norm(q, p["q_norm"]["scale"], eps), rms_norm(k, p["k_norm"]["scale"], eps)
    if settings.qk_norm == "width":
        q = rms_norm(q.reshape(*q.shape[:2], -1), p["q_norm"]["scale"], eps).reshape(q.shape)
        k = rms_norm(k.reshape(*k.shape[:2], -1), p["k_norm"]["scale"], eps).reshape(k.shape)
    q, k = rope(q, batch["positions"], settings.rope_theta), rope(k, batch["positions"], settings.rope_theta)
    mask = attention_mask(batch["segment_ids"], window)
    y = 0.0
    for n in range(settings.num_heads):
        kv = n // (settings.num_heads // settings.kv_heads)
        scores = np.einsum("bth,bsh->bts", q[:, :, n], k[:, :, kv]) / math.sqrt(q.shape[-1])
        probabilities = softmax(np.where(mask, scores, -1e30))
        y = y + np.einsum("bts,bsh,hd->btd", probabilities, v[:, :, kv], p["w_o"][n])
    return y


def mlp(x, w_in, w_out):
    gate, up = x @ w_in[:, 0], x @ w_in[:, 1]
    return (gate * sigmoid(gate) * up) @ w_out


def gating_scores(logits, gating):
    return sigmoid(logits) + 1e-7 if gating == "sigmoid" else softmax(logits)


def choose_experts(logits, bias, moe: MoEConfig):
    """Chosen experts int [BT, k] with ties to the lower index, and the smallest relative gap between the last chosen and the first left."""
    tokens = logits.shape[0]
    if moe.router.assignment == "uniform":
        return np.arange(tokens * moe.top_k).reshape(tokens, moe.top_k) % moe.num_experts, math.inf
    assert moe.router.assignment == "learned", "random routes have to be given"
    value = logits if moe.router.gating == "topk_softmax" else gating_scores(logits, moe.router.gating)
    value = value + bias
    order = np.argsort(-value, axis=-1, kind="stable")
    ranked = np.take_along_axis(value, order, axis=-1)
    if moe.top_k == moe.num_experts:
        return order, math.inf
    last, first = ranked[:, moe.top_k - 1], ranked[:, moe.top_k]
    size = np.max(np.abs(value), axis=-1) if moe.router.gating == "topk_softmax" else np.maximum(np.abs(last), np.abs(first))
    gap = float(np.min((last - first) / np.maximum(size, 1e-30)))
    return order[:, : moe.top_k], gap


def route_weights(logits, experts, moe: MoEConfig):
    """Weight of each route [BT, k], from the unbiased scores."""
    router, token = moe.router, np.arange(len(experts))[:, None]
    if router.gating == "topk_softmax":
        weights = softmax(logits[token, experts])
    else:
        weights = gating_scores(logits, router.gating)[token, experts]
    if router.normalize is not None:
        weights = weights / np.sum(weights**router.normalize, axis=-1, keepdims=True) ** (1 / router.normalize)
    return weights * (moe.top_k if router.restore_scale else 1) * router.scale


def per_group(experts, segment_ids, layout: Layout):
    """For each microbatch and group of ep ranks: rows of each rank, chosen experts [ep, tokens, k], which tokens are real [ep, tokens]."""
    rows, length = segment_ids.shape
    experts = experts.reshape(rows, length, -1)
    for places in layout.expert_groups(rows):
        chosen = np.stack([experts[r].reshape(-1, experts.shape[2]) for r in places])
        yield places, chosen, np.stack([segment_ids[r].reshape(-1) != 0 for r in places])


def keep(experts, segment_ids, moe: MoEConfig, layout: Layout):
    """Kept routes bool [BT, k] of a whole step."""
    kept = np.zeros((*segment_ids.shape, moe.top_k), bool)
    for places, chosen, real in per_group(experts, segment_ids, layout):
        result = kept_routes(chosen, real, num_experts=moe.num_experts, capacity_factor=moe.capacity_factor)
        for rows, of_rank in zip(places, result, strict=True):
            kept[rows] = of_rank.reshape(len(rows), -1, moe.top_k)
    return kept.reshape(-1, moe.top_k)


def largest_demand(routes: list[Routes], segment_ids, moe: MoEConfig, layout: Layout) -> float:
    """Rows asked for over capacity, of the most wanted rank in any layer and microbatch; 0 without a capacity."""
    if moe.capacity_factor is None:
        return 0.0
    groups = [group for of_layer in routes for group in per_group(of_layer.experts, segment_ids, layout)]
    return max(demand(chosen, real, num_experts=moe.num_experts, capacity_factor=moe.capacity_factor) for _, chosen, real in groups)


def moe_layer(p, x, bias, batch, moe: MoEConfig, layout: Layout, routes: Routes | None):
    """Routed plus shared experts on x [BT, D]; the routes are chosen here unless they are given."""
    logits = x @ p["router"]["w_router"]
    margin = math.inf
    if routes is None:
        experts, margin = choose_experts(logits, bias, moe)
        routes = Routes(experts, keep(experts, batch["segment_ids"], moe, layout))
    weights = np.where(routes.kept, route_weights(logits, routes.experts, moe), 0.0)
    y = 0.0
    for e in range(moe.num_experts):
        weight_e = np.sum(np.where(routes.experts == e, weights, 0.0), axis=-1)
        y = y + weight_e[:, None] * mlp(x, p["experts"]["w_in"][e], p["experts"]["w_out"][e])
    for j in range(moe.num_shared_experts):
        score = 1.0
        if moe.num_shared_experts > 1:
            score = gating_scores(x @ p["shared"]["w_router"], moe.router.gating)[:, j, None]
        y = y + score * mlp(x, p["shared"]["w_in"][j], p["shared"]["w_out"][j])
    scores = gating_scores(logits, moe.router.gating)
    balance_scores = scores / np.sum(scores, axis=-1, keepdims=True) if moe.router.gating == "sigmoid" else scores
    return y, Routing(logits, balance_scores, routes, margin)


def with_norms(p, name, branch, x, config: ModelConfig):
    """x plus the branch, normed before (pre), after (post) or on both sides (peri)."""
    if config.norm_placement in ("pre", "peri"):
        h = branch(rms_norm(x, p[f"{name}_norm_in"]["scale"], config.norm_eps))
    else:
        h = branch(x)
    if config.norm_placement in ("post", "peri"):
        h = rms_norm(h, p[f"{name}_norm_out"]["scale"], config.norm_eps)
    return x + h


def layer_of(tree, index):
    """One layer of a stack."""
    return {name: layer_of(value, index) if isinstance(value, dict) else value[index] for name, value in tree.items()}


def forward(params, bias, batch, config: ModelConfig, layout: Layout, routes: list[Routes] | None = None):
    """Logits [B, T, V] and one Routing per MoE layer. Under differentiation the routes must be given."""
    x = params["embed"]["w_embed"][batch["tokens"]]
    if config.embed_scale is not None:
        x = x * config.embed_scale
    if config.embed_norm:
        x = rms_norm(x, params["embed"]["norm"]["scale"], config.norm_eps)
    trace = []
    for layer in range(config.num_layers):
        moe_index = layer - config.num_dense_layers
        p = layer_of(params["dense_blocks"], layer) if moe_index < 0 else layer_of(params["moe_blocks"], moe_index)

        def attend(h, p=p, layer=layer):
            return attention(p["attention"], h, batch, config.attention, config.window(layer), config.norm_eps)

        def feed_forward(h, p=p, moe_index=moe_index):
            if moe_index < 0:
                return mlp(h, p["mlp"]["w_in"], p["mlp"]["w_out"])
            given = None if routes is None else routes[moe_index]
            y, routing = moe_layer(p["moe"], h.reshape(-1, h.shape[-1]), bias[moe_index], batch, config.moe, layout, given)
            trace.append(routing)
            return y.reshape(h.shape)

        x = with_norms(p, "attention", attend, x, config)
        x = with_norms(p, "ffn", feed_forward, x, config)
    h = rms_norm(x, params["head"]["norm"]["scale"], config.norm_eps)
    w_head = params["embed"]["w_embed"].T if config.tie_embeddings else params["head"]["w_head"]
    return h @ w_head, trace
