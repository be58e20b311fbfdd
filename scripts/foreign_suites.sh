#!/usr/bin/env bash
# Install the suites of other projects, run them against Polar, and print a table (tests/foreign/run.py).
#
#   scripts/foreign_suites.sh [--open-responses CHECKOUT] [--only SUITE] [--write]
#
# It needs Node.js 20 or newer with npm for the two JavaScript suites.
set -euo pipefail
cd "$(dirname "$0")/.."
BIN=.venv/bin
[ -x "$BIN/python" ] || BIN=$(dirname "$(command -v python3)")
exec "$BIN/python" -m tests.foreign.run "$@"
