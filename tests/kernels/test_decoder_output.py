# SPDX-License-Identifier: Apache-2.0
"""The video's types, and its delivery pass by pass."""

import weakref

import pytest
import torch

from wan22_vae_decode import Decoder


@pytest.mark.parametrize("frames_per_pass", [1, 2, 3, 7])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.uint8])
def test_stream_is_the_video_in_order(frames_per_pass, out_dtype, state_dict, latents):
    decoder = Decoder.from_state_dict(state_dict, frames_per_pass=frames_per_pass)
    z = latents(5, 2, 3, batch=2).float()
    items = list(decoder.stream(z, out_dtype=out_dtype))
    assert len(items) == -(-5 // frames_per_pass)
    assert items[0].shape[2] == 4 * min(frames_per_pass, 5) - 3
    assert all(item.is_contiguous() for item in items)
    assert torch.equal(torch.cat(items, dim=2), decoder.decode(z, out_dtype=out_dtype))


def test_stream_computes_only_what_is_asked_for(state_dict, latents, monkeypatch):
    decoder = Decoder.from_state_dict(state_dict, frames_per_pass=1)
    heads = []
    head = type(decoder._ops).output_head

    def count(self, *args):
        heads.append(1)
        return head(self, *args)

    monkeypatch.setattr(type(decoder._ops), "output_head", count)
    stream = decoder.stream(latents(4, 2, 2).float())
    assert not heads
    next(stream)
    assert len(heads) == 1


@pytest.mark.parametrize("on_host", [False, True])
def test_item_that_was_dropped_is_gone_while_the_next_pass_is_computed(on_host, state_dict, latents, monkeypatch):
    decoder = Decoder.from_state_dict(state_dict, frames_per_pass=1)
    head, dropped, gone = type(decoder._ops).output_head, [], []

    def look(self, *args):
        gone.extend(item() is None for item in dropped)
        return head(self, *args)

    monkeypatch.setattr(type(decoder._ops), "output_head", look)
    stream = decoder.stream(latents(2, 2, 2).float(), on_host=on_host)
    dropped.append(weakref.ref(next(stream)))
    next(stream)
    assert gone == [True]


def test_items_of_a_stream_do_not_share_memory(state_dict, latents):
    stream = Decoder.from_state_dict(state_dict, frames_per_pass=1).stream(latents(3, 2, 2).float())
    first = next(stream)
    before = first.clone()
    second = next(stream)
    second.zero_()
    next(stream)
    assert torch.equal(first, before)


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types_round_the_video_once(out_dtype, state_dict, latents):
    decoder = Decoder.from_state_dict(state_dict)
    z = latents(2, 3, 2).float()
    assert torch.equal(decoder.decode(z, out_dtype), decoder.decode(z).to(out_dtype))


def test_uint8_is_what_fastvideos_writer_makes_of_the_video(state_dict, latents):
    """Its decoding stage maps to (v / 2 + 0.5) in [0, 1], its writer truncates that times 255."""
    bright = state_dict | {"decoder.conv_out.weight": 8 * state_dict["decoder.conv_out.weight"]}
    decoder = Decoder.from_state_dict(bright)
    z = latents(2, 3, 2).float()
    expected = ((decoder.decode(z) / 2 + 0.5).clamp(0, 1) * 255).clamp(0, 255).to(torch.uint8)
    pixels = decoder.decode(z, torch.uint8)
    assert torch.equal(pixels, expected)
    assert pixels.max() == 255
    assert pixels.min() == 0


def test_decode_defaults_to_float32(state_dict, latents):
    z = latents(1, 1, 1).float()
    assert Decoder.from_state_dict(state_dict, dtype="bfloat16").decode(z).dtype == torch.float32


def test_profiler_sees_every_layer_by_name(state_dict, latents):
    decoder = Decoder.from_state_dict(state_dict)
    z = latents(2, 1, 1).float()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        decoder.decode(z)
    names = {event.key for event in profile.key_averages()}
    resnets = [f"wan.up_blocks.{block}.resnets.{number}" for block in range(4) for number in range(3)]
    others = [
        "wan.post_quant_conv",
        "wan.conv_in",
        "wan.mid_block.resnets.0",
        "wan.mid_block.attention",
        "wan.mid_block.resnets.1",
        *(f"wan.up_blocks.{block}.time_double" for block in range(2)),
        *(f"wan.up_blocks.{block}.upsample" for block in range(3)),
        "wan.head",
    ]
    assert names.issuperset(resnets + others)


def test_stream_on_the_host_of_a_cpu_is_the_stream(state_dict, latents):
    decoder = Decoder.from_state_dict(state_dict, frames_per_pass=2)
    z = latents(5, 2, 3).float()
    items = list(decoder.stream(z, torch.uint8, on_host=True))
    assert len(items) == 3
    assert torch.equal(torch.cat(items, dim=2), decoder.decode(z, torch.uint8))
