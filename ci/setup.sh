# shellcheck shell=bash
# Sourced by ci/test and ci/demo: makes a virtual environment and keeps it up to date.
# Needs $repo. Gives: setup_venv FOLDER EXTRAS

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.13 python3.12 python3.11 python3.10 python3; do
        [ -n "$candidate" ] || continue
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail 'no Python 3.10 to 3.13 with venv: apt-get install python3 python3-venv, or set PYTHON'
}

check_compiler() {
    command -v "${CXX:-g++}" >/dev/null || fail 'g++ is missing, and torch.compile needs it on CPU: apt-get install g++'
}

# The HTML report is tested in a real browser. A fresh machine gets one if we may install it.
check_browser() {
    command -v chromium >/dev/null && command -v chromedriver >/dev/null && return
    local packages='chromium chromium-driver fonts-dejavu-core'
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        printf '== browser\n'
        # shellcheck disable=SC2086
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends -y $packages; } >/dev/null ||
            fail "chromium could not be installed: apt-get install $packages"
        return
    fi
    fail "the report's test needs a browser: apt-get install $packages"
}

# The digest of everything that goes into the wheel, and of what is asked for beside it.
sources_digest() {
    (
        cd "$repo" &&
            { printf '%s\n' "$1"; find cachepipe pyproject.toml cachepipe-attach.pth ci/torch-pin.txt README.md -type f ! -name '*.pyc' -print0 |
                LC_ALL=C sort -z | xargs -0 sha256sum; } | sha256sum | cut -d' ' -f1
    )
}

setup_venv() {
    local venv=$1 extras=$2 digest python
    digest=$(sources_digest "$extras")
    [ "$(cat "$venv/.cachepipe-sources" 2>/dev/null)" != "$digest" ] || return 0
    if [ ! -x "$venv/bin/python" ]; then
        python=$(find_python)
        "$python" -m venv "$venv"
    fi
    # torch first and by the one pin: a later requirement must find it there, or pip would fetch another build.
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check -r "$repo/ci/torch-pin.txt"
    local wheels
    wheels=$(mktemp -d)
    # A real wheel, not an editable install: only then does the .pth file lie where services have it.
    "$venv/bin/python" -m pip wheel -qq --disable-pip-version-check --no-deps -w "$wheels" "$repo"
    local wheel=("$wheels"/cachepipe-*.whl)
    "$venv/bin/python" -m pip uninstall -qq --disable-pip-version-check --yes cachepipe 2>/dev/null || true
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check -c "$repo/ci/torch-pin.txt" "${wheel[0]}$extras"
    rm -rf "$wheels"
    printf '%s\n' "$digest" >"$venv/.cachepipe-sources"
}
