/* Allgather, reducescatter and alltoall over farandole.h, and what mistakes sound like. */
#include <farandole/farandole.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

enum { kMost = 8 }; /* ranks */

static int rank, size;
static farandole_context* context;

static int complain(const char* what) {
  fprintf(stderr, "rank %d: %s: %s\n", rank, what, farandole_last_error());
  return 1;
}

static farandole_params params_of(int32_t kind, const int64_t* rows) {
  farandole_params params;
  memset(&params, 0, sizeof params);
  params.struct_size = sizeof params;
  params.kind = kind;
  params.op = FARANDOLE_SUM;
  params.prescale = params.postscale = 1.0;
  params.root = -1;
  params.rows = rows;
  return params;
}

/* One tensor of int32 [rows, 2]. */
static int prepare(const farandole_params* params, int64_t rows, farandole_operation** operation) {
  const int64_t shape[2] = {rows, 2};
  const farandole_tensor tensor = {NULL, FARANDOLE_INT32, 2, shape};
  return farandole_prepare(context, params, "c", &tensor, 1, operation, NULL);
}

static int run(const farandole_params* params, int64_t rows, const int32_t* in, int32_t* out) {
  farandole_operation* operation = NULL;
  const int code = prepare(params, rows, &operation);
  if (code != FARANDOLE_OK) return code;
  const void* from = in;
  void* to = out;
  farandole_work* work = NULL;
  return farandole_run(operation, 0, &from, &to, 60.0, &work);
}

/* Rank r gives r rows of its number; rank 0 none, and no memory. */
static int gather(void) {
  int64_t rows[kMost], total = 0;
  int32_t mine[2 * kMost], all[kMost * kMost];
  for (int r = 0; r < size; ++r) total += rows[r] = r;
  for (int i = 0; i < 2 * rank; ++i) mine[i] = rank;
  const farandole_params params = params_of(FARANDOLE_ALLGATHER, rows);
  if (run(&params, total, rank == 0 ? NULL : mine, all) != FARANDOLE_OK) return complain("gather");
  int at = 0;
  for (int r = 0; r < size; ++r)
    for (int i = 0; i < 2 * r; ++i)
      if (all[at++] != r) return complain("wrong rows were gathered");
  return 0;
}

/* size + 1 rows of their numbers: rank 0 gets two. */
static int reduce_and_scatter(void) {
  int32_t data[2 * kMost + 2], part[4] = {-1, -1, -1, -1};
  for (int i = 0; i < 2 * size + 2; ++i) data[i] = i / 2;
  const farandole_params params = params_of(FARANDOLE_REDUCESCATTER, NULL);
  if (run(&params, size + 1, data, part) != FARANDOLE_OK) return complain("reducescatter");
  const int first = rank == 0 ? 0 : rank + 1;
  if (part[0] != size * first || part[1] != size * first) return complain("a wrong sum");
  if (part[2] != (rank == 0 ? size : -1)) return complain("a wrong part");
  return 0;
}

/* Each rank sends its number to the next, and nothing to the others. */
static int exchange(void) {
  int64_t rows[2 * kMost] = {0};
  const int next = (rank + 1) % size, previous = (rank + size - 1) % size;
  rows[next] = rows[size + previous] = 1;
  const int32_t mine[2] = {rank, 10 * rank};
  int32_t theirs[2] = {-1, -1};
  const farandole_params params = params_of(FARANDOLE_ALLTOALL, rows);
  if (run(&params, 1, mine, theirs) != FARANDOLE_OK) return complain("alltoall");
  return theirs[1] == 10 * previous ? 0 : complain("a wrong piece");
}

static int refuses(const farandole_params* params, const char* sentence) {
  farandole_operation* operation = NULL;
  if (prepare(params, 1, &operation) != FARANDOLE_INVALID_ARGUMENT) return 0;
  return strstr(farandole_last_error(), sentence) != NULL;
}

static int mistakes(void) {
  const int64_t rows[2 * kMost] = {2};
  farandole_params params = params_of(FARANDOLE_ALLGATHER, NULL);
  if (!refuses(&params, "allgather needs farandole_params.rows")) return complain("no rows");
  params = params_of(FARANDOLE_ALLTOALL, NULL);
  if (!refuses(&params, "alltoall needs farandole_params.rows")) return complain("no splits");
  params = params_of(FARANDOLE_REDUCESCATTER, rows);
  if (!refuses(&params, "reducescatter takes no farandole_params.rows")) return complain("rows");
  params = params_of(FARANDOLE_ALLGATHER, rows);
  if (!refuses(&params, "add up to 2; expected 1")) return complain("rows of another tensor");
  params.struct_size = offsetof(farandole_params, rows); /* a program from before */
  if (!refuses(&params, "allgather needs farandole_params.rows")) return complain("old size");
  params.kind = 6;
  if (!refuses(&params, "collective kind is 6; expected 0 to 5")) return complain("kind");
  return 0;
}

/* Structs of earlier versions, which end before `device`, `rows` or `function`. */
static int old_structs(void) {
  const size_t sizes[] = {offsetof(farandole_params, device), offsetof(farandole_params, rows),
                          offsetof(farandole_params, function)};
  for (int i = 0; i < 3; ++i) {
    farandole_params params = params_of(FARANDOLE_ALLREDUCE, i < 2 ? (const int64_t*)8 : NULL);
    params.function = (const char*)8;
    params.struct_size = sizes[i];
    const int32_t one[2] = {1, 1};
    int32_t sum[2];
    if (run(&params, 1, one, sum) != FARANDOLE_OK) return complain("an old struct");
    if (sum[1] != size) return complain("a wrong sum");
  }
  return 0;
}

int main(void) {
  if (farandole_init(&context) != FARANDOLE_OK) return complain("init");
  farandole_topology topology;
  if (farandole_get_topology(context, &topology) != FARANDOLE_OK) return complain("topology");
  rank = topology.rank;
  size = topology.size;
  for (int use = 0; use < 4; ++use) { /* by name, by name, by id */
    if (gather() != 0 || reduce_and_scatter() != 0 || exchange() != 0) return 1;
  }
  if (mistakes() != 0 || old_structs() != 0) return 1;
  if (farandole_shutdown(context) != FARANDOLE_OK) return complain("shutdown");
  farandole_release(context);
  printf("rank %d of %d: all right\n", rank, size);
  return 0;
}
