# SPDX-License-Identifier: Apache-2.0
"""Configuration of PAN2's text encoder, the text part of Qwen3.5."""

from dataclasses import dataclass, field

from fastvideo.configs.models.encoders.base import TextEncoderArchConfig, TextEncoderConfig

# Tokens after the header in front of the prompt that PAN2 sees.
MAX_PROMPT_TOKENS = 1536


@dataclass
class Qwen3_5ArchConfig(TextEncoderArchConfig):
    """The fields of ``text_encoder/config.json`` that FastVideo reads; transformers reads the file itself."""

    architectures: list[str] = field(default_factory=lambda: ["Qwen3_5TextModel"])
    vocab_size: int = 248320
    hidden_size: int = 4096
    num_hidden_layers: int = 32
    num_attention_heads: int = 16
    text_len: int = MAX_PROMPT_TOKENS
    output_hidden_states: bool = True


@dataclass
class Qwen3_5Config(TextEncoderConfig):
    """FastVideo's side of the text encoder's configuration."""

    arch_config: TextEncoderArchConfig = field(default_factory=Qwen3_5ArchConfig)

    prefix: str = "qwen3_5"
    is_chat_model: bool = True
