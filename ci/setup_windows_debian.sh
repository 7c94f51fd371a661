#!/usr/bin/env bash
# Installs what `nox -s windows` needs on Debian: Wine, and a CPython for Windows, in llamapipe's cache. As root.
#
# The compiler is zig's clang, a package of Python's index, which the session installs. What is taken of the archive with
# CPython is signed by the Python Software Foundation: tools/windows_python.py checks it.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
packages=(wine wine64 bubblewrap osslsigncode openssl binutils python3-venv python3-dev)

missing=()
for package in "${packages[@]}"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
if ((${#missing[@]})); then
    apt-get update
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}"
fi

cache=${LLAMAPIPE_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/llamapipe}
folder=$cache/roots/x86_64-windows-gnu
if [ ! -f "$folder/python.exe" ]; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    python3 -m venv "$work"
    "$work/bin/pip" install --quiet ziglang
    "$work/bin/python" "$here/../tools/windows_python.py" "$folder"
fi
export WINEPREFIX=$folder/wine WINEDEBUG=-all
if [ ! -d "$WINEPREFIX" ]; then
    wine wineboot -i >/dev/null 2>&1
    wine reg add 'HKCU\Software\Wine' /v Version /d win10 /f >/dev/null 2>&1 # Wine 8 says Windows 7
fi
echo "$(wine "$folder/python.exe" -c 'import platform; print("Python", platform.python_version(), platform.machine())' 2>/dev/null | tr -d '\r'): $folder/python.exe"
