/* Whether all numbers of a small tensor are finite: all bits of an exponent are set in NaN and infinity alone. */
#include "typed_rows.h"
#include "variants.h"

enum { EXPONENT = 0x7f800000, EXPONENT_BFLOAT16 = 0x7f80, EXPONENT_FLOAT16 = 0x7c00 };

INLINE int finite_floats(const uint32_t *numbers, int64_t count, int64_t stride) {
    uint32_t found = 0;
    for (int64_t i = 0; i < count; i++) found |= (numbers[i * stride] & EXPONENT) == EXPONENT;
    return !found;
}

INLINE int finite_halves(const uint16_t *numbers, int64_t count, int64_t stride, const uint16_t exponent) {
    uint16_t found = 0;
    for (int64_t i = 0; i < count; i++) found |= (numbers[i * stride] & exponent) == exponent;
    return !found;
}

INLINE int finite_row(const void *row, int64_t dtype, int64_t count, int64_t stride) {
    if (dtype == FLOAT32) return finite_floats(row, count, stride);
    return finite_halves(row, count, stride, dtype == BFLOAT16 ? EXPONENT_BFLOAT16 : EXPONENT_FLOAT16);
}

/* 1 if so many contiguous numbers are all finite. Few arguments: each takes Python 0.1 microseconds. */
int64_t EXPORTED(regard_finite)(const void *data, int64_t dtype, int64_t count) {
    return finite_row(data, dtype, count, 1);
}

/* The same of a tensor of four axes, of any strides in elements. */
int64_t EXPORTED(regard_finite_strided)(const void *data, int64_t dtype, int64_t batches, int64_t heads, int64_t rows,
                                        int64_t columns, int64_t batch, int64_t head, int64_t row, int64_t column) {
    const int64_t size = entry_bytes((int)dtype);
    for (int64_t b = 0; b < batches; b++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t r = 0; r < rows; r++) {
                const void *own = (const char *)data + (b * batch + h * head + r * row) * size;
                if (!(column == 1 ? finite_row(own, dtype, columns, 1) : finite_row(own, dtype, columns, column))) return 0;
            }
    return 1;
}
