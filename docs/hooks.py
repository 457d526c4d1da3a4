"""What `make docs` adds to the pages: the command line's reference, as typer writes it."""

import subprocess
import sys
from typing import Any


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    if page.file.src_uri != "reference/command-line.md":
        return markdown
    command = [sys.executable, "-m", "typer", "gnnplan.cli", "utils", "docs", "--name", "gnnplan"]
    written = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return markdown + written.partition("\n")[2]  # the page has a title
