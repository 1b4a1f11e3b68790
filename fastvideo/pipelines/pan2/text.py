# SPDX-License-Identifier: Apache-2.0
"""From a prompt to what PAN2 conditions on: the text model's hidden states of the tokens after the user header."""

import re
from typing import Any, NamedTuple

import torch
from fastvideo.configs.models.encoders.qwen3_5 import MAX_PROMPT_TOKENS

SYSTEM_MESSAGE = "You are a helpful assistant. Generate the video with the following instructions."
USER_HEADER = "<|im_start|>user\n"
# The text model's last two layers are skipped: its final states predict words, these describe them.
HIDDEN_STATE = -3

# A line break after the header's own would merge with it into one token, and the header would not be found.
_LEADING_LINE_BREAKS = re.compile(r"^\s*[\r\n]+")


class TokenizedPrompt(NamedTuple):
    """Token ids [1, tokens] (int64) and the position of the first one after the user header."""

    ids: torch.Tensor
    start: int


def chat_messages(prompt: str) -> list[dict[str, str]]:
    """The conversation that carries a prompt; an empty prompt is a single space, as in training."""
    prompt = _LEADING_LINE_BREAKS.sub("", prompt)
    return [{"role": "system", "content": SYSTEM_MESSAGE}, {"role": "user", "content": prompt or " "}]


def tokenize_prompt(tokenizer: Any, prompt: str, max_tokens: int = MAX_PROMPT_TOKENS) -> TokenizedPrompt:
    """Tokenize one prompt with the tokenizer's chat template, generation prompt added.

    Args:
        tokenizer: a transformers tokenizer.
        prompt: any text, also text that looks like a header.
        max_tokens: how many tokens to keep after the user header.

    Raises:
        ValueError: the tokenizer has no chat template, or one without ``<|im_start|>user`` and a line break.
    """
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "PAN2's tokenizer has no chat template: the tokenizer folder must hold chat_template.jinja or a "
            "chat_template in tokenizer_config.json"
        )
    ids = tokenizer.apply_chat_template(
        chat_messages(prompt), add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]
    header = tokenizer(USER_HEADER, add_special_tokens=False)["input_ids"]
    # The first match is the template's own: only the fixed system message is in front of it.
    starts = (i + len(header) for i in range(len(ids)) if ids[i : i + len(header)] == header)
    start = next(starts, None)
    if start is None:
        raise ValueError(
            f"The chat template of PAN2's tokenizer does not write the header {USER_HEADER!r} in front of the prompt: "
            f"use the tokenizer that came with the checkpoint"
        )
    return TokenizedPrompt(torch.tensor([ids[: start + max_tokens]]), start)


@torch.no_grad()
def encode_prompt(
    tokenizer: Any,
    text_encoder: torch.nn.Module,
    prompt: str,
    device: torch.device | None = None,
    max_tokens: int = MAX_PROMPT_TOKENS,
) -> torch.Tensor:
    """Encode one prompt, without padding.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        text_encoder: transformers' `Qwen3_5TextModel`.
        prompt: the text; empty for the unconditional pass.
        device: where the token ids go; the text encoder's own if not given.
        max_tokens: how many tokens after the user header to keep.

    Returns:
        [1, tokens, width] in the text encoder's type: the prompt and the assistant header that ends it.

    Raises:
        ValueError: see `tokenize_prompt`.
    """
    ids, start = tokenize_prompt(tokenizer, prompt, max_tokens)
    if device is None:
        device = next(text_encoder.parameters()).device
    outputs = text_encoder(input_ids=ids.to(device), output_hidden_states=True)
    return outputs.hidden_states[HIDDEN_STATE][:, start:]
