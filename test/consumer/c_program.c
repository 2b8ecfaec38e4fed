/* A plain C program over farandole.h: one named allreduce, and what a mistake sounds like. With an
 * argument it returns without a shutdown, rank 0 so many seconds after the others. */
#include <farandole/farandole.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int complain(const char* what) {
  fprintf(stderr, "%s: %s\n", what, farandole_last_error());
  return 1;
}

int main(int argc, char** argv) {
  farandole_context* context = NULL;
  if (farandole_abi_version() != FARANDOLE_ABI_VERSION) return complain("abi");
  if (farandole_init(NULL, &context) != FARANDOLE_OK) return complain("init");
  farandole_topology topology;
  if (farandole_get_topology(context, &topology) != FARANDOLE_OK) return complain("topology");

  farandole_params params = farandole_params_of(FARANDOLE_ALLREDUCE, FARANDOLE_SUM);
  const int64_t count = 4;
  farandole_tensor tensor = {NULL, FARANDOLE_INT32, 1, &count};
  farandole_operation* operation = NULL;
  if (farandole_prepare(context, &params, "c", &tensor, 1, &operation, NULL) != FARANDOLE_OK)
    return complain("prepare");
  int32_t data[4] = {1, 2, 3, 4};
  const void* in = data;
  void* out = data;
  farandole_work* work = NULL;
  if (farandole_run(operation, 0, &in, &out, 60.0, &work) != FARANDOLE_OK) return complain("run");
  if (data[3] != 4 * topology.size) return complain("a wrong sum");

  params.op = 99;
  if (farandole_prepare(context, &params, "bad", &tensor, 1, &operation, NULL) !=
      FARANDOLE_INVALID_ARGUMENT)
    return complain("a bad op was taken");
  if (strstr(farandole_last_error(), "reduce op is 99") == NULL) return complain("the sentence");
  farandole_failure failure;
  memset(&failure, 0, sizeof failure);
  if (farandole_last_failure(&failure) != FARANDOLE_INVALID_ARGUMENT)
    return complain("a struct without a size was taken");
  failure.struct_size = sizeof failure;
  if (farandole_last_failure(&failure) != FARANDOLE_OK || failure.rank_count != 0 ||
      failure.cause != NULL || failure.tensor != NULL)
    return complain("what is known of a wrong call");
  if (argc == 1) {
    if (farandole_shutdown(context) != FARANDOLE_OK) return complain("shutdown");
    farandole_release(context);
  } else if (topology.rank == 0) {
    (void)sleep((unsigned)atoi(argv[1]));
  }
  printf("rank %d of %d: all right\n", topology.rank, topology.size);
  return 0;
}
