/* serve.h: a model behind HTTP, in the interface of OpenAI: completions, conversations, scores.
 *
 * Threads of http.c read requests and check them; each becomes a job in a queue with a bound. The program's own thread
 * owns the generator and MPI: between two steps it takes jobs from the queue into the batch, and cancels those whose
 * client has gone; after a step it gives every job its new tokens. */
#ifndef MT_SERVE_H
#define MT_SERVE_H

#include "../run/inference.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Serves the model of an opened run until SIGTERM or SIGINT, then finishes the requests that it has taken. Every rank
 * calls it; rank 0 opens the port. Ends the program on an error, as mt_inference_check does. */
void mt_serve(mt_inference *run);

/* Reads "[ADDRESS:]PORT", an address of IPv6 in brackets; the address is to be freed. */
int mt_serve_parse_place(const char *text, char **address, int64_t *port, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
