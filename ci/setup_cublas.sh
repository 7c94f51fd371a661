#!/usr/bin/env bash
# Completes a CUDA toolkit that has a compiler but no cuBLAS, from the nvidia-cublas wheel of the same major version: so the
# CUDA backend can be compiled, not run, on a machine without a GPU. Needs pip, and write access to the toolkit.
#   ci/setup_cublas.sh [TOOLKIT]        default: /usr/local/cuda
set -euo pipefail
toolkit=${1:-/usr/local/cuda}
major=$("$toolkit/bin/nvcc" --version | sed -n 's/.*release \([0-9]*\)\..*/\1/p')
target=$toolkit/targets/$(uname -m)-linux
if [ -e "$target/include/cublas_v2.h" ] && [ -e "$target/lib/libcublas.so" ]; then
    exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m pip download --quiet --no-deps --dest "$work" "nvidia-cublas>=$major,<$((major + 1))"
"${PYTHON:-python3}" -m zipfile -e "$work"/nvidia_cublas-*.whl "$work/unpacked"
found=$(dirname "$(find "$work/unpacked" -name cublas_v2.h)")
cp "$found"/* "$target/include/"
for library in "$(dirname "$found")"/lib/*.so.*; do
    name=$(basename "$library")
    cp "$library" "$target/lib/$name"
    ln -sf "$name" "$target/lib/${name%.so.*}.so"
done
echo "cuBLAS of the nvidia-cublas wheel: $target"
