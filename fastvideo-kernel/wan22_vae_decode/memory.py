# SPDX-License-Identifier: Apache-2.0
"""How many bytes a pass needs, and the largest pass that fits.

The peak of a pass is

    history + max over the steps of (what the step reads + what it writes + what lives on beside it + its workspace)

where history is every causal conv's last two inputs, and the largest layer's once more while old and new change places.
The steps are those of ``graph``, in its order; each backend says what its conv inputs and workspaces take. Weights,
latents and the video are not part of a pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from wan22_vae_decode.backends.base import Backend, OpShape
from wan22_vae_decode.geometry import CONTEXT_FRAMES, RESNETS, Architecture, UpBlockShape
from wan22_vae_decode.layers import UPSAMPLE_HALO_ROWS

MAX_FRAMES = 61
"""Latent frames that a pass carries at most, over all ranks."""

DEFAULT_FRAMES = 4
"""Latent frames per GPU that fill it even at the latents' resolution."""

DEFAULT_SLAB = 2
"""Latent frames per GPU of a slab: enough to fill it from level 2 on, few enough to keep the largest tensors small."""


@dataclass(frozen=True)
class Plan:
    """How a clip is cut: latent frames of a pass, and of a slab of it (see ``Graph.tail``)."""

    frames: int
    slab: int


@dataclass(frozen=True)
class Extent:
    """What one rank holds of a video: batch, its rows (a band, or all), all rows of the image, columns, in latents."""

    batch: int
    rows: int
    image_rows: int
    cols: int
    world: int = 1

    @property
    def split(self) -> bool:
        return self.world > 1


def plans(frames: int, world: int = 1, every: bool = False) -> list[Plan]:
    """From passes of ``frames`` latent frames down to one, halving (or one by one, ``every``), each with slabs of the
    usual size down to one.
    """
    sizes = range(frames, 0, -1) if every else _halvings(frames)
    return [Plan(n, slab) for n in sizes for slab in _halvings(min(n, DEFAULT_SLAB * world))]


def pass_bytes(ops: Backend, arch: Architecture, extent: Extent, plan: Plan) -> int:
    """The peak bytes of a pass of ``plan``, beside weights, latents and video."""
    layers = list(_history_layers(ops, arch, extent))
    return sum(layers) + max(layers) + max(live for _, live in steps(ops, arch, extent, plan))


def prefix_frames(plan: Plan, world: int) -> int:
    """The most latent frames that a rank computes the prefix of, in a pass of ``plan`` or a shorter one at the end."""
    if world == 1:
        return plan.frames
    # Fewer than two frames a rank are not split, and context comes before either kind.
    return max(-(-plan.frames // world), min(plan.frames, 2 * world - 1)) + CONTEXT_FRAMES


def readable(nbytes: int) -> str:
    """Bytes in the unit in which people think of them."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


def steps(ops: Backend, arch: Architecture, extent: Extent, plan: Plan) -> Iterator[tuple[str, int]]:
    """Every step of a pass after the first and the bytes that live during it, history apart."""
    yield from _prefix_steps(ops, arch, extent, plan)
    yield from _tail_steps(ops, arch, extent, plan)


def _prefix_steps(ops: Backend, arch: Architecture, extent: Extent, plan: Plan) -> Iterator[tuple[str, int]]:
    frames = prefix_frames(plan, extent.world)
    c, item = arch.inner, ops.dtype.itemsize
    shape = OpShape(extent.batch, frames, extent.image_rows, extent.cols, arch.latent, c, row_halo=False)
    stream = _activation(ops, shape, c)
    latents = _activation(ops, shape, arch.latent)
    yield "conv_in", 2 * latents + ops.input_bytes(shape) + stream + ops.workspace_bytes("causal_conv3d", shape)
    inner = replace(shape, c_in=c)
    yield from _resnet_steps(ops, "mid_block.resnets.0", inner, 0, False, 0, copies=extent.split)
    yield "attention", 2 * stream + ops.workspace_bytes("attention", inner)
    if extent.split:
        # The prefix transpose holds the frames, the send and receive buffers, and the band.
        band = extent.batch * plan.frames * extent.rows * extent.cols * c * item
        yield "prefix transpose", 2 * stream + 2 * band


def _tail_steps(ops: Backend, arch: Architecture, extent: Extent, plan: Plan) -> Iterator[tuple[str, int]]:
    shape = OpShape(extent.batch, plan.frames, extent.rows, extent.cols, arch.inner, arch.inner, row_halo=extent.split)
    yield from _resnet_steps(ops, "mid_block.resnets.1", shape, 0, extent.split, 0)
    # The prefix's output, which the pass holds to its end.
    beside = _activation(ops, shape, arch.inner)
    for index, block in enumerate(arch.up_blocks[:2]):
        yield from _up_block_steps(ops, index, block, shape, extent.split, beside)
        shape = _enlarged(shape, block)
    if plan.slab < plan.frames:
        whole = _activation(ops, shape, shape.c_in)
        yield "slabs", beside + 2 * whole
        shape = replace(shape, frames=shape.frames // plan.frames * plan.slab)
        # During the first slab the others wait.
        beside += whole - _activation(ops, shape, shape.c_in)
    for index, block in enumerate(arch.up_blocks[2:], start=2):
        yield from _up_block_steps(ops, index, block, shape, extent.split, beside)
        shape = _enlarged(shape, block)
    stream = _activation(ops, shape, arch.base)
    head = replace(shape, c_in=arch.base, c_out=arch.base)
    padded = ops.input_bytes(head)
    yield "head: norm", beside + stream + padded + ops.workspace_bytes("norm_silu_pad", head) + _halo(ops, head)
    yield "head: conv_out", beside + stream + padded + ops.workspace_bytes("output_head", head)


def _up_block_steps(
    ops: Backend, index: int, block: UpBlockShape, shape: OpShape, split: bool, beside: int
) -> Iterator[tuple[str, int]]:
    name = f"up_blocks.{index}"
    block_input = _activation(ops, shape, block.c_in) if block.doubles_space else 0
    for number in range(RESNETS):
        first = number == 0
        resnet = replace(shape, c_in=block.c_in if first else block.c_out, c_out=block.c_out)
        # The first resnet's input is the block's input, which counts once.
        same = first and block.c_in == block.c_out and block.doubles_space
        held = beside + (0 if first else block_input)
        yield from _resnet_steps(
            ops,
            f"{name}.resnets.{number}",
            resnet,
            block.level,
            split,
            held,
            preserve=same,
            keep_input=first and block.doubles_space,
        )
    if not block.doubles_space:
        return
    shape = replace(shape, c_in=block.c_out, c_out=block.c_out)
    if block.doubles_time:
        x = _activation(ops, shape, block.c_out)
        time = replace(shape, row_halo=False)
        padded = ops.input_bytes(time)
        yield f"{name}.time_double: pad", beside + block_input + 4 * x + padded
        work = ops.workspace_bytes("time_double", replace(time, c_out=2 * block.c_out))
        yield f"{name}.time_double", beside + block_input + 2 * x + padded + work
        shape = replace(shape, frames=2 * shape.frames)
    shape = replace(shape, upsample_method=ops.upsample_method(block.level, block.c_out, block.c_out))
    x = _activation(ops, shape, block.c_out)
    live = beside + block_input + 5 * x + ops.workspace_bytes("upsample_conv2x", shape)
    yield f"{name}.upsample", live + UPSAMPLE_HALO_ROWS[shape.upsample_method] * _halo(ops, shape)


def _resnet_steps(
    ops: Backend,
    name: str,
    shape: OpShape,
    level: int,
    split: bool,
    beside: int,
    preserve: bool = False,
    keep_input: bool = False,
    copies: bool = False,
) -> Iterator[tuple[str, int]]:
    """``preserve``: the residual must not be overwritten. ``keep_input``: somebody reads the input later. ``copies``: a
    window of frames is pruned after every conv, by copying when a batch has several items.
    """
    conv1 = replace(shape, winograd=ops.winograd_form(level, shape.c_in, shape.c_out, split))
    form2 = ops.winograd_form(level, shape.c_out, shape.c_out, split)
    conv2 = replace(shape, c_in=shape.c_out, winograd=form2)
    x = _activation(ops, shape, shape.c_in)
    y = _activation(ops, shape, shape.c_out)
    padded1, padded2 = ops.input_bytes(conv1), ops.input_bytes(conv2)
    work1, work2 = (
        ops.workspace_bytes("winograd_conv3d" if conv.winograd else "causal_conv3d", conv) for conv in (conv1, conv2)
    )
    # What a conv input that refers to x keeps alive: x itself and the rows received for it.
    held1 = x if ops.input_holds_x(conv1) else 0
    held2 = y if ops.input_holds_x(conv2) else 0
    work1 += _halo(ops, conv1) // 2 if held1 else 0
    work2 += _halo(ops, conv2) // 2 if held2 else 0
    extra = y if copies else 0
    yield f"{name}.norm1", beside + x + padded1 + ops.workspace_bytes("norm_silu_pad", conv1) + _halo(ops, conv1)
    if shape.c_in == shape.c_out:
        skip, held1 = x, 0
    else:
        yield f"{name}.conv_shortcut", beside + x + padded1 + y
        skip, held1 = (y + x, 0) if keep_input else (y, held1)
    yield f"{name}.conv1", beside + skip + held1 + padded1 + y + work1 + extra
    norm2 = ops.workspace_bytes("norm_silu_pad", conv2) + _halo(ops, conv2)
    yield f"{name}.norm2", beside + skip + y + padded2 + norm2 + extra
    yield f"{name}.conv2", beside + skip + held2 + padded2 + (y if preserve else 0) + work2 + extra


def _history_layers(ops: Backend, arch: Architecture, extent: Extent) -> Iterator[int]:
    """Bytes of each causal conv's history."""

    def conv(level: int, channels: int, halo: bool) -> int:
        rows, cols = extent.rows << level, extent.cols << level
        return ops.history_bytes(OpShape(extent.batch, 0, rows, cols, channels, channels, row_halo=halo))

    if not extent.split:
        yield conv(0, arch.latent, False)
        yield from [conv(0, arch.inner, False)] * 2
    yield from [conv(0, arch.inner, extent.split)] * 2
    for block in arch.up_blocks:
        yield conv(block.level, block.c_in, extent.split)
        yield from [conv(block.level, block.c_out, extent.split)] * (2 * RESNETS - 1)
        if block.doubles_time:
            yield conv(block.level, block.c_out, False)
    yield conv(arch.up_blocks[-1].level, arch.base, extent.split)


def _enlarged(shape: OpShape, block: UpBlockShape) -> OpShape:
    """The shape that an up block leaves."""
    space, time = 2 if block.doubles_space else 1, 2 if block.doubles_time else 1
    return replace(
        shape, frames=shape.frames * time, rows=shape.rows * space, cols=shape.cols * space, c_in=block.c_out
    )


def _activation(ops: Backend, shape: OpShape, channels: int) -> int:
    return shape.batch * shape.frames * shape.rows * shape.cols * channels * ops.dtype.itemsize


def _halo(ops: Backend, shape: OpShape) -> int:
    """Two rows to send and two received."""
    rows = 4 * shape.batch * shape.frames * shape.cols * shape.c_in * ops.dtype.itemsize
    return rows if shape.row_halo else 0


def _halvings(count: int) -> Iterator[int]:
    while count >= 1:
        yield count
        count //= 2
