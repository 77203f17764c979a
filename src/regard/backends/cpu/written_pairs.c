/* The pairs of masks whose numbers are new in each call, which kernels of whole rows read as bytes: those that lists of keys, or of
 * blocks of keys, name, and those of equal ids. */
#include "variants.h"

#include <stdint.h>
#include <string.h>

/* keep[lists][queries][keys] = whether key j is in one of the blocks of `columns` keys that indices[list][i / rows] names, of
 * `listed` in all, where a number below 0 names none; and j <= i + shift. One list, of as many rows, may be that of all queries. */
void EXPORTED(regard_listed_pairs)(const int32_t *indices, int64_t lists, int64_t listed, int64_t rows, int64_t columns, int64_t queries,
                                   int64_t keys, int64_t shift, uint8_t *keep) {
    int64_t blocks = (queries + rows - 1) / rows;
    memset(keep, 0, (size_t)(lists * queries * keys));
    for (int64_t list = 0; list < lists; list++)
        for (int64_t i = 0; i < queries; i++) {
            const int32_t *own = indices + (list * blocks + i / rows) * listed;
            uint8_t *row = keep + (list * queries + i) * keys;
            int64_t end = i + shift + 1 < keys ? i + shift + 1 : keys;
            for (int64_t number = 0; number < listed; number++) {
                int64_t first = own[number] * columns, last = first + columns < end ? first + columns : end;
                if (own[number] >= 0 && first < last) memset(row + first, 1, (size_t)(last - first));
            }
        }
}

/* keep[batch][heads][queries][keys] = whether query i and key j have equal ids, and j <= i + shift. Strides are in ids, 0 along an
 * axis that all share. */
void EXPORTED(regard_equal_ids)(const int64_t *query_ids, const int64_t *key_ids, int64_t query_batch, int64_t query_head,
                                int64_t key_batch, int64_t key_head, int64_t batch, int64_t heads, int64_t queries, int64_t keys,
                                int64_t shift, uint8_t *keep) {
    for (int64_t head = 0; head < batch * heads; head++) {
        const int64_t *rows = query_ids + head / heads * query_batch + head % heads * query_head;
        const int64_t *columns = key_ids + head / heads * key_batch + head % heads * key_head;
        for (int64_t i = 0; i < queries; i++, keep += keys) {
            int64_t id = rows[i], end = i + shift + 1 < keys ? i + shift + 1 : keys;
            for (int64_t j = 0; j < end; j++) keep[j] = columns[j] == id;
            memset(keep + end, 0, (size_t)(keys - end));
        }
    }
}
