# SPDX-License-Identifier: Apache-2.0
"""Writes a PAN2 checkpoint in the real layout with random weights: small enough for a CPU, and the same every time.

The released weights are 58 GB for the transformer alone. A random model of the same structure exercises every line
from loading to the written video, and shows a picture rather than a flat grey: the VAE is scaled so that random latents
decode to pixels that span [-1, 1], and so that images encode to latents of the mean and spread that the pipeline
expects.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

TRANSFORMER = {
    "_class_name": "PAN2Transformer3DModel",
    "patch_size": [1, 2, 2],
    "in_channels": 97,
    "out_channels": 48,
    "num_attention_heads": 4,
    "attention_head_dim": 64,
    "num_layers": 3,
    "num_refiner_layers": 2,
    "mlp_ratio": 8.0,
    "context_mlp_ratio": 4.0,
    "refiner_mlp_ratio": 4.0,
    "text_embed_dim": 64,
    "rope_axes_dim": [8, 28, 28],
    "rope_theta": 256.0,
    "rope_temporal_scale": 16 / 24,
}

TEXT_ENCODER = {
    "hidden_size": TRANSFORMER["text_embed_dim"],
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    # Both kinds below the layer that PAN2 reads, which is the third from the end.
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "initializer_range": 0.1,
}

# fmt: off
LATENTS_MEAN = [
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891,
    0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
    -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723,
    -0.2839, -0.2083, -0.0520, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
]
LATENTS_STD = [
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901,
    0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
    0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944,
    0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
]
# fmt: on
# The Wan2.2 TI2V-5B VAE; only the two widths are ever changed.
VAE = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "attn_scales": [],
    "temperal_downsample": [False, True, True],
    "dropout": 0.0,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_temporal": 4,
    "scale_factor_spatial": 16,
    "latents_mean": LATENTS_MEAN,
    "latents_std": LATENTS_STD,
}
TINY_VAE_WIDTH = 16

SCHEDULER = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 7.0}

INDEX = {
    "_class_name": "PAN2Pipeline",
    "_diffusers_version": "0.42.1",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen3_5TextModel"],
    "tokenizer": ["transformers", "Qwen3_5Tokenizer"],
    "transformer": ["diffusers", "PAN2Transformer3DModel"],
    "vae": ["diffusers", "AutoencoderKLWan"],
}

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Each becomes one token; the double line break is one in Qwen's vocabulary, too.
WORDS = (
    *("user", "system", "assistant", "\n\n", "You", " are", " a", " helpful", " Generate", " the", " video", " with"),
    *(" following", " instructions", " of", " in", " on", " and", " camera", " light", " slow", " wind", " water"),
)
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def write_tiny_checkpoint(path: str | Path, seed: int = 0, full_vae: bool = False) -> Path:
    """Write a whole checkpoint folder; the same seed writes the same bytes with the same library versions.

    Args:
        path: folder to write; created if absent. One that holds anything but an earlier checkpoint is refused.
        seed: of all weights. Each component draws its own numbers, so ``full_vae`` changes the VAE only.
        full_vae: the VAE at its real size, 2.8 GB; tiny otherwise.

    Returns:
        ``path``.

    Raises:
        FileExistsError: ``path`` is a file, or a folder with other contents.
        OSError: the folder cannot be written.
    """
    folder = Path(path)
    for _ in write_components(folder, seed, full_vae):
        pass
    return folder


def write_components(folder: Path, seed: int, full_vae: bool) -> Iterable[str]:
    """`write_tiny_checkpoint` step by step: yields the name of each component once it is written."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not (folder / "model_index.json").exists()):
        raise FileExistsError(f"{folder} exists and is not a checkpoint: name a new or empty folder")
    vae = VAE if full_vae else {**VAE, "base_dim": TINY_VAE_WIDTH, "decoder_base_dim": TINY_VAE_WIDTH}
    writers: dict[str, Callable[[Path, int], None]] = {
        "transformer": _write_transformer,
        "text_encoder": _write_text_encoder,
        "tokenizer": _write_tokenizer,
        "vae": lambda target, component_seed: _write_vae(target, component_seed, vae),
        "scheduler": lambda target, _: _write_json(target / "scheduler_config.json", SCHEDULER),
    }
    for number, (name, write) in enumerate(writers.items()):
        (folder / name).mkdir(parents=True, exist_ok=True)
        write(folder / name, seed * len(writers) + number)
        yield name
    # Last, so that a folder whose writing was interrupted is not taken for a checkpoint.
    _write_json(folder / "model_index.json", INDEX)


def _write_transformer(folder: Path, seed: int) -> None:
    from fastvideo.configs.models.dits.pan2 import PAN2Config
    from fastvideo.models.dits.pan2_checkpoint import expected_shapes

    config = PAN2Config()
    config.update_model_arch(TRANSFORMER)
    generator = torch.Generator().manual_seed(seed)
    weights = {name: _random_weight(name, shape, generator) for name, shape in expected_shapes(config).items()}
    _write_json(folder / "config.json", TRANSFORMER)
    _save({name: weight.bfloat16() for name, weight in weights.items()}, folder / "diffusion_pytorch_model.safetensors")


def _write_text_encoder(folder: Path, seed: int) -> None:
    from transformers import Qwen3_5TextConfig, Qwen3_5TextModel

    config = Qwen3_5TextConfig(vocab_size=len(_vocabulary()) + len(SPECIAL_TOKENS), dtype="bfloat16", **TEXT_ENCODER)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3_5TextModel(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    _save(model.bfloat16().state_dict(), folder / "model.safetensors")


def _write_tokenizer(folder: Path, seed: int) -> None:
    from transformers import AddedToken, Qwen3_5Tokenizer

    tokenizer = Qwen3_5Tokenizer(
        vocab=_vocabulary(), merges=list(_merges()), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.add_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS], special_tokens=True)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def _vocabulary() -> dict[str, int]:
    """Byte-level BPE without the special tokens: all bytes, then what the merges make of them."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = [*sorted(ByteLevel.alphabet()), *(left + right for left, right in _merges())]
    return {token: number for number, token in enumerate(tokens)}


def _merges() -> list[tuple[str, str]]:
    """Merges that build each of `WORDS` from its first byte on."""
    from tokenizers.pre_tokenizers import ByteLevel

    as_bytes = ByteLevel(add_prefix_space=False, use_regex=False)
    merges: dict[tuple[str, str], None] = {}
    for word in WORDS:
        ((symbols, _),) = as_bytes.pre_tokenize_str(word)
        for end in range(1, len(symbols)):
            merges[symbols[:end], symbols[end]] = None
    return list(merges)


@torch.no_grad()
def _write_vae(folder: Path, seed: int, config: dict[str, Any]) -> None:
    from diffusers import AutoencoderKLWan

    with torch.device("meta"):
        vae = AutoencoderKLWan(**config)
    vae.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    for name, weight in vae.state_dict().items():
        weight.copy_(_random_weight(name, tuple(weight.shape), generator))
    _calibrate_encoder(vae, generator)
    _calibrate_decoder(vae, generator)
    _write_json(folder / "config.json", {"_class_name": "AutoencoderKLWan", **config})
    _save(vae.state_dict(), folder / "diffusion_pytorch_model.safetensors")


def _calibrate_encoder(vae: Any, generator: torch.Generator) -> None:
    """Give the latents of smooth random images the mean and spread that the pipeline normalises by."""
    images = torch.randn(4, 3, 4, 4, generator=generator)
    images = torch.nn.functional.interpolate(images, size=(64, 64), mode="bicubic").tanh()
    latents = torch.cat([vae.encode(image[None, :, None]).latent_dist.mode() for image in images])
    spread, mean = torch.std_mean(latents, dim=(0, 2, 3, 4))
    wanted_mean, wanted_spread = torch.tensor(vae.config.latents_mean), torch.tensor(vae.config.latents_std)
    _rescale(vae.quant_conv, wanted_spread / spread, mean, wanted_mean)


def _calibrate_decoder(vae: Any, generator: torch.Generator) -> None:
    """Centre the pixels of random latents and let all but two percent of them lie inside of [-1, 1]."""
    shape = (1, vae.config.z_dim, 2, 4, 4)
    mean, std = (torch.tensor(part).view(1, -1, 1, 1, 1) for part in (vae.config.latents_mean, vae.config.latents_std))
    pixels: list[torch.Tensor] = []
    # Before `decode` clamps them.
    hook = vae.decoder.conv_out.register_forward_hook(lambda module, inputs, output: pixels.append(output))
    vae.decode(mean + std * torch.randn(shape, generator=generator))
    hook.remove()
    values = torch.cat(pixels, dim=2).transpose(0, 1).flatten(1)
    centre = values.median(dim=1).values
    reach = (values - centre[:, None]).abs().flatten().quantile(0.98)
    _rescale(vae.decoder.conv_out, 1 / reach.expand_as(centre), centre, torch.zeros_like(centre))


def _rescale(conv: torch.nn.Conv3d, scale: torch.Tensor, mean: torch.Tensor, new_mean: torch.Tensor) -> None:
    """Let the first output channels of a convolution have ``(output - mean) * scale + new_mean`` from now on."""
    channels = len(scale)
    assert conv.bias is not None
    conv.weight[:channels] *= scale.view(-1, 1, 1, 1, 1)
    conv.bias[:channels] = (conv.bias[:channels] - mean) * scale + new_mean


def _random_weight(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """fp32 values that keep the variance of what passes through: gains near 1, small biases, linears by fan-in."""
    normal = torch.empty(shape).normal_(generator=generator)
    is_gain = name.endswith("gamma") or (name.endswith(".weight") and len(shape) == 1)
    if is_gain:
        return normal.mul_(0.1).add_(1)
    if len(shape) == 1:
        return normal.mul_(0.1)
    return normal.div_(math.sqrt(math.prod(shape[1:])))


def _save(weights: dict[str, torch.Tensor], file: Path) -> None:
    save_file({name: weight.contiguous() for name, weight in weights.items()}, file, metadata={"format": "pt"})


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m fastvideo.pipelines.pan2.tiny_checkpoint",
        description="Write a PAN2 checkpoint with random weights, in the layout of the released one and small enough "
        "for a CPU. Pass its folder to VideoGenerator.from_pretrained or to fastvideo-pan2.",
        epilog="Writes about 20 MB in seconds; with --full-vae 2.8 GB in about a minute.",
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to write; new, empty or an earlier checkpoint")
    parser.add_argument("--seed", type=int, default=0, help="the same seed writes the same weights (default: 0)")
    parser.add_argument("--full-vae", action="store_true", help="the VAE at its real size, 16 times wider")
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    try:
        for name in write_components(options.out, options.seed, options.full_vae):
            size = sum(file.stat().st_size for file in (options.out / name).iterdir())
            print(f"{name:<13} {size / 1e6:9.1f} MB {time.perf_counter() - start:7.1f} s", flush=True)
    except OSError as error:
        parser.error(f"cannot write the checkpoint: {error}")
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
