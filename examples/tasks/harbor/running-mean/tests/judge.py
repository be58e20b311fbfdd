"""Prints the rewards as JSON. The numbers tried here are not those that the agent could see."""

import json
import subprocess
import tempfile
from pathlib import Path

CASES = [
    (2, [1, 2, 3, 4], [1.5, 2.5, 3.5]),
    (1, [5], [5.0]),
    (4, [2, 2, 4, 4], [3.0]),
    (5, [1, 2], []),
]


def right(width, numbers, expected):
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("".join(f"{number}\n" for number in numbers))
        file.flush()
        command = ["python3", "/app/mean.py", str(width), file.name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    try:
        return done.returncode == 0 and [float(line) for line in done.stdout.split()] == expected
    except ValueError:
        return False


answer = Path("/app/answer.txt")
program = all(right(*case) for case in CASES)
file = answer.is_file() and answer.read_text().split() == ["6.0", "9.0", "6.0", "6.0"]
print(json.dumps({"reward": 0.5 * program + 0.5 * file, "program": int(program), "answer": int(file)}))
