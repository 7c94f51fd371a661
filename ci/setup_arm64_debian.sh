#!/usr/bin/env bash
# Installs what `nox -s arm64` needs on Debian and Ubuntu: the cross compiler, qemu-user, and a Python for arm64. As root.
#
# Python, its headers and the libraries it needs are unpacked from the release's arm64 packages into llamapipe's cache. They
# are not installed: no foreign architecture is added to this system. The kernel is told to run arm64 programs with
# qemu-user, until it starts again. A program finds the unpacked libraries through QEMU_LD_PREFIX=FOLDER.
set -euo pipefail
target=aarch64-linux-gnu
packages=(g++-$target qemu-user-static)

missing=()
for package in "${packages[@]}"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
if ((${#missing[@]})); then
    apt-get update
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}"
fi

formats=/proc/sys/fs/binfmt_misc
mountpoint -q $formats || mount -t binfmt_misc binfmt_misc $formats
if [ ! -e $formats/qemu-aarch64 ]; then
    # The line of the package, which systemd would read when it starts.
    tr -d '\n' </usr/lib/binfmt.d/qemu-aarch64.conf >$formats/register
fi

cache=${LLAMAPIPE_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/llamapipe}
folder=$cache/roots/$target
if [ ! -x "$folder/usr/bin/python3" ]; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    chmod 755 "$work"
    mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
    : >"$work/status" # nothing is installed yet, so that all that is needed is fetched
    options=(-o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State="$work" -o Dir::State::status="$work/status"
        -o Dir::Cache="$work/cache" -o APT::Sandbox::User=root -o Debug::NoLocking=1)
    apt-get "${options[@]}" update
    apt-get "${options[@]}" install -y --no-install-recommends --download-only python3-venv libpython3-dev libstdc++6
    rm -rf "$folder.new" "$folder"
    mkdir -p "$folder.new"
    for package in "$work"/cache/archives/*.deb; do
        dpkg-deb -x "$package" "$folder.new"
    done
    mv "$folder.new" "$folder"
fi
echo "$(QEMU_LD_PREFIX=$folder "$folder/usr/bin/python3" -c 'import platform; print("Python", platform.python_version(), platform.machine())'): $folder/usr/bin/python3"
