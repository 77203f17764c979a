/* Products of bytes that are summed in whole numbers of 32 bits. */
#ifndef REGARD_BYTE_PRODUCTS_H
#define REGARD_BYTE_PRODUCTS_H

#include "simd.h"

/* Adds four products of bytes to each lane, those of the first factor unsigned, exactly. BYTE_PRODUCTS: whether the variant
 * has instructions for it that take less time than products of floats. */
#if defined(__AVX512VNNI__) || (defined(__AVX2__) && !defined(__AVX512F__))
enum { BYTE_PRODUCTS = 1 };
#else
enum { BYTE_PRODUCTS = 0 };
#endif

INLINE void add_byte_products(bits *sum, bits codes, bits own) {
#if defined(__AVX512VNNI__)
    /* By intrinsics GCC would copy each sum to another register and back. */
    __asm__("vpdpbusd %2, %1, %0" : "+v"(*sum) : "v"(codes), "v"(own));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    /* As numbers of 16 bits, every second byte at a time: sums of two products of bytes would saturate there. */
    __m256i lower = _mm256_srai_epi16(_mm256_slli_epi16((__m256i)own, 8), 8), upper = _mm256_srai_epi16((__m256i)own, 8);
    *sum += (bits)_mm256_madd_epi16((__m256i)(codes & 0x00ff00ff), lower);
    *sum += (bits)_mm256_madd_epi16(_mm256_srli_epi16((__m256i)codes, 8), upper);
#else
    UNROLL for (int byte = 0; byte < 32; byte += 8) *sum += ((codes >> byte) & 255) * ((own << (24 - byte)) >> 24);
#endif
}

#endif
