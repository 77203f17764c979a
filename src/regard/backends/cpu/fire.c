/* The numbers of FIRE at default positions: a function of one hidden layer of each distance's share of the query's position. */
#include <math.h>
#include <stdint.h>

#include "variants.h"

enum { LONGEST_FIRE = 512 };

/* All tensors are float32 without gaps. */
struct fire {
    int64_t queries, keys, features, heads;
    const float *hidden_weight, *hidden_bias; /* (features) */
    const float *output_weight, *output_bias; /* (heads, features) and (heads) */
    const float *rate, *threshold;            /* one number each */
    float *result;                            /* (heads, queries, keys) */
};

/* One row of each head, from the shares of its keys. */
static void add_features(const struct fire *problem, const float *share, float *result) {
    float hidden[LONGEST_FIRE];
    const int64_t keys = problem->keys, head_numbers = problem->queries * keys;
    for (int64_t h = 0; h < problem->heads; h++)
        for (int64_t j = 0; j < keys; j++) result[h * head_numbers + j] = problem->output_bias[h];
    for (int64_t f = 0; f < problem->features; f++) {
        const float weight = problem->hidden_weight[f], bias = problem->hidden_bias[f];
        for (int64_t j = 0; j < keys; j++) {
            const float number = weight * share[j] + bias;
            hidden[j] = number < 0.0f ? 0.0f : number; /* NaN stays */
        }
        for (int64_t h = 0; h < problem->heads; h++) {
            const float own = problem->output_weight[h * problem->features + f];
            float *to = result + h * head_numbers;
            for (int64_t j = 0; j < keys; j++) to[j] += own * hidden[j];
        }
    }
}

/* smallest: what is added to the logarithm that is divided by. */
void EXPORTED(regard_fire)(const struct fire *problem, double smallest) {
    double logs[LONGEST_FIRE]; /* by distance */
    float share[LONGEST_FIRE];
    const double rate = fabs((double)*problem->rate), threshold = fabs((double)*problem->threshold);
    const int64_t keys = problem->keys, first = keys - problem->queries;
    for (int64_t away = 0; away < (keys > problem->queries ? keys : problem->queries); away++)
        logs[away] = log1p(rate * (double)away);
    for (int64_t i = 0; i < problem->queries; i++) {
        const int64_t position = first + i;
        const double least = (double)position < threshold ? threshold : (double)position;
        const double most = log1p(rate * (threshold == threshold ? least : threshold)) + smallest;
        for (int64_t j = 0; j < keys; j++) share[j] = (float)(logs[position < j ? j - position : position - j] / most);
        add_features(problem, share, problem->result + i * keys);
    }
}
