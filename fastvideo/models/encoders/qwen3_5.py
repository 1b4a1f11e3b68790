# SPDX-License-Identifier: Apache-2.0
"""Loads the text part of Qwen3.5 through transformers, whichever class the checkpoint was saved from."""

import torch
from fastvideo.configs.models.encoders.qwen3_5 import Qwen3_5Config
from fastvideo.models.encoders.base import TextEncoder
from torch import nn

# What a checkpoint may hold besides the text model: the language head, the vision tower, multi-token prediction.
OTHER_PARTS = ("lm_head", "visual", "mtp")


class Qwen3_5TextModel(TextEncoder):
    """Entry for FastVideo's registry: `from_pretrained_local` returns transformers' own `Qwen3_5TextModel`."""

    supports_hf_from_pretrained = True

    @classmethod
    def from_pretrained_local(
        cls, model_path: str, model_config: Qwen3_5Config, dtype: torch.dtype, device: torch.device
    ) -> nn.Module:
        """Load the text model of a local folder.

        Args:
            model_path: folder with ``config.json`` and safetensors, of the text model alone, of the language model
                with its head, or of the multimodal model (whose vision tower is not loaded).
            model_config: FastVideo's configuration of the encoder.
            dtype: type of the weights.
            device: where the weights go.

        Raises:
            ImportError: the installed transformers has no Qwen3.5.
            ValueError: the folder lacks weights of the text model, or has weights that belong to none of its parts.
        """
        try:
            import transformers

            text_model = transformers.Qwen3_5TextModel
        except (ImportError, AttributeError) as error:
            raise ImportError(
                "PAN2's text encoder needs a transformers that has Qwen3_5TextModel: install transformers>=5.2"
            ) from error
        model, loading = text_model.from_pretrained(
            model_path,
            local_files_only=True,
            dtype=dtype,
            # Qwen3_5Model names its parts without the prefix that transformers strips by itself.
            key_mapping={r"^language_model\.": "", r"^model\.language_model\.": ""},
            output_loading_info=True,
        )
        _check_weights(model_path, loading["missing_keys"], loading["unexpected_keys"])
        # One pass over the prompt: nothing reads a cache of it.
        model.config.use_cache = False
        return model.to(device).eval()


def _check_weights(model_path: str, missing: set[str], unexpected: set[str]) -> None:
    """transformers only logs these, and goes on with random weights."""
    unexpected = {name for name in unexpected if not set(OTHER_PARTS).intersection(name.split("."))}
    if missing or unexpected:
        raise ValueError(
            f"The text encoder in {model_path} does not hold Qwen3.5's text model: missing {sorted(missing)}, "
            f"unexpected {sorted(unexpected)}"
        )


# `architectures` in the checkpoint's config.json decides which of these names FastVideo looks up.
Qwen3_5ForCausalLM = Qwen3_5TextModel
Qwen3_5ForConditionalGeneration = Qwen3_5TextModel
Qwen3_5Model = Qwen3_5TextModel

EntryClass = [Qwen3_5TextModel, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration, Qwen3_5Model]
