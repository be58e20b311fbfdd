"""The Docker image, really built if there is a Docker engine. Marked `full`.

If no base image can be pulled, the sandbox image (Debian with Python) takes its place and pip comes from a wheel.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from sandboxes.choice import available

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]
ROOT = Path(__file__).resolve().parent.parent
TAG = "polar-image-test:latest"


def run(*command: str, **more: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **more)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    docker = next(item for item in available() if item.kind == "docker")
    if not docker.ok:
        pytest.skip(f"no Docker engine: {docker.why_not}. {docker.how_to_get}")
    context = tmp_path_factory.mktemp("context")
    shutil.copytree(
        ROOT,
        context,
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns(".venv", ".git", "*_cache", "__pycache__", "out"),
    )
    wheels = context / "wheelhouse"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    run(*pip, "download", "-c", "constraints.txt", "-d", str(wheels), ".[local,docker,postgres]", "pip", cwd=context)
    run(*pip, "download", "-d", str(wheels), "hatchling>=1.25", "setuptools", cwd=context)
    base = _base(context, wheels)
    offline = "--no-index --find-links wheelhouse --break-system-packages"
    run(
        "docker",
        "build",
        "-q",
        "-t",
        TAG,
        "--build-arg",
        f"BASE={base}",
        "--build-arg",
        f"PIP_ARGS={offline}",
        str(context),
    )
    return TAG


def _base(context: Path, wheels: Path) -> str:
    """The sandbox image with pip in it."""
    from sandboxes.images import tag

    (pip,) = wheels.glob("pip-*.whl")
    recipe = context / "Base"
    recipe.write_text(
        f"FROM {tag()}\nCOPY wheelhouse/{pip.name} /tmp/\n"
        f"RUN python3 /tmp/{pip.name}/pip install --no-index --break-system-packages /tmp/{pip.name}\n"
    )
    run("docker", "build", "-q", "-t", "polar-image-base:latest", "-f", str(recipe), str(context))
    return "polar-image-base:latest"


def test_the_image_serves(image: str) -> None:
    """The gateway of the image answers /readyz with the bundled policy, and refuses unknown keys."""
    assert run("docker", "run", "--rm", image, "--version").stdout.startswith("polar ")
    name = run("docker", "run", "-d", "--rm", "-p", "127.0.0.1:0:8399", image).stdout.strip()
    try:
        port = run("docker", "port", name, "8399").stdout.strip().rpartition(":")[2]
        base = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 240
        while True:
            try:
                with urllib.request.urlopen(base + "/readyz", timeout=30) as answer:
                    assert json.load(answer)["engine"]["model"] == "polar-tiny"
                break
            except OSError:  # it is not there yet
                assert time.monotonic() < deadline, run("docker", "logs", name).stderr
                time.sleep(0.5)
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 16}).encode()
        request = urllib.request.Request(base + "/v1/chat/completions", body, {"authorization": "Bearer unknown"})
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=60)
        assert refused.value.code == 401
        made = run("docker", "exec", name, "polar", "session", "new", "--json").stdout
        key = json.loads(made)["key"]
        request.add_header("authorization", f"Bearer {key}")
        with urllib.request.urlopen(request, timeout=240) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] > 0
    finally:
        subprocess.run(["docker", "rm", "-f", name], capture_output=True, check=False)
