#!/usr/bin/env bash
# Sets everything up and runs the main job; see scripts/demo.py. Takes --quick and --help.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
exec .venv/bin/python scripts/demo.py "$@"
