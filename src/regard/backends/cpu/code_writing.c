/* Numbers become codes, with the same scales and offsets, to the last bit, as by the formula in core/packing.py. */
#include "packed_decode.h"
#include "simd.h"

#include <math.h>

/* The largest bfloat16 number that is not above a float32 one. */
INLINE float downwards(float number) {
    int32_t word, nearer;
    memcpy(&word, &number, sizeof(word));
    nearer = word & -0x10000;
    if (number < 0 && nearer != word) nearer += 0x10000;
    memcpy(&number, &nearer, sizeof(number));
    return number;
}

/* What some numbers share: code = round((x - offset) / scale). */
struct range {
    float scale, offset;
};

/* The largest code: of whole numbers from 0 on, of floats of either sign. */
INLINE float largest_of(const int code) {
    return code == INT8 ? 255.0f : code == INT4 ? 15.0f : code == E4M3 ? 448.0f : 57344.0f;
}

INLINE struct range range_of(float low, float high, const int code) {
    float offset = code <= INT8 ? downwards(low) : 0.0f;
    float reach = code <= INT8 ? high - offset : -low > high ? -low : high;
    float scale = -downwards(-reach / largest_of(code));
    if (isfinite(scale) && isfinite(offset)) return (struct range){scale, offset};
    return (struct range){NAN, NAN};
}

INLINE int32_t word_of(const struct range range) {
    int32_t scale, offset;
    memcpy(&scale, &range.scale, sizeof(scale)), memcpy(&offset, &range.offset, sizeof(offset));
    return (scale & -0x10000) | (offset >> 16 & 0xffff);
}

/* Numbers from 0 on as whole ones, ties to even: adding 1.5 * 2^23 rounds, and the low bits hold the result. */
INLINE bits rounded(lanes numbers) { return (bits)(numbers + 12582912.0f) - 0x4b400000; }

/* The nearest floats of 8 bits, ties to even. Below the smallest normal one they are multiples of the smallest of all;
 * above it the mantissa loses bits, and what it carries over goes into the exponent. */
INLINE bits float8_of(lanes numbers, const int code) {
    const int kept = code == E4M3 ? 3 : 2, bias = code == E4M3 ? 7 : 15, lost = 23 - kept;
    const float normal = code == E4M3 ? 0x1p-6f : 0x1p-14f, smallest = code == E4M3 ? 0x1p-9f : 0x1p-16f;
    lanes size = min_lanes(largest_of(code), absolute(numbers));
    bits word = (bits)size, below = size < normal;
    bits nearest = ((word + ((1 << (lost - 1)) - 1) + ((word >> lost) & 1)) >> lost) - ((127 - bias) << kept);
    bits either = (below & rounded(size / smallest)) | (~below & nearest);
    return (numbers == numbers) & (either | (((bits)numbers >> 24) & 0x80));
}

/* Codes of LANES numbers: NaN becomes 0, and what is beyond the range its end. */
INLINE bits codes_of(lanes numbers, lanes scale, lanes offset, const int code) {
    if (code > INT8) return float8_of(numbers / scale, code);
    return rounded(min_lanes(largest_of(code), max_lanes((numbers - offset) / scale, broadcast(0.0f))));
}

typedef uint8_t few_codes __attribute__((vector_size(LANES)));

/* Codes of a strip of numbers are computed side by side, and then written one by one. */
enum { STRIP = 64 };

INLINE void store_codes(uint8_t *target, bits codes) {
    few_codes bytes = __builtin_convertvector(codes, few_codes);
    memcpy(target, &bytes, LANES);
}

/* Writes the codes of some dims of a token; the first of the dims is a multiple of 8. Bytes of words come the lowest
 * first. The codes of other tokens stay as they are. */
INLINE void write_codes(uint8_t *words, const uint8_t *codes, int64_t token, int64_t first, int64_t count, int64_t dim,
                        const int of_keys, const int code) {
    const int64_t per = 32 / code_bits(code), place = token % per, high = place >= 4;
    if (of_keys && code != INT4)
        for (int64_t a = 0; a < count; a += 4) memcpy(words + (first + a) * TOKENS + 4 * token, codes + a, 4);
    else if (of_keys)
        for (int64_t a = 0; a < count; a += 8)
            for (int64_t i = 0; i < 4; i++)
                words[(first + a) / 2 * TOKENS + 4 * token + i] = (uint8_t)(codes[a + i] | codes[a + 4 + i] << 4);
    else {
        uint8_t *byte = words + 4 * (token / per * dim + first) + place % 4;
        for (int64_t a = 0; a < count; a++, byte += 4)
            *byte = code != INT4 ? codes[a] : (uint8_t)(high ? (*byte & 0x0f) | codes[a] << 4 : (*byte & 0xf0) | codes[a]);
    }
}

/* One token, whose numbers share a scale and an offset. */
INLINE void write_token(const struct code_writing *work, const float *numbers, uint8_t *words, int32_t *parameter,
                        int64_t token, const int of_keys, const int code) {
    lanes least = broadcast(INFINITY), most = broadcast(-INFINITY), none = {0};
    int64_t whole = work->dim / LANES * LANES;
    for (int64_t a = 0; a < whole; a += LANES) {
        lanes number = load(numbers + a);
        least = -max_lanes(-least, -number), most = max_lanes(most, number), none += number * 0.0f;
    }
    float low = -max_of_lanes(-least), high = max_of_lanes(most), check = sum_lanes(none);
    for (int64_t a = whole; a < work->dim; a++) {
        low = numbers[a] < low ? numbers[a] : low, high = numbers[a] > high ? numbers[a] : high;
        check += numbers[a] * 0.0f;
    }
    struct range range = check == 0.0f ? range_of(low, high, code) : (struct range){NAN, NAN};
    *parameter = word_of(range);
    for (int64_t first = 0; first < work->dim; first += STRIP) {
        uint8_t codes[STRIP];
        int64_t count = work->dim - first < STRIP ? work->dim - first : STRIP;
        for (int64_t a = 0; a < count; a += LANES)
            store_codes(codes + a, codes_of(load_partial(numbers + first + a, count - a), broadcast(range.scale),
                                            broadcast(range.offset), code));
        write_codes(words, codes, token, first, count, work->dim, of_keys, code);
    }
}

/* The finite numbers of a vector; another number in place of those that are not. */
INLINE lanes finite_or(lanes numbers, float other) {
    bits known = numbers * 0.0f == broadcast(0.0f);
    return (lanes)((known & (bits)numbers) | (~known & (bits)broadcast(other)));
}

/* Dims of a block that are written at once: whole words, and whole vectors. */
enum { CHANNELS = LANES < 8 ? 8 : LANES, CHANNEL_VECTORS = CHANNELS / LANES };

/* CHANNELS dims of a block of tokens, or as many as there are: the finite numbers of each share a scale and an offset. */
INLINE void write_channels(const struct code_writing *work, const float *numbers, uint8_t *words, int32_t *parameters,
                           int64_t first, const int code) {
    int64_t dim = work->dim, filled = dim - first < CHANNELS ? dim - first : CHANNELS;
    float low[CHANNELS], high[CHANNELS], scale[CHANNELS] = {0}, offset[CHANNELS] = {0};
    for (int v = 0; v < CHANNEL_VECTORS; v++) {
        lanes least = broadcast(INFINITY), most = broadcast(-INFINITY);
        for (int64_t t = 0; t < TOKENS; t++) {
            lanes number = load_partial(numbers + t * dim + first + v * LANES, filled - v * LANES);
            least = -max_lanes(-least, -finite_or(number, INFINITY));
            most = max_lanes(most, finite_or(number, -INFINITY));
        }
        store(low + v * LANES, least), store(high + v * LANES, most);
    }
    for (int64_t i = 0; i < filled; i++) {
        struct range range = low[i] > high[i] ? (struct range){0.0f, 0.0f} : range_of(low[i], high[i], code);
        scale[i] = range.scale, offset[i] = range.offset, parameters[first + i] = word_of(range);
    }
    for (int64_t t = 0; t < TOKENS; t++) {
        uint8_t codes[CHANNELS];
        for (int v = 0; v < CHANNEL_VECTORS; v++) {
            lanes number = load_partial(numbers + t * dim + first + v * LANES, filled - v * LANES);
            lanes own_scale = load(scale + v * LANES), own_offset = load(offset + v * LANES);
            store_codes(codes + v * LANES, codes_of(number, own_scale, own_offset, code));
        }
        write_codes(words, codes, t, first, filled, dim, 1, code);
    }
}

INLINE void write_unit(const struct code_writing *work, int64_t unit, const int of_keys, const int code) {
    const float *numbers = work->numbers + unit * work->tokens * work->dim;
    int64_t block_words = TOKENS * work->dim * code_bits(code) / 32, of_block = work->by_channel ? work->dim : TOKENS;
    for (int64_t t = 0; t < work->tokens; t += work->by_channel ? TOKENS : 1, numbers += work->dim) {
        int64_t block = (work->first + t) / TOKENS, token = (work->first + t) % TOKENS;
        uint8_t *words = (uint8_t *)(work->codes + unit * work->unit_codes + block * block_words);
        int32_t *parameters = work->parameters + unit * work->unit_parameters + block * of_block;
        if (!work->by_channel) {
            write_token(work, numbers, words, parameters + token, token, of_keys, code);
            continue;
        }
        for (int64_t a = 0; a < work->dim; a += CHANNELS) write_channels(work, numbers, words, parameters, a, code);
        numbers += (TOKENS - 1) * work->dim;
    }
}

#define WRITE_OF(code)                                                          \
    APART void write_##code(const struct code_writing *work, int64_t unit) {    \
        work->of_keys ? write_unit(work, unit, 1, code) : write_unit(work, unit, 0, code); \
    }
WRITE_OF(INT8)
WRITE_OF(INT4)
WRITE_OF(E4M3)
WRITE_OF(E5M2)

static void (*const write_of[CODES])(const struct code_writing *, int64_t) = {write_INT8, write_INT4, write_E4M3,
                                                                              write_E5M2};

/* Takes one unit after another while any is left; any number of threads may call it at once. */
void EXPORTED(regard_code_writing)(struct code_writing *work) {
    int64_t unit;
    while ((unit = __atomic_fetch_add(&work->next_unit, 1, __ATOMIC_RELAXED)) < work->unit_count)
        write_of[row_of(work->code)](work, unit);
}
