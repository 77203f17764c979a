/* Products of bytes that are summed in whole numbers of 32 bits. */
#ifndef REGARD_BYTE_PRODUCTS_H
#define REGARD_BYTE_PRODUCTS_H

#include "simd.h"

/* Adds four products of bytes to each lane, those of the first factor unsigned, exactly. BYTE_PRODUCTS: whether the variant
 * has an instruction for it. */
#if defined(__AVX512VNNI__)
enum { BYTE_PRODUCTS = 1 };
#else
enum { BYTE_PRODUCTS = 0 };
#endif

INLINE void add_byte_products(bits *sum, bits codes, bits own) {
#if defined(__AVX512VNNI__)
    /* By intrinsics GCC would copy each sum to another register and back. */
    __asm__("vpdpbusd %2, %1, %0" : "+v"(*sum) : "v"(codes), "v"(own));
#else
    UNROLL for (int byte = 0; byte < 32; byte += 8) *sum += ((codes >> byte) & 255) * ((own << (24 - byte)) >> 24);
#endif
}

#endif
