/* Reductions of the weights exp(score(i, j) - lse[i]): each is computed once, and goes into all that is asked for. */
#include "panel.h"

/* Sums of a row go lane by lane in float32 over so many blocks of keys, and then into a float64. */
enum { BETWEEN = 16 };

/* Most rows of a tile have nothing that is among their largest: one comparison says so. */
INLINE void largest_of_rows(const struct flash *of, const struct panel *at, int64_t row, int64_t column,
                            const float *products, const uint64_t *words, int64_t low, int64_t high) {
    const struct reductions *into = of->reductions;
    for (int r = 0; r < GROUP && row + r < at->count; r++) {
        lanes most = every(-INFINITY);
        for (int64_t j = low; j < high; j += LANES)
            most = larger(most, where_bits(words[r], j, load(products + r * BLOCK + j), -INFINITY));
        most -= at->shift[row + r];
        for (int64_t t = 0; t < into->tops; t++) {
            struct leading own = leading_of(at->leading + t, row + r);
            int64_t asked = into->top[t].most;
            if (over(most, own.exponents[asked - 1]))
                put_in_all(own, asked, products + r * BLOCK, at->shift[row + r], words[r], low, high, column);
        }
    }
}

INLINE float sum_between(const float *entries, int64_t from, int64_t to) {
    lanes sum = every(0.0f);
    for (; from + LANES <= to; from += LANES) sum += load(entries + from);
    float total = sum_of(sum);
    for (; from < to; from++) total += entries[from];
    return total;
}

INLINE float largest_between(const float *entries, int64_t from, int64_t to) {
    float most = entries[from];
    for (; from < to; from++) most = entries[from] > most ? entries[from] : most;
    return most;
}

/* The columns of some rows of a tile, all of one cell of rows, go into their cells. */
INLINE void into_cells(const struct flash *of, const struct panel *at, const struct map *map, int64_t row,
                       int64_t column) {
    int64_t strips = of->reductions->strips, cell = map->rows[row];
    if (cell < 0) return;
    int begun = cell == map->begun[at->strip];
    int64_t line = (begun ? at->pair * strips + at->strip : at->pair * map->height + cell) * map->width;
    double *sums = begun ? map->begun_sums : map->sums;
    float *largest = begun ? map->begun_largest : map->largest;
    for (int64_t p = map->first[column / BLOCK]; p < map->first[column / BLOCK + 1]; p++) {
        const int32_t *piece = map->pieces + 3 * p;
        if (map->sums) {
            sums[line + piece[2]] += (double)sum_between(at->sums, piece[0], piece[1]);
        } else {
            float most = largest_between(at->largest, piece[0], piece[1]), *to = largest + line + piece[2];
            *to = most > *to ? most : *to;
        }
    }
}

/* What the columns of a tile have added up goes to where it belongs; the row is the last of those. */
static void into_columns(const struct flash *of, struct panel *at, int64_t row, int64_t column) {
    const struct reductions *into = of->reductions;
    if (!at->some) return;
    if (into->column_sums) {
        double *to = into->column_sums + (at->pair * into->strips + at->strip) * of->columns + column;
        for (int64_t j = 0; j < smaller(of->columns - column, BLOCK); j++) to[j] += (double)at->sums[j];
    }
    for (int64_t m = 0; m < into->maps; m++) into_cells(of, at, into->map + m, row, column);
    memset(at->sums, 0, BLOCK * sizeof(float)), memset(at->largest, 0, BLOCK * sizeof(float));
    at->some = 0;
}

/* Products become exponents but for the log-sum-exp. */
INLINE void scores_of(const struct flash *of, const struct panel *at, int64_t row, int64_t column, int64_t low,
                      int64_t high, float *products) {
    int64_t count = smaller(of->columns - column, BLOCK);
    for (int r = 0; r < GROUP; r++) {
        const float *line = line_of(of, at->head, at->begin + row + r, column);
        for (int64_t j = low; j < high; j += LANES) {
            lanes score = capped(of, load(products + r * BLOCK + j), 0);
            if (line && j < count) score += load_some(line + j, count - j);
            store(products + r * BLOCK + j, score);
        }
    }
}

/* A group of rows with one block of keys; cuts: the bits of its own rows. */
static void group_of(const struct flash *of, struct panel *at, int64_t row, int64_t column, const uint64_t *words,
                     const struct extent extent, uint32_t cuts) {
    int64_t padded = whole_pairs(of->dim), low = low_of(extent), high = high_of(extent);
    float products[GROUP * BLOCK] ALIGNED;
    struct factor query = {at->query + row * padded, padded, 1};
    for (int64_t j = low; j < high; j += PAIR)
        product(query, (struct vectors){at->keys + j, BLOCK, 0, of->dim}, products + j, BLOCK, 0);
    if (of->softcap != 0.0f || of->line) scores_of(of, at, row, column, low, high, products);
    if (of->reductions->tops) largest_of_rows(of, at, row, column, products, words, low, high);
    if (of->reductions->reach)
        for (int r = 0; r < GROUP && row + r < at->count; r++)
            weigh_distances(of->reductions->reach, at, row + r, column, products + r * BLOCK, words[r], low, high);
    if (!of->reductions->terms && !of->reductions->column_sums && !of->reductions->maps) return;
    if (cuts & ((1u << (GROUP - 1)) - 1)) {
        for (int r = 0; r < GROUP && row + r < at->count; r++) {
            weigh(at, row + r, products + r * BLOCK, words + r, low, high, 1, 1);
            if (cuts >> r & 1) into_columns(of, at, at->begin + row + r, column);
        }
        return;
    }
    for (int r = 0; r < GROUP; r += AT_ONCE)
        if (extent.partial)
            weigh(at, row + r, products + r * BLOCK, words + r, low, high, AT_ONCE, 1);
        else
            weigh(at, row + r, products + r * BLOCK, words + r, low, high, AT_ONCE, 0);
    if (cuts) into_columns(of, at, at->begin + row + GROUP - 1, column);
}

/* Which bins the distances of a tile lie in. */
INLINE void begin_bins(const struct reach *reach, struct panel *at, int64_t block, int64_t column) {
    const float *rows = reach->of_rows + 2 * (at->begin / BLOCK + block);
    const float *columns = reach->of_columns + 2 * (column / BLOCK);
    float after = rows[0] - columns[1], before = columns[0] - rows[1];
    float near = after > before ? after : before;
    float far = rows[1] - columns[0] > columns[1] - rows[0] ? rows[1] - columns[0] : columns[1] - rows[0];
    for (at->nearest = 0; reach->edges[at->nearest + 1] <= near; at->nearest++);
    for (at->farthest = at->nearest; reach->edges[at->farthest + 1] <= far; at->farthest++);
}

/* What a tile has added up by distance goes into float64. */
INLINE void end_bins(const struct reach *reach, const struct panel *at, int64_t strips) {
    double *to = reach->histogram + (at->pair * strips + at->strip) * reach->bins;
    for (int64_t b = at->nearest; b <= at->farthest; b++) {
        to[b] += (double)sum_of(load(at->binned + b * LANES));
        store(at->binned + b * LANES, every(0.0f));
    }
}

/* A block of rows with one block of keys. */
INLINE void tile_of(const struct flash *of, struct panel *at, int64_t block, int64_t column, const uint64_t *words) {
    int64_t first = block * BLOCK, count = smaller(of->columns - column, BLOCK);
    uint64_t all = count < BLOCK ? ((uint64_t)1 << count) - 1 : ~(uint64_t)0;
    uint64_t cuts = of->reductions->cuts[at->begin / BLOCK + block];
    const struct reach *reach = of->reductions->reach;
    if (reach) begin_bins(reach, at, block, column);
    for (int64_t row = 0; row < BLOCK && first + row < at->count; row += GROUP) {
        uint64_t own[GROUP], some = 0, common = ~(uint64_t)0;
        for (int r = 0; r < GROUP; r++) {
            own[r] = at->alive[block] >> (row + r) & 1 ? (words ? words[row + r] & all : all) : 0;
            some |= own[r], common &= own[r];
        }
        uint32_t here = cuts >> row & ((1u << GROUP) - 1);
        if (!some) {
            if (here) into_columns(of, at, at->begin + first + row + __builtin_ctz(here), column);
            continue;
        }
        struct extent extent = {common != ~(uint64_t)0, __builtin_ctzll(some), BLOCK - __builtin_clzll(some)};
        group_of(of, at, first + row, column, own, extent, here);
    }
    if (reach) end_bins(reach, at, of->reductions->strips);
}

/* What rows have added up goes into float64. */
INLINE void into_rows(const struct flash *of, const struct panel *at, float *sums, double *to) {
    if (!to) return;
    to += at->pair * of->rows + at->begin;
    for (int64_t row = 0; row < at->count; row++) {
        to[row] += (double)sum_of(load(sums + row * LANES));
        store(sums + row * LANES, every(0.0f));
    }
}

static void into_all_rows(const struct flash *of, const struct panel *at) {
    const struct reach *reach = of->reductions->reach;
    into_rows(of, at, at->terms, of->reductions->terms);
    into_rows(of, at, at->mass, reach ? reach->mass : 0), into_rows(of, at, at->moments, reach ? reach->moments : 0);
}

static void begin_rows(const struct flash *of, struct panel *at) {
    int64_t padded = whole_pairs(of->dim), number = at->pair * of->rows + at->begin;
    memset(at->alive, 0, sizeof(at->alive));
    memset(at->terms, 0, (size_t)(at->blocks * BLOCK * LANES) * sizeof(float));
    memset(at->mass, 0, (size_t)(at->blocks * BLOCK * LANES) * sizeof(float));
    memset(at->moments, 0, (size_t)(at->blocks * BLOCK * LANES) * sizeof(float));
    memset(at->shift, 0, (size_t)(at->blocks * BLOCK) * sizeof(float));
    for (int64_t row = 0; row < at->count; row++) {
        float lse = of->lse[number + row];
        if (lse - lse != 0.0f) continue; /* it attends to nothing, or to NaN */
        at->shift[row] = LOG2_E * lse;
        at->alive[row / BLOCK] |= (uint64_t)1 << row % BLOCK;
    }
    for (int64_t row = 0; row < at->blocks * BLOCK; row += BLOCK) {
        const void *query = rows_of(&of->query, at->batch, at->head, at->begin + row, (int)of->narrow);
        int64_t count = smaller(at->count - row, BLOCK);
        if (of->narrow)
            lay_rows(query, of->query.row, count, of->dim, query_factor(of), at->query + row * padded, 1);
        else
            lay_rows(query, of->query.row, count, of->dim, query_factor(of), at->query + row * padded, 0);
    }
    for (int64_t t = 0; t < of->reductions->tops; t++)
        for (int64_t n = 0; n < at->count * at->leading[t].count; n++)
            at->leading[t].exponents[n] = -127.0f, at->leading[t].columns[n] = -1; /* smaller ones have the weight 0 */
}

static void end_rows(const struct flash *of, const struct panel *at) {
    into_all_rows(of, at);
    for (int64_t t = 0; t < of->reductions->tops; t++) {
        const struct top *top = of->reductions->top + t;
        for (int64_t row = 0; row < at->count; row++) {
            struct leading own = leading_of(at->leading + t, row);
            int64_t first = (at->pair * of->rows + at->begin + row) * top->most;
            for (int64_t n = 0; n < top->most; n += LANES)
                store_some(top->weights + first + n, power_of_two(load(own.exponents + n)), top->most - n);
            for (int64_t n = 0; n < top->most; n++) top->columns[first + n] = own.columns[n];
        }
    }
}

/* Some blocks of rows with all keys that their mask leaves: each block of these is laid out once. */
static void whole_panel(const struct flash *of, struct panel *at) {
    struct cursor cursors[MOST_BLOCKS];
    begin_rows(of, at);
    for (int64_t b = 0; b < at->blocks; b++) cursors[b] = beginning_of(of, at->begin / BLOCK + b);
    for (int64_t visited = 1;; visited++) {
        int64_t column = INT64_MAX;
        for (int64_t b = 0; b < at->blocks; b++) column = smaller(column, cursors[b].column);
        if (column == INT64_MAX) break;
        int64_t count = smaller(of->columns - column, BLOCK);
        const void *keys = rows_of(&of->key, at->batch, at->head / of->group, column, (int)of->narrow);
        if (of->narrow)
            lay_columns(keys, of->key.row, count, of->dim, at->keys, 1);
        else
            lay_columns(keys, of->key.row, count, of->dim, at->keys, 0);
        for (int64_t b = 0; b < at->blocks; b++)
            if (cursors[b].column == column)
                tile_of(of, at, b, column, words_of(of, at->batch, at->head, next_tile(of, cursors + b)));
        if (visited % BETWEEN == 0) into_all_rows(of, at);
    }
    end_rows(of, at);
}

/* Takes one strip of one head after another, as long as any is left: for as many threads at once as like. */
void EXPORTED(regard_flash_reductions)(struct flash *of) {
    const int64_t *strip = of->reductions->strip, strips = of->reductions->strips;
    float *room = aligned_alloc(64, (size_t)(room_for(of) * 4 + 63) / 64 * 64);
    if (!room) {
        of->failed = 1;
        return;
    }
    struct panel at = panel_in(of, room);
    int64_t unit;
    while ((unit = __atomic_fetch_add(&of->taken, 1, __ATOMIC_RELAXED)) < of->units) {
        at.pair = unit / strips, at.strip = unit % strips;
        at.batch = at.pair / of->heads, at.head = at.pair % of->heads;
        for (int64_t block = strip[at.strip]; block < strip[at.strip + 1]; block += of->segment) {
            at.blocks = smaller(of->segment, strip[at.strip + 1] - block), at.begin = block * BLOCK;
            at.count = smaller(of->rows - at.begin, at.blocks * BLOCK);
            whole_panel(of, &at);
        }
    }
    free(room);
}
