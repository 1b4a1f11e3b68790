# SPDX-License-Identifier: Apache-2.0
"""FastVideo's Wan VAE whose ``decode`` runs through ``wan22_vae_decode`` where it can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from fastvideo.distributed import get_sp_group, model_parallel_is_initialized
from fastvideo.logger import init_logger
from fastvideo.models.vaes.wan22_host_frames import collect
from fastvideo.models.vaes.wanvae import AutoencoderKLWan as UpstreamAutoencoderKLWan

from wan22_vae_decode import CommunicationError, DecodeError, InputError, PeerError
from wan22_vae_decode.geometry import video_shape
from wan22_vae_decode.log import without_figures
from wan22_vae_decode.module_decoder import ModuleDecoder, Source

logger = init_logger(__name__)

UPSTREAM_PATH = "FastVideo"


class AutoencoderKLWan(UpstreamAutoencoderKLWan):
    """Upstream's VAE; with ``config.decode_kernel`` off, or absent, its ``decode`` is upstream's, bit for bit.

    With it on, Wan2.2 latents are decoded by ``wan22_vae_decode`` (over the sequence-parallel ranks with
    ``config.decode_kernel_parallel``). What that decoder cannot do goes to upstream's decode, on all ranks alike, with
    one log line that gives the reason.

    Raises:
        ValueError: the config's switches contradict each other.
    """

    def __init__(self, config: Any) -> None:
        check = getattr(config, "check_decode", None)
        if check is not None:
            check()
        super().__init__(config)
        self._prepared = ModuleDecoder()
        self._report = {"decode_path": "", "decode_reason": ""}
        self._reasons_given: set[str] = set()

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        """Denormalised latents [B, z, T, H, W] to the full video on every rank.

        Returns:
            [B, 3, 4T - 3, 16H, 16W] in [-1, 1], float32.

        Raises:
            CommunicationError: a rank failed in the middle of a parallel decode; every rank raises.
        """
        video = self._decode_to(z, "all")
        assert video is not None
        return video

    def decode_on_first_rank(self, z: torch.Tensor, *, is_writer: bool) -> torch.Tensor | None:
        """As ``decode``, but only where the pixels are wanted: None on every rank that is not the writer.

        The writer must be the first of its sequence-parallel group. All ranks call it.
        """
        return self._on_first_rank(z, is_writer, as_frames=False)

    def frames_on_first_rank(self, z: torch.Tensor, *, is_writer: bool) -> torch.Tensor | None:
        """As ``decode_on_first_rank``, for a file: the video in [0, 1] whose 255-fold, truncated, is the file's.

        The kernels quantise it themselves and hand it over pass by pass: it is then in steps of 1/255, in host memory,
        and never as a whole on the GPU. Upstream's decode leaves it where it computes it. The writer's choice between
        this method and the other holds for all ranks.
        """
        return self._on_first_rank(z, is_writer, as_frames=True)

    def decode_report(self) -> dict[str, str]:
        """``decode_path`` and ``decode_reason`` of the last decode on this rank, for the stage log."""
        return dict(self._report)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> AutoencoderKLWan:
        with self._prepared.following(self):
            return super()._apply(fn, recurse)

    # Routing

    def _on_first_rank(self, z: torch.Tensor, is_writer: bool, as_frames: bool) -> torch.Tensor | None:
        if self._tiles_over_ranks():
            video = self._decode_to(z, "all", as_frames)
        elif self._parallel_group() is not None:
            video = self._decode_to(z, 0, as_frames)
        else:
            video = self._decode_to(z, "all", as_frames) if is_writer else None
        return video if is_writer else None

    def _decode_to(self, z: torch.Tensor, to: int | Literal["all"], as_frames: bool = False) -> torch.Tensor | None:
        """Decodes by the kernels or else by upstream, to [-1, 1] or ``as_frames`` to [0, 1]; None on ranks that ``to``
        leaves out.
        """
        group = self._parallel_group()
        reason, source = self._survey(z, group)
        current = self._prepared.is_current(source)
        if group is not None:
            # All ranks take the same path, and prepare anew together if one of them has to.
            answers = _gathered((reason, current, as_frames), group)
            reason = _first_reason([theirs for theirs, _, _ in answers], group.rank_in_group)
            current = all(theirs for _, theirs, _ in answers)
            as_frames = answers[0][2]
        if reason is None:
            assert source is not None
            try:
                return self._decode_by_kernels(z, to, as_frames, source, current)
            except (InputError, PeerError) as error:
                reason = str(error)
            except (DecodeError, torch.OutOfMemoryError) as error:
                lost = isinstance(error, CommunicationError) or self._lost_peers(z)
                # Of no use any more, or in the way of upstream's decode, which needs the memory.
                self._prepared.drop()
                if lost:
                    raise
                reason = str(error)
        self._note_upstream(reason, group)
        if group is not None and to != "all" and group.rank_in_group != to:
            return None
        video = super().decode(z)
        return (video / 2 + 0.5).clamp(0, 1) if as_frames else video

    def _survey(self, z: torch.Tensor, group: Any) -> tuple[str | None, Source | None]:
        """The reason for upstream's decode as far as this rank can tell without preparing anything, or else what a
        decoder has to be made from.
        """
        config = self.config
        if not self._kernel_wanted():
            return "decode_kernel is off", None
        if not config.is_residual or config.patch_size != 2:
            return f"the kernels are for the Wan2.2 TI2V-5B VAE; this is another one (z_dim {config.z_dim})", None
        if config.use_light_vae:
            return "use_light_vae changes the rule for the first frame", None
        if not self.use_feature_cache:
            return "use_feature_cache=False decodes in tiles, which changes the pixels", None
        return self._prepared.survey(
            self,
            z,
            dtype=config.decode_dtype,
            backend=config.decode_backend,
            frames_per_pass=config.decode_frames_per_pass,
            group=group,
        )

    def _kernel_wanted(self) -> bool:
        return bool(getattr(self.config, "decode_kernel", False))

    def _tiles_over_ranks(self) -> bool:
        """True if upstream's decode is one that exchanges tiles, so that no rank may leave it out."""
        return not self.use_feature_cache and self.use_tiling and self.use_parallel_tiling

    def _parallel_group(self) -> Any:
        """The sequence-parallel group that decodes together, or None."""
        wanted = self._kernel_wanted() and getattr(self.config, "decode_kernel_parallel", False)
        if not wanted or not model_parallel_is_initialized():
            return None
        group = get_sp_group()
        return group if group.world_size > 1 else None

    def _decode_by_kernels(
        self, z: torch.Tensor, to: int | Literal["all"], as_frames: bool, source: Source, current: bool
    ) -> torch.Tensor | None:
        decoder, group = self._prepared.prepare(self, source, anew=not current), source.options["group"]
        latents = z.detach()
        if as_frames:
            batch, _, frames, rows, cols = latents.shape
            receives = group is None or to in ("all", group.rank_in_group)
            passes = decoder.stream(latents, torch.uint8, to=to, on_host=True)
            video = collect(passes, video_shape(batch, frames, rows, cols) if receives else (batch, 3, 0, rows, cols))
        else:
            video = decoder.decode(latents, to=to)
        parts = ["wan22_vae_decode", decoder.backend, str(decoder.dtype).removeprefix("torch.")]
        parts += [f"{group.world_size} ranks"] if group is not None else []
        parts += ["uint8 to the host"] if as_frames else []
        path = ", ".join(parts)
        if not current:
            logger.info("Decoding with %s.", path)
        self._report = {"decode_path": path, "decode_reason": "decode_kernel is on"}
        return video if video.shape[2] else None

    def _lost_peers(self, z: torch.Tensor) -> bool:
        """After a failed decode: whether it broke off in the middle, where the other ranks can only raise."""
        decoder = self._prepared.decoder
        return decoder is not None and decoder.why_not(z.detach()) is not None

    def _note_upstream(self, reason: str | None, group: Any) -> None:
        self._report = {"decode_path": UPSTREAM_PATH, "decode_reason": str(reason)}
        # Without its figures, since the free memory differs every time.
        kind = without_figures(str(reason))
        if not self._kernel_wanted() or kind in self._reasons_given:
            return
        self._reasons_given.add(kind)
        if group is None or group.is_first_rank:
            logger.warning("Decoding with FastVideo's own decode: %s", reason)


def _first_reason(reasons: list[str | None], rank: int) -> str | None:
    """One reason for all ranks: the first that any of them has."""
    for other, reason in enumerate(reasons):
        if reason is not None:
            return reason if reason == reasons[rank] else f"rank {other}: {reason}"
    return None


def _gathered(value: Any, group: Any) -> list[Any]:
    values: list[Any] = [None] * group.world_size
    dist.all_gather_object(values, value, group=group.cpu_group)
    return values
