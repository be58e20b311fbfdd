"""Build the default image of docker sandboxes: `python -m sandboxes.images.build [--force]`.

It runs `docker build`, or `podman build`, on the Dockerfile. This can fail, for example if only a Debian mirror is
reachable (closed networks, CI). Then mmdebstrap, which needs root, installs the same packages, and the result is
imported. Both ways give the image the tag of the recipe, which is printed at the end.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from sandboxes.images import DOCKERFILE, HERE, packages, tag

SUITE = "bookworm"
# Used if it names the same distribution: it has signed Release files and this machine's own mirrors.
HOST_SOURCES = Path("/etc/apt/sources.list.d/debian.sources")


class BuildFailed(Exception):
    """The image could not be built. The text says why. If both `docker build` and mmdebstrap failed, the text has both
    reasons."""


def engine_command() -> list[str]:
    """Return the words with which every docker or podman command begins. Raise `BuildFailed` if neither docker nor
    podman is installed.

    Docker reads the address in DOCKER_HOST itself. Podman gets this address as an option.
    """
    if shutil.which("docker") is not None:
        return ["docker"]
    if shutil.which("podman") is None:
        raise BuildFailed("neither docker nor podman is installed")
    address = os.environ.get("DOCKER_HOST")
    return ["podman", "--url", address] if address else ["podman"]


def exists(image: str) -> bool:
    command = [*engine_command(), "image", "inspect", image]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _run(command: list[str], *, timeout: float) -> None:
    """Run a command. Raise BuildFailed with the end of its output if it fails."""
    print("+", " ".join(command), file=sys.stderr, flush=True)
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise BuildFailed(f"{command[0]} took longer than {timeout:.0f} s") from error
    if done.returncode != 0:
        raise BuildFailed(f"{' '.join(command[:2])} failed: {' '.join(done.stdout.split()[-60:])}")


def by_dockerfile(image: str) -> None:
    _run([*engine_command(), "build", "--tag", image, "--file", str(DOCKERFILE), str(HERE)], timeout=900)


def by_mmdebstrap(image: str) -> None:
    if os.getuid() != 0:
        raise BuildFailed("building the image without a registry (by mmdebstrap, from Debian packages) needs root")
    if shutil.which("mmdebstrap") is None:
        raise BuildFailed("building the image without a registry needs mmdebstrap (apt-get install mmdebstrap)")
    sources = [str(HOST_SOURCES)] if HOST_SOURCES.exists() and SUITE in HOST_SOURCES.read_text() else []
    with tempfile.TemporaryDirectory(prefix="polar-image-") as folder:
        archive = str(Path(folder) / "root.tar")
        include = f"--include={','.join(packages())}"
        _run(["mmdebstrap", "--variant=apt", include, SUITE, archive, *sources], timeout=900)
        _run([*engine_command(), "import", archive, image], timeout=300)


def build(*, force: bool = False) -> str:
    """Build the image unless it exists, and return its tag. Raise `BuildFailed` if it cannot be built."""
    image = tag()
    if exists(image) and not force:
        return image
    reasons = []
    for way in (by_dockerfile, by_mmdebstrap):
        try:
            way(image)
        except BuildFailed as error:
            reasons.append(str(error))
        else:
            return image
    raise BuildFailed("; ".join(reasons))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--force", action="store_true", help="build the image even if it exists")
    try:
        print(build(force=parser.parse_args().force))
    except BuildFailed as error:
        print(f"the image was not built: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
