"""Entry point of the command ``evoke``, which needs the extra ``cli``: ``evoke-core[cli]``."""

import sys


def main() -> int:
    """Run the command; without the extra, say so in one line and return 1."""
    try:
        from evoke_core.replay.command import cli
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("click", "rich", "matplotlib"):
            raise
        print(
            f"Error: {error.name} is missing; the command needs the extra:"
            " pip install 'evoke-core[cli]'",
            file=sys.stderr,
        )
        return 1
    cli.main(prog_name="evoke")
    return 0


if __name__ == "__main__":
    sys.exit(main())
