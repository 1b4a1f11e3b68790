# SPDX-License-Identifier: Apache-2.0
"""diffusers' VAE with its decode run by this package: the unpatched result, and a fallback for all else."""

import copy
import functools
import gc
import io
import pickle
import runpy
import threading
import time
import types
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d
from diffusers.models.autoencoders.vae import DecoderOutput
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from wan22_vae_decode import Decoder, InputError, module_decoder
from wan22_vae_decode.integrations import diffusers as fast_decode

TORCH = {"backend": "torch", "dtype": "float64"}


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    # More would only wait for each other on tensors of this size.
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def vae(reference_vae):
    """A VAE to change, in float64, whose stock decode is exact to float64's rounding."""
    return copy.deepcopy(reference_vae)


def assert_same(actual, expected, atol=1e-9):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


# The same result


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("frames", [1, 4])
def test_video_is_the_unpatched_one(frames, batch, vae, reference_vae, latents, made):
    z = latents(frames, 3, 2, batch=batch)
    fast_decode.enable(vae, **TORCH)
    decoded = vae.decode(z)
    assert isinstance(decoded, DecoderOutput)
    assert_same(decoded.sample, reference_vae.decode(z).sample)
    (video,) = vae.decode(z, return_dict=False)
    assert torch.equal(video, decoded.sample)
    assert torch.equal(vae.decode(z, False)[0], video)
    assert len(made) == 1


def test_float32_video_is_the_unpatched_one(vae, latents, made):
    vae.float()
    z = latents(3, 3, 2).float()
    expected = vae.decode(z).sample
    fast_decode.enable(vae, backend="torch", frames_per_pass=2)
    video = vae.decode(z).sample
    assert video.dtype == torch.float32
    assert_same(video, expected, atol=2e-5)
    assert made[0].frames_per_pass == 2


def test_video_has_the_type_of_the_vae(vae, latents, made):
    vae.to(torch.bfloat16)
    z = latents(2, 3, 2).bfloat16()
    expected = vae.decode(z).sample
    fast_decode.enable(vae, backend="torch")
    video = vae.decode(z).sample
    assert video.dtype == expected.dtype == torch.bfloat16
    assert_same(video, expected, atol=0.1)
    assert made[0].dtype == torch.float32


def test_latents_of_another_type_give_the_type_of_the_vae(vae, latents, made):
    fast_decode.enable(vae.to(torch.bfloat16), backend="torch")
    video = vae.decode(latents(2, 3, 2).float()).sample
    assert video.dtype == vae.decode(latents(2, 3, 2).bfloat16()).sample.dtype == torch.bfloat16
    assert len(made) == 1


@pytest.mark.parametrize("return_dict", [True, False])
def test_forward_with_a_generator_is_the_unpatched_one(return_dict, vae, reference_vae, made):
    pixels = torch.randn(1, 3, 5, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    fast_decode.enable(vae, **TORCH)

    def forward(model):
        generator = torch.Generator().manual_seed(4)
        return model(pixels, sample_posterior=True, return_dict=return_dict, generator=generator)[0]

    assert_same(forward(vae), forward(reference_vae))
    assert len(made) == 1


def tiny_pipeline(kind, vae):
    """A pipeline of the TI2V-5B kind (which conditions on an image by its latents) on a VAE, in float32."""
    from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel

    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "text_dim": 16, "freq_dim": 16, "ffn_dim": 16}
    channels = vae.config.z_dim
    transformer = WanTransformer3DModel(in_channels=channels, out_channels=channels, num_layers=1, **sizes)
    parts = dict.fromkeys(("tokenizer", "text_encoder"))
    if kind is not WanPipeline:
        parts |= dict.fromkeys(("image_encoder", "image_processor"))
    scheduler = FlowMatchEulerDiscreteScheduler()
    pipe = kind(**parts, vae=vae, transformer=transformer.eval(), scheduler=scheduler, expand_timesteps=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize("name", ["WanPipeline", "WanImageToVideoPipeline"])
def test_pipelines_decode_through_it(name, vae, made):
    import diffusers

    pipe = tiny_pipeline(getattr(diffusers, name), vae.float())
    request = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 1, "guidance_scale": 1.0}
    request |= {"prompt_embeds": torch.randn(1, 8, 16), "negative_prompt_embeds": torch.zeros(1, 8, 16)}
    if name != "WanPipeline":
        request["image"] = torch.rand(1, 3, 32, 32)

    def frames():
        return pipe(**request, output_type="pt", generator=torch.Generator().manual_seed(0)).frames

    expected = frames()
    fast_decode.enable(pipe, backend="torch")
    assert_same(frames(), expected, atol=1e-5)
    assert len(made) == 1
    fast_decode.disable(pipe)
    assert torch.equal(frames(), expected)
    assert len(made) == 1


def test_disabled_again_it_is_the_stock_vae(vae, reference_vae, latents, made):
    z, names = latents(2, 3, 2), set(vae.__dict__)
    fast_decode.enable(vae, **TORCH)
    vae.decode(z)
    fast_decode.disable(vae)
    fast_decode.disable(vae)
    assert set(vae.__dict__) == names
    assert torch.equal(vae.decode(z).sample, reference_vae.decode(z).sample)
    assert len(made) == 1


def test_enabling_again_changes_the_options(vae, latents, made):
    z = latents(2, 3, 2)
    fast_decode.enable(vae, **TORCH)
    fast_decode.enable(vae, backend="torch", dtype="float32")
    vae.decode(z)
    assert [decoder.dtype for decoder in made] == [torch.float32]
    fast_decode.disable(vae)
    assert type(vae) is AutoencoderKLWan


@pytest.mark.parametrize("compiled", [True, False])
def test_decode_of_the_vae_itself_comes_back(compiled, vae, latents, made, lines):
    z, stock = latents(1, 1, 1), vae.decode
    own = torch.compile(stock, backend="eager") if compiled else lambda z, return_dict=True: (stock(z, False)[0] / 2,)
    vae.decode = own
    fast_decode.enable(vae, **TORCH)
    fast_decode.enable(vae, **TORCH)
    video = vae.decode(z, return_dict=False)[0]
    assert_same(video, stock(z, False)[0] / (1 if compiled else 2))
    assert len(made) == compiled
    assert lines == ([] if compiled else ["decoding with diffusers' own decode: this VAE has a decode of its own"])
    fast_decode.disable(vae)
    assert vae.decode is own


def test_decode_wrapped_afterwards_stays_and_calls_the_stock_one(vae, reference_vae, latents, made):
    z = latents(1, 1, 1)
    fast_decode.enable(vae, **TORCH)
    enabled = vae.decode
    vae.decode = wrapped = lambda z: enabled(z)
    vae.decode(z)
    assert len(made) == 1
    fast_decode.disable(vae)
    assert vae.decode is wrapped
    assert torch.equal(vae.decode(z).sample, reference_vae.decode(z).sample)
    fast_decode.enable(vae, **TORCH)
    vae.decode(z)
    assert len(made) == 2
    del vae.decode
    fast_decode.disable(vae)
    assert type(vae) is AutoencoderKLWan
    assert torch.equal(enabled(z).sample, reference_vae.decode(z).sample)


def test_decode_compiled_afterwards_keeps_the_compiler_out(vae, latents, made):
    z, stock = latents(1, 1, 1), vae.decode
    expected = stock(z, False)[0]
    graphs = []
    fast_decode.enable(vae, **TORCH)
    vae.decode = torch.compile(vae.decode, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    assert_same(vae.decode(z, return_dict=False)[0], expected)
    assert len(made) == 1
    assert not graphs


def test_compiled_vae_of_a_pipeline_is_enabled(vae, latents, made):
    pipe = types.SimpleNamespace(vae=torch.compile(vae, backend="eager"))
    fast_decode.enable(pipe, **TORCH)
    pipe.vae.decode(latents(1, 1, 1))
    assert len(made) == 1
    fast_decode.disable(pipe)
    assert type(vae) is AutoencoderKLWan
    pipe.vae = torch.nn.Linear(1, 1)
    with pytest.raises(InputError, match="not Linear"):
        fast_decode.enable(pipe)


# Flags


def test_slicing_decodes_one_video_at_a_time(vae, reference_vae, latents, monkeypatch):
    z = latents(2, 3, 2, batch=3)
    batches = []
    decode = Decoder.decode
    monkeypatch.setattr(Decoder, "decode", lambda self, z, *rest: batches.append(z.shape[0]) or decode(self, z, *rest))
    fast_decode.enable(vae, **TORCH)
    vae.enable_slicing()
    assert_same(vae.decode(z).sample, reference_vae.decode(z).sample)
    assert batches == [1, 1, 1]
    vae.disable_slicing()
    vae.decode(z)
    assert batches == [1, 1, 1, 3]


def test_tiles_are_diffusers_own(vae, reference_vae, latents, made, lines):
    z, stock = latents(2, 4, 6), copy.deepcopy(reference_vae)
    for model in (vae, stock):
        model.enable_tiling(64, 64, 48, 48)
    fast_decode.enable(vae, **TORCH)
    for _ in range(2):
        assert torch.equal(vae.decode(z).sample, stock.decode(z).sample)
    assert not made
    assert len(lines) == 1
    assert lines[0].startswith("decoding with diffusers' own decode: tiling is enabled, which changes the pixels")
    vae.decode(z[..., :4])
    assert len(made) == 1, "one tile holds these latents"


# Weights


CHANGES = {
    "load_state_dict": lambda vae, other: vae.load_state_dict(other.state_dict()),
    "load_state_dict, assigned": lambda vae, other: vae.load_state_dict(other.state_dict(), assign=True),
    "through .data": lambda vae, other: vae.decoder.conv_in.weight.data.mul_(1.2),
    "layer replaced": lambda vae, other: setattr(vae.decoder, "conv_in", other.decoder.conv_in),
    "rounded": lambda vae, other: vae.bfloat16().double(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_the_ones_that_decode(change, vae, latents, made):
    z, other = latents(2, 3, 2), copy.deepcopy(vae)
    for weight in other.parameters():
        weight.data.mul_(0.9)
    fast_decode.enable(vae, **TORCH)
    before = vae.decode(z).sample
    CHANGES[change](vae, other)
    after = vae.decode(z).sample
    assert (after - before).abs().max() > 1e-4
    assert_same(after, AutoencoderKLWan.decode(vae, z).sample)
    vae.decode(z)
    assert len(made) == 2


def test_a_vae_that_moves_lets_its_prepared_weights_go(vae, latents, made):
    fast_decode.enable(vae, **TORCH)
    vae.decode(latents(1, 1, 1))
    prepared = vae._fast_decode.prepared
    assert prepared.decoder is made[0]
    vae.to("cpu")
    assert prepared.decoder is made[0]
    vae.to(torch.float32)
    assert prepared.decoder is None


def saved(vae):
    file = io.BytesIO()
    torch.save(vae, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda vae: pickle.loads(pickle.dumps(vae, 0)), saved])
def test_copies_decode_by_weights_of_their_own(copied, vae, latents, made):
    z = latents(2, 3, 2)
    fast_decode.enable(vae, **TORCH)
    before = vae.decode(z).sample
    other = copied(vae)
    other.decoder.conv_in.weight.data.mul_(1.2)
    assert_same(other.decode(z).sample, AutoencoderKLWan.decode(other, z).sample)
    assert torch.equal(vae.decode(z).sample, before)
    assert len(made) == 2
    other.float()
    assert vae._fast_decode.prepared.decoder is not None


def test_shallow_copy_decodes_by_its_own_layers(vae, latents, made):
    z = latents(2, 3, 2)
    fast_decode.enable(vae, **TORCH)
    before = vae.decode(z).sample
    other = copy.copy(vae)
    other._modules = dict(vae._modules)
    other.decoder = copy.deepcopy(vae.decoder)
    other.decoder.conv_in.weight.data.mul_(1.2)
    assert_same(other.decode(z).sample, AutoencoderKLWan.decode(other, z).sample)
    assert torch.equal(vae.decode(z).sample, before)
    fast_decode.disable(other)
    assert type(other) is AutoencoderKLWan is not type(vae)


def test_vae_goes_with_its_last_reference(vae, latents):
    fast_decode.enable(vae, **TORCH)
    vae.decode(latents(1, 1, 1))
    other, there = copy.deepcopy(vae), gc.isenabled()
    gone = weakref.ref(other)
    gc.disable()
    del other
    assert gone() is None
    if there:
        gc.enable()


def test_threads_get_the_decoder_of_their_own_source(vae, latents, monkeypatch):
    """Two threads with two types prepare in turns, however they interleave."""
    prepared, z = module_decoder.ModuleDecoder(), latents(1, 1, 1)
    both, alone = threading.Barrier(2), threading.Lock()
    from_state_dict = Decoder.from_state_dict

    def slow(*arguments, **options):
        assert alone.acquire(blocking=False), "two threads prepare at a time"
        decoder = from_state_dict(*arguments, **options)
        time.sleep(0.05)
        alone.release()
        return decoder

    monkeypatch.setattr(module_decoder.Decoder, "from_state_dict", slow)

    def prepares(dtype):
        _, source = prepared.survey(vae, z, backend="torch", dtype=dtype)
        got = set()
        for _ in range(3):
            both.wait(timeout=10)
            got.add(prepared.prepare(vae, source).dtype)
        return got

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(prepares, ("float32", "float64"))) == [{torch.float32}, {torch.float64}]


def test_saved_vae_is_the_stock_one(vae, tmp_path):
    fast_decode.enable(vae, **TORCH)
    vae.save_pretrained(tmp_path)
    assert type(AutoencoderKLWan.from_pretrained(tmp_path)) is AutoencoderKLWan
    assert "decode" not in AutoencoderKLWan.from_pretrained(tmp_path).__dict__


def test_offload_hook_brings_the_weights_first(vae, latents, made):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    brought = []

    class Hook(accelerate.hooks.ModelHook):
        def pre_forward(self, module, *arguments, **options):
            brought.append(len(made))
            return arguments, options

    fast_decode.enable(vae, **TORCH)
    vae._hf_hook = Hook()
    vae.decode(latents(1, 1, 1))
    assert brought[0] == 0


def test_offloaded_vae_decodes_through_it(vae, reference_vae, latents, made, lines):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    z = latents(2, 3, 2)
    fast_decode.enable(vae, **TORCH)
    accelerate.cpu_offload_with_hook(vae, torch.device("cpu"))
    accelerate.hooks.add_hook_to_module(vae.decoder.conv_in, accelerate.hooks.AlignDevicesHook())
    for _ in range(2):
        assert_same(vae.decode(z).sample, reference_vae.decode(z).sample)
    assert (len(made), lines) == (1, [])


# Falling back


def test_gradients_are_diffusers_own(vae, reference_vae, latents, made, lines):
    z = latents(1, 2, 2).requires_grad_()
    fast_decode.enable(vae, **TORCH)
    (ours,) = torch.autograd.grad(vae.decode(z).sample.square().sum(), z)
    (theirs,) = torch.autograd.grad(reference_vae.decode(z).sample.square().sum(), z)
    assert torch.equal(ours, theirs)
    assert lines == [
        "decoding with diffusers' own decode: gradients may be needed; decode under torch.no_grad() for the fast path"
    ]
    assert not made


@pytest.mark.skipif(torch.cuda.is_available(), reason="the reason is a CPU's")
@pytest.mark.parametrize("backend", ["auto", "cuda"])
def test_without_a_gpu_the_decode_is_diffusers_own(backend, vae, reference_vae, latents, lines):
    z = latents(2, 3, 2)
    fast_decode.enable(vae, backend=backend)
    for _ in range(2):
        assert torch.equal(vae.decode(z).sample, reference_vae.decode(z).sample)
    assert lines == ["decoding with diffusers' own decode: the CUDA kernels need a CUDA device, not cpu"]


def test_lack_of_memory_is_diffusers_own_decode(vae, reference_vae, latents, lines, monkeypatch):
    from wan22_vae_decode.backends.torch import TorchBackend

    def fails(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    fast_decode.enable(vae, **TORCH, frames_per_pass=1)
    monkeypatch.setattr(TorchBackend, "output_head", fails)
    z = latents(2, 3, 2)
    assert torch.equal(vae.decode(z).sample, reference_vae.decode(z).sample)
    assert vae._fast_decode.prepared.decoder is None
    assert "a pass of 1 latent frames needs" in lines[0]


def test_weights_that_are_not_finite_are_diffusers_own(vae, latents, lines):
    z = latents(2, 3, 2)
    fast_decode.enable(vae, **TORCH)
    vae.decode(z)
    with torch.no_grad():
        vae.decoder.conv_out.bias[4] = torch.nan
    for _ in range(2):
        assert vae.decode(z).sample.isnan().any()
    assert lines == [
        "decoding with diffusers' own decode: the weights hold NaN or values beyond float32, in decoder.conv_out.bias; "
        "load or copy them again"
    ]
    assert vae._fast_decode.prepared.decoder is None


def test_wrong_latents_raise_what_diffusers_raises(vae, reference_vae, lines):
    z = torch.zeros(1, 7, 2, 3, 2, dtype=torch.float64)
    fast_decode.enable(vae, **TORCH)
    with pytest.raises(RuntimeError) as theirs:
        reference_vae.decode(z)
    with pytest.raises(RuntimeError, match=r"channels") as ours:
        vae.decode(z)
    assert str(ours.value) == str(theirs.value)
    assert lines == ["decoding with diffusers' own decode: latents have 7 channels, but this decoder takes 4"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"backend": "cudnn"}, "backend must be 'auto' or one of 'cuda', 'torch', not 'cudnn'"),
        ({"dtype": "int8"}, "dtype must be 'auto' or one of float16"),
        ({"frames_per_pass": 0}, "frames_per_pass must be 'auto' or from 1 to 61, not 0"),
    ],
)
def test_options_without_meaning_are_refused_at_once(options, sentence, vae):
    with pytest.raises(InputError, match=sentence):
        fast_decode.enable(vae, **options)
    assert type(vae) is AutoencoderKLWan


def test_other_vaes_are_refused(vae):
    wan21 = AutoencoderKLWan(base_dim=4, z_dim=16, num_res_blocks=1)
    with pytest.raises(InputError, match=r"only the VAE of Wan2\.2 TI2V-5B .* another one \(z_dim 16\)"):
        fast_decode.enable(wan21)
    for call in (fast_decode.enable, fast_decode.disable):
        with pytest.raises(InputError, match="an AutoencoderKLWan or a pipeline with one, not Linear"):
            call(torch.nn.Linear(1, 1))


# Code that the weights do not tell


class Subclass(AutoencoderKLWan):
    def decode(self, z, return_dict=True):
        return super().decode(z * 2, return_dict=return_dict)


def replaced_forward(module):
    module.forward = functools.partial(
        lambda forward, *arguments, **options: forward(*arguments, **options) * 2, module.forward
    )


def hooked(module, **options):
    module.register_forward_hook(lambda _, arguments, output: output * 2, **options)


def compiled_and_hooked(vae):
    vae.decoder = torch.compile(vae.decoder, backend="eager")
    hooked(vae.decoder)


def dropping(vae):
    vae.decoder.mid_block.resnets[0].dropout.p = 0.5
    vae.train()


OTHER_CODE = {
    "subclass": (lambda vae: setattr(vae, "__class__", Subclass), "this VAE has a decode of its own"),
    "_decode": (lambda vae: setattr(vae, "_decode", lambda z: DecoderOutput(z)), "this VAE has a decode of its own"),
    "hook": (lambda vae: hooked(vae.post_quant_conv), "post_quant_conv has forward hooks"),
    "compiled": (compiled_and_hooked, "decoder has forward hooks"),
    "pre-hook": (
        lambda vae: vae.decoder.conv_out.register_forward_pre_hook(
            lambda _, arguments: (arguments[0] * 2, *arguments[1:])
        ),
        "decoder.conv_out has forward hooks",
    ),
    "forward": (lambda vae: replaced_forward(vae.decoder.conv_in), "decoder.conv_in has a forward of its own"),
    "layer": (
        lambda vae: setattr(vae.decoder, "nonlinearity", torch.nn.GELU()),
        "decoder.nonlinearity is not the layer that diffusers makes from the VAE's configuration",
    ),
    "attribute": (
        lambda vae: setattr(vae.decoder.norm_out, "scale", 3.0),
        "decoder.norm_out is not the layer that diffusers makes from the VAE's configuration",
    ),
    "configuration": (
        lambda vae: vae.register_to_config(patch_size=None),
        "its configuration has become another VAE's",
    ),
    "dropout": (dropping, "decoder.mid_block.resnets.0.dropout drops values, since it is in training mode"),
}


# A VAE is of its class from the beginning.
@pytest.mark.parametrize(
    ("change", "when"),
    [
        (change, when)
        for change in OTHER_CODE
        for when in ("before", "after")
        if (change, when) not in (("subclass", "after"), ("configuration", "before"))
    ],
)
def test_other_code_is_diffusers_own(change, when, vae, latents, made, lines):
    z = latents(2, 3, 2)
    (apply, reason), stock = OTHER_CODE[change], copy.deepcopy(vae)
    if when == "after":
        fast_decode.enable(vae, **TORCH)
    for model in (vae, stock):
        apply(model)
    if when == "before":
        fast_decode.enable(vae, **TORCH)
    videos = []
    for model in (vae, stock):
        torch.manual_seed(0)
        videos.append(model.decode(z).sample)
    assert torch.equal(*videos)
    assert not made
    assert lines == [f"decoding with diffusers' own decode: {reason}"]


@pytest.mark.parametrize(
    ("owner", "name", "reason"),
    [
        (AutoencoderKLWan, "decode", "this VAE has a decode of its own"),
        (AutoencoderKLWan, "_decode", "this VAE has a decode of its own"),
        (WanCausalConv3d, "forward", "post_quant_conv has a forward of its own"),
    ],
    ids=["decode", "_decode", "forward"],
)
@pytest.mark.parametrize("when", ["before import", "before", "after"])
def test_patched_classes_are_diffusers_own(
    when, owner, name, reason, vae, reference_vae, latents, made, lines, monkeypatch
):
    z, function = latents(1, 2, 2), getattr(owner, name)

    @functools.wraps(function)
    def patched(self, x, *arguments, **options):
        return function(self, 1.5 * x, *arguments, **options)

    if when == "after":
        fast_decode.enable(vae, **TORCH)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, patched)
        if when == "before":
            fast_decode.enable(vae, **TORCH)
        elif when == "before import":
            runpy.run_path(fast_decode.__file__)["enable"](vae, **TORCH)
        assert torch.equal(vae.decode(z).sample, reference_vae.decode(z).sample)
    assert not made
    assert lines == [f"decoding with diffusers' own decode: {reason}"]
    assert_same(vae.decode(z).sample, reference_vae.decode(z).sample)
    assert len(made) == 1, "the class is diffusers' again"


def test_decode_of_the_class_that_torch_compiled_is_the_same_code(vae, latents, lines, monkeypatch):
    monkeypatch.setattr(AutoencoderKLWan, "decode", torch.compile(AutoencoderKLWan.decode, backend="eager"))
    fast_decode.enable(vae, **TORCH)
    vae.decode(latents(1, 1, 1))
    assert not lines


@pytest.mark.parametrize("register", [register_module_forward_hook, register_module_forward_pre_hook])
def test_hooks_of_all_modules_are_called_by_diffusers_own(register, vae, latents, made, lines):
    z, called = latents(1, 1, 1), []
    fast_decode.enable(vae, **TORCH)
    handle = register(lambda module, *_: called.append(module))
    try:
        vae.decode(z)
    finally:
        handle.remove()
    assert vae.decoder in called
    assert not made
    assert lines == ["decoding with diffusers' own decode: every module has forward hooks"]
    vae.decode(z)
    assert len(made) == 1


@pytest.mark.parametrize("hook", ["AlignDevicesHook", "LayerwiseCastingHook"])
def test_hooks_of_accelerate_that_move_weights_change_nothing(hook, vae, latents, made, lines):
    def new_forward(module, *arguments, **options):
        return module._old_forward(*arguments, **options)

    new_forward.__module__ = "accelerate.hooks"
    fast_decode.enable(vae, **TORCH)
    layer = vae.decoder.conv_in
    layer._hf_hook, layer._old_forward = type(hook, (), {"__module__": "accelerate.hooks"})(), layer.forward
    layer.forward = functools.update_wrapper(functools.partial(new_forward, layer), layer.forward)
    vae.decode(latents(1, 1, 1))
    assert (len(made), len(lines)) == ((1, 0) if hook == "AlignDevicesHook" else (0, 1))
    # As accelerate removes it.
    layer.forward = layer._old_forward
    del layer._hf_hook, layer._old_forward
    vae.decode(latents(1, 1, 1))
    assert len(made) == 1


def test_compiled_layers_are_the_same_code(vae, reference_vae, latents, made):
    z = latents(1, 2, 2)
    vae.decoder = torch.compile(vae.decoder, backend="eager")
    fast_decode.enable(vae, **TORCH)
    assert_same(vae.decode(z).sample, reference_vae.decode(z).sample)
    assert len(made) == 1
