#!/usr/bin/env bash
# Installs what the Vulkan backend needs on Debian and Ubuntu: headers, shader compiler, loader, and Mesa's drivers (a
# software device among them, so that tests need no GPU). As root.
#
# llama.cpp needs headers that know VK_EXT_layer_settings. Where the release's own are older, those of the next Debian
# release are unpacked into llamapipe's cache, where the build looks for them; nothing else of that release is installed.
set -euo pipefail
newer=trixie
packages=(glslc spirv-headers libvulkan-dev mesa-vulkan-drivers)

missing=()
for package in "${packages[@]}"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
if ((${#missing[@]})); then
    apt-get update
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}"
fi

if grep -qs VK_EXT_layer_settings /usr/include/vulkan/vulkan_core.h; then
    exit 0
fi
cache=${LLAMAPIPE_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/llamapipe}
folder=$cache/vulkan-headers
if grep -qs VK_EXT_layer_settings "$folder/include/vulkan/vulkan_core.h"; then
    exit 0
fi
# The mirror that this system already uses, with the name of the next release.
mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' | grep -v -- '-security' | grep -m 1 debian || true)
if [ -z "$mirror" ]; then
    echo "no Debian mirror is configured here; unpack newer Vulkan headers into $folder/include" >&2
    exit 1
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
chmod 755 "$work"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $newer main" >"$work/$newer.list"
options=(-o Dir::Etc::sourcelist="$work/$newer.list" -o Dir::Etc::sourceparts=/dev/null
    -o Dir::State::lists="$work/lists" -o Dir::Cache="$work/cache" -o APT::Sandbox::User=root)
apt-get "${options[@]}" update
(cd "$work" && apt-get "${options[@]}" download libvulkan-dev && dpkg-deb -x libvulkan-dev_*.deb unpacked)
mkdir -p "$cache"
rm -rf "$folder.new" "$folder"
mkdir "$folder.new"
mv "$work/unpacked/usr/include" "$folder.new/include"
mv "$folder.new" "$folder"
echo "Vulkan headers of Debian $newer: $folder/include"
