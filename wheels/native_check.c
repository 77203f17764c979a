/* Opens the native code of a wheel and compares attention of two rows, and a step of a Transformer's decoder, by every
 * variant that runs here, with the formula in double precision: where no Python with torch can be run, under Wine and with
 * musl.
 *
 *     native_check LIBRARY VARIANT ...
 */
#include "decode.h"
#include "panels.h"
#include "transformer_step.h"

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

/* A step of a decoder with one layer and one head, of the first token: it attends to itself, and to the source. */
enum { FEATURES = 53, HEAD = 29, HIDDEN = 97, MATRICES = 6 };

static struct packed_matrix random_matrix(int64_t terms, int64_t columns, uint32_t seed) {
    static float memory[MATRICES][HIDDEN * 128]; /* whole panels */
    float *panels = memory[seed % MATRICES], *bias = panels + terms * panel_columns(columns);
    fill(panels, (int)(terms * panel_columns(columns) + columns), seed);
    return (struct packed_matrix){.panels = panels, .bias = bias, .terms = terms, .columns = columns};
}

/* into += left . matrix + bias */
static void add_rows(const double *left, const struct packed_matrix *matrix, double *into) {
    const float *panels = matrix->panels;
    for (int64_t c = 0; c < matrix->columns; c++) {
        into[c] += (double)matrix->bias[c];
        for (int64_t t = 0; t < matrix->terms; t++)
            into[c] += left[t] *
                       (double)panels[(c / PANEL_COLUMNS * matrix->terms + t) * PANEL_COLUMNS + c % PANEL_COLUMNS];
    }
}

/* into = norm(x) . matrix + bias */
static void project(const struct step_norm *norm, const double *x, const struct packed_matrix *matrix, double *into) {
    double mean = 0.0, variance = 0.0, normed[FEATURES];
    for (int i = 0; i < FEATURES; i++) mean += x[i] / FEATURES;
    for (int i = 0; i < FEATURES; i++) variance += (x[i] - mean) * (x[i] - mean) / FEATURES;
    for (int i = 0; i < FEATURES; i++) normed[i] = (x[i] - mean) / sqrt(variance + norm->epsilon) * (double)norm->gain[i];
    memset(into, 0, (size_t)matrix->columns * sizeof(double));
    add_rows(normed, matrix, into);
}

/* The sum of all differences of features from those of the formula; NaN if any is. */
static double error_of_features(const struct step_layer *layer, const float *input, const float *features) {
    double x[FEATURES], projected[HIDDEN], context[HEAD] = {0.0}, weights[COLUMNS], total = 0.0, error = 0.0;
    for (int i = 0; i < FEATURES; i++) x[i] = (double)input[i];
    project(&layer->own_norm, x, &layer->own, projected);
    add_rows(projected + 2 * HEAD, &layer->own_output, x); /* the weight of its own value is 1 */
    project(&layer->norm, x, &layer->query, projected);
    for (int j = 0; j < COLUMNS; j++) {
        double score = 0.0;
        for (int i = 0; i < HEAD; i++) score += projected[i] * (double)key[j * DIM + i];
        total += weights[j] = exp(score / sqrt(HEAD));
    }
    for (int j = 0; j < COLUMNS; j++)
        for (int i = 0; i < HEAD; i++) context[i] += weights[j] / total * (double)value[j * VALUE_DIM + i];
    add_rows(context, &layer->output, x);
    project(&layer->feed_forward_norm, x, &layer->up, projected);
    for (int i = 0; i < HIDDEN; i++) projected[i] = projected[i] > 0.0 ? projected[i] : 0.0;
    add_rows(projected, &layer->down, x);
    for (int i = 0; i < FEATURES; i++) error += fabs(x[i] - (double)features[i]);
    return error;
}

static double error_of_step(void (*run)(struct transformer_step *)) {
    static float input[FEATURES], features[FEATURES], own[2 * HEAD], gain[FEATURES];
    const int64_t length = COLUMNS;
    fill(input, FEATURES, 4), fill(gain, FEATURES, 5);
    const struct step_norm norm = {.gain = gain, .epsilon = 1e-5};
    const struct step_layer layer = {
        .own = random_matrix(FEATURES, 3 * HEAD, 6), .own_output = random_matrix(HEAD, FEATURES, 7),
        .query = random_matrix(FEATURES, HEAD, 8), .output = random_matrix(HEAD, FEATURES, 9),
        .up = random_matrix(FEATURES, HIDDEN, 10), .down = random_matrix(HIDDEN, FEATURES, 11),
        .own_norm = norm, .norm = norm, .feed_forward_norm = norm,
    };
    const struct step_source source = {.key = key, .value = value, .key_row = DIM, .value_row = VALUE_DIM};
    struct transformer_step problem = {
        .unit_count = 1, .unit = GROUP, .rows = 1, .dim = FEATURES, .hidden_dim = HIDDEN, .layer_count = 1, .heads = 1,
        .key_heads = 1, .head_dim = HEAD, .norm_first = 1, .activation = RECTIFIED, .keys = COLUMNS, .shared = 1,
        .layers = &layer, .sources = &source, .lengths = &length, .input = input, .own = own, .features = features,
    };
    for (int i = 0; i < FEATURES; i++) features[i] = NAN;
    run(&problem);
    return problem.failed ? INFINITY : error_of_features(&layer, input, features);
}

/* A function of a variant; null where the library has none. */
static void *function_of(void *library, const char *name, const char *variant) {
    char whole[64];
    snprintf(whole, sizeof(whole), "%s_%s", name, variant);
    return found(library, whole);
}

int main(int count, char **words) {
    void *library = count > 1 ? opened(words[1]) : 0;
    int (*runs)(const char *) = library ? (int (*)(const char *))(intptr_t)found(library, "regard_runs") : 0;
    if (!runs) return printf("%s is no library of regard\n", count > 1 ? words[1] : "nothing"), 2;
    fill(query, ROW_COUNT * DIM, 1), fill(key, COLUMNS * DIM, 2), fill(value, COLUMNS * VALUE_DIM, 3);
    int checked = 0;
    for (int i = 2; i < count; i++) {
        if (!runs(words[i])) {
            printf("%s does not run here\n", words[i]);
            continue;
        }
        void (*decode)(struct decode *) =
            (void (*)(struct decode *))(intptr_t)function_of(library, "regard_decode", words[i]);
        void (*step)(struct transformer_step *) =
            (void (*)(struct transformer_step *))(intptr_t)function_of(library, "regard_transformer_step", words[i]);
        double error = decode ? error_of(decode) : INFINITY, of_step = step ? error_of_step(step) : INFINITY;
        printf("%s: error %.1e, of a decoder's step %.1e\n", words[i], error, of_step);
        if (!(error < 1e-4) || !(of_step < 1e-3)) return 1;
        checked++;
    }
    return checked ? 0 : 1;
}
