# SPDX-License-Identifier: Apache-2.0
"""``fastvideo-pan2``: FastVideo's own command line with PAN2 registered."""


def main() -> None:
    """Takes the arguments of ``fastvideo`` (``fastvideo-pan2 generate --config run.yaml``)."""
    import fastvideo.pipelines.pan2  # noqa: F401 (registers)
    from fastvideo.entrypoints.cli.main import main as fastvideo_main

    fastvideo_main()


if __name__ == "__main__":
    main()
