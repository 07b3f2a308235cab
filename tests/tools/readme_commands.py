"""Run the commands of README.md's section "The way of your data" as they stand there, and its Python example.

python tests/tools/readme_commands.py        # after `make demo` or `make demo DEMO=--quick`
"""

import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def blocks(text: str, language: str) -> list[str]:
    """Fenced blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def main() -> None:
    """Run them; the first that fails ends this with its exit code."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [shell] = [block for block in blocks(readme, "bash") if "source .venv/bin/activate" in block]
    [python] = blocks(readme, "python")
    for name, command in (("shell", ["bash", "-euxc", shell]), ("python", [".venv/bin/python", "-c", python])):
        start = time.monotonic()
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        if code:
            sys.exit(f"the {name} example of README.md ended with exit code {code}")
        sys.stderr.write(f"README.md, {name} example: {time.monotonic() - start:.0f} s\n")


if __name__ == "__main__":
    main()
