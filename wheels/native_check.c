/* Opens the native code of a wheel and compares attention of two rows, by every variant that runs here, with the formula in
 * double precision: where no Python with torch can be run, under Wine and with musl.
 *
 *     native_check LIBRARY VARIANT ...
 */
#include "decode.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#if defined(_WIN32)
#include <windows.h>
static void *opened(const char *path) { return (void *)LoadLibraryA(path); }
static void *found(void *library, const char *name) { return (void *)(intptr_t)GetProcAddress((HMODULE)library, name); }
#else
#include <dlfcn.h>
static void *opened(const char *path) { return dlopen(path, RTLD_NOW); }
static void *found(void *library, const char *name) { return dlsym(library, name); }
#endif

enum { ROW_COUNT = 2, COLUMNS = 131, DIM = 67, VALUE_DIM = 37 };

static float query[ROW_COUNT * DIM], key[COLUMNS * DIM], value[COLUMNS * VALUE_DIM], output[ROW_COUNT * VALUE_DIM], lse[ROW_COUNT];

/* Numbers from -1 to 1 that are the same on every system. */
static void fill(float *numbers, int count, uint32_t seed) {
    for (int i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        numbers[i] = (float)(seed >> 8) / 8388608.0f - 1.0f;
    }
}

/* The sum of all differences of the output from softmax(query key^T) value, and of the log-sum-exp: NaN if any is. */
static double error_of_output(void) {
    double error = 0.0;
    for (int row = 0; row < ROW_COUNT; row++) {
        double weights[COLUMNS], total = 0.0;
        for (int column = 0; column < COLUMNS; column++) {
            double score = 0.0;
            for (int i = 0; i < DIM; i++) score += (double)query[row * DIM + i] * (double)key[column * DIM + i];
            total += weights[column] = exp(score);
        }
        for (int i = 0; i < VALUE_DIM; i++) {
            double sum = 0.0;
            for (int column = 0; column < COLUMNS; column++) sum += weights[column] / total * (double)value[column * VALUE_DIM + i];
            error += fabs(sum - (double)output[row * VALUE_DIM + i]);
        }
        error += fabs(log(total) - (double)lse[row]);
    }
    return error;
}

static double error_of(void (*decode)(struct decode *)) {
    struct decode problem = {
        .unit_count = 1, .heads = 1, .rows = ROW_COUNT, .columns = COLUMNS, .dim = DIM, .value_dim = VALUE_DIM, .parts = 1,
        .part = COLUMNS, .scale = 1.0f, .query = query, .query_row = DIM, .key = key, .key_row = DIM, .value = value,
        .value_row = VALUE_DIM, .output = output, .lse = lse,
    };
    for (int i = 0; i < ROW_COUNT * VALUE_DIM; i++) output[i] = NAN;
    decode(&problem);
    return problem.failed ? INFINITY : error_of_output();
}

int main(int count, char **words) {
    void *library = count > 1 ? opened(words[1]) : 0;
    int (*runs)(const char *) = library ? (int (*)(const char *))(intptr_t)found(library, "regard_runs") : 0;
    if (!runs) return printf("%s is no library of regard\n", count > 1 ? words[1] : "nothing"), 2;
    fill(query, ROW_COUNT * DIM, 1), fill(key, COLUMNS * DIM, 2), fill(value, COLUMNS * VALUE_DIM, 3);
    int checked = 0;
    for (int i = 2; i < count; i++) {
        char name[64];
        snprintf(name, sizeof(name), "regard_decode_%s", words[i]);
        if (!runs(words[i])) {
            printf("%s does not run here\n", words[i]);
            continue;
        }
        void (*decode)(struct decode *) = (void (*)(struct decode *))(intptr_t)found(library, name);
        double error = decode ? error_of(decode) : INFINITY;
        printf("%s: error %.1e\n", words[i], error);
        if (!(error < 1e-4)) return 1;
        checked++;
    }
    return checked ? 0 : 1;
}
