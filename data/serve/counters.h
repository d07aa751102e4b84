/* counters.h: what a server has done, for /metrics in the text format of Prometheus. Any thread may count. */
#ifndef MT_COUNTERS_H
#define MT_COUNTERS_H

#include "../tokens/tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mt_counters mt_counters;

/* All zero; and their end. */
mt_counters *mt_counters_open(void);
void mt_counters_close(mt_counters *counters);

/* Times whose distribution is shown. */
typedef enum mt_latency {
    MT_LATENCY_QUEUE,   // from the arrival of a request to its first step
    MT_LATENCY_FIRST,   // ... to its first token
    MT_LATENCY_REQUEST, // ... to its end
    MT_LATENCY_STEP,    // of a step
    MT_NUM_LATENCIES
} mt_latency;
void mt_counters_time(mt_counters *counters, mt_latency latency, double seconds);

/* The end of a request: an endpoint, which is a literal, and the status of HTTP; 499: its client had gone. */
void mt_counters_request(mt_counters *counters, const char *endpoint, int status);

/* Tokens of prompts that were asked for, and new tokens. */
void mt_counters_tokens(mt_counters *counters, int64_t prompt, int64_t generated);

/* The state at the moment. */
typedef struct mt_gauges {
    int64_t running_requests, waiting_requests, running_sequences, pages, used_pages, connections;
    int64_t drafted_tokens, accepted_tokens; // so far: see mt_generator_totals
} mt_gauges;
void mt_counters_state(mt_counters *counters, const mt_gauges *gauges);

/* Appends all numbers as text. */
void mt_counters_print(mt_counters *counters, mt_text *text);

#ifdef __cplusplus
}
#endif
#endif
