#!/usr/bin/env bash
# Makes .venv with the exact versions of constraints.txt, or does nothing when it is up to date.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: scripts/setup.sh [--help]

Makes .venv in the project's folder with this package (editable), its tests' tools and DeepSpeed.
Nothing happens when pyproject.toml, constraints.txt, the folder and the Python are the same as last
time. Python 3.12 or newer is looked for on PATH and under pyenv; TENPLEX_PYTHON names another one.
uv installs when it can be had, pip otherwise. pip's settings (PIP_INDEX_URL, ...) hold for both.
TEXT
}

case "${1:-}" in
    "") ;;
    -h | --help) usage && exit 0 ;;
    *) echo "setup.sh: unknown argument '$1'; it takes --help only" >&2 && exit 2 ;;
esac

cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
python=$root/.venv/bin/python
stamp=$root/.venv/tenplex-stamp

say() { echo "[setup] $*"; }
fail() { echo "setup.sh: $*" >&2 && exit 1; }

# The folder counts because scripts and the editable install hold absolute paths.
fingerprint() {
    { cat pyproject.toml constraints.txt && echo "$root" && "$1" -VV; } 2>/dev/null | sha256sum
}

up_to_date() {
    [[ -x $python && -f $stamp ]] && [[ $(fingerprint "$python") == "$(<"$stamp")" ]]
}

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

find_python() {
    local candidate version pyenv_root=${PYENV_ROOT:-${HOME:-}/.pyenv}
    local candidates=()
    if [[ -n ${TENPLEX_PYTHON:-} ]]; then
        candidates=("$TENPLEX_PYTHON")
    else
        # 3.12 first: the exact set of constraints.txt is tested with it.
        for version in 3.12 3.13 3.14; do
            candidates+=("python$version" "$pyenv_root/versions/$version"*/bin/python)
        done
        candidates+=(python3 python)
    fi
    for candidate in "${candidates[@]}"; do
        # pyenv's shims exist without the version behind them, so each is tried, not only found.
        if is_new_enough "$candidate"; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    fail "no Python >= 3.12 found: tried ${candidates[*]}. Install Python 3.12" \
        "(for example 'pyenv install 3.12'), or name one: TENPLEX_PYTHON=/path/to/python3.12 $0"
}

find_uv() {
    local candidate
    for candidate in uv "$root/.venv/bin/uv"; do
        if "$candidate" --version >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
}

# uv reads no PIP_* variable and no pip.conf; the same settings must reach both.
export_pip_settings() {
    local index=${PIP_INDEX_URL:-}
    [[ -n $index ]] || index=$("$1" -m pip config get global.index-url 2>/dev/null || true)
    [[ -n $index ]] && export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$index}
    if [[ -n ${PIP_EXTRA_INDEX_URL:-} ]]; then
        export UV_INDEX=${UV_INDEX:-$PIP_EXTRA_INDEX_URL}
        export UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match}
    fi
    [[ -n ${PIP_FIND_LINKS:-} ]] && export UV_FIND_LINKS=${UV_FIND_LINKS:-$PIP_FIND_LINKS}
    [[ -n ${PIP_CERT:-} ]] && export SSL_CERT_FILE=${SSL_CERT_FILE:-$PIP_CERT}
    [[ -n ${PIP_DEFAULT_TIMEOUT:-} ]] && export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-$PIP_DEFAULT_TIMEOUT}
    export UV_PYTHON_DOWNLOADS=never
}

make_venv() {
    local base=$1 uv=$2
    rm -rf .venv
    if [[ -n $uv ]]; then
        "$uv" venv --quiet --python "$base" .venv
        return
    fi
    "$base" -m venv .venv || fail "$base cannot make a virtual environment: install its venv" \
        "module (Debian: apt-get install python3-venv), or uv"
    "$python" -m pip install --quiet -c constraints.txt uv || say "uv cannot be had: pip installs"
}

install() {
    if [[ -n $uv ]]; then
        "$uv" pip install --python "$python" -c constraints.txt "$@"
    else
        "$python" -m pip install -c constraints.txt "$@"
    fi
}

if up_to_date; then exit 0; fi

exec 9>.venv.lock
if ! flock --nonblock 9; then
    say "another set-up of this folder is running; waiting for it"
    flock 9
fi
if up_to_date; then exit 0; fi

started=$SECONDS
base=$(find_python)
uv=""
# pip alone understands "no registry at all, only these folders".
[[ -n ${PIP_NO_INDEX:-} ]] || uv=$(find_uv)
export_pip_settings "$base"

# A finished .venv of the same Python is brought up to date in place; a torn one is made anew.
if [[ ! -f $stamp ]] || [[ $("$python" -VV 2>/dev/null) != "$("$base" -VV)" ]] ||
    [[ $(head -n 1 .venv/bin/tenplex 2>/dev/null) != "#!$python" ]]; then
    say "making .venv with $("$base" -V) ($base)"
    make_venv "$base" "$uv"
    [[ -n ${PIP_NO_INDEX:-} ]] || uv=$(find_uv)
fi
rm -f "$stamp"

say "1/3 torch and what DeepSpeed's build needs (the first time about 3 GB are downloaded)"
install setuptools torch numpy packaging psutil py-cpuinfo
say "2/3 tenplex-megatron with its tools and DeepSpeed"
# DeepSpeed comes as source and asks torch at build time; its kernels are not built ahead.
DS_BUILD_OPS=0 install --no-build-isolation -e ".[dev,deepspeed]"
# uv leaves this to the first import: under PYTHONDONTWRITEBYTECODE that is every import of every rank.
say "3/3 bytecode"
"$python" -W ignore -m compileall -q -j 0 .venv/lib/python3*/site-packages tenplex_megatron \
    >/dev/null 2>&1 || true

fingerprint "$python" >"$stamp"
say "done in $((SECONDS - started)) s; activate with: source .venv/bin/activate"
