// C ABI over the patched llama.cpp. This file is the only description of the ABI: the C++ side includes it and
// shim/abi.py hands the part between the cffi marks to cffi.
//
// Rules that hold for every function:
//   - int32_t results are a swarm_status; on anything but SWARM_OK the text is in swarm_last_error() (per thread).
//   - no exception and no GGML_ABORT crosses: shapes, positions, slots, token ids and non-finite values are checked first.
//   - an engine is used by one thread at a time; different engines may run in parallel.
//   - arrays are row-major, caller-owned, and only read or written during the call.
#ifndef SWARM_SHIM_H
#define SWARM_SHIM_H

#include <stdbool.h>
#include <stdint.h>

#if defined(__GNUC__)
#define SWARM_API __attribute__((visibility("default")))
#else
#define SWARM_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

// cffi: begin

typedef enum swarm_status {
    SWARM_OK              = 0,
    SWARM_ERR_ARGUMENT    = 1, // a caller's value is out of range; nothing was changed
    SWARM_ERR_MODEL       = 2, // not a GGUF, truncated, tensors missing
    SWARM_ERR_UNSUPPORTED = 3, // architecture or option without span support
    SWARM_ERR_MEMORY      = 4, // an allocation failed
    SWARM_ERR_GAP         = 5, // a row starts beyond what the slot holds
    SWARM_ERR_FULL        = 6, // a row's position is beyond the slot's capacity
    SWARM_ERR_COMPUTE     = 7, // the graph failed; the touched slots are cleared
    SWARM_ERR_CANCELLED   = 8, // the progress callback asked to stop
} swarm_status;

typedef struct swarm_engine swarm_engine;
typedef struct swarm_vocab swarm_vocab;

// fraction in [0, 1]; return false to cancel the load
typedef bool (*swarm_progress_fn)(float fraction, void * user);
// level: 1 debug, 2 info, 3 warning, 4 error (ggml's numbering)
typedef void (*swarm_log_fn)(int32_t level, const char * text, void * user);

// n_slots KV streams of n_tokens cells each
typedef struct swarm_context_spec {
    int32_t n_slots;
    int32_t n_tokens;
} swarm_context_spec;

typedef struct swarm_engine_params {
    const char *               model_path; // first file of a split set
    int32_t                    span_first; // layers [span_first, span_last) are loaded
    int32_t                    span_last;  // -1: to the end
    const swarm_context_spec * contexts;   // slots are numbered through all contexts in this order
    int32_t                    n_contexts;
    int32_t                    n_threads;
    int32_t                    chunk_tokens; // largest n_rows of one call
    int32_t                    kv_type;      // ggml_type: 0 F32, 1 F16, 8 Q8_0
    int32_t                    wanted_rows;  // most rows of one call whose logits are kept, 1 to chunk_tokens; each
                                             // takes n_vocab floats of compute buffer. n_slots rows always may
    bool                       load_mtp;     // the span that ends with the last layer can draft; others ignore it
    bool                       lock_weights; // mlock the span's tensors
    swarm_progress_fn          progress;     // may be NULL
    void *                     progress_user;
} swarm_engine_params;

typedef struct swarm_engine_info {
    char     arch[64];
    int32_t  n_layers; // of the whole model, MTP block not counted
    int32_t  n_embd;
    int32_t  n_vocab;
    int32_t  n_ctx_train;
    int32_t  span_first;
    int32_t  span_last;
    int32_t  n_slots;
    int32_t  n_mtp;          // MTP blocks that are loaded
    uint64_t weights_bytes;  // tensors of the span
    uint64_t kv_bytes;
    uint64_t compute_bytes;
    uint64_t output_bytes;   // host buffers for hidden states and logits
} swarm_engine_info;

// One forward pass. All rows run the layers [run_first, run_last) and belong to slots of one context.
// Rows of one slot are consecutive and their positions ascend by one. The first row of a slot drops what the slot
// holds at or above its position (retry, rollback); a position beyond what every layer of the run holds is
// SWARM_ERR_GAP.
typedef struct swarm_step {
    int32_t         run_first;
    int32_t         run_last;
    int32_t         n_rows;
    const int32_t * slot;     // [n_rows]
    const int32_t * position; // [n_rows]
    const int32_t * token;    // [n_rows], when run_first is 0, else NULL; a loaded MTP block takes them beside hidden
    const float *   hidden;   // [n_rows, n_embd], when run_first is not 0, else NULL
    const uint8_t * want;     // [n_rows], when run_last is n_layers: rows whose logits are kept; else NULL (all rows)
    bool            tiled;    // tiled matmul: true for a prefill chunk, false for decode rows and their replay
} swarm_step;

// SHA-256 over source pin, patches and flags, then the CPU variant: "9f2c.../x86-64-v3"
SWARM_API const char * swarm_build_id(void);
// NULL when this CPU can run the library, else which feature it lacks
SWARM_API const char * swarm_cpu_missing(void);
SWARM_API const char * swarm_last_error(void);
SWARM_API void         swarm_log_set(swarm_log_fn fn, void * user);

SWARM_API int32_t swarm_engine_init(const swarm_engine_params * params, swarm_engine ** out);
SWARM_API void    swarm_engine_free(swarm_engine * engine);
SWARM_API int32_t swarm_engine_info_get(const swarm_engine * engine, swarm_engine_info * out);
// Not exit: hidden receives [n_rows, n_embd]. Exit: hidden is NULL, and the logits of wanted rows stay in the engine
// until the slot's next step: one row per slot, the last wanted one; logits, when not NULL, receives [n_wanted, n_vocab].
SWARM_API int32_t swarm_engine_step(swarm_engine * engine, const swarm_step * step, float * hidden, float * logits);
// copies the row the slot keeps, [n_vocab]; SWARM_ERR_ARGUMENT when it keeps none
SWARM_API int32_t swarm_engine_row(const swarm_engine * engine, int32_t slot, float * logits);
// tokens held by the slot: by any of its layers, where they differ
SWARM_API int32_t swarm_engine_position(const swarm_engine * engine, int32_t slot, int32_t * out);
// drops everything at or above position (0 frees the slot)
SWARM_API int32_t swarm_engine_truncate(swarm_engine * engine, int32_t slot, int32_t position);
// capacity of the slot in tokens
SWARM_API int32_t swarm_engine_capacity(const swarm_engine * engine, int32_t slot, int32_t * out);

// Drafts: up to *n_ids (in: capacity, out: number found) greedy guesses of the MTP block at the tokens after the one
// that the slot's kept row predicts (its argmax). None when the slot keeps no row or the block has not seen all tokens:
// a step to the last layer without tokens leaves a hole, until the slot is cut to before it. Nothing of the trunk
// changes: not its bits, not the slot. SWARM_ERR_UNSUPPORTED when no MTP block is loaded.
SWARM_API int32_t swarm_engine_draft(swarm_engine * engine, int32_t slot, int32_t * ids, int32_t * n_ids);

// KV rows: what a layer keeps of each position. They mean something only to an engine of the same artifact and
// numerics_id; there they replace the computation bit by bit.
//
// A layer has up to three rows per position: keys, values (a dense model; MLA has none), and indexer keys (a layer with
// an indexer of its own). The rows of [first, first + n_rows) lie one tensor after the other: n_rows of keys, then
// n_rows of values, then n_rows of indexer keys, in the KV type's own bytes: F32 and F16 little-endian, Q8_0 blocks of
// an F16 scale and 32 int8 (34 bytes). With load_mtp, layer n_layers is the MTP block; only drafts need its rows.
//
// bytes of one row of keys, values and indexer keys, 0 where the layer has none; row_bytes is [3]
SWARM_API int32_t swarm_engine_kv_row_bytes(const swarm_engine * engine, int32_t layer, int32_t * row_bytes);
// n_bytes is n_rows times the sum of row_bytes. Positions that the layer does not hold are SWARM_ERR_GAP.
SWARM_API int32_t swarm_engine_kv_read(swarm_engine * engine, int32_t slot, int32_t layer, int32_t first,
                                       int32_t n_rows, void * data, uint64_t n_bytes);
// Afterwards the layer holds the positions [0, first + n_rows) and nothing above; first beyond what it holds is
// SWARM_ERR_GAP. Layers are written one after the other: a step can go on from a position once every layer of its run
// holds it, so a state that was not written whole is never computed on. The row that the slot kept is dropped. Values
// that are not finite are refused.
SWARM_API int32_t swarm_engine_kv_write(swarm_engine * engine, int32_t slot, int32_t layer, int32_t first,
                                        int32_t n_rows, const void * data, uint64_t n_bytes);

// The n_top largest of a row, descending, ties by id ascending; rest_lse is the log-sum-exp of logit / temperature over
// all other ids (-inf when none is left; a temperature <= 0 counts as 1).
SWARM_API int32_t swarm_logits_top(const float * logits, int32_t n_vocab, float temperature, int32_t n_top,
                                   int32_t * ids, float * values, double * rest_lse);

// vocabulary only; path names a GGUF whose tensors may be absent
SWARM_API int32_t swarm_vocab_init(const char * path, swarm_vocab ** out);
SWARM_API void    swarm_vocab_free(swarm_vocab * vocab);
SWARM_API int32_t swarm_vocab_size(const swarm_vocab * vocab);
SWARM_API int32_t swarm_vocab_bos(const swarm_vocab * vocab); // -1 when the model has none
SWARM_API int32_t swarm_vocab_eos(const swarm_vocab * vocab);
SWARM_API bool    swarm_vocab_adds_bos(const swarm_vocab * vocab);
SWARM_API bool    swarm_vocab_is_stop(const swarm_vocab * vocab, int32_t token);
SWARM_API bool    swarm_vocab_is_control(const swarm_vocab * vocab, int32_t token);
// *n_tokens: in capacity, out the number needed; SWARM_ERR_FULL when it is larger than the capacity
SWARM_API int32_t swarm_vocab_encode(const swarm_vocab * vocab, const char * text, int32_t n_bytes, bool add_bos,
                                     bool parse_special, int32_t * tokens, int32_t * n_tokens);
// bytes of one token (may be part of a UTF-8 character); *n_bytes as above
SWARM_API int32_t swarm_vocab_piece(const swarm_vocab * vocab, int32_t token, bool special, char * bytes,
                                    int32_t * n_bytes);
// the chat template's text, or NULL
SWARM_API const char * swarm_vocab_template(const swarm_vocab * vocab);

// cffi: end

#ifdef __cplusplus
}
#endif

#endif
