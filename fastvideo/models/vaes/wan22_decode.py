# SPDX-License-Identifier: Apache-2.0
"""FastVideo's Wan VAE whose ``decode`` runs through ``wan22_vae_decode`` where it can."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from fastvideo.distributed import get_sp_group, model_parallel_is_initialized
from fastvideo.logger import init_logger
from fastvideo.models.vaes.wanvae import AutoencoderKLWan as UpstreamAutoencoderKLWan

from wan22_vae_decode import CommunicationError, DecodeError, Decoder, why_not
from wan22_vae_decode.signature import signature

logger = init_logger(__name__)

UPSTREAM_PATH = "FastVideo"


@dataclass
class _Prepared:
    """A decoder and the weights' signature that it was made from."""

    decoder: Decoder
    signature: tuple


class _Cache:
    """Holds the prepared decoder of one module; copies of the module start without one."""

    def __init__(self) -> None:
        self.prepared: _Prepared | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Cache:
        return _Cache()

    def __reduce__(self) -> tuple[Callable[[], _Cache], tuple[()]]:
        return _Cache, ()


class AutoencoderKLWan(UpstreamAutoencoderKLWan):
    """Upstream's VAE; with ``config.decode_kernel`` off, or absent, its ``decode`` is upstream's, bit for bit.

    With it on, Wan2.2 latents are decoded by ``wan22_vae_decode`` (over the sequence-parallel ranks with
    ``config.decode_kernel_parallel``). What that decoder cannot do goes to upstream's decode, on all ranks alike, with
    one log line that gives the reason.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        check = getattr(config, "check_decode", None)
        if check is not None:
            check()
        self._cache = _Cache()
        self._report = {"decode_path": "", "decode_reason": ""}
        self._reasons_given: set[str] = set()

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        """Denormalised latents [B, z, T, H, W] to the full video on every rank.

        Returns:
            [B, 3, 4T - 3, 16H, 16W] in [-1, 1], float32.
        """
        return self._decode_to(z, "all")

    def decode_on_first_rank(self, z: torch.Tensor, *, is_writer: bool) -> torch.Tensor | None:
        """As ``decode``, but only where the pixels are wanted: None on every rank that is not the writer.

        The writer must be the first of its sequence-parallel group. All ranks call it.
        """
        if self._parallel_group() is None:
            return self.decode(z) if is_writer else None
        video = self._decode_to(z, 0)
        return video if is_writer else None

    def decode_report(self) -> dict[str, str]:
        """``decode_path`` and ``decode_reason`` of the last decode on this rank, for the stage log."""
        return dict(self._report)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> AutoencoderKLWan:
        # A module that leaves the device must not leave its prepared weights behind there.
        before = self._placement()
        result = super()._apply(fn, recurse)
        if self._placement() != before:
            self._cache.prepared = None
        return result

    def _placement(self) -> tuple[torch.device, torch.dtype]:
        weight = self.post_quant_conv.weight
        return weight.device, weight.dtype

    # Routing

    def _decode_to(self, z: torch.Tensor, to: int | Literal["all"]) -> torch.Tensor | None:
        """Decodes by the kernels or else by upstream; None on ranks that ``to`` leaves out."""
        group = self._parallel_group()
        reason = self._why_not(z)
        if group is not None:
            reason = _first_reason(reason, group)
        if reason is None:
            try:
                decoder = self._decoder(z.device, group)
                video = decoder.decode(z.detach(), to=to)
                self._report = {
                    "decode_path": f"wan22_vae_decode, {decoder.backend}, {str(decoder.dtype).removeprefix('torch.')}",
                    "decode_reason": "decode_kernel is on",
                }
                return video if video.shape[2] else None
            except CommunicationError:
                raise
            except (DecodeError, torch.OutOfMemoryError) as error:
                reason = str(error)
        self._report = {"decode_path": UPSTREAM_PATH, "decode_reason": reason}
        if self._kernel_wanted() and reason not in self._reasons_given:
            self._reasons_given.add(reason)
            logger.warning("Decoding with FastVideo's own decode: %s", reason)
        if group is not None and to != "all" and group.rank_in_group != to:
            return None
        return super().decode(z)

    def _kernel_wanted(self) -> bool:
        return bool(getattr(self.config, "decode_kernel", False))

    def _why_not(self, z: torch.Tensor) -> str | None:
        """Why this decode is upstream's, as far as this rank can tell without preparing anything."""
        config = self.config
        if not self._kernel_wanted():
            return "decode_kernel is off"
        if not getattr(config, "is_residual", False) or config.patch_size != 2:
            return f"the kernels are for the Wan2.2 TI2V-5B VAE; this is another one (z_dim {config.z_dim})"
        if config.use_light_vae:
            return "use_light_vae changes the rule for the first frame"
        if not self.use_feature_cache:
            return "use_feature_cache=False decodes in tiles, which changes the pixels"
        if torch.is_grad_enabled() and (z.requires_grad or self.post_quant_conv.weight.requires_grad):
            return "gradients may be needed; decode under torch.no_grad() for the fast path"
        if config.decode_backend == "auto":
            # Reference ops would be no faster than upstream: only somebody who names them wants them.
            return why_not(self.state_dict(), device=z.device, dtype=config.decode_dtype, backend="cuda")
        return None

    def _parallel_group(self) -> Any:
        """The sequence-parallel group that decodes together, or None."""
        wanted = self._kernel_wanted() and getattr(self.config, "decode_kernel_parallel", False)
        if not wanted or not model_parallel_is_initialized():
            return None
        group = get_sp_group()
        return group if group.world_size > 1 else None

    def _decoder(self, device: torch.device, group: Any) -> Decoder:
        """The decoder of the weights as they are now.

        The ranks of a group compare: all of them prepare anew if one of them has to.
        """
        state_dict = self.state_dict()
        now = signature(state_dict)
        prepared = self._cache.prepared
        current = prepared is not None and prepared.signature == now and prepared.decoder.device == device
        if group is not None:
            current = all(_gathered(current, group))
        if prepared is None or not current:
            self._cache.prepared = prepared = None  # before the new weights need the memory
            config = self.config
            decoder = Decoder.from_state_dict(
                state_dict,
                device=device,
                dtype=config.decode_dtype,
                backend="cuda" if config.decode_backend == "auto" else config.decode_backend,
                frames_per_pass=config.decode_frames_per_pass,
                group=group,
            )
            self._cache.prepared = prepared = _Prepared(decoder, now)
        return prepared.decoder


def _first_reason(reason: str | None, group: Any) -> str | None:
    """One reason for all ranks: the first that any of them has."""
    for rank, other in enumerate(_gathered(reason, group)):
        if other is not None:
            return other if rank == group.rank_in_group or other == reason else f"rank {rank}: {other}"
    return None


def _gathered(value: Any, group: Any) -> list[Any]:
    values: list[Any] = [None] * group.world_size
    dist.all_gather_object(values, value, group=group.cpu_group)
    return values
