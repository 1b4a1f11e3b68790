# SPDX-License-Identifier: Apache-2.0
"""What the tests of both packages share."""

import pytest


@pytest.fixture
def made(monkeypatch) -> list:
    """Every decoder that a VAE module makes."""
    from wan22_vae_decode import Decoder, module_decoder

    decoders: list[Decoder] = []

    class Counted(Decoder):
        @classmethod
        def from_state_dict(cls, *arguments, **options):
            decoders.append(super().from_state_dict(*arguments, **options))
            return decoders[-1]

    monkeypatch.setattr(module_decoder, "Decoder", Counted)
    return decoders
