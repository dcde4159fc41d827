/* SPDX-License-Identifier: Apache-2.0
 *
 * Opens a package, prints its inputs and outputs, and ranks a made-up request: one user, all inputs
 * zero. Then the same request twice in one run.
 *
 *   rank MODEL.pt2 NUM_CANDIDATES [LIBIKBO_OPS.so]
 */
#include <ikbo/ikbo.h>
#include <stdio.h>
#include <stdlib.h>

static const size_t kElementBytes[] = {1, 1, 1, 2, 4, 8, 2, 2, 4, 8}; /* by ikbo_dtype */

/* Ends the program where there is an error. */
static void check(ikbo_error* error) {
  if (error != NULL) {
    fprintf(stderr, "rank: %s\n", ikbo_error_message(error));
    ikbo_error_free(error);
    exit(EXIT_FAILURE);
  }
}

static void* allocate(size_t count, size_t size) {
  void* memory = calloc(count == 0 ? 1 : count, size);
  if (memory == NULL) {
    fprintf(stderr, "rank: out of memory\n");
    exit(EXIT_FAILURE);
  }
  return memory;
}

static void print_specs(const char* kind, const ikbo_tensor_spec* specs, size_t count) {
  static const char* const roles[] = {"user", "candidate", "index"};
  for (size_t i = 0; i < count; ++i) {
    printf("%s %s: %s [B", kind, specs[i].name, roles[specs[i].role]);
    for (int32_t d = 1; d < specs[i].rank; ++d) {
      printf(", %lld", (long long)specs[i].shape[d]);
    }
    printf("]\n");
  }
}

/* Zeros of the shape that `spec` has with that many rows. */
static ikbo_tensor make_input(const ikbo_tensor_spec* spec, int64_t rows) {
  int64_t* shape = allocate((size_t)spec->rank, sizeof(*shape));
  size_t bytes = kElementBytes[spec->dtype] * (size_t)rows;
  shape[0] = rows;
  for (int32_t d = 1; d < spec->rank; ++d) {
    shape[d] = spec->shape[d];
    bytes *= (size_t)spec->shape[d];
  }
  ikbo_tensor tensor = {allocate(bytes, 1), bytes, shape, spec->rank, spec->dtype};
  return tensor;
}

static void print_outputs(const ikbo_package_info* info, const ikbo_result* result,
                          size_t request) {
  const ikbo_tensor* outputs = ikbo_result_get_outputs(result, request);
  for (size_t i = 0; i < info->num_outputs; ++i) {
    printf("request %zu, %s: %lld rows", request, info->outputs[i].name,
           (long long)outputs[i].shape[0]);
    if (outputs[i].dtype == IKBO_FLOAT32 && outputs[i].bytes > 0) {
      printf(", first %g", ((const float*)outputs[i].data)[0]);
    }
    printf("\n");
  }
}

int main(int argc, char** argv) {
  if (argc < 3 || ikbo_abi_version() != IKBO_ABI_VERSION) {
    fprintf(stderr, "usage: rank MODEL.pt2 NUM_CANDIDATES [LIBIKBO_OPS.so]\n");
    return 2;
  }
  ikbo_package* package = NULL;
  check(ikbo_package_open(argv[1], NULL, &package));
  const ikbo_package_info* info = ikbo_package_get_info(package);
  printf("ikbo %s: model %s, version %s\n", ikbo_version(), info->model_name, info->model_version);
  print_specs("input", info->inputs, info->num_inputs);
  print_specs("output", info->outputs, info->num_outputs);

  ikbo_model_options options = {0};
  options.size = sizeof(options);
  options.ops_library = argc > 3 ? argv[3] : NULL;
  ikbo_model* model = NULL;
  ikbo_session* session = NULL;
  check(ikbo_model_load(package, &options, &model));
  check(ikbo_session_create(model, &session));

  ikbo_request request = {info->max_users > 0 ? 1 : 0, atoll(argv[2]), NULL, info->num_inputs};
  ikbo_tensor* inputs = allocate(info->num_inputs, sizeof(*inputs));
  for (size_t i = 0; i < info->num_inputs; ++i) {
    const int is_user = info->inputs[i].role == IKBO_USER;
    inputs[i] = make_input(&info->inputs[i], is_user ? 1 : request.num_candidates);
  }
  request.inputs = inputs;

  ikbo_result* result = NULL;
  check(ikbo_session_run(session, &request, 1, &result));
  print_outputs(info, result, 0);
  ikbo_result_free(result);

  const ikbo_request both[] = {request, request};
  check(ikbo_session_run(session, both, 2, &result));
  print_outputs(info, result, 1);
  ikbo_result_free(result);

  for (size_t i = 0; i < info->num_inputs; ++i) {
    free((void*)inputs[i].data);
    free((void*)inputs[i].shape);
  }
  free(inputs);
  ikbo_session_free(session);
  ikbo_model_free(model);
  ikbo_package_free(package);
  return EXIT_SUCCESS;
}
