# SPDX-License-Identifier: Apache-2.0
"""PAN2's diffusion transformer: joint attention over video and text tokens, MMDiT blocks (Esser et al. 2024,
arXiv 2403.03206) with AdaLN-Zero (Peebles & Xie 2022, arXiv 2212.09748) on the video stream.

Modules carry the names of the released state dict, so weights load without renaming.
"""

from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from fastvideo.attention import DistributedAttention, LocalAttention
from fastvideo.configs.models.dits.pan2 import PAN2Config
from fastvideo.distributed.communication_op import (
    sequence_model_parallel_all_gather_with_unpad,
    sequence_model_parallel_shard,
)
from fastvideo.distributed.parallel_state import get_sp_world_size, model_parallel_is_initialized
from fastvideo.layers.linear import ReplicatedLinear
from fastvideo.layers.visual_embedding import timestep_embedding, unpatchify
from fastvideo.models.dits.base import BaseDiT
from fastvideo.models.dits.pan2_ops import TORCH_OPS, PAN2Ops, RotaryTable
from torch import nn

EPS = 1e-6
REFINER_EPS = 1e-5
TIME_CHANNELS = 256


class BlockModulation(NamedTuple):
    """The six vectors of one stream in one block, each [B or 1, 1, width], in checkpoint order."""

    shift_attn: torch.Tensor
    scale_attn: torch.Tensor
    gate_attn: torch.Tensor
    shift_mlp: torch.Tensor
    scale_mlp: torch.Tensor
    gate_mlp: torch.Tensor


class Modulation(nn.Module):
    """Linear from the activated time embedding [B, width] to ``parts`` vectors of [B, 1, width]."""

    def __init__(self, width: int, parts: int, config: PAN2Config, prefix: str) -> None:
        super().__init__()
        self.parts = parts
        self.linear = _linear(width, parts * width, config, f"{prefix}.linear")

    def forward(self, activated_time: torch.Tensor) -> tuple[torch.Tensor, ...]:
        vectors, _ = self.linear(activated_time)
        return vectors.unflatten(-1, (self.parts, 1, -1)).unbind(1)


class TimeEmbedding(nn.Module):
    """Timesteps [B] to [B, width]: fp32 sinusoids with the cosines first, then two linears."""

    def __init__(self, width: int, config: PAN2Config, prefix: str) -> None:
        super().__init__()
        self.linear_1 = _linear(TIME_CHANNELS, width, config, f"{prefix}.linear_1")
        self.linear_2 = _linear(width, width, config, f"{prefix}.linear_2")

    def forward(self, timestep: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        sinusoids = timestep_embedding(timestep, TIME_CHANNELS).to(dtype)
        hidden, _ = self.linear_1(sinusoids)
        embedding, _ = self.linear_2(F.silu(hidden))
        return embedding


class PatchEmbed(nn.Module):
    """A convolution whose kernel is its stride, as a linear over flattened patches [B, tokens, patch values].

    The weight keeps the convolution's shape; working on patches lets each rank embed its own tokens only.
    """

    def __init__(self, in_channels: int, width: int, patch_size: tuple[int, int, int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, in_channels, *patch_size))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return F.linear(patches.to(self.weight.dtype), self.weight.flatten(1), self.bias)


class ActivatedProjection(nn.Module):
    """First half of a feed-forward: GELU (tanh) of a projection, or SwiGLU with the value half before the gate."""

    def __init__(self, width: int, inner: int, swiglu: bool, config: PAN2Config, prefix: str) -> None:
        super().__init__()
        self.swiglu = swiglu
        self.proj = _linear(width, 2 * inner if swiglu else inner, config, f"{prefix}.proj", bias=not swiglu)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.proj(x)
        if self.swiglu:
            value, gate = x.chunk(2, dim=-1)
            return value * F.silu(gate)
        return F.gelu(x, approximate="tanh")


class FeedForward(nn.Module):
    def __init__(self, width: int, ratio: float, swiglu: bool, config: PAN2Config, prefix: str) -> None:
        super().__init__()
        inner = int(width * ratio)
        # The checkpoint numbers the dropout between the two linears.
        self.net = nn.ModuleList(
            [
                ActivatedProjection(width, inner, swiglu, config, f"{prefix}.net.0"),
                nn.Identity(),
                _linear(inner, width, config, f"{prefix}.net.2", bias=not swiglu),
            ]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.net[2](self.net[0](x))
        return x


class RefinerAttention(nn.Module):
    """Self attention of the text tokens, which every rank holds in full."""

    def __init__(self, config: PAN2Config, prefix: str) -> None:
        super().__init__()
        width, self.heads = config.hidden_size, config.num_attention_heads
        self.to_q = _linear(width, width, config, f"{prefix}.to_q", bias=False)
        self.to_k = _linear(width, width, config, f"{prefix}.to_k", bias=False)
        self.to_v = _linear(width, width, config, f"{prefix}.to_v", bias=False)
        self.norm_q = nn.RMSNorm(config.attention_head_dim, eps=REFINER_EPS)
        self.norm_k = nn.RMSNorm(config.attention_head_dim, eps=REFINER_EPS)
        self.to_out = nn.ModuleList([_linear(width, width, config, f"{prefix}.to_out.0", bias=False)])
        self.attn = LocalAttention(
            num_heads=self.heads,
            head_size=config.attention_head_dim,
            supported_attention_backends=config._supported_attention_backends,
        )
        self.ops = TORCH_OPS

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        q, k, v = (_heads(project, text, self.heads) for project in (self.to_q, self.to_k, self.to_v))
        q, k = self.ops.qk_norm_rope(q, k, self.norm_q.weight, self.norm_k.weight, REFINER_EPS, None)
        out, _ = self.to_out[0](self.attn(q, k, v).flatten(2))
        return out


class RefinerBlock(nn.Module):
    """Pre-norm transformer block over the text tokens [B, tokens, width], without time and without position."""

    def __init__(self, config: PAN2Config, prefix: str) -> None:
        super().__init__()
        width = config.hidden_size
        self.norm1 = nn.RMSNorm(width, eps=REFINER_EPS)
        self.attn = RefinerAttention(config, f"{prefix}.attn")
        self.norm2 = nn.RMSNorm(width, eps=REFINER_EPS)
        self.ff = FeedForward(width, config.refiner_mlp_ratio, True, config, f"{prefix}.ff")

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        text = text + self.attn(self.norm1(text))
        return text + self.ff(self.norm2(text))


class JointAttention(nn.Module):
    """Softmax attention over [video; text], each stream with its own projections; only video has positions."""

    def __init__(self, config: PAN2Config, prefix: str) -> None:
        super().__init__()
        width, head_dim, self.heads = config.hidden_size, config.attention_head_dim, config.num_attention_heads
        self.to_q = _linear(width, width, config, f"{prefix}.to_q")
        self.to_k = _linear(width, width, config, f"{prefix}.to_k")
        self.to_v = _linear(width, width, config, f"{prefix}.to_v")
        self.norm_q = nn.RMSNorm(head_dim, eps=EPS)
        self.norm_k = nn.RMSNorm(head_dim, eps=EPS)
        self.to_out = nn.ModuleList([_linear(width, width, config, f"{prefix}.to_out.0")])

        self.add_q_proj = _linear(width, width, config, f"{prefix}.add_q_proj")
        self.add_k_proj = _linear(width, width, config, f"{prefix}.add_k_proj")
        self.add_v_proj = _linear(width, width, config, f"{prefix}.add_v_proj")
        self.norm_added_q = nn.RMSNorm(head_dim, eps=EPS)
        self.norm_added_k = nn.RMSNorm(head_dim, eps=EPS)
        self.to_add_out = _linear(width, width, config, f"{prefix}.to_add_out")

        self.attn = DistributedAttention(
            num_heads=self.heads,
            head_size=head_dim,
            supported_attention_backends=config._supported_attention_backends,
            prefix=f"{prefix}.attn",
        )
        self.ops = TORCH_OPS

    def forward(
        self, video: torch.Tensor, text: torch.Tensor, rope: RotaryTable, video_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (_heads(project, video, self.heads) for project in (self.to_q, self.to_k, self.to_v))
        q, k = self.ops.qk_norm_rope(q, k, self.norm_q.weight, self.norm_k.weight, EPS, rope)

        text_q, text_k, text_v = (
            _heads(project, text, self.heads) for project in (self.add_q_proj, self.add_k_proj, self.add_v_proj)
        )
        text_q, text_k = self.ops.qk_norm_rope(
            text_q, text_k, self.norm_added_q.weight, self.norm_added_k.weight, EPS, None
        )

        video, text = self.attn(q, k, v, video_tokens, text_q, text_k, text_v)
        video, _ = self.to_out[0](video.flatten(2))
        text, _ = self.to_add_out(text.flatten(2))
        return video, text


class TransformerBlock(nn.Module):
    """One joint block: attention, then a feed-forward per stream, each modulated, gated and added to its stream."""

    def __init__(self, config: PAN2Config, prefix: str) -> None:
        super().__init__()
        width = config.hidden_size
        self.norm1 = Modulation(width, 6, config, f"{prefix}.norm1")
        # The text stream does not see the time: its six vectors are learned as they are.
        self.scale_shift_table_context = nn.Parameter(torch.empty(6 * width))
        self.attn = JointAttention(config, f"{prefix}.attn")
        self.ff = FeedForward(width, config.mlp_ratio, False, config, f"{prefix}.ff")
        self.ff_context = FeedForward(width, config.context_mlp_ratio, False, config, f"{prefix}.ff_context")
        self.ops = TORCH_OPS

    def forward(
        self,
        video: torch.Tensor,
        text: torch.Tensor,
        activated_time: torch.Tensor,
        rope: RotaryTable,
        video_tokens: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One block on this rank's part of the video and all of the text.

        Args:
            video: [B, this rank's tokens, width].
            text: [B, text tokens, width].
            activated_time: [B, width], SiLU of the time embedding.
            rope: rotation of this rank's video tokens.
            video_tokens: video tokens of all ranks together, padding excluded.

        Returns:
            both streams in their own shape.
        """
        ops = self.ops
        v = BlockModulation(*self.norm1(activated_time))
        t = BlockModulation(*self.scale_shift_table_context.unflatten(0, (6, 1, 1, -1)).unbind(0))

        video_attn, text_attn = self.attn(
            ops.norm_modulate(video, v.shift_attn, v.scale_attn, EPS),
            ops.norm_modulate(text, t.shift_attn, t.scale_attn, EPS),
            rope,
            video_tokens,
        )
        video, video_in = ops.gate_residual_norm_modulate(video, video_attn, v.gate_attn, v.shift_mlp, v.scale_mlp, EPS)
        text, text_in = ops.gate_residual_norm_modulate(text, text_attn, t.gate_attn, t.shift_mlp, t.scale_mlp, EPS)

        video = ops.gate_residual(video, self.ff(video_in), v.gate_mlp)
        text = ops.gate_residual(text, self.ff_context(text_in), t.gate_mlp)
        return video, text


class PAN2Transformer3DModel(BaseDiT):
    """Predicts the flow of 48-channel Wan2.2 latents from noisy latents, condition, text and time.

    Under sequence parallelism every rank is given the whole inputs and returns the whole output; in between it holds a
    part of the video tokens and all of the text tokens.

    Raises:
        ValueError: the sequence-parallel ranks cannot share the attention heads.
    """

    _fsdp_shard_conditions = PAN2Config()._fsdp_shard_conditions
    _compile_conditions = PAN2Config()._compile_conditions
    _supported_attention_backends = PAN2Config()._supported_attention_backends
    param_names_mapping: ClassVar[dict] = {}
    reverse_param_names_mapping: ClassVar[dict] = {}
    # Adapters saved by diffusers name the component first.
    lora_param_names_mapping: ClassVar[dict] = {r"^transformer\.(.*)$": r"\1"}

    def __init__(self, config: PAN2Config, hf_config: dict[str, Any]) -> None:
        super().__init__(config=config, hf_config=hf_config)
        if model_parallel_is_initialized():
            config.check_sequence_parallel(get_sp_world_size())
        self.hidden_size = width = config.hidden_size
        self.num_attention_heads = config.num_attention_heads
        self.num_channels_latents = config.num_channels_latents
        self.patch_size = config.patch_size

        self.x_embedder = PatchEmbed(config.in_channels, width, config.patch_size)
        self.time_embedder = TimeEmbedding(width, config, f"{config.prefix}.time_embedder")
        self.context_embedder = nn.Sequential(
            nn.RMSNorm(config.text_embed_dim, eps=REFINER_EPS),
            _linear(config.text_embed_dim, width, config, f"{config.prefix}.context_embedder.1"),
        )
        # A Sequential: upstream's layer-wise offload takes the first ModuleList, which must be the transformer blocks.
        self.context_refiner = nn.Sequential(
            *(RefinerBlock(config, f"{config.prefix}.context_refiner.{i}") for i in range(config.num_refiner_layers))
        )
        self.context_type_embedding = nn.Parameter(torch.empty(width))
        self.transformer_blocks = nn.ModuleList(
            TransformerBlock(config, f"{config.prefix}.transformer_blocks.{i}") for i in range(config.num_layers)
        )
        self.norm_out = Modulation(width, 2, config, f"{config.prefix}.norm_out")
        patch_t, patch_h, patch_w = config.patch_size
        self.proj_out = _linear(
            width, config.out_channels * patch_t * patch_h * patch_w, config, f"{config.prefix}.proj_out"
        )
        self.ops = TORCH_OPS
        self.__post_init__()

    def set_ops(self, ops: PAN2Ops) -> None:
        """Make this model, and no other, run its elementwise groups through ``ops``."""
        for module in self.modules():
            if isinstance(module, PAN2Transformer3DModel | TransformerBlock | JointAttention | RefinerAttention):
                module.ops = ops

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | list[torch.Tensor],
        timestep: torch.Tensor,
        encoder_hidden_states_image: torch.Tensor | list[torch.Tensor] | None = None,
        guidance: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """One evaluation of the flow.

        Args:
            hidden_states: [B, 97, T, H, W]: noisy latents (48), condition latents (48), condition mask (1).
            encoder_hidden_states: [B or 1, text tokens, text_embed_dim], or a list of one such tensor.
            timestep: [B] or one value for all, in 0..1000 (a thousand times sigma).
            encoder_hidden_states_image, guidance: not used; part of FastVideo's call.

        Returns:
            [B, 48, T, H, W] in the type of the weights.

        Raises:
            ValueError: an input has the wrong shape.
        """
        if not isinstance(encoder_hidden_states, torch.Tensor):
            (encoder_hidden_states,) = encoder_hidden_states
        batch = hidden_states.shape[0]
        grid = self._token_grid(hidden_states)
        timestep = self._timestep_per_sample(timestep, batch)

        activated_time = F.silu(self.time_embedder(timestep, self.context_type_embedding.dtype))
        text = self._embed_text(encoder_hidden_states).expand(batch, -1, -1)

        # Padded to a multiple of the ranks; attention drops the padding, and so does the gather below.
        patches, video_tokens = sequence_model_parallel_shard(patchify(hidden_states, self.patch_size), dim=1)
        video = self.x_embedder(patches)
        rope = RotaryTable(
            *(sequence_model_parallel_shard(part, dim=0)[0] for part in self._rope(grid, hidden_states.device))
        )

        for block in self.transformer_blocks:
            video, text = block(video, text, activated_time, rope, video_tokens)

        scale, shift = self.norm_out(activated_time)
        video, _ = self.proj_out(self.ops.norm_modulate(video, shift, scale, EPS))
        video = sequence_model_parallel_all_gather_with_unpad(video, video_tokens, dim=1)
        return unpatchify(video, *grid, self.patch_size, self.num_channels_latents)

    def _embed_text(self, states: torch.Tensor) -> torch.Tensor:
        width = self.config.text_embed_dim
        if states.dim() != 3 or states.shape[-1] != width:
            raise ValueError(
                f"PAN2's text states must be [batch, tokens, {width}] (text_embed_dim), got {tuple(states.shape)}"
            )
        norm, linear = self.context_embedder
        text, _ = linear(norm(states.to(self.context_type_embedding.dtype)))
        return self.context_refiner(text) + self.context_type_embedding

    def _rope(self, grid: tuple[int, int, int], device: torch.device) -> RotaryTable:
        config = self.config
        return rotary_table(grid, config.rope_axes_dim, config.rope_theta, config.rope_temporal_scale, device)

    def _token_grid(self, latents: torch.Tensor) -> tuple[int, int, int]:
        channels = self.config.in_channels
        if latents.dim() != 5 or latents.shape[1] != channels:
            raise ValueError(
                f"PAN2's input must be [batch, {channels}, frames, height, width] (noisy latents, condition latents "
                f"and mask), got {tuple(latents.shape)}"
            )
        sizes = tuple(latents.shape[2:])
        if any(size % patch or not size for size, patch in zip(sizes, self.patch_size, strict=True)):
            raise ValueError(f"PAN2's latent frames, height and width {sizes} must be multiples of {self.patch_size}")
        frames, height, width = (size // patch for size, patch in zip(sizes, self.patch_size, strict=True))
        return frames, height, width

    @staticmethod
    def _timestep_per_sample(timestep: torch.Tensor, batch: int) -> torch.Tensor:
        if timestep.dim() > 1 or timestep.numel() not in (1, batch):
            raise ValueError(
                f"PAN2 takes one timestep, or one for each of the {batch} samples, got shape {tuple(timestep.shape)}"
            )
        return timestep.reshape(-1).expand(batch)


def patchify(latents: torch.Tensor, patch_size: tuple[int, int, int]) -> torch.Tensor:
    """[B, C, T, H, W] to [B, tokens in (t, h, w) order, values of a patch in (c, t, h, w) order]."""
    patch_t, patch_h, patch_w = patch_size
    patches = latents.unflatten(4, (-1, patch_w)).unflatten(3, (-1, patch_h)).unflatten(2, (-1, patch_t))
    # [B, C, t, patch_t, h, patch_h, w, patch_w]
    return patches.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)


def rotary_table(
    grid: tuple[int, int, int],
    axes_dim: tuple[int, int, int],
    theta: float,
    temporal_scale: float,
    device: torch.device | str,
) -> RotaryTable:
    """Rotation of the tokens of a (t, h, w) grid, flattened in that order (RoPE, Su et al. 2021, arXiv 2104.09864).

    Args:
        grid: tokens along time, height and width.
        axes_dim: channels of a head that belong to each axis; two channels share an angle.
        theta: base of the angles' geometric series.
        temporal_scale: multiplies the frame position, and only that.
        device: where the table is made.
    """
    cos, sin = [], []
    for axis, (size, dim) in enumerate(zip(grid, axes_dim, strict=True)):
        # fp64 until the cosine: the tables are small, and no rank or device rounds an angle differently.
        position = torch.arange(size, dtype=torch.float64, device=device)
        if axis == 0:
            position = position * temporal_scale
        frequency = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
        angle = torch.outer(position, frequency)
        shape = [size if other == axis else 1 for other in range(3)]
        cos.append(angle.cos().float().view(*shape, -1).expand(*grid, -1))
        sin.append(angle.sin().float().view(*shape, -1).expand(*grid, -1))
    return RotaryTable(torch.cat(cos, dim=-1).flatten(0, 2), torch.cat(sin, dim=-1).flatten(0, 2))


def _linear(inputs: int, outputs: int, config: PAN2Config, prefix: str, bias: bool = True) -> ReplicatedLinear:
    return ReplicatedLinear(inputs, outputs, bias=bias, quant_config=config.quant_config, prefix=prefix)


def _heads(project: ReplicatedLinear, x: torch.Tensor, heads: int) -> torch.Tensor:
    """Project [B, tokens, width] and split the result into [B, tokens, heads, head_dim]."""
    projected, _ = project(x)
    return projected.unflatten(-1, (heads, -1))


EntryClass = PAN2Transformer3DModel
