/* SPDX-License-Identifier: Apache-2.0
 *
 * The runtime for C, and for languages that call C: open a package, load it, run requests.
 *
 *   ikbo_package  an opened file, checked, no code loaded      any thread
 *   ikbo_model    one loaded package                           any thread
 *   ikbo_session  one thread's way to run a model              one thread at a time
 *   ikbo_result   the outputs of one run                       any thread
 *
 * A handle keeps alive what it came from: they may be freed in any order. Functions that can fail
 * return NULL on success, else an error that the caller frees. No exception leaves the library.
 */
#ifndef IKBO_IKBO_H_
#define IKBO_IKBO_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define IKBO_API __attribute__((visibility("default")))
#else
#define IKBO_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Changes when a program that was compiled against this header has to be compiled again. */
#define IKBO_ABI_VERSION 1

typedef struct ikbo_error ikbo_error;
typedef struct ikbo_package ikbo_package;
typedef struct ikbo_model ikbo_model;
typedef struct ikbo_session ikbo_session;
typedef struct ikbo_result ikbo_result;

typedef enum ikbo_dtype {
  IKBO_BOOL = 0, /* one byte, 0 or 1 */
  IKBO_UINT8 = 1,
  IKBO_INT8 = 2,
  IKBO_INT16 = 3,
  IKBO_INT32 = 4,
  IKBO_INT64 = 5,
  IKBO_FLOAT16 = 6,
  IKBO_BFLOAT16 = 7,
  IKBO_FLOAT32 = 8,
  IKBO_FLOAT64 = 9
} ikbo_dtype;

typedef enum ikbo_role {
  IKBO_USER = 0,      /* one row per user */
  IKBO_CANDIDATE = 1, /* one row per candidate */
  IKBO_INDEX = 2      /* int32, one element per candidate: the row of its user */
} ikbo_role;

/* An input or output of a package. */
typedef struct ikbo_tensor_spec {
  const char* name;
  const int64_t* shape; /* rank extents; shape[0] is -1, the batch */
  int32_t rank;
  ikbo_dtype dtype;
  ikbo_role role;
  int32_t has_range; /* whether elements must lie in min..max, both included */
  int64_t min;
  int64_t max;
} ikbo_tensor_spec;

/* What a package says of itself; lives as long as the package. */
typedef struct ikbo_package_info {
  const char* model_name;
  const char* model_version;
  const char* torch_version;
  const char* device;     /* "cpu" or "cuda" */
  int64_t max_users;      /* of one run; 0: there are no user inputs and no index */
  int64_t max_candidates; /* of one run */
  size_t num_inputs;
  const ikbo_tensor_spec* inputs; /* in the order of a request */
  size_t num_outputs;
  const ikbo_tensor_spec* outputs; /* in the order of a result */
  int32_t has_digests;             /* whether the manifest lists the digests of its files */
} ikbo_package_info;

/* `size` is sizeof the struct. All else may be zero. */
typedef struct ikbo_package_options {
  size_t size;
  const char* const* trusted_keys; /* PEM files of Ed25519 public keys, one of which must have */
  size_t num_trusted_keys;         /* signed the package; none: anybody */
  int32_t require_digests;         /* refuse a package whose manifest lists none */
} ikbo_package_options;

/* `size` is sizeof the struct. All else may be zero. */
typedef struct ikbo_model_options {
  size_t size;
  const char* ops_library; /* libikbo_ops.so; needed when the package calls ikbo operators */
  int32_t num_sessions;    /* runs that may be under way at once, at most 1024; 0: one */
  int32_t threads_per_run; /* a setting of the whole process, at most 1024; 0: leave it as it is */
  /* Of a package for CUDA: record the runs of at most so many sizes as CUDA graphs, for each
   * session, where that makes them faster; it takes a second or so. */
  int32_t cuda_graphs;
} ikbo_model_options;

/* A dense row-major tensor in host memory. */
typedef struct ikbo_tensor {
  const void* data;
  size_t bytes;
  const int64_t* shape;
  int32_t rank;
  ikbo_dtype dtype;
} ikbo_tensor;

/* The candidates of some users, mostly one. With one user the index may be left out: all zeros. */
typedef struct ikbo_request {
  int64_t num_users; /* 0 when the package has no user inputs */
  int64_t num_candidates;
  const ikbo_tensor* inputs; /* in the package's order; read in place, not after the run */
  size_t num_inputs;
} ikbo_request;

/* "0.1.0" */
IKBO_API const char* ikbo_version(void);
/* IKBO_ABI_VERSION of the library; a program compares it with the header's. */
IKBO_API int32_t ikbo_abi_version(void);

/* What failed, why, and what to do; as long as the error. */
IKBO_API const char* ikbo_error_message(const ikbo_error* error);
/* Every ..._free takes NULL, too. */
IKBO_API void ikbo_error_free(ikbo_error* error);

/* Reads and checks the whole file; runs nothing of it. `options` may be NULL. */
IKBO_API ikbo_error* ikbo_package_open(const char* path, const ikbo_package_options* options,
                                       ikbo_package** package);
IKBO_API const ikbo_package_info* ikbo_package_get_info(const ikbo_package* package);
IKBO_API void ikbo_package_free(ikbo_package* package);

/* Loads the compiled code, which may do what this process may. `options` may be NULL. */
IKBO_API ikbo_error* ikbo_model_load(const ikbo_package* package, const ikbo_model_options* options,
                                     ikbo_model** model);
IKBO_API void ikbo_model_free(ikbo_model* model);

IKBO_API ikbo_error* ikbo_session_create(const ikbo_model* model, ikbo_session** session);
IKBO_API void ikbo_session_free(ikbo_session* session);

/* Checks the requests against the package and runs them together, in one run; their sums of users
 * and of candidates must be within the package's range. The inputs of a single request are not
 * copied; those of several are, once, side by side. */
IKBO_API ikbo_error* ikbo_session_run(ikbo_session* session, const ikbo_request* requests,
                                      size_t num_requests, ikbo_result** result);

/* The outputs of a request, as many as the package has, where the run left them; as long as the
 * result. NULL when there is no such request. */
IKBO_API const ikbo_tensor* ikbo_result_get_outputs(const ikbo_result* result, size_t request);
IKBO_API void ikbo_result_free(ikbo_result* result);

#ifdef __cplusplus
}
#endif

#endif /* IKBO_IKBO_H_ */
