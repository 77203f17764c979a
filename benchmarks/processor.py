"""What this processor multiplies and adds in its registers, by each of its instructions, and in torch's products.

The limit of all other benchmarks: on one thread, with sums in registers and no memory read. Products of float32 decide
whether an instruction for halves pays: with sums in float32, as exact attention needs, only that of bfloat16 is one.
"""

import subprocess
import tempfile
from pathlib import Path

import _timing
import torch
from _report import table

SOURCE = r"""
#include <stdio.h>
#include <time.h>
#include <immintrin.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

/* Best of some rounds: SUMS independent sums, enough for the latency, few enough for the registers. */
#define MEASURE(name, features, type, initial, step, flops)          \
    __attribute__((target(features))) static void name(void) {       \
        enum { SUMS = 12, STEPS = 2000000 };                         \
        double best = 1e9;                                           \
        for (int round = 0; round < 20; round++) {                   \
            type sum[SUMS];                                          \
            for (int i = 0; i < SUMS; i++) sum[i] = initial;         \
            double began = now();                                    \
            for (long n = 0; n < STEPS; n++) {                       \
                for (int i = 0; i < SUMS; i++) {                     \
                    sum[i] = step;                                   \
                    __asm__ volatile("" : "+v"(sum[i]));             \
                }                                                    \
            }                                                        \
            double spent = now() - began;                            \
            if (spent < best) best = spent;                          \
        }                                                            \
        printf(#name " %.1f\n", 1e-9 * flops * SUMS * STEPS / best); \
    }

MEASURE(avx2_float32, "avx2,fma", __m256, _mm256_set1_ps(0),
        _mm256_fmadd_ps(_mm256_set1_ps(0.5f), _mm256_set1_ps(0.5f), sum[i]), 16)
MEASURE(avx512_float32, "avx512f", __m512, _mm512_set1_ps(0),
        _mm512_fmadd_ps(_mm512_set1_ps(0.5f), _mm512_set1_ps(0.5f), sum[i]), 32)
MEASURE(avx512_bfloat16, "avx512f,avx512bf16", __m512, _mm512_set1_ps(0),
        _mm512_dpbf16_ps(sum[i], (__m512bh)_mm512_set1_epi32(0x3f003f00), (__m512bh)_mm512_set1_epi32(0x3f003f00)), 64)
MEASURE(avx512_float16, "avx512f,avx512fp16", __m512h, _mm512_set1_ph(0),
        _mm512_fmadd_ph(_mm512_set1_ph(0.5f), _mm512_set1_ph(0.5f), sum[i]), 64)

int main(void) {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) avx2_float32();
    if (__builtin_cpu_supports("avx512f")) avx512_float32();
    if (__builtin_cpu_supports("avx512bf16")) avx512_bfloat16();
    if (HAS_FLOAT16) avx512_float16();
    return 0;
}
"""

ROWS = {
    "avx2_float32": "AVX2, float32 (8 lanes)",
    "avx512_float32": "AVX-512, float32 (16 lanes)",
    "avx512_bfloat16": "AVX-512 BF16: bfloat16, summed in float32",
    "avx512_float16": "AVX-512 FP16: float16, summed in float16",
}


def flags() -> set[str]:
    """What Linux says that the processor has."""
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


SECONDS = 3.0
"""How long a product is repeated."""


def in_registers() -> dict[str, float]:
    """GFLOP/s of one thread by each instruction that the processor has."""
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "rate.c"), Path(folder, "rate")
        source.write_text(SOURCE, "utf-8")
        has = f"-DHAS_FLOAT16={int('avx512_fp16' in flags())}"
        subprocess.run(["cc", "-O3", "-funroll-all-loops", has, str(source), "-o", str(program)], check=True)
        printed = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    return {name: float(rate) for name, rate in (line.split() for line in printed.splitlines())}


def in_torch(dtype: torch.dtype, size: int = 2048) -> float:
    """GFLOP/s of one thread in torch's product of two square matrices, the best in some seconds or the first."""
    left, right = torch.randn(2, size, size).to(dtype).unbind()
    seconds = [_timing.seconds(lambda: left @ right, 1)]
    while sum(seconds) < SECONDS:  # float16 takes minutes where the processor has no instruction for it
        seconds.append(_timing.seconds(lambda: left @ right, 1))
    return 2e-9 * size**3 / min(seconds)


def main() -> None:
    torch.set_num_threads(1)
    print(_timing.machine())
    model = next(line for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines() if "model name" in line)
    print(model.split(":")[1].strip())
    rates = in_registers()
    base = rates.get("avx512_float32") or rates["avx2_float32"]
    rows = [[ROWS[name], f"{rate:,.3g}", f"{rate / base:.2f}"] for name, rate in rates.items()]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rate = in_torch(dtype)
        name = str(dtype).removeprefix("torch.")
        rows.append([f"torch's product of 2,048 × 2,048, {name}", f"{rate:,.3g}", f"{rate / base:.2f}"])
    table(
        "Products in registers, one thread (`benchmarks/processor.py`)", ["products", "GFLOP/s", "of float32's"], rows
    )


if __name__ == "__main__":
    main()
