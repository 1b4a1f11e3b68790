# SPDX-License-Identifier: Apache-2.0
"""PAN2's transformer in float64, from its description: one function per part, tensors from a state dict by name.

Shares no code with the package. Shapes follow the paper's notation: video [B, S, C], text [B, L, C].
"""

import math

import torch


class Weights:
    """The tensors of a state dict below one prefix, in float64."""

    def __init__(self, tensors: dict[str, torch.Tensor], prefix: str = "") -> None:
        self.tensors, self.prefix = tensors, prefix

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[self.prefix + name].double()

    def under(self, name: str) -> "Weights":
        return Weights(self.tensors, f"{self.prefix}{name}.")

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        y = torch.einsum("...i,oi->...o", x, self[f"{name}.weight"])
        bias = self.tensors.get(f"{self.prefix}{name}.bias")
        return y if bias is None else y + bias.double()


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def layer_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + eps)


def rms_norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps) * gain


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Multiply the complex numbers x[2i] + j x[2i+1] by exp(j angle); x [B, S, heads, D], angles [S, D/2]."""
    pairs = torch.complex(x[..., 0::2], x[..., 1::2]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.stack((pairs.real, pairs.imag), dim=-1).flatten(-2)


def rope_angles(grid: tuple[int, int, int], config: dict) -> torch.Tensor:
    """[S, D/2], token by token."""
    rows = []
    for t in range(grid[0]):
        for h in range(grid[1]):
            for w in range(grid[2]):
                position = (t * config["rope_temporal_scale"], h, w)
                row = []
                for p, dim in zip(position, config["rope_axes_dim"], strict=True):
                    row += [p / config["rope_theta"] ** (2 * i / dim) for i in range(dim // 2)]
                rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[B, N, heads, D] each; returns [B, N, heads * D]."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)


def split_heads(x: torch.Tensor, config: dict) -> torch.Tensor:
    return x.unflatten(-1, (config["num_attention_heads"], config["attention_head_dim"]))


def time_embedding(w: Weights, timestep: torch.Tensor) -> torch.Tensor:
    frequencies = torch.tensor([10000 ** (-i / 128) for i in range(128)], dtype=torch.float64)
    angles = timestep.double()[:, None] * frequencies
    x = torch.cat((angles.cos(), angles.sin()), dim=-1)
    return w.linear("linear_2", silu(w.linear("linear_1", x)))


def refiner_block(w: Weights, text: torch.Tensor, config: dict) -> torch.Tensor:
    x = rms_norm(text, w["norm1.weight"], 1e-5)
    q, k, v = (split_heads(w.linear(f"attn.to_{part}", x), config) for part in "qkv")
    q, k = rms_norm(q, w["attn.norm_q.weight"], 1e-5), rms_norm(k, w["attn.norm_k.weight"], 1e-5)
    text = text + w.linear("attn.to_out.0", attention(q, k, v))
    x = w.linear("ff.net.0.proj", rms_norm(text, w["norm2.weight"], 1e-5))
    value, gate = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return text + w.linear("ff.net.2", value * silu(gate))


def joint_block(
    w: Weights, video: torch.Tensor, text: torch.Tensor, time: torch.Tensor, angles: torch.Tensor, config: dict
) -> tuple[torch.Tensor, torch.Tensor]:
    width = video.shape[-1]
    v_mod = w.linear("norm1.linear", silu(time)).view(-1, 6, 1, width).unbind(1)
    t_mod = w["scale_shift_table_context"].view(6, 1, 1, width).unbind(0)

    x = layer_norm(video, 1e-6) * (1 + v_mod[1]) + v_mod[0]
    y = layer_norm(text, 1e-6) * (1 + t_mod[1]) + t_mod[0]
    a = w.under("attn")
    q, k, v = (split_heads(a.linear(name, x), config) for name in ("to_q", "to_k", "to_v"))
    q = rotate(rms_norm(q, a["norm_q.weight"], 1e-6), angles)
    k = rotate(rms_norm(k, a["norm_k.weight"], 1e-6), angles)
    text_q, text_k, text_v = (
        split_heads(a.linear(name, y), config) for name in ("add_q_proj", "add_k_proj", "add_v_proj")
    )
    text_q = rms_norm(text_q, a["norm_added_q.weight"], 1e-6)
    text_k = rms_norm(text_k, a["norm_added_k.weight"], 1e-6)
    joint = attention(*(torch.cat(pair, dim=1) for pair in ((q, text_q), (k, text_k), (v, text_v))))
    tokens = video.shape[1]
    video = video + v_mod[2] * a.linear("to_out.0", joint[:, :tokens])
    text = text + t_mod[2] * a.linear("to_add_out", joint[:, tokens:])

    x = layer_norm(video, 1e-6) * (1 + v_mod[4]) + v_mod[3]
    y = layer_norm(text, 1e-6) * (1 + t_mod[4]) + t_mod[3]
    video = video + v_mod[5] * w.linear("ff.net.2", gelu_tanh(w.linear("ff.net.0.proj", x)))
    text = text + t_mod[5] * w.linear("ff_context.net.2", gelu_tanh(w.linear("ff_context.net.0.proj", y)))
    return video, text


def transformer(
    tensors: dict[str, torch.Tensor], config: dict, latents: torch.Tensor, text: torch.Tensor, timestep: torch.Tensor
) -> torch.Tensor:
    """latents [B, 2C+1, T, H, W], text [B, L, text_embed_dim], timestep [B] to [B, C, T, H, W]."""
    w = Weights(tensors)
    patch = tuple(config["patch_size"])
    embedded = torch.nn.functional.conv3d(latents.double(), w["x_embedder.weight"], w["x_embedder.bias"], stride=patch)
    grid = tuple(embedded.shape[2:])
    video = torch.einsum("bcthw->bthwc", embedded).flatten(1, 3)
    time = time_embedding(w.under("time_embedder"), timestep)

    text = w.linear("context_embedder.1", rms_norm(text.double(), w["context_embedder.0.weight"], 1e-5))
    for i in range(config["num_refiner_layers"]):
        text = refiner_block(w.under(f"context_refiner.{i}"), text, config)
    text = text + w["context_type_embedding"]

    angles = rope_angles(grid, config)
    for i in range(config["num_layers"]):
        video, text = joint_block(w.under(f"transformer_blocks.{i}"), video, text, time, angles, config)

    scale, shift = w.linear("norm_out.linear", silu(time)).chunk(2, dim=-1)
    video = w.linear("proj_out", layer_norm(video, 1e-6) * (1 + scale[:, None]) + shift[:, None])
    video = video.view(-1, *grid, config["out_channels"], *patch)
    return torch.einsum("bthwcpqr->bctphqwr", video).flatten(6).flatten(4, 5).flatten(2, 3)
