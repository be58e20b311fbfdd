"""Record `make demo` and `polar show` as an animated SVG without scripts and fonts from elsewhere.

    python scripts/demo_svg.py [docs/images/demo.svg]

The commands really run, in a new Polar home that uses the caller's installed harnesses.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 92
MAX_LINES = 62
"""Lines of each command's output that are shown."""
MAX_BYTES = 60_000
SECONDS_PER_LINE = 0.15

FORMAT = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img">
<title>polar run and polar show in a terminal</title>
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, monospace; font-size: {char_height}px;
  line-height: {line_height}px; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
.line {{ animation: appear 1ms both; animation-delay: calc(var(--n) * SECONDSs); }}
@keyframes appear {{ from {{ opacity: 0 }} to {{ opacity: 1 }} }}
@media (prefers-reduced-motion: reduce) {{ .line {{ animation: none }} }}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath></defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def run(command: list[str], env: dict[str, str]) -> str:
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return done.stdout


def record(polar: str, home: str) -> str:
    """Run the demo and return its SVG."""
    cache = os.environ.get("POLAR_HARNESSES") or str(
        Path(os.environ.get("POLAR_HOME", "~/.polar")).expanduser() / "harnesses"
    )
    env = {**os.environ, "POLAR_HOME": home, "POLAR_HARNESSES": cache, "COLUMNS": str(WIDTH)}
    env.pop("NO_COLOR", None)
    coloured = {**env, "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    shown = run([polar, "run", "swe-task", "--samples", "4"], coloured)
    rows = json.loads(run([polar, "sql", "SELECT rollout_id FROM v_rollouts ORDER BY reward DESC", "--json"], env))
    best = rows[0]["rollout_id"]
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    for command, output in (
        ("polar run swe-task --samples 4", shown.replace(home, "~/.polar")),
        (f"polar show {best}", run([polar, "show", best], coloured).replace(home, "~/.polar")),
    ):
        console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
        lines = output.splitlines()
        console.print(Text.from_ansi("\n".join(lines[:MAX_LINES])))
        console.print(Text("..." if len(lines) > MAX_LINES else ""))
    svg = console.export_svg(
        title="Polar", code_format=FORMAT.replace("SECONDS", str(SECONDS_PER_LINE)), unique_id="polar"
    )
    return animate(svg)


def animate(svg: str) -> str:
    """Replace the clip path of each line of text by the line's number, from which CSS computes when it appears."""
    svg = re.sub(r' clip-path="url\(#polar-line-(\d+)\)"', r' style="--n:\1" data-line=""', svg)
    return re.sub(r'class="(polar-r\d+)"([^>]*) data-line=""', r'class="\1 line"\2', svg)


def main() -> None:
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images" / "demo.svg"
    polar = str(Path(sys.executable).parent / "polar")
    with tempfile.TemporaryDirectory() as home:
        svg = record(polar, home)
    if len(svg) > MAX_BYTES:
        sys.exit(f"the recording has {len(svg)} bytes, more than {MAX_BYTES}")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(svg)
    print(f"{target}: {len(svg)} bytes")


if __name__ == "__main__":
    main()
