# SPDX-License-Identifier: Apache-2.0
"""Writes a Wan2.2 TI2V-5B checkpoint in diffusers' layout with random weights, small enough for a CPU:
``tiny_wan.py FOLDER VAE``, where VAE is the folder of a VAE to copy.
"""

import json
import shutil
import sys
from pathlib import Path

import torch

TRANSFORMER = {
    "num_attention_heads": 2,
    "attention_head_dim": 64,
    "in_channels": 48,
    "out_channels": 48,
    "text_dim": 32,
    "freq_dim": 32,
    "ffn_dim": 128,
    "num_layers": 2,
}

TEXT_ENCODER = {
    "vocab_size": 64,
    "d_model": TRANSFORMER["text_dim"],
    "d_kv": 16,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 2,
    "feed_forward_proj": "gated-gelu",
}

# FastVideo's loader passes every key on, and knows fewer than the current diffusers writes.
SCHEDULER = {
    "_class_name": "UniPCMultistepScheduler",
    "num_train_timesteps": 1000,
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "flow_shift": 5.0,
}

INDEX = {
    "_class_name": "WanPipeline",
    "_diffusers_version": "0.35.0",
    "expand_timesteps": True,
    "boundary_ratio": None,
    "scheduler": ["diffusers", "UniPCMultistepScheduler"],
    "text_encoder": ["transformers", "UMT5EncoderModel"],
    "tokenizer": ["transformers", "T5TokenizerFast"],
    "transformer": ["diffusers", "WanTransformer3DModel"],
    "transformer_2": [None, None],
    "vae": ["diffusers", "AutoencoderKLWan"],
}


def write_tiny_wan(folder: Path, vae: Path) -> None:
    """Write the checkpoint, always the same; its VAE is a copy of the folder ``vae``."""
    folder.mkdir(parents=True)
    shutil.copytree(vae, folder / "vae")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        write_transformer(folder / "transformer")
        write_text_encoder(folder / "text_encoder")
    write_tokenizer(folder / "tokenizer")
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(SCHEDULER))
    (folder / "model_index.json").write_text(json.dumps(INDEX))


def write_transformer(folder: Path) -> None:
    from diffusers import WanTransformer3DModel

    WanTransformer3DModel(**TRANSFORMER).save_pretrained(folder)


def write_text_encoder(folder: Path) -> None:
    from transformers import UMT5Config, UMT5EncoderModel

    UMT5EncoderModel(UMT5Config(**TEXT_ENCODER)).save_pretrained(folder)


def write_tokenizer(folder: Path) -> None:
    """One token a letter."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "</s>", "<unk>"]
    vocabulary = {token: number for number, token in enumerate([*special, *"abcdefghijklmnopqrstuvwxyz "])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )
    wrapped.save_pretrained(folder)


if __name__ == "__main__":
    write_tiny_wan(Path(sys.argv[1]), Path(sys.argv[2]))
