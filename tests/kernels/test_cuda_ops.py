# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels on a GPU: every op against the torch op in fp32, bounds, determinism, streams and graphs."""

import math
import threading

import pytest
import torch

from wan22_vae_decode import backends, layers, weights, winograd
from wan22_vae_decode.backends.base import Halo
from wan22_vae_decode.backends.cuda import heuristics, selftest
from wan22_vae_decode.backends.cuda.selftest import Case
from wan22_vae_decode.backends.torch import TorchBackend
from wan22_vae_decode.errors import DecodeError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

GUARD_BYTES = 4096


@pytest.fixture(scope="module", params=[torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def backend(request):
    return backends.create("cuda", torch.device("cuda", torch.cuda.current_device()), request.param)


@pytest.fixture
def poisoned_memory():
    """Fills fresh tensors with NaN, so that an output element that nobody writes is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def guarded_memory(monkeypatch):
    """Puts poisoned margins around every tensor that an op makes, and checks them at the end."""
    margins = []

    def guarded(shape, dtype, device):
        size = math.prod(shape) * dtype.itemsize
        memory = torch.full((size + 2 * GUARD_BYTES,), 0xA5, dtype=torch.uint8, device=device)
        margins.append((memory, size))
        return memory[GUARD_BYTES : GUARD_BYTES + size].view(dtype).view(shape)

    def new_empty(self, *shape, dtype=None):
        shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return guarded(tuple(shape), dtype or self.dtype, self.device)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    monkeypatch.setattr(torch, "empty_like", lambda x, dtype=None: guarded(tuple(x.shape), dtype or x.dtype, x.device))
    yield margins
    torch.cuda.synchronize()
    assert margins
    for memory, size in margins:
        assert bool((memory[:GUARD_BYTES] == 0xA5).all()), "an op wrote in front of a tensor"
        assert bool((memory[GUARD_BYTES + size :] == 0xA5).all()), "an op wrote behind a tensor"


CASES = [
    *selftest.CASES,
    Case("causal_conv3d", frames=1, rows=1, cols=1, c_in=8, c_out=8),
    Case("causal_conv3d", batch=2, frames=1, rows=3, cols=130, c_in=40, c_out=136, history=True, halo=True),
    Case("causal_conv3d", batch=2, frames=4, rows=17, cols=19, c_in=256, c_out=256, history=True),
    Case("causal_conv3d", frames=2, rows=13, cols=15, c_in=512, c_out=264, history=True),
    Case("causal_conv3d", frames=1, rows=5, cols=3, c_in=1048, c_out=1032),
    Case("winograd_conv3d", batch=2, frames=2, rows=6, cols=9, c_in=128, c_out=192, halo=True),
    Case("winograd_conv3d", batch=2, frames=1, rows=1, cols=1, c_in=8, c_out=8),
    Case("winograd_conv3d", batch=2, frames=4, rows=18, cols=35, c_in=256, c_out=256, history=True),
    Case("winograd_conv3d", frames=2, rows=13, cols=15, c_in=512, c_out=264, history=True, halo=True),
    Case("winograd_conv3d", frames=1, rows=5, cols=3, c_in=1024, c_out=1032),
    Case("pointwise_conv", batch=2, frames=2, rows=7, cols=33, c_in=48, c_out=48),
    Case("pointwise_conv", frames=1, rows=31, cols=17, c_in=1024, c_out=512),
    Case("attention", batch=2, frames=9, rows=6, cols=5, c_in=256),
    Case("time_double", batch=2, frames=1, rows=1, cols=3, c_in=128),
    Case("time_double", batch=2, frames=5, rows=11, cols=13, c_in=256, history=True),
    Case("upsample_conv2x", batch=2, frames=5, rows=1, cols=1, c_in=64, c_out=64),
    Case("upsample_conv2x", batch=2, frames=4, rows=9, cols=11, c_in=256, c_out=256, history=True, halo=True),
    Case("upsample_conv2x", frames=2, rows=13, cols=7, c_in=272, c_out=136, history=True),
    Case("upsample_conv2x", frames=2, rows=5, cols=6, c_in=256, c_out=64, history=True),
    Case("upsample_winograd", batch=2, frames=5, rows=1, cols=1, c_in=64, c_out=64),
    Case("upsample_winograd", batch=2, frames=4, rows=9, cols=11, c_in=256, c_out=256, history=True, halo=True),
    Case("upsample_winograd", frames=2, rows=13, cols=7, c_in=272, c_out=136, history=True),
    Case("upsample_winograd", frames=2, rows=5, cols=6, c_in=256, c_out=64, history=True, halo=True),
    Case("upsample_winograd", frames=4, rows=7, cols=27, c_in=8, c_out=8, history=True, halo=True),
    Case("upsample_winograd", frames=1, rows=2, cols=12, c_in=1024, c_out=512),
    Case("output_head", batch=2, frames=3, rows=1, cols=1, c_in=64),
    Case("output_head", batch=2, frames=2, rows=19, cols=67, c_in=256, history=True, halo=True),
    Case("row_movement", batch=2, frames=7, rows=12, cols=9, c_in=72),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_op_agrees_with_torch(backend, poisoned_memory, case):
    assert selftest.compare(backend, case, seed=7) <= selftest.tolerance(case, backend.dtype)


@pytest.mark.parametrize("columns", [128, 256])
@pytest.mark.parametrize("case", [case for case in CASES if "conv" in case.op or "head" in case.op], ids=str)
def test_every_tile_agrees_with_torch(backend, poisoned_memory, columns, case):
    error = selftest.compare(backend.with_tile(columns), case, seed=8)
    assert error <= selftest.tolerance(case, backend.dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_op_stays_inside_its_tensors(backend, guarded_memory, case):
    assert selftest.compare(backend, case, seed=9) <= selftest.tolerance(case, backend.dtype)


def test_bands_do_not_change_a_winograd_conv(backend, monkeypatch):
    case = Case("winograd_conv3d", batch=2, frames=3, rows=38, cols=22, c_in=128, c_out=136, history=True, halo=True)
    run = selftest._OPS[case.op](case, selftest._Random(backend.dtype, 1))
    whole = run(backend, lambda tensor: tensor.to(backend.device, copy=True))
    monkeypatch.setattr(heuristics, "WINOGRAD_BYTES", 1)
    for one, other in zip(run(backend, lambda tensor: tensor.to(backend.device, copy=True)), whole, strict=True):
        assert torch.equal(one, other)


def upsampling_layer(backend, channels=128):
    random = selftest._Random(backend.dtype, 4)
    weight = weights.upsample_components(random.weight(channels, channels, 3, 3).double())
    bias = random.fp32(channels).to(backend.device)
    up = layers.UpsampleConv(None, weight.to(backend.device, backend.dtype), bias)
    return up, random(1, 4, 26, 22, channels).to(backend.device), random(1, 2, 26, 22, channels).to(backend.device)


def test_slabs_and_bands_do_not_change_an_upsampling_conv(backend, monkeypatch):
    up, x, shortcut = upsampling_layer(backend)
    whole = backend.upsample_conv2x(x, up, shortcut, 0, None)
    # All rows of two frames, some rows of one, one row of tiles.
    for scratch in (3 << 20, 1 << 20, 1):
        monkeypatch.setattr(heuristics, "SCRATCH_BYTES", scratch)
        assert torch.equal(backend.upsample_conv2x(x, up, shortcut, 0, None), whole)


def test_a_row_band_of_an_upsampling_conv_has_the_bits_of_the_image(backend):
    up, x, shortcut = upsampling_layer(backend)
    whole = backend.upsample_conv2x(x, up, shortcut, 0, None)
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 2, 2))
    for first, last in ((0, 26), (0, 10), (10, 20), (20, 26), (3, 4), (7, 9), (5, 18)):
        above, below = padded[:, :, first : first + 2], padded[:, :, last + 2 : last + 4]
        halo = Halo(above.contiguous(), below.contiguous(), first)
        source, skip = (tensor[:, :, first:last].contiguous() for tensor in (x, shortcut))
        band = backend.upsample_conv2x(source, up, skip, 0, halo)
        assert torch.equal(band, whole[:, :, 2 * first : 2 * last])


def test_history_carries_a_winograd_conv_across_passes(backend):
    random = selftest._Random(backend.dtype, 2)
    conv = layers.WinogradConv(
        winograd.transform_weight(random.weight(64, 3, 3, 3, 256), 3).to(backend.device, backend.dtype),
        random.fp32(64).to(backend.device),
        layers.WinogradForm(3),
    )
    x, norm = random(1, 4, 10, 14, 256).to(backend.device), 1 + 0.1 * random.fp32(256).to(backend.device)
    source, kept = backend.norm_silu_pad(x, norm, None, None, conv)
    whole = backend.winograd_conv3d(source, conv)
    for split in (1, 3):
        history, parts = None, []
        for part in x.split(split, dim=1):
            source, history = backend.norm_silu_pad(part.contiguous(), norm, history, None, conv)
            parts.append(backend.winograd_conv3d(source, conv))
        assert torch.equal(torch.cat(parts, dim=1), whole)
        assert torch.equal(history, kept)


def some_layers(backend, frames=3, rows=20, cols=24, channels=64, seed=0):
    """Inputs of a short chain of ops, on the GPU."""
    random = selftest._Random(backend.dtype, seed)
    move = {"device": backend.device}
    conv = layers.Conv(random.weight(channels, 3, 3, 3, channels).to(**move), random.fp32(channels).to(**move))
    head = layers.Head(
        torch.ones(channels, **move), random.weight(112, 3, 1, 1, channels).to(**move), random.fp32(12).to(**move)
    )
    up = layers.UpsampleConv(
        torch.stack([random.weight(channels, 2, 2, channels) for _ in range(4)]).unflatten(0, (2, 2)).to(**move),
        None,
        random.fp32(channels).to(**move),
    )
    x = random(1, frames, rows, cols, channels).to(**move)
    return x, conv, up, head


def run_layers(backend, x, conv, up, head, video, flag):
    """resnet conv, upsample and head."""
    norm = head.norm
    padded, _ = backend.norm_silu_pad(x, norm, None, None, conv)
    y = backend.causal_conv3d(padded, conv, residual=x)
    y = backend.upsample_conv2x(y, up, x, 0, None)
    padded, _ = backend.norm_silu_pad(y, norm, None, None, head)
    backend.output_head(padded, head, video, flag)
    return video


def new_video(backend, x, dtype=torch.float32):
    _, frames, rows, cols, _ = x.shape
    return torch.full((1, 3, frames, 4 * rows, 4 * cols), math.nan, dtype=dtype, device=backend.device)


def test_same_bytes_twice(backend):
    inputs = some_layers(backend, rows=44, cols=78, channels=256)
    videos = [run_layers(backend, *inputs, new_video(backend, inputs[0]), backend.nonfinite_flag()) for _ in range(2)]
    assert torch.equal(*videos)


def test_two_threads_on_two_streams(backend):
    inputs = [some_layers(backend, seed=seed) for seed in range(2)]
    expected = [run_layers(backend, *given, new_video(backend, given[0]), backend.nonfinite_flag()) for given in inputs]
    torch.cuda.synchronize()
    videos, failures = [None, None], []

    def work(index):
        try:
            stream = torch.cuda.Stream(backend.device)
            with torch.cuda.stream(stream):
                for _ in range(20):
                    video = new_video(backend, inputs[index][0])
                    run_layers(backend, *inputs[index], video, backend.nonfinite_flag())
                videos[index] = video
            stream.synchronize()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for video, reference in zip(videos, expected, strict=True):
        assert torch.equal(video, reference)


def test_capture_into_a_graph(backend):
    inputs = some_layers(backend)
    video, flag = new_video(backend, inputs[0]), backend.nonfinite_flag()
    expected = run_layers(backend, *inputs, new_video(backend, inputs[0]), flag).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_layers(backend, *inputs, video, flag)
    video.fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(video, expected)


@pytest.mark.parametrize("method", ["direct", "winograd"])
def test_more_than_2_31_elements(backend, method):
    if torch.cuda.mem_get_info(backend.device)[0] < 48 << 30:
        pytest.skip("needs 48 GiB of GPU memory")
    frames, rows, cols, c_in, c_out = 20, 352, 624, 512, 64
    x = torch.randn(1, frames, rows, cols, c_in, dtype=backend.dtype, device=backend.device)
    assert x.numel() > 2**31
    random = selftest._Random(backend.dtype, 3)
    weight, bias = random.weight(c_out, 3, 3, 3, c_in), random.fp32(c_out)
    # The last frame's last rows lie behind the 2^31st element.
    tail = slice(rows - 8, rows)
    norm = torch.ones(c_in)
    oracle = TorchBackend(torch.device("cpu"), torch.float32)
    conv = layers.Conv(weight.float(), bias)
    expected, _ = oracle.norm_silu_pad(x[:, -3:, tail].float().cpu(), norm, None, None, conv)
    expected = oracle.causal_conv3d(expected, conv)[:, -1, 1:]
    prepared = {
        "direct": layers.Conv(weight.to(backend.device), bias.to(backend.device)),
        "winograd": layers.WinogradConv(
            winograd.transform_weight(weight, 4).to(backend.device, backend.dtype),
            bias.to(backend.device),
            layers.WinogradForm(4),
        ),
    }
    conv = prepared[method]
    padded, _ = backend.norm_silu_pad(x, norm.to(backend.device), None, None, conv)
    y = (backend.causal_conv3d if method == "direct" else backend.winograd_conv3d)(padded, conv)
    limit = (selftest.TOLERANCE if method == "direct" else selftest.WINOGRAD_TOLERANCE)[backend.dtype]
    assert selftest.relative_error(y[:, -1, rows - 7 :].cpu(), expected) < limit


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_value_just_before_the_clamp_is_seen(backend, value):
    part = torch.zeros(2, 5, 7, 112, dtype=backend.dtype, device=backend.device)
    bias = torch.zeros(12, device=backend.device)
    video = torch.zeros(3, 2, 10, 14, device=backend.device)
    flag = backend.nonfinite_flag()
    backend.kernels.output_head(part, bias, False, video, flag)
    assert flag.item() == 0
    # Tap (1, 1), output 5: channel 1, column 2x, row 2y + 1.
    part[1, 4, 6, 12 * 4 + 5] = value
    backend.kernels.output_head(part, bias, False, video, flag)
    assert flag.item() == 1
    pixel = video[1, 1, 9, 12].item()
    assert math.isnan(pixel) if math.isnan(value) else pixel == math.copysign(1.0, value)
    pixels = torch.full((3, 2, 10, 14), 77, dtype=torch.uint8, device=backend.device)
    backend.kernels.output_head(part, bias, False, pixels, flag)
    assert pixels[1, 1, 9, 12].item() == {1: 255, -1: 0}.get(
        0 if math.isnan(value) else int(math.copysign(1, value)), 0
    )


def test_attention_flags_what_softmax_would_hide(backend):
    c = 64
    x = torch.randn(1, 1, 4, 4, c, device=backend.device).to(backend.dtype)
    weight = torch.zeros(3 * c, c, dtype=backend.dtype, device=backend.device)
    bias = torch.zeros(3 * c, device=backend.device)
    bias[c] = -math.inf
    proj = layers.Pointwise(torch.zeros(c, c, dtype=backend.dtype, device=backend.device), None)
    for shift, expected in ((0.0, 1), (math.inf, 0)):
        flag = backend.nonfinite_flag()
        safe = torch.where(bias.isinf() & (shift > 0), torch.zeros_like(bias), bias)
        backend.attention(
            x, layers.Attention(torch.ones(c, device=x.device), layers.Pointwise(weight, safe), proj), flag
        )
        assert flag.item() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
def test_video_of_odd_strides(backend, dtype):
    part = torch.randn(2, 6, 9, 112, device=backend.device).to(backend.dtype) * 0.2
    bias = torch.zeros(12, device=backend.device)
    dense = torch.zeros(3, 2, 12, 18, dtype=dtype, device=backend.device)
    wide = torch.full((3, 2, 12, 21), 3, dtype=dtype, device=backend.device)
    backend.kernels.output_head(part, bias, False, dense, backend.nonfinite_flag())
    backend.kernels.output_head(part, bias, False, wide[..., 1:19], backend.nonfinite_flag())
    assert torch.equal(wide[..., 1:19], dense)
    assert bool((wide[..., 0] == 3).all())
    assert bool((wide[..., 19:] == 3).all())


def test_zero_pixels_and_halo_edges_stay_zero(backend):
    x = torch.zeros(1, 1, 2, 3, 64, dtype=backend.dtype, device=backend.device)
    halo = Halo(torch.zeros_like(x[:, :, :1]), torch.zeros_like(x[:, :, :1]))
    _, conv, _, _ = some_layers(backend)
    padded, kept = backend.norm_silu_pad(x, torch.ones(64, device=x.device), None, halo, conv)
    assert not padded.tensor.any()
    assert not kept.any()


def test_a_refused_launch_says_why(backend):
    x = torch.zeros(1, 1, 3, 3, 12, dtype=backend.dtype, device=backend.device)
    with pytest.raises(DecodeError, match="12 channels"):
        backend.kernels.pad(x[0], None, silu=False, out=torch.empty_like(x[0]))
    misplaced = torch.zeros(65, dtype=backend.dtype, device=backend.device)[1:].view(1, 1, 8, 8)
    with pytest.raises(DecodeError, match="16 bytes"):
        backend.kernels.pad(misplaced, None, silu=False, out=torch.empty_like(misplaced))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_device_than_the_current_one(backend):
    inputs = some_layers(backend)
    expected = run_layers(backend, *inputs, new_video(backend, inputs[0]), backend.nonfinite_flag())
    other = backends.create("cuda", torch.device("cuda", 1), backend.dtype)
    inputs = some_layers(other)
    video = run_layers(other, *inputs, new_video(other, inputs[0]), other.nonfinite_flag())
    assert torch.cuda.current_device() == 0
    assert torch.equal(video.cpu(), expected.cpu())


def test_the_self_test_is_remembered(backend, tmp_path, monkeypatch):
    selftest.require(backend, tmp_path)
    records = list(tmp_path.glob("selftest-*.json"))
    assert len(records) == 1
    monkeypatch.setattr(selftest, "compare", lambda *arguments, **options: pytest.fail("ran again"))
    selftest.require(backend, tmp_path)
