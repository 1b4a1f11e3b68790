# SPDX-License-Identifier: Apache-2.0
"""FastVideo's Wan VAE whose ``decode`` runs through ``wan22_vae_decode`` where it can."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from fastvideo.distributed import get_sp_group, model_parallel_is_initialized
from fastvideo.logger import init_logger
from fastvideo.models.vaes.wanvae import AutoencoderKLWan as UpstreamAutoencoderKLWan

from wan22_vae_decode import (
    CommunicationError,
    DecodeError,
    Decoder,
    InputError,
    PeerError,
    why_not,
)
from wan22_vae_decode.signature import signature

logger = init_logger(__name__)

UPSTREAM_PATH = "FastVideo"


class _Prepared:
    """The decoder of one module, and what it was made from; copies of the module start without."""

    def __init__(self) -> None:
        self.drop()

    def drop(self) -> None:
        self.decoder: Decoder | None = None
        self.source: tuple[tuple, dict[str, Any]] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Prepared:
        return _Prepared()

    def __reduce__(self) -> tuple[Callable[[], _Prepared], tuple[()]]:
        return _Prepared, ()


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
        self._prepared = _Prepared()
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
        if self._tiles_over_ranks():
            video = self._decode_to(z, "all")
        elif self._parallel_group() is not None:
            video = self._decode_to(z, 0)
        else:
            video = self.decode(z) if is_writer else None
        return video if is_writer else None

    def decode_report(self) -> dict[str, str]:
        """``decode_path`` and ``decode_reason`` of the last decode on this rank, for the stage log."""
        return dict(self._report)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> AutoencoderKLWan:
        # A module that leaves the device must not leave its prepared weights behind there.
        before = self._placement()
        result = super()._apply(fn, recurse)
        if self._placement() != before:
            self._prepared.drop()
        return result

    def _placement(self) -> tuple[torch.device, torch.dtype]:
        weight = self.post_quant_conv.weight
        return weight.device, weight.dtype

    # Routing

    def _decode_to(self, z: torch.Tensor, to: int | Literal["all"]) -> torch.Tensor | None:
        """Decodes by the kernels or else by upstream; None on ranks that ``to`` leaves out."""
        group = self._parallel_group()
        reason, source = self._survey(z, group)
        current = self._prepared.source == source
        if group is not None:
            # All ranks take the same path, and prepare anew together if one of them has to.
            answers = _gathered((reason, current), group)
            reason = _first_reason([theirs for theirs, _ in answers], group.rank_in_group)
            current = all(theirs for _, theirs in answers)
        if reason is None:
            assert source is not None
            try:
                return self._decode_by_kernels(z, to, source, current)
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
        return super().decode(z)

    def _survey(self, z: torch.Tensor, group: Any) -> tuple[str | None, tuple[tuple, dict[str, Any]] | None]:
        """The reason for upstream's decode as far as this rank can tell without preparing anything, or else what a
        decoder has to be made from: the weights as they are now, and the options.
        """
        try:
            reason = self._why_not(z)
            contents = signature(self._weights()) if reason is None else ()
        except torch.OutOfMemoryError as error:
            return str(error), None
        except RuntimeError as error:  # a rank that raised here alone would leave the others waiting
            return f"the weights cannot be examined ({error})", None
        if reason is not None:
            return reason, None
        config = self.config
        options = {
            "device": z.device,
            "dtype": config.decode_dtype,
            "backend": self._backend(),
            "frames_per_pass": config.decode_frames_per_pass,
            "group": group,
        }
        return None, (contents, options)

    def _why_not(self, z: torch.Tensor) -> str | None:
        config = self.config
        if not self._kernel_wanted():
            return "decode_kernel is off"
        if not config.is_residual or config.patch_size != 2:
            return f"the kernels are for the Wan2.2 TI2V-5B VAE; this is another one (z_dim {config.z_dim})"
        if config.use_light_vae:
            return "use_light_vae changes the rule for the first frame"
        if not self.use_feature_cache:
            return "use_feature_cache=False decodes in tiles, which changes the pixels"
        device, _ = self._placement()
        if z.device != device:
            return f"latents are on {z.device}, but the VAE is on {device}; move one of them"
        if torch.is_grad_enabled() and (z.requires_grad or self._decoder_learns()):
            return "gradients may be needed; decode under torch.no_grad() for the fast path"
        return why_not(self._weights(), device=z.device, dtype=config.decode_dtype, backend=self._backend())

    def _kernel_wanted(self) -> bool:
        return bool(getattr(self.config, "decode_kernel", False))

    def _weights(self) -> dict[str, torch.Tensor]:
        """The state dict under its own names, also where a part has been wrapped by torch.compile."""
        return {name.replace("_orig_mod.", ""): tensor for name, tensor in self.state_dict().items()}

    def _decoder_learns(self) -> bool:
        return any(
            parameter.requires_grad
            for name, parameter in self.named_parameters()
            if name.startswith(("post_quant_conv.", "decoder."))
        )

    def _backend(self) -> str:
        # Reference ops would be no faster than upstream: only somebody who names them wants them.
        return "cuda" if self.config.decode_backend == "auto" else self.config.decode_backend

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
        self, z: torch.Tensor, to: int | Literal["all"], source: tuple[tuple, dict[str, Any]], current: bool
    ) -> torch.Tensor | None:
        prepared = self._prepared
        if not current:
            prepared.drop()  # before the new weights need the memory
            prepared.decoder = Decoder.from_state_dict(self._weights(), **source[1])
            prepared.source = source
        decoder, group = prepared.decoder, source[1]["group"]
        assert decoder is not None
        video = decoder.decode(z.detach(), to=to)
        ranks = [] if group is None else [f"{group.world_size} ranks"]
        path = ", ".join(["wan22_vae_decode", decoder.backend, str(decoder.dtype).removeprefix("torch."), *ranks])
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
        kind = re.sub(r"[\d.]+", "", str(reason))
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
