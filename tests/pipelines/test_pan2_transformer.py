# SPDX-License-Identifier: Apache-2.0
"""PAN2's transformer against a float64 reference, its order conventions, its loading and its sequence parallelism."""

import importlib.util
import json
import shutil
import types
from pathlib import Path

import diffusers
import fastvideo.pipelines.pan2  # noqa: F401  (on a CPU: the device, the attention backend)
import pytest
import torch
from fastvideo.configs.models.dits.pan2 import PAN2Config
from fastvideo.distributed import cleanup_dist_env_and_memory, maybe_init_distributed_environment_and_model_parallel
from fastvideo.forward_context import set_forward_context
from fastvideo.models.dits.pan2 import ActivatedProjection, PAN2Transformer3DModel, patchify, rotary_table
from fastvideo.models.dits.pan2_checkpoint import check_checkpoint, expected_shapes, summarise_names
from fastvideo.models.dits.pan2_ops import TORCH_OPS, PAN2Ops
from fastvideo.models.registry import ModelRegistry
from safetensors.torch import save_file

HERE = Path(__file__).parent

TINY = {
    "patch_size": [1, 2, 2],
    "in_channels": 13,
    "out_channels": 6,
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "num_layers": 2,
    "num_refiner_layers": 2,
    "mlp_ratio": 3.0,
    "context_mlp_ratio": 2.0,
    "refiner_mlp_ratio": 1.5,
    "text_embed_dim": 24,
    "rope_axes_dim": [4, 8, 4],
    "rope_theta": 256.0,
    "rope_temporal_scale": 16 / 24,
}


@pytest.fixture(scope="module")
def reference() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("pan2_float64", HERE / "reference" / "pan2_float64.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", autouse=True)
def single_rank(tmp_path_factory: pytest.TempPathFactory):
    rendezvous = tmp_path_factory.mktemp("rendezvous") / "file"
    maybe_init_distributed_environment_and_model_parallel(1, 1, f"file://{rendezvous}")
    yield
    cleanup_dist_env_and_memory()


def make_config(**changes) -> PAN2Config:
    config = PAN2Config()
    config.update_model_arch({**TINY, **changes})
    return config


def make_model(seed: int = 0, **changes) -> PAN2Transformer3DModel:
    """A model whose every tensor matters: no zero gates, no unit gains."""
    model = PAN2Transformer3DModel(make_config(**changes), hf_config={})
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        tensor.normal_(std=0.3 if tensor.dim() == 1 else tensor[0].numel() ** -0.5, generator=generator)
        if "norm" in name and tensor.dim() == 1 and name.endswith("weight"):
            tensor.add_(1)
    return model


def make_inputs(batch: int = 2, grid: tuple[int, int, int] = (3, 6, 10), tokens: int = 7, seed: int = 1) -> dict:
    generator = torch.Generator().manual_seed(seed)
    return {
        "hidden_states": torch.randn(batch, TINY["in_channels"], *grid, generator=generator),
        "encoder_hidden_states": torch.randn(batch, tokens, TINY["text_embed_dim"], generator=generator),
        "timestep": torch.tensor([37.5, 912.0, 500.0])[:batch],
    }


def run(model: torch.nn.Module, **inputs) -> torch.Tensor:
    with torch.no_grad(), set_forward_context(current_timestep=0, attn_metadata=None):
        return model(**inputs)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


# Against the reference


@pytest.mark.parametrize("grid", [(3, 6, 10), (1, 2, 2), (2, 4, 2)])
def test_forward_matches_the_reference(reference, grid):
    model, inputs = make_model(), make_inputs(grid=grid)
    expected = reference.transformer(
        model.state_dict(), TINY, inputs["hidden_states"], inputs["encoder_hidden_states"], inputs["timestep"]
    )
    assert relative_error(run(model, **inputs), expected) < 5e-6


def test_temporal_patches_match_the_reference(reference):
    model, inputs = make_model(patch_size=[2, 2, 1]), make_inputs(grid=(4, 4, 3))
    expected = reference.transformer(
        model.state_dict(),
        {**TINY, "patch_size": [2, 2, 1]},
        inputs["hidden_states"],
        inputs["encoder_hidden_states"],
        inputs["timestep"],
    )
    assert relative_error(run(model, **inputs), expected) < 5e-6


def test_bf16_stays_within_its_rounding_of_the_reference(reference):
    model, inputs = make_model().bfloat16(), make_inputs()
    rounded = {name: value.bfloat16().float() for name, value in inputs.items() if name != "timestep"}
    expected = reference.transformer(
        model.state_dict(), TINY, rounded["hidden_states"], rounded["encoder_hidden_states"], inputs["timestep"]
    )
    actual = run(model, **inputs)
    assert actual.dtype == torch.bfloat16
    assert 1e-4 < relative_error(actual, expected) < 2e-2


def test_joint_block_matches_the_reference(reference):
    model, grid = make_model(), (3, 3, 5)
    video, text, time = torch.randn(2, 45, 64), torch.randn(2, 7, 64), torch.randn(2, 64)
    rope = rotary_table(grid, (4, 8, 4), 256.0, 16 / 24, "cpu")
    for index, block in enumerate(model.transformer_blocks):
        weights = reference.Weights(model.state_dict(), f"transformer_blocks.{index}.")
        expected = reference.joint_block(
            weights, video.double(), text.double(), time.double(), reference.rope_angles(grid, TINY), TINY
        )
        actual = run(
            block,
            video=video,
            text=text,
            activated_time=torch.nn.functional.silu(time),
            rope=rope,
            video_tokens=45,
        )
        for stream, wanted in zip(actual, expected, strict=True):
            assert relative_error(stream, wanted) < 2e-6


def test_refiner_block_matches_the_reference(reference):
    model, text = make_model(), torch.randn(2, 7, 64)
    for index, block in enumerate(model.context_refiner):
        weights = reference.Weights(model.state_dict(), f"context_refiner.{index}.")
        expected = reference.refiner_block(weights, text.double(), TINY)
        assert relative_error(run(block, text=text), expected) < 2e-6


def test_forward_matches_diffusers():
    if not hasattr(diffusers, "PAN2Transformer3DModel"):
        pytest.skip(f"diffusers {diffusers.__version__} has no PAN2Transformer3DModel to compare with")
    model, inputs = make_model(), make_inputs()
    theirs = diffusers.PAN2Transformer3DModel(**TINY).eval()
    theirs.load_state_dict(model.state_dict())
    with torch.no_grad():
        expected = theirs(**inputs, return_dict=False)[0]
    assert relative_error(run(model, **inputs), expected.double()) < 5e-6


# Batches


def test_each_sample_follows_its_own_timestep_and_text():
    model, inputs = make_model(), make_inputs(batch=3)
    together = run(model, **inputs)
    for index in range(3):
        alone = run(model, **{name: value[index : index + 1] for name, value in inputs.items()})
        torch.testing.assert_close(together[index : index + 1], alone, rtol=1e-4, atol=1e-5)
    same_time = run(model, **{**inputs, "timestep": torch.tensor([912.0])})
    assert relative_error(same_time[0], together[0].double()) > 1e-2
    torch.testing.assert_close(same_time[1], together[1])


def test_one_text_and_one_timestep_serve_the_whole_batch():
    model, inputs = make_model(), make_inputs()
    inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"][:1]
    repeated = run(
        model,
        hidden_states=inputs["hidden_states"],
        encoder_hidden_states=[inputs["encoder_hidden_states"].repeat(2, 1, 1)],
        timestep=torch.tensor([500.0, 500.0]),
    )
    shared = run(model, **{**inputs, "timestep": torch.tensor(500.0)})
    torch.testing.assert_close(shared, repeated)


# Order conventions of the checkpoint


def test_swiglu_takes_the_value_from_the_first_half():
    projection = ActivatedProjection(1, 1, True, make_config(), "")
    projection.proj.weight.data = torch.tensor([[3.0], [0.5]])
    expected = 3.0 * torch.nn.functional.silu(torch.tensor(0.5))
    torch.testing.assert_close(projection(torch.ones(1, 1, 1)), expected.view(1, 1, 1))


def test_output_modulation_has_the_scale_first():
    model, inputs = make_model(), make_inputs()
    state, width = model.state_dict(), 64
    state["norm_out.linear.weight"].zero_()
    state["norm_out.linear.bias"].copy_(torch.cat((torch.full((width,), -1.0), torch.zeros(width))))
    # scale -1 cancels the stream, shift 0 adds nothing: the output is the projection's bias.
    bias = state["proj_out.bias"].view(6, 1, 2, 2)
    expected = bias.repeat(1, 3, 3, 5).expand(2, -1, -1, -1, -1)
    torch.testing.assert_close(run(model, **inputs), expected)


@pytest.mark.parametrize(("parts", "keeps_video"), [((2, 5), True), ((0, 3), False), ((1, 4), False)])
def test_block_modulation_has_the_gate_third(parts, keeps_video):
    block = make_model().transformer_blocks[0]
    state, width = block.state_dict(), 64
    for vector in parts:
        rows = slice(vector * width, (vector + 1) * width)
        state["norm1.linear.weight"][rows].zero_()
        state["norm1.linear.bias"][rows].zero_()
        state["scale_shift_table_context"][rows].zero_()
    video, text = torch.randn(1, 8, width), torch.randn(1, 3, width)
    rope = rotary_table((2, 2, 2), (4, 8, 4), 256.0, 1.0, "cpu")
    new_video, new_text = run(
        block, video=video, text=text, activated_time=torch.randn(1, width), rope=rope, video_tokens=8
    )
    assert torch.equal(new_video, video) == keeps_video
    assert torch.equal(new_text, text) == keeps_video


def test_patches_are_in_time_height_width_order():
    latents = torch.arange(2 * 2 * 4 * 4.0).view(1, 2, 2, 4, 4)
    patches = patchify(latents, (1, 2, 2))
    assert patches.shape == (1, 8, 8)
    # Token 5 is frame 1, row 0, column 1.
    assert torch.equal(patches[0, 5], latents[0, :, 1, 0:2, 2:4].flatten())


# RoPE


def test_rope_gives_each_axis_its_own_angles():
    table = rotary_table((2, 3, 4), (4, 8, 6), 256.0, 1.0, "cpu")
    assert table.cos.shape == table.sin.shape == (24, 9)
    assert table.cos.dtype == table.sin.dtype == torch.float32
    angle = torch.atan2(table.sin, table.cos).view(2, 3, 4, 9).double()
    for t, h, w in ((1, 0, 0), (0, 2, 0), (0, 0, 3), (1, 2, 3)):
        expected = [t, t / 16] + [h / 256 ** (i / 4) for i in range(4)] + [w / 256 ** (i / 3) for i in range(3)]
        torch.testing.assert_close(angle[t, h, w], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-6)


def test_temporal_scale_touches_the_frame_position_only():
    grid, axes = (3, 2, 2), (4, 8, 6)
    plain, scaled = rotary_table(grid, axes, 256.0, 1.0, "cpu"), rotary_table(grid, axes, 256.0, 0.5, "cpu")
    for one, half in zip(plain, scaled, strict=True):
        one, half = one.view(*grid, -1), half.view(*grid, -1)
        torch.testing.assert_close(half[2, ..., :2], one[1, ..., :2])
        assert torch.equal(half[..., 2:], one[..., 2:])
        assert not torch.equal(half[1:, ..., :2], one[1:, ..., :2])


def test_text_has_no_position():
    model, inputs = make_model(), make_inputs(batch=1)
    text = inputs["encoder_hidden_states"]
    shuffled = {**inputs, "encoder_hidden_states": text[:, torch.randperm(text.shape[1])]}
    torch.testing.assert_close(run(model, **shuffled), run(model, **inputs), rtol=1e-4, atol=1e-5)


# Exchangeable elementwise groups


def test_ops_are_replaced_in_one_model_only():
    ours, other, inputs = make_model(), make_model(), make_inputs()
    calls: list[str] = []

    def counted(name):
        def call(*arguments):
            calls.append(name)
            return getattr(TORCH_OPS, name)(*arguments)

        return call

    names = ("norm_modulate", "qk_norm_rope", "gate_residual", "gate_residual_norm_modulate")
    ours.set_ops(PAN2Ops(**{name: counted(name) for name in names}))
    expected = run(other, **inputs)
    assert calls == []
    assert torch.equal(run(ours, **inputs), expected)
    # Two streams in each of two blocks, two refiner blocks, one output norm.
    assert {name: calls.count(name) for name in names} == {
        "norm_modulate": 2 * 2 + 1,
        "qk_norm_rope": 2 * 2 + 2,
        "gate_residual": 2 * 2,
        "gate_residual_norm_modulate": 2 * 2,
    }


# Bad input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_states": torch.zeros(2, 12, 3, 6, 10)}, r"\[batch, 13, frames, height, width\]"),
        ({"hidden_states": torch.zeros(2, 13, 6, 10)}, r"\[batch, 13, frames, height, width\]"),
        ({"hidden_states": torch.zeros(2, 13, 3, 5, 10)}, r"\(3, 5, 10\) must be multiples of \(1, 2, 2\)"),
        ({"hidden_states": torch.zeros(2, 13, 0, 6, 10)}, r"\(0, 6, 10\) must be multiples"),
        ({"encoder_hidden_states": torch.zeros(2, 7, 23)}, r"\[batch, tokens, 24\]"),
        ({"timestep": torch.zeros(3)}, "one for each of the 2 samples"),
        ({"timestep": torch.zeros(2, 1)}, "one for each of the 2 samples"),
    ],
)
def test_wrong_shapes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        run(make_model(), **{**make_inputs(), **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_axes_dim": [4, 8, 8]}, "add up to attention_head_dim 16"),
        ({"rope_axes_dim": [5, 7, 4]}, "must be even numbers"),
        ({"rope_axes_dim": [8, 8]}, "three parts"),
        ({"in_channels": 12}, r"2 \* out_channels \+ 1"),
        ({"patch_size": [2, 2]}, r"three parts \(t, h, w\)"),
    ],
)
def test_contradictory_configs_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        make_config(**change)


@pytest.mark.parametrize("ranks", [0, 3, 8])
def test_ranks_must_share_the_heads(ranks):
    with pytest.raises(ValueError, match=f"4 attention heads cannot be shared by {ranks} sequence-parallel ranks"):
        make_config().check_sequence_parallel(ranks)
    for possible in (1, 2, 4):
        make_config().check_sequence_parallel(possible)


# Weights


def test_defaults_are_the_released_model():
    shapes = expected_shapes(PAN2Config())
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 29_201_996_992
    assert len(shapes) == 1418
    assert shapes["x_embedder.weight"] == (4096, 97, 1, 2, 2)
    assert shapes["transformer_blocks.43.scale_shift_table_context"] == (6 * 4096,)
    assert shapes["transformer_blocks.0.ff.net.0.proj.weight"] == (8 * 4096, 4096)
    assert shapes["context_refiner.3.ff.net.0.proj.weight"] == (2 * 4 * 4096, 4096)
    assert "context_refiner.0.attn.to_q.bias" not in shapes
    assert shapes["proj_out.weight"] == (192, 4096)


def test_state_dict_has_the_checkpoint_names():
    linears = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "ff.net.0.proj", "ff.net.2"]
    text_linears = ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"]
    text_linears += ["ff_context.net.0.proj", "ff_context.net.2"]
    gains = ["attn.norm_q", "attn.norm_k", "attn.norm_added_q", "attn.norm_added_k"]
    names = {"context_type_embedding", "context_embedder.0.weight"}
    biased = ["x_embedder", "time_embedder.linear_1", "time_embedder.linear_2", "context_embedder.1"]
    biased += ["norm_out.linear", "proj_out"]
    for index in range(2):
        block, refiner = f"transformer_blocks.{index}", f"context_refiner.{index}"
        biased += [f"{block}.{name}" for name in ["norm1.linear", *linears, *text_linears]]
        names |= {f"{block}.{name}.weight" for name in gains} | {f"{block}.scale_shift_table_context"}
        names |= {f"{refiner}.{name}.weight" for name in [*linears, "attn.norm_q", "attn.norm_k", "norm1", "norm2"]}
    names |= {f"{name}.{kind}" for name in biased for kind in ("weight", "bias")}
    assert set(make_model().state_dict()) == names


def write_checkpoint(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """In two files with an index, as large checkpoints are."""
    folder.mkdir(exist_ok=True)
    names = sorted(weights)
    index = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"diffusion_pytorch_model-0000{number}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, folder / file)
        index |= dict.fromkeys(part, file)
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps({"_class_name": "PAN2Transformer3DModel", **TINY}))


def test_weights_survive_the_way_through_fastvideos_loader(tmp_path):
    from fastvideo.models.loader.fsdp_load import maybe_load_fsdp_model

    model, inputs = make_model(), make_inputs()
    write_checkpoint(tmp_path, model.state_dict())
    config = make_config()
    check_checkpoint(tmp_path, config)
    cls, _ = ModelRegistry.resolve_model_cls("PAN2Transformer3DModel")
    assert cls is PAN2Transformer3DModel
    loaded = maybe_load_fsdp_model(
        model_cls=cls,
        init_params={"config": config, "hf_config": {}},
        weight_dir_list=sorted(str(file) for file in tmp_path.glob("*.safetensors")),
        device=torch.device("cpu"),
        hsdp_replicate_dim=1,
        hsdp_shard_dim=1,
        default_dtype=torch.float32,
        param_dtype=torch.float32,
        reduce_dtype=torch.float32,
        training_mode=False,
    )
    assert {name: tuple(t.shape) for name, t in loaded.state_dict().items()} == expected_shapes(config)
    assert torch.equal(run(loaded, **inputs), run(model, **inputs))


def test_all_differences_are_in_one_error(tmp_path):
    weights = make_model().state_dict()
    for index in range(2):
        weights.pop(f"transformer_blocks.{index}.attn.to_q.bias")
        weights[f"transformer_blocks.{index}.attn.to_qkv.bias"] = torch.zeros(3)
        weights[f"transformer_blocks.{index}.scale_shift_table_context"] = torch.zeros(6, 64)
    weights.pop("context_type_embedding")
    write_checkpoint(tmp_path, weights)
    with pytest.raises(ValueError, match="does not hold the PAN2 transformer") as error:
        check_checkpoint(tmp_path, make_config())
    message = str(error.value)
    assert "missing: context_type_embedding, transformer_blocks.[0-1].attn.to_q.bias" in message
    assert "unexpected: transformer_blocks.[0-1].attn.to_qkv.bias" in message
    assert "misshapen: transformer_blocks.[0-1].scale_shift_table_context is [6, 64] instead of [384]" in message
    assert "stored twice" not in message


def test_broken_files_are_refused_by_name(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no safetensors files"):
        check_checkpoint(tmp_path, make_config())
    write_checkpoint(tmp_path, make_model().state_dict())
    first, second = sorted(tmp_path.glob("*.safetensors"))
    shutil.copy(first, tmp_path / "copy.safetensors")
    with pytest.raises(ValueError, match="stored twice"):
        check_checkpoint(tmp_path, make_config())
    (tmp_path / "copy.safetensors").unlink()
    first.write_bytes(first.read_bytes()[:-16])
    with pytest.raises(ValueError, match=f"{first.name} is damaged or cut short"):
        check_checkpoint(tmp_path, make_config())
    second.unlink()
    with pytest.raises(FileNotFoundError, match=f"lacks files that its index names: {second.name}"):
        check_checkpoint(tmp_path, make_config())


def test_names_of_blocks_are_summarised():
    names = ["a.b", *(f"blocks.{index}.net.0.w" for index in (0, 1, 2, 5)), "blocks.7.net.2.w"]
    assert summarise_names(reversed(names)) == ["a.b", "blocks.7.net.2.w", "blocks.[0-2,5].net.0.w"]


# Sequence parallelism


@pytest.fixture(scope="module")
def outputs_of_ranks(run_python, scripts, tmp_path_factory):
    """Outputs of one rank, and a function that gives those of every rank of several."""
    model, folder = make_model(), tmp_path_factory.mktemp("ranks")
    # 45, 8 and 1 video tokens: padded for both numbers of ranks, even, and fewer than ranks.
    cases = [make_inputs(), make_inputs(batch=1, grid=(2, 4, 4), tokens=3), make_inputs(batch=1, grid=(1, 2, 2))]
    torch.save({"config": TINY, "weights": model.state_dict(), "cases": cases}, folder / "cases.pt")
    run_python(scripts / "transformer_ranks.py", folder / "cases.pt", folder / "out", "2", "4", timeout=240)
    alone = [run(model, **case) for case in cases]
    return alone, lambda ranks: [torch.load(folder / f"out.{ranks}.{rank}") for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_returns_the_output_of_one(outputs_of_ranks, ranks):
    alone, of_ranks = outputs_of_ranks
    for outputs in of_ranks(ranks):
        for actual, expected in zip(outputs, alone, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
