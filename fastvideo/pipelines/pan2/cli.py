# SPDX-License-Identifier: Apache-2.0
"""``fastvideo-pan2``: FastVideo's own command line with PAN2 registered, its refusals as one line."""

import sys


def main() -> None:
    """Takes the arguments of ``fastvideo`` (``generate --config run.yaml``); exits with 2 on bad input."""
    import fastvideo.pipelines.pan2  # noqa: F401 (registers)
    from fastvideo.entrypoints.cli.main import main as fastvideo_main

    try:
        fastvideo_main()
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
