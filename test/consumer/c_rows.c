/* Rows over farandole.h: results in the library's and in one's own memory, and what mistakes sound
 * like. The C++ API, in row_api.cc, does the rest. */
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

static farandole_params params_of(int32_t kind, const int64_t* splits) {
  farandole_params params = farandole_params_of(kind, FARANDOLE_SUM);
  params.splits = splits;
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

/* Starts with a result of any size and waits. */
static int run_allocating(const farandole_params* params, int64_t rows, const int32_t* in,
                          const farandole_allocator* allocator, farandole_work** work) {
  farandole_operation* operation = NULL;
  int code = prepare(params, rows, &operation);
  if (code != FARANDOLE_OK) return code;
  const void* from = in;
  code = farandole_start_allocating(operation, 0, &from, allocator, NULL, work);
  return code == FARANDOLE_OK ? farandole_wait(*work, 60.0) : code;
}

/* Rank r gives r + use rows of its number; rank 0 none at first, and no memory. The result is in
   memory of the library. */
static int gather(int use) {
  int32_t mine[4 * kMost];
  int64_t rows[kMost];
  for (int i = 0; i < 2 * (rank + use); ++i) mine[i] = rank;
  const farandole_params params = params_of(FARANDOLE_ALLGATHER, NULL);
  farandole_work* work = NULL;
  const int64_t given = rank + use;
  if (run_allocating(&params, given, given == 0 ? NULL : mine, NULL, &work) != FARANDOLE_OK)
    return complain("gather");
  if (farandole_received_rows(work, 0, rows, size) != FARANDOLE_OK) return complain("its rows");
  if (farandole_received_rows(work, 0, rows, size + 1) != FARANDOLE_INVALID_ARGUMENT ||
      strstr(farandole_last_error(), "expected room for as many") == NULL)
    return complain("rows of too many ranks");
  farandole_buffer* buffer = NULL;
  if (farandole_take_result(work, 0, &buffer) != FARANDOLE_OK) return complain("its result");
  farandole_buffer* again = NULL;
  if (farandole_take_result(work, 0, &again) != FARANDOLE_INVALID_ARGUMENT || again != NULL)
    return complain("a result that was taken twice");
  farandole_work_release(work);
  const int32_t* all = farandole_buffer_data(buffer);
  for (int r = 0; r < size; ++r) {
    if (rows[r] != r + use) return complain("a wrong number of rows");
    for (int i = 0; i < 2 * (r + use); ++i)
      if (*all++ != r) return complain("wrong rows were gathered");
  }
  farandole_buffer_release(buffer);
  return 0;
}

/* Ranks with memory for equal numbers of rows give different ones: each of them is refused. */
static int unequal_rows(void) {
  int32_t mine[2 * kMost] = {0}, all[2 * kMost * kMost];
  char told[200] = "allgather \"c\": each rank must give the same number of rows; the ranks gave [";
  for (int r = 0; r < size; ++r)
    snprintf(told + strlen(told), sizeof told - strlen(told), "%d%s", r + 1,
             r + 1 < size ? "," : "]");
  const farandole_params params = params_of(FARANDOLE_ALLGATHER, NULL);
  const int code = run(&params, rank + 1, mine, all);
  if (size == 1) return code == FARANDOLE_OK ? 0 : complain("gather alone");
  if (code != FARANDOLE_MISMATCH) return complain("unequal rows");
  return strcmp(farandole_last_error(), told) == 0 ? 0 : complain("another message");
}

/* Memory as a program of one's own gives it. */
struct room {
  int32_t memory[2 * kMost * kMost];
  int64_t rows[kMost];
  int64_t bytes;
};

static void* allocate(void* user, int32_t tensor, const int64_t* rows, int32_t ranks,
                      int64_t bytes) {
  struct room* const room = user;
  if (tensor != 0 || ranks != size) return NULL;
  memcpy(room->rows, rows, (size_t)ranks * sizeof *rows);
  room->bytes = bytes;
  return room->memory;
}

/* Rank r sends rank q (r + q) % 3 rows of 10 r + q, of which rank 0 sends none to itself. */
static int exchange(void) {
  int64_t splits[kMost], total = 0;
  int32_t mine[2 * 3 * kMost];
  for (int q = 0; q < size; ++q) {
    splits[q] = (rank + q) % 3;
    for (int i = 0; i < 2 * splits[q]; ++i) mine[2 * total + i] = 10 * rank + q;
    total += splits[q];
  }
  struct room room = {{0}, {0}, 0};
  const farandole_allocator allocator = {sizeof allocator, &room, allocate};
  const farandole_params params = params_of(FARANDOLE_ALLTOALL, splits);
  farandole_work* work = NULL;
  if (run_allocating(&params, total, mine, &allocator, &work) != FARANDOLE_OK)
    return complain("alltoall");
  farandole_work_release(work);
  int at = 0;
  for (int r = 0; r < size; ++r) {
    if (room.rows[r] != (r + rank) % 3) return complain("a wrong number of rows");
    for (int i = 0; i < 2 * room.rows[r]; ++i)
      if (room.memory[at++] != 10 * r + rank) return complain("a wrong piece");
  }
  return room.bytes == at * 4 ? 0 : complain("a wrong size");
}

static int refuses(const farandole_params* params, const char* sentence) {
  farandole_operation* operation = NULL;
  if (prepare(params, 1, &operation) != FARANDOLE_INVALID_ARGUMENT) return 0;
  return strstr(farandole_last_error(), sentence) != NULL;
}

static int refuses_to_start(int32_t kind, const farandole_allocator* allocator,
                            const char* sentence) {
  const farandole_params params = params_of(kind, NULL);
  const int32_t mine[2 * kMost] = {0};
  farandole_work* work = NULL;
  if (run_allocating(&params, size, mine, allocator, &work) != FARANDOLE_INVALID_ARGUMENT) return 0;
  return strstr(farandole_last_error(), sentence) != NULL;
}

static int mistakes(void) {
  const int64_t two[kMost] = {2};
  farandole_params params = params_of(FARANDOLE_REDUCESCATTER, two);
  if (!refuses(&params, "reducescatter takes no farandole_params.splits"))
    return complain("splits of a reducescatter");
  params = params_of(FARANDOLE_ALLTOALL, two);
  if (!refuses(&params, "add up to 2 rows; expected at most the 1 of the tensor"))
    return complain("too many splits");
  params = params_of(FARANDOLE_ALLTOALL, NULL);
  if (size > 1 && !refuses(&params, "1 rows do not divide among")) return complain("no splits");
  params.kind = 6;
  if (!refuses(&params, "collective kind is 6; expected 0 to 5")) return complain("kind");
  if (!refuses_to_start(FARANDOLE_REDUCESCATTER, NULL, "its results have a size that is known"))
    return complain("a reducescatter of any size");
  const farandole_allocator none = {sizeof none, NULL, NULL};
  if (!refuses_to_start(FARANDOLE_ALLGATHER, &none, "farandole_allocator.allocate is NULL"))
    return complain("an allocator without a function");
  return 0;
}

/* Structs of earlier versions, which end before `device`, `splits` or `function`. */
static int old_structs(void) {
  const size_t sizes[] = {offsetof(farandole_params, device), offsetof(farandole_params, splits),
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
  if (farandole_init(NULL, &context) != FARANDOLE_OK) return complain("init");
  farandole_topology topology;
  if (farandole_get_topology(context, &topology) != FARANDOLE_OK) return complain("topology");
  rank = topology.rank;
  size = topology.size;
  for (int use = 0; use < 4; ++use) { /* by name, by name, by id */
    if (gather(use) != 0 || exchange() != 0 || unequal_rows() != 0) return 1;
  }
  if (mistakes() != 0 || old_structs() != 0) return 1;
  if (farandole_shutdown(context) != FARANDOLE_OK) return complain("shutdown");
  farandole_release(context);
  printf("rank %d of %d: all right\n", rank, size);
  return 0;
}
