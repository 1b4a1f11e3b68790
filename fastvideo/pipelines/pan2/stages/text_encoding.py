# SPDX-License-Identifier: Apache-2.0
"""Encodes prompt and negative prompt, each at its own length."""

from __future__ import annotations

from typing import Any

import torch
from fastvideo.distributed import get_local_torch_device
from fastvideo.fastvideo_args import FastVideoArgs
from fastvideo.pipelines.pan2.text import encode_prompt
from fastvideo.pipelines.stages.text_encoding import TextEncodingStage


class PAN2TextEncodingStage(TextEncodingStage):
    """Sets ``batch.prompt_embeds`` and, with guidance, ``batch.negative_prompt_embeds``: one tensor [1, tokens,
    width] each.

    When to encode what is upstream's; how a text becomes embeddings is PAN2's (:mod:`fastvideo.pipelines.pan2.text`).
    """

    @torch.no_grad()
    def encode_text(self, text: str | list[str], fastvideo_args: FastVideoArgs, *_: Any, **__: Any) -> Any:
        """Encodes one text; returns a list with its embeddings and a list with its mask of ones, as upstream's caller
        expects.

        Raises:
            ValueError: several texts at once, or a tokenizer whose chat template PAN2 cannot use.
        """
        if isinstance(text, list):
            if len(text) != 1:
                raise ValueError(f"PAN2 encodes one prompt at a time, got {len(text)}: send one request per prompt.")
            (text,) = text
        encoder, device = self.text_encoders[0], get_local_torch_device()
        parked = next(encoder.parameters()).device.type != device.type
        if parked:
            encoder.to(device)
        embeds = encode_prompt(self.tokenizers[0], encoder, text, device)
        if parked and fastvideo_args.text_encoder_cpu_offload:
            encoder.to("cpu")
        return [embeds], [torch.ones(embeds.shape[:2], dtype=torch.int64, device=device)]
