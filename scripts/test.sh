#!/usr/bin/env bash
# Sets everything up, then runs lint, types and all tests; stops at the first stage that fails.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: scripts/test.sh [--fast] [--help]

Makes or updates .venv, then runs in this order and stops at the first failure with its exit code:
lint (ruff check), format (ruff format), types (mypy --strict), unit tests, dist tests (gloo
processes), end to end tests (real frameworks).

  --fast   lint, format, types and unit tests only
TEXT
}

fast=0
for argument in "$@"; do
    case $argument in
        --fast) fast=1 ;;
        -h | --help) usage && exit 0 ;;
        *) echo "test.sh: unknown argument '$argument'; it takes --fast and --help" >&2 && exit 2 ;;
    esac
done

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bin=$PWD/.venv/bin
started=$SECONDS
number=0

stage() {
    local title=$1 stage_started=$SECONDS code=0
    shift
    number=$((number + 1))
    echo
    echo "=== $number. $title"
    "$@" || code=$?
    if ((code != 0)); then
        echo "=== $number. $title: FAILED with exit code $code after $((SECONDS - started)) s in all" >&2
        exit "$code"
    fi
    echo "=== $number. $title: passed in $((SECONDS - stage_started)) s"
}

# Given files and folders that are not there are left out. pytest's exit code 5 (no test ran) fails
# the stage like any other: a folder that exists and runs nothing is a mistake.
run_tests() {
    local path paths=()
    for path in "$@"; do
        [[ -e $path ]] && paths+=("$path")
    done
    if ((${#paths[@]} == 0)); then
        echo "nothing to run: none of $* exists"
        return 0
    fi
    "$bin/python" -m pytest "${paths[@]}"
}

stage "set-up" scripts/setup.sh
stage "lint" "$bin/ruff" check .
stage "format" "$bin/ruff" format --check .
stage "types" "$bin/mypy"
stage "unit tests and doctests" run_tests tests/unit tests/oracle tests/golden \
    tenplex_megatron/core tenplex_megatron/planner tenplex_megatron/config.py
if ((!fast)); then
    stage "dist tests" run_tests tests/dist
    stage "end to end tests" run_tests tests/end_to_end
fi
echo
echo "=== all $number stages passed in $((SECONDS - started)) s"
