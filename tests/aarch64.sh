#!/usr/bin/env bash
# Tests of the native code on an emulated aarch64 processor: its variants "neonbf16" and "neon", with Python and torch for
# aarch64.
#
# Needs Debian on x86-64 with root's rights, for its packages. qemu translates each instruction, so this takes long, and
# no time that it shows means anything. torch 2.10.0 is the newest whose aarch64 wheel needs no CUDA.
#
#   tests/aarch64.sh [FOLDER [PYTEST ARGUMENTS]]    FOLDER: where Python, torch and the library are kept (2 GB)
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$(realpath -m "${1:-build/aarch64}")
tests=("${@:2}")
[ ${#tests[@]} -gt 0 ] || tests=(tests/native/test_structs.py tests/native/test_short_attention.py tests/native/test_gemv.py
    tests/native/test_decode_rows.py tests/native/test_flash.py tests/native/test_typed_rows.py tests/native/test_library.py)

if [ ! -e "$folder/complete" ]; then
    mkdir -p "$folder/packages"
    dpkg --add-architecture arm64
    apt-get update -qq
    apt-get install -y -qq qemu-user-static gcc-aarch64-linux-gnu
    libraries=(libc6 libgcc-s1 libstdc++6 libgomp1 zlib1g libexpat1 libssl3 libffi8 libbz2-1.0 liblzma5 libsqlite3-0
        libncursesw6 libtinfo6 libreadline8 libuuid1 libcrypt1 libdb5.3)
    python=(python3.11 python3.11-minimal libpython3.11-minimal libpython3.11-stdlib)
    (cd "$folder/packages" && apt-get download -qq "${python[@]/%/:arm64}" "${libraries[@]/%/:arm64}")
    for package in "$folder"/packages/*.deb; do dpkg -x "$package" "$folder/root"; done
    .venv/bin/python -m pip install --quiet --no-deps --target "$folder/site" --python-version 3.11 --only-binary=:all: \
        --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux2014_aarch64 \
        --platform any torch==2.10.0 numpy sympy mpmath networkx jinja2 MarkupSafe typing_extensions filelock fsspec \
        pytest pytest-timeout iniconfig pluggy packaging pygments hypothesis sortedcontainers
    touch "$folder/complete"
fi

emulated=(qemu-aarch64-static -L "$folder/root" -E "PYTHONPATH=$folder/src:$folder/site"
    "$folder/root/usr/bin/python3.11")
rm -rf "$folder/src"
cp -r src "$folder/src"
rm -f "$folder"/src/regard/backends/cpu/libregard.so*
CC=aarch64-linux-gnu-gcc "${emulated[@]}" "$folder/src/regard/backends/cpu/build.py"
"${emulated[@]}" -c "import platform, torch, regard.native as n; print(platform.machine(), torch.__version__, n.variants())"
exec "${emulated[@]}" -m pytest -p no:cacheprovider -q --timeout 0 -m "not slow" "${tests[@]}"
