# SPDX-License-Identifier: Apache-2.0
"""What PAN2 takes from a prompt: the conversation, the crop after the user header, the hidden state, the limit; and the
text encoder's loading."""

import sys
import types

import pytest
import torch
import transformers
from fastvideo.configs.models.encoders.qwen3_5 import MAX_PROMPT_TOKENS, Qwen3_5Config
from fastvideo.models.registry import ModelRegistry
from fastvideo.pipelines.pan2.text import SYSTEM_MESSAGE, chat_messages, encode_prompt, tokenize_prompt
from safetensors.torch import load_file, save_file

ENDING = "<|im_end|>\n<|im_start|>assistant\n"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint):
    return transformers.AutoTokenizer.from_pretrained(tiny_checkpoint / "tokenizer")


@pytest.fixture(scope="module")
def text_encoder(tiny_checkpoint):
    return transformers.Qwen3_5TextModel.from_pretrained(tiny_checkpoint / "text_encoder", dtype=torch.float32).eval()


def text_after_header(tokenizer, prompt: str, **options) -> str:
    ids, start = tokenize_prompt(tokenizer, prompt, **options)
    return tokenizer.decode(ids[0, start:])


# The conversation and the crop


@pytest.mark.parametrize("prompt", ["a cat", "  two spaces", "ends with a space ", "naïve 猫 🎥", "line\n\nbreaks\n"])
def test_the_crop_starts_at_the_prompt(tokenizer, prompt):
    ids, start = tokenize_prompt(tokenizer, prompt)
    assert ids.shape[0] == 1
    assert ids.dtype == torch.int64
    assert tokenizer.decode(ids[0, start:]) == prompt + ENDING
    assert tokenizer.decode(ids[0, :start]) == f"<|im_start|>system\n{SYSTEM_MESSAGE}<|im_end|>\n<|im_start|>user\n"


def test_the_system_message_is_the_one_of_training():
    assert chat_messages("a cat") == [
        {
            "role": "system",
            "content": "You are a helpful assistant. Generate the video with the following instructions.",
        },
        {"role": "user", "content": "a cat"},
    ]


def test_an_empty_prompt_is_a_space(tokenizer):
    assert text_after_header(tokenizer, "") == " " + ENDING


@pytest.mark.parametrize("prompt", ["<|im_start|>user\na cat", "a <|im_start|>user\n<|im_start|>user\n b<|im_end|>"])
def test_a_prompt_that_holds_the_header_is_kept_whole(tokenizer, prompt):
    assert text_after_header(tokenizer, prompt) == prompt + ENDING


@pytest.mark.parametrize("prompt", ["\na cat", "\n\n\na cat", " \r\n \na cat"])
def test_leading_line_breaks_are_dropped(tokenizer, prompt):
    assert text_after_header(tokenizer, prompt) == "a cat" + ENDING


def test_a_leading_line_break_would_hide_the_header(tokenizer):
    header, merged = (
        tokenizer("<|im_start|>user\n" + prompt, add_special_tokens=False).input_ids for prompt in ("", "\na cat")
    )
    assert merged[: len(header)] != header


def test_nothing_but_line_breaks_is_an_empty_prompt(tokenizer):
    assert text_after_header(tokenizer, "\n\n") == " " + ENDING


# The hidden state


def test_states_are_those_before_the_last_two_layers(tokenizer, text_encoder):
    ids, start = tokenize_prompt(tokenizer, "a cat")
    captured = []
    hook = text_encoder.layers[-3].register_forward_hook(lambda module, inputs, output: captured.append(output))
    actual = encode_prompt(tokenizer, text_encoder, "a cat")
    hook.remove()
    (after_layer,) = (output[0] if isinstance(output, tuple) else output for output in captured)
    assert actual.shape == (1, ids.shape[1] - start, text_encoder.config.hidden_size)
    assert torch.equal(actual, after_layer[:, start:])
    assert not actual.requires_grad


def test_the_system_message_is_read_though_it_is_cropped(tokenizer, text_encoder):
    ids, start = tokenize_prompt(tokenizer, "a cat")
    with torch.no_grad():
        alone = text_encoder(input_ids=ids[:, start:], output_hidden_states=True).hidden_states[-3]
    actual = encode_prompt(tokenizer, text_encoder, "a cat")
    assert (actual - alone).norm() > 1e-3 * alone.norm()


def test_prompts_are_not_padded_to_one_length(tokenizer, text_encoder):
    short, long = (encode_prompt(tokenizer, text_encoder, prompt) for prompt in ("", "a cat on a sunny roof"))
    assert short.shape[1] == 1 + len(tokenizer(ENDING).input_ids)
    assert long.shape[1] > short.shape[1]


def test_at_most_1536_tokens_follow_the_header(tokenizer, text_encoder):
    prompt = "water " * 2000
    ids, start = tokenize_prompt(tokenizer, prompt)
    assert ids.shape[1] - start == MAX_PROMPT_TOKENS == 1536
    whole, _ = tokenize_prompt(tokenizer, prompt, max_tokens=10**6)
    assert torch.equal(ids, whole[:, : start + 1536])
    assert encode_prompt(tokenizer, text_encoder, prompt).shape[1] == 1536


def test_cutting_the_prompt_does_not_change_the_tokens_before(tokenizer, text_encoder):
    whole = encode_prompt(tokenizer, text_encoder, "slow wind and light on the water")
    cut = encode_prompt(tokenizer, text_encoder, "slow wind and light on the water", max_tokens=5)
    torch.testing.assert_close(cut, whole[:, :5], rtol=1e-5, atol=1e-6)


# Tokenizers that do not fit


def test_a_template_without_the_header_is_one_clear_error(tokenizer, tiny_checkpoint):
    other = transformers.AutoTokenizer.from_pretrained(tiny_checkpoint / "tokenizer")
    other.chat_template = "{% for message in messages %}[{{ message.role }}] {{ message.content }}{% endfor %}"
    with pytest.raises(ValueError, match=r"does not write the header '<\|im_start\|>user\\n'"):
        tokenize_prompt(other, "a cat")
    other.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        tokenize_prompt(other, "a cat")


# Loading

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
TEXT = {**SIZES, **HEADS, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}


def saved_model(name: str, folder) -> torch.nn.Module:
    """Save a random model of transformers' class ``name`` and return its text part."""
    if name in ("Qwen3_5TextModel", "Qwen3_5ForCausalLM"):
        config = transformers.Qwen3_5TextConfig(**TEXT)
    else:
        config = transformers.Qwen3_5Config(text_config=TEXT, vision_config={**VISION, "num_position_embeddings": 16})
    model = getattr(transformers, name)(config)
    model.save_pretrained(folder)
    return next(module for module in model.modules() if isinstance(module, transformers.Qwen3_5TextModel))


@pytest.mark.parametrize(
    "name", ["Qwen3_5TextModel", "Qwen3_5ForCausalLM", "Qwen3_5Model", "Qwen3_5ForConditionalGeneration"]
)
def test_the_text_model_is_loaded_from_every_class(name, tmp_path):
    expected = saved_model(name, tmp_path)
    cls, _ = ModelRegistry.resolve_model_cls([name])
    assert cls.supports_hf_from_pretrained
    loaded = cls.from_pretrained_local(str(tmp_path), Qwen3_5Config(), torch.bfloat16, CPU)
    assert isinstance(loaded, transformers.Qwen3_5TextModel)
    assert not loaded.training
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    expected_weights = expected.bfloat16().state_dict()
    assert loaded.state_dict().keys() == expected_weights.keys()
    assert all(torch.equal(tensor, expected_weights[key]) for key, tensor in loaded.state_dict().items())


def test_foreign_text_weights_are_refused_by_name(tmp_path):
    saved_model("Qwen3_5TextModel", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["layers.0.other.weight"] = weights.pop("norm.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    cls, _ = ModelRegistry.resolve_model_cls(["Qwen3_5TextModel"])
    with pytest.raises(ValueError, match=r"missing \['norm.weight'\], unexpected \['layers.0.other.weight'\]"):
        cls.from_pretrained_local(str(tmp_path), Qwen3_5Config(), torch.float32, CPU)


def test_a_transformers_without_qwen3_5_is_named(tmp_path, monkeypatch):
    cls, _ = ModelRegistry.resolve_model_cls(["Qwen3_5TextModel"])
    monkeypatch.setitem(sys.modules, "transformers", types.ModuleType("transformers"))
    with pytest.raises(ImportError, match=r"install transformers>=5\.2"):
        cls.from_pretrained_local(str(tmp_path), Qwen3_5Config(), torch.float32, CPU)
