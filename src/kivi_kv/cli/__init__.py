"""The `kivi` command."""

import sys


def main() -> None:
    """Run the command line; without its dependencies, say what to install."""
    try:
        from .app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"kivi needs {error.name}: pip install 'kivi-kv[cli]'")
    app()
