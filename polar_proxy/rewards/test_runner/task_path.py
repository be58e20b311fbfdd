"""Adds the task's own folders to the import path, because pytest may be in one; those in the workspace are left out."""

from __future__ import annotations

import os
import sys

_given = [os.path.realpath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
sys.path += [path for path in _given if not (path + "/").startswith(os.path.realpath(os.getcwd()) + "/")]
