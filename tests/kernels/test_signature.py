# SPDX-License-Identifier: Apache-2.0
"""The signature of a decoder's weights changes with every write, by whatever means, and with nothing else."""

import math

import pytest
import torch

from wan22_vae_decode.signature import contents, signature
from wan22_vae_decode.weights import decoder_tensors

NAME = "decoder.conv_in.weight"


@pytest.fixture
def weights(state_dict):
    """Weights of our own in float32, as a module would hold them."""
    return {name: tensor.float().clone() for name, tensor in state_dict.items()}


def test_nothing_written_gives_the_same_signature(weights):
    before = signature(weights)
    assert signature(weights) == before
    assert signature({name: tensor.detach() for name, tensor in weights.items()}) == before
    weights[NAME].sum()
    with torch.inference_mode():
        assert signature(weights) == before


def test_parameters_from_inference_mode_that_were_retyped_outside(weights):
    with torch.inference_mode():
        module = torch.nn.ParameterList([weights[NAME].clone()])
    module.requires_grad_(False).to(torch.float64)
    retyped = {NAME: module[0]}
    before = signature(retyped)
    assert signature(retyped) == before
    decoder_tensors(retyped)[NAME].mul_(2)
    assert signature(retyped) != before


def test_contents_do_not_depend_on_the_place_in_memory(weights):
    buffer = torch.zeros(weights[NAME].numel() + 1)
    moved = buffer[1:].view(weights[NAME].shape).copy_(weights[NAME])
    assert contents({NAME: moved}) == contents({NAME: weights[NAME]})


def test_tensors_that_are_not_the_decoder_s_do_not_matter(weights):
    before = signature(weights)
    assert signature(weights | {"encoder.conv_in.weight": torch.randn(3), "quant_conv.bias": torch.randn(2)}) == before


def exchange(tensor, one, other):
    flat = tensor.view(-1)
    flat[one], flat[other] = flat[other].clone(), flat[one].clone()


WRITES = {
    "in place": lambda tensor: tensor.add_(1e-3),
    "one element by the last bit": lambda tensor: tensor.view(-1)[77:78].view(torch.int32).add_(1),
    "sign of a zero": lambda tensor: tensor.view(-1)[5].neg_(),
    "two neighbours": lambda tensor: exchange(tensor, 100, 101),
    "two of the same place in other rows": lambda tensor: exchange(tensor, 3, 3 + tensor[0].numel()),
    "first and last": lambda tensor: exchange(tensor, 0, -1),
    "rows": lambda tensor: tensor.copy_(tensor.flip(0)),
    "rolled": lambda tensor: tensor.view(-1).copy_(tensor.view(-1).roll(1)),
    "transposed": lambda tensor: tensor.copy_(tensor.transpose(3, 4).clone()),
    "NaN": lambda tensor: tensor.view(-1)[9].fill_(math.nan),
}


@pytest.mark.parametrize("way", ["directly", "through .data", "in inference mode"])
@pytest.mark.parametrize("write", WRITES)
def test_every_write_changes_it(write, way, weights):
    weights[NAME].view(-1)[5] = 0
    if way == "in inference mode":
        with torch.inference_mode():
            # Tensors without a version counter.
            weights = {name: tensor.clone() for name, tensor in weights.items()}
            before = signature(weights)
            WRITES[write](weights[NAME])
    else:
        before = signature(weights)
        WRITES[write](weights[NAME].data if way == "through .data" else weights[NAME])
    after = signature(weights)
    assert after[1] != before[1], "the contents alone tell"
    assert after != before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_element_of_every_type_counts(dtype, weights):
    weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
    seen = {signature(weights)[1]}
    bits = weights["decoder.norm_out.gamma"].data.view(-1).view(torch.int16)
    for index in range(bits.numel()):
        bits[index] ^= 1
        seen.add(signature(weights)[1])
    assert len(seen) == 1 + bits.numel()


def test_equal_contents_elsewhere_or_of_another_type_count_as_replaced(weights):
    before = signature(weights)
    weights[NAME] = weights[NAME].clone()
    moved = signature(weights)
    assert moved != before
    assert moved[1] == before[1]
    weights[NAME] = weights[NAME].double()
    assert signature(weights) != moved


def test_names_count(weights):
    before = signature(weights)
    renamed = {name.replace("conv_in", "conv_in.base_layer"): tensor for name, tensor in weights.items()}
    assert signature(renamed) != before
    del weights[NAME]
    assert signature(weights) != before


def test_nan_weights_are_stable(weights):
    weights[NAME].fill_(math.nan)
    before = signature(weights)
    assert signature(weights) == before
    # Another NaN than before is another weight.
    weights[NAME].data.view(torch.int32).add_(1)
    assert weights[NAME].isnan().all()
    assert signature(weights) != before


def test_any_layout_and_place_in_memory_can_be_read():
    buffer = torch.randn(99)
    odd = {
        "decoder.nothing": torch.empty(0, 3),
        "decoder.scalar": torch.tensor(1.0),
        "decoder.odd": buffer[1:8].view(7),
        "decoder.half": torch.randn(11).half()[3:],
        "decoder.last": torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
        "decoder.transposed": torch.randn(4, 6).t(),
    }
    before = signature(odd)
    assert len(before[1]) == 5
    assert signature(odd) == before
    for name in list(odd)[1:]:
        odd[name].data.view(-1)[-1:].mul_(2) if odd[name].is_contiguous() else odd[name].data[-1, -1].mul_(2)
        assert signature(odd) != before
        before = signature(odd)
    assert signature({}) == ((), ())
