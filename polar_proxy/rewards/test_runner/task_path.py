"""Adds the folders of the task's PYTHONPATH to the import path, because pytest may be in one of them.

Folders in the workspace are left out: the agent could have put modules there.
"""

from __future__ import annotations

import os
import sys

_given = [os.path.realpath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
sys.path += [path for path in _given if not (path + "/").startswith(os.path.realpath(os.getcwd()) + "/")]
